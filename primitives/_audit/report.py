"""The findings of an audit."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from primitives._audit.nestings import described

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["AuditReport", "Finding"]

# More places of one operator than these are counted.
PLACES = 3


@dataclasses.dataclass(frozen=True)
class Finding:
    """An operation whose derivatives are not known to be right.

    Attributes:
        operation: The operator, as `"aten.native_layer_norm.default"`, or the name of an `autograd.Function`.
        wrong: Nestings in which torch gives another number without a word: `"jvp(vjp)"`.
        raises: Nestings in which torch raises.
        places: Where it is called: module, file and line, with how many calls of each.
        remedy: The way to make it right.
    """

    operation: str
    wrong: tuple[str, ...]
    raises: tuple[str, ...]
    places: Mapping[str, int]
    remedy: str

    @property
    def verdict(self) -> str:
        """Both in words."""
        kinds = {"silently wrong": self.wrong, "raises": self.raises}
        return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names) or "not known"


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """The findings of `audit`; printed as a table.

    Attributes:
        findings: Operations that are not known to be right in every nesting up to `order`.
        right: Calls of those that are, by operation.
        order: Derivatives that were asked about.
        torch_version: The version of torch that the table was measured on.
        errors: With `strict`, the relative error of each nesting of the whole function against central differences, or
            what it raised; empty otherwise.
    """

    findings: tuple[Finding, ...]
    right: Mapping[str, int]
    order: int
    torch_version: str
    errors: Mapping[str, float | Exception]
    tolerance: float

    @property
    def failed(self) -> tuple[str, ...]:
        """Nestings of the whole function that are wrong or raise, by `strict`."""
        return tuple(n for n, e in self.errors.items() if isinstance(e, Exception) or not e <= self.tolerance)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings and not self.failed

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        lines = [
            f"audit to order {self.order}, by the table of torch {self.torch_version}",
            f"right in every nesting: {len(self.right)} operations, called {sum(self.right.values())} times",
            f"wrong, missing or not known: {len(self.findings)}",
        ]
        for finding in self.findings:
            lines += ["", finding.operation, f"  {finding.verdict}"]
            shown = list(finding.places.items())[:PLACES]
            lines += [f"  at {place}{f' ({calls} calls)' if calls > 1 else ''}" for place, calls in shown]
            if len(finding.places) > PLACES:
                lines.append(f"  and at {len(finding.places) - PLACES} other places")
            lines.append(f"  remedy: {finding.remedy}")
        for nesting, error in self.errors.items():
            text = f"raises {type(error).__name__}" if isinstance(error, Exception) else f"is off by {error:.1e}"
            lines.append(f"{described(nesting)} {text}{' WRONG' if nesting in self.failed else ''}")
        return "\n".join(lines)
