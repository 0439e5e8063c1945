"""Two results against each other: what of this package became slower, stopped being right, or is gone.

Machines differ, and so do days on a shared one. Where both runs have it, a time is therefore compared by what the same
run measured beside it: as a fraction of the speed of a copy of as many bytes, or else over the time of torch eager.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from perf.suite.results import OK, SKIPPED, Row, key
from perf.suite.tables import OURS

# Where falls within the spread are allowed: one of more than this many times what is flagged is held against all the
# same.
CERTAIN = 2.0
WITHIN_SPREAD = "within the spread of both runs: measure again"


@dataclass(frozen=True)
class Change:
    """How one row changed.

    Attributes:
        what: Workload and mode.
        by: What was compared.
        change: Speed of the second run over that of the first, minus one.
        apart: Whether the ranges between the 20 % and 80 % quantiles of the two have no value in common.
    """

    what: str
    by: str
    change: float
    apart: bool


@dataclass
class Comparison:
    """What came out.

    Attributes:
        fall: Part of its speed that a row may lose.
        allow_spread: Whether a row may lose up to `CERTAIN` times that within the spread of the samples.
        warnings: What the runs do not have in common.
        changes: Rows that are right in both.
        broken: Rows that are no longer right.
        gone: Rows that were right, and that the second run does not have or skipped.
        still: Rows that are right in neither.
        fixed: Rows that are right in the second run alone.
        new: Rows that only the second run has.
    """

    fall: float
    allow_spread: bool = False
    warnings: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    still: list[str] = field(default_factory=list)
    fixed: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)

    def fell(self, change: Change) -> bool:
        """Whether a row is slower by more than `fall`."""
        return change.change < -self.fall

    def allowed(self, change: Change) -> bool:
        """Whether a fall is let pass, as one within the spread of the samples, because that was asked for."""
        return self.allow_spread and not change.apart and change.change >= -CERTAIN * self.fall

    @property
    def fallen(self) -> list[Change]:
        """Rows whose fall is held against the second run."""
        return [change for change in self.changes if self.fell(change) and not self.allowed(change)]

    @property
    def failed(self) -> bool:
        """Whether the second run is not acceptable."""
        return bool(self.fallen or self.broken or self.gone) or not self.changes

    def text(self) -> str:
        """Everything, in lines."""
        kinds: dict[str, int] = {}
        for change in self.changes:
            kinds[change.by] = kinds.get(change.by, 0) + 1
        lines = [f"WARNING: {text}" for text in self.warnings]
        lines.append(f"{len(self.changes)} rows compared" + "".join(f"; {n} by {by}" for by, n in kinds.items()) + ".")
        groups = {
            "BROKEN": self.broken,
            "GONE": self.gone,
            "STILL": self.still,
            "fixed": self.fixed,
            "new": self.new,
        }
        lines += [f"{name:<8}{text}" for name, texts in groups.items() for text in texts]
        notable = sorted((c for c in self.changes if abs(c.change) > self.fall), key=lambda c: c.change)
        lines += [self._line(change) for change in notable]
        return "\n".join([*lines, self._conclusion()])

    def _line(self, change: Change) -> str:
        word = ("allowed" if self.allowed(change) else "FELL") if change.change < 0 else "rose"
        spread = "" if change.apart else f"; {WITHIN_SPREAD}"
        return f"{word:<8}{change.change:+.1%}  {change.what}  ({change.by}{spread})"

    def _conclusion(self) -> str:
        allowed = sum(self.fell(change) and self.allowed(change) for change in self.changes)
        beyond = f" but {allowed} within the spread of both runs, which --allow-spread lets pass" if allowed else ""
        if not self.failed:
            return f"Nothing fell by more than {self.fall:.0%}{beyond}."
        found = {
            f"fell by more than {self.fall:.0%}": len(self.fallen),
            "broke": len(self.broken),
            "are gone": len(self.gone),
        }
        said = ", ".join(f"{count} {verb}" for verb, count in found.items() if count)
        return f"Failed: of the rows, {said}." if said else "Failed: no row is right in both runs."


def compare(
    before: dict[str, Any], after: dict[str, Any], fall: float = 0.05, *, allow_spread: bool = False
) -> Comparison:
    """Compare the rows of this package in two results.

    Args:
        before: The result to hold on to.
        after: The result in question.
        fall: Part of its speed that a row may lose, by the medians.
        allow_spread: Whether a row may lose up to `CERTAIN` times that if the ranges between the quantiles of the two
            runs overlap.
    """
    comparison = Comparison(fall, allow_spread, list(_differences(before, after)))
    older, newer = _own(before), _own(after)
    for where, old in older.items():
        new = newer.get(where)
        if old["status"] == OK:
            _compare_right(comparison, old, new)
        elif new is not None and new["status"] == OK:
            comparison.fixed.append(f"{_what(old)}: was {old['status']}")
        elif new is not None and new["status"] != SKIPPED:
            # A row that nobody had measured before is no reason to put up with what it is.
            known = comparison.broken if old["status"] == SKIPPED else comparison.still
            known.append(f"{_what(new)}: {new['status']}: {new['message']}")
    for where, row in newer.items():
        if where not in older:
            found = comparison.new if row["status"] in {OK, SKIPPED} else comparison.broken
            found.append(f"{_what(row)}: {row['status']}" + (f": {row['message']}" if row["message"] else ""))
    return comparison


def _what(row: Row) -> str:
    return f"{row['workload']}: {row['mode']}"


def _compare_right(comparison: Comparison, old: Row, new: Row | None) -> None:
    """Note what became of a row that was right."""
    what = _what(old)
    if new is None or new["status"] == SKIPPED:
        comparison.gone.append(f"{what}: {'no row' if new is None else new['message']}")
    elif new["status"] != OK:
        comparison.broken.append(f"{what}: {new['status']}: {new['message']}")
    elif (change := _change(what, old, new)) is not None:
        comparison.changes.append(change)
    else:
        comparison.gone.append(f"{what}: no time that both runs have")


def _own(result: dict[str, Any]) -> dict[tuple[str, str, str], Row]:
    return {key(row): row for row in result["rows"] if row["provider"] == OURS}


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What besides this package's sources can have changed a time, in words."""
    first, second = _facts(before), _facts(after)
    found = [
        f"{name} differs: {first.get(name)} and then {second.get(name)}."
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]
    if first.get("device") != second.get("device"):
        found.append("the DEVICES differ: only what is relative to the same run means something.")
    runs = {"first": before, "second": after}
    return found + [f"the {name} run is not complete." for name, run in runs.items() if not run["complete"]]


def _facts(result: dict[str, Any]) -> dict[str, Any]:
    device, environment = result["device"] or {}, result["environment"] or {}
    drivers = sorted({asked[0].get("driver_version") for asked in result["clocks"].values() if asked})
    asked = {name: value for name, value in result["options"].items() if name not in {"seconds", "workers"}}
    return {
        "device": device.get("name"),
        "driver": drivers,
        "python": environment.get("python"),
        "cuda": environment.get("cuda"),
        "threads": environment.get("threads"),
        **environment.get("packages", {}),
        "options": asked,
    }


def _change(what: str, old: Row, new: Row) -> Change | None:
    for by, costs in _COSTS.items():
        first, second = costs(old), costs(new)
        if first and second:
            apart = first["p80"] < second["p20"] or second["p80"] < first["p20"]
            return Change(what, by, first["median"] / second["median"] - 1, apart)
    return None


def _copies(row: Row) -> dict[str, float] | None:
    """Device time in units of the time of a copy of the minimum of bytes."""
    if not row["device_us"] or not row["copy_gbps"] or not row["minimum_bytes"]:
        return None
    copy_us = row["minimum_bytes"] / row["copy_gbps"] * 1e-3
    return {name: row["device_us"][name] / copy_us for name in ("median", "p20", "p80")}


# What a row costs, lower is better; the first that both rows have decides.
_COSTS = {
    "device time over a copy": _copies,
    "device time over torch": lambda row: row["vs_torch_device"],
    "call time over torch": lambda row: row["vs_torch_call"],
    "device time": lambda row: row["device_us"],
    "call time": lambda row: row["call_us"],
}
