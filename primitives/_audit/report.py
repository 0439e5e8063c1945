"""The findings of an audit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from primitives._audit.nestings import described
from primitives._audit.recording import told
from primitives.testing._compare import html_table

# Of a whole function in float64 against central differences, relative to the derivative.
TOLERANCE = 1e-5
# More places of one operator than these are counted.
PLACES = 3


def failed_in(errors: Mapping[str, float | Exception]) -> tuple[str, ...]:
    """The nestings that are wrong or raise."""
    return tuple(n for n, e in errors.items() if isinstance(e, Exception) or not e <= TOLERANCE)


def grouped(errors: Mapping[str, float | Exception], failed: Sequence[str] = ()) -> list[str]:
    """Errors in words, with all nestings that have the same one; those of `failed` are called wrong."""
    nestings: dict[str, list[str]] = {}
    for nesting, error in errors.items():
        text = f"raises {told(error)}" if isinstance(error, Exception) else f"off by {error:.1e}"
        nestings.setdefault(text + " WRONG" * (nesting in failed), []).append(described(nesting))
    return [f"{', '.join(names)}: {text}" for text, names in nestings.items()]


@dataclasses.dataclass(frozen=True)
class Finding:
    """An operation whose derivatives are not known to be right.

    Attributes:
        operation: The operator, as `"aten.native_layer_norm.default"`, or an `autograd.Function`. With `strict`, also a
            module or function whose derivatives are wrong for a reason that no operator in it explains.
        wrong: Nestings in which torch gives another number without a word: `"jvp(vjp)"`.
        raises: Nestings in which torch raises.
        places: Where it is called: module, file and line, with how many calls of each.
        remedy: The way to make it right.
        notes: With `strict`, the errors and exceptions, each with the line that raises it.
    """

    operation: str
    wrong: tuple[str, ...]
    raises: tuple[str, ...]
    places: Mapping[str, int]
    remedy: str
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Both in words."""
        kinds = {"silently wrong": self.wrong, "raises": self.raises}
        return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names) or "not known"

    @property
    def shown_places(self) -> list[str]:
        """The first places in words, and how many others there are."""
        shown = [f"{place}{f' ({n} calls)' * (n > 1)}" for place, n in list(self.places.items())[:PLACES]]
        left = len(self.places) - PLACES
        return [*shown, *[f"{left} other places"] * (left > 0)]


@dataclasses.dataclass(frozen=True, repr=False)
class AuditReport:
    """The findings of `audit`; printed as a table.

    Attributes:
        findings: Operations that are not known to be right in every nesting up to `order`.
        right: Calls of those that are, by operation.
        order: Derivatives that were asked about.
        torch_version: The version of torch that the table was measured on.
        errors: With `strict`, the relative error of each nesting of the whole function against central differences, or
            what it raised; empty otherwise.
        repaired: Whether `repair_torch` was on.
    """

    findings: tuple[Finding, ...]
    right: Mapping[str, int]
    order: int
    torch_version: str
    errors: Mapping[str, float | Exception]
    repaired: bool = False

    @property
    def failed(self) -> tuple[str, ...]:
        """Nestings of the whole function that are wrong or raise, by `strict`."""
        return failed_in(self.errors)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings and not self.failed

    def __bool__(self) -> bool:
        return self.ok

    def _heading(self) -> list[str]:
        repaired = ", with pr.repair_torch()" * self.repaired
        return [
            f"audit to order {self.order}, by the table of torch {self.torch_version}{repaired}",
            f"right in every nesting: {len(self.right)} operations, called {sum(self.right.values())} times",
            f"wrong, missing or not known: {len(self.findings)}",
        ]

    def _differences(self) -> list[str]:
        lines = ["in float64, against central differences:"] * bool(self.errors)
        return [*lines, *[f"  {line}" for line in grouped(self.errors, self.failed)]]

    def __str__(self) -> str:
        lines = self._heading()
        for f in self.findings:
            lines += ["", f.operation, f"  {f.verdict}", *[f"  {note}" for note in f.notes]]
            lines += [*[f"  at {place}" for place in f.shown_places], f"  remedy: {f.remedy}"]
        return "\n".join([*lines, *[""] * bool(self.errors), *self._differences()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [
            (f.operation, "\n".join([f.verdict, *f.notes]), "\n".join(f.shown_places), f.remedy) for f in self.findings
        ]
        header = ("operation", "found", "at", "remedy")
        return html_table("\n".join(self._heading()), header, rows, "\n".join(self._differences()))
