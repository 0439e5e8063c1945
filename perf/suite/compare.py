"""Two results against each other: what of this package became slower, stopped being right, or is gone.

Machines differ, and so do days on a shared one. Where both runs have it, a time is therefore compared by what the same
run measured beside it: as a fraction of the speed of a copy of as many bytes, or else over the time of torch eager.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from perf.suite.results import OK, SKIPPED, Row, key
from perf.workloads import OURS

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
        lines: Warnings, and what became of rows that cannot be compared, in words.
        changes: Rows that are right in both.
        failures: Numbers of rows that broke, and that are gone.
    """

    fall: float
    allow_spread: bool = False
    lines: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    failures: Counter = field(default_factory=Counter)

    def allowed(self, change: Change) -> bool:
        """Whether a fall is let pass, as one within the spread of the samples, because that was asked for."""
        return self.allow_spread and not change.apart and change.change >= -CERTAIN * self.fall

    @property
    def fallen(self) -> list[Change]:
        """Rows that are slower by more than `fall`."""
        return [change for change in self.changes if change.change < -self.fall]

    @property
    def failed(self) -> bool:
        """Whether the second run is not acceptable."""
        return bool(self.failures) or not self.changes or not all(map(self.allowed, self.fallen))

    def text(self) -> str:
        """Everything, in lines."""
        kinds = Counter(change.by for change in self.changes)
        found = [f"{len(self.changes)} rows compared" + "".join(f"; {n} by {by}" for by, n in kinds.items()) + "."]
        for change in sorted(self.changes, key=lambda change: change.change):
            if abs(change.change) > self.fall:
                word = ("allowed" if self.allowed(change) else "FELL") if change.change < 0 else "rose"
                spread = "" if change.apart else f"; {WITHIN_SPREAD}"
                found.append(f"{word:<8}{change.change:+.1%}  {change.what}  ({change.by}{spread})")
        return "\n".join([*self.lines, *found, self._conclusion()])

    def _conclusion(self) -> str:
        allowed = sum(map(self.allowed, self.fallen))
        if not self.failed:
            beyond = f" but {allowed} within the spread of both runs, which --allow-spread lets pass" if allowed else ""
            return f"Nothing fell by more than {self.fall:.0%}{beyond}."
        counts = {f"fell by more than {self.fall:.0%}": len(self.fallen) - allowed, **self.failures}
        said = ", ".join(f"{count} {verb}" for verb, count in counts.items() if count)
        return f"Failed: of the rows, {said}." if said else "Failed: no row is right in both runs."

    def note(self, word: str, text: str, failure: str | None = None) -> None:
        """Add a line about a row, which fails the comparison if `failure` says how."""
        self.lines.append(f"{word:<8}{text}")
        if failure is not None:
            self.failures[failure] += 1


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
    comparison = Comparison(fall, allow_spread, _differences(before, after))
    older, newer = ({key(row): row for row in run["rows"] if row["provider"] == OURS} for run in (before, after))
    for where in dict.fromkeys([*older, *newer]):
        _compare_row(comparison, f"{where[0]}: {where[1]}", older.get(where), newer.get(where))
    return comparison


def _compare_row(comparison: Comparison, what: str, old: Row | None, new: Row | None) -> None:
    """Note what became of a row."""
    was = None if old is None else old["status"]
    now = SKIPPED if new is None else new["status"]
    said = f"{what}: no row" if new is None else f"{what}: {now}" + (f": {new['message']}" if new["message"] else "")
    if old is not None and new is not None and was == now == OK:
        change = _change(what, old, new)
        if change is None:
            comparison.note("GONE", f"{what}: no time that both runs have", "are gone")
        else:
            comparison.changes.append(change)
    elif was == OK and now == SKIPPED:
        comparison.note("GONE", said, "are gone")
    elif now not in {OK, SKIPPED}:
        # A row that nobody had measured before is no reason to put up with what it is.
        known = was not in {OK, SKIPPED, None}
        comparison.note(*(("STILL", said) if known else ("BROKEN", said, "broke")))
    elif was is None:
        comparison.note("new", said)
    elif now == OK:
        comparison.note("fixed", f"{what}: was {was}")


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What besides this package's sources can have changed a time, in words."""
    first, second = _facts(before), _facts(after)
    found = [
        f"{name} differs: {first.get(name)} and then {second.get(name)}."
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]
    if first["device"] != second["device"]:
        found.append("the DEVICES differ: only what is relative to the same run means something.")
    runs = {"first": before, "second": after}
    found += [f"the {name} run is not complete." for name, run in runs.items() if not run["complete"]]
    return [f"WARNING: {text}" for text in found]


def _facts(result: dict[str, Any]) -> dict[str, Any]:
    environment = result["environment"] or {}
    return {
        "device": (result["device"] or {}).get("name"),
        "driver": sorted({asked[0].get("driver_version") for asked in result["clocks"].values() if asked}),
        **{name: environment.get(name) for name in ("python", "cuda", "threads")},
        **environment.get("packages", {}),
        "options": {name: value for name, value in result["options"].items() if name not in {"seconds", "workers"}},
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


# The cost of a row, lower is better; the first that both rows have decides.
_COSTS = {
    "device time over a copy": _copies,
    "device time over torch": lambda row: row["vs_torch_device"],
    "call time over torch": lambda row: row["vs_torch_call"],
    "device time": lambda row: row["device_us"],
    "call time": lambda row: row["call_us"],
}
