"""Two results against each other: what of this package became slower, or stopped being right.

Machines differ, and so do days on a shared one. Where both runs have it, a time is therefore compared by what the same
run measured beside it: as a fraction of the speed of a copy of as many bytes, or else over the time of torch eager.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from perf.suite.results import OK, SKIPPED, Row, key
from perf.suite.tables import OURS


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
    """What came out: rows that fell, that may have fallen, that rose, that broke, and how many were compared."""

    fall: float
    same_device: bool
    changes: list[Change] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    only_before: int = 0

    @property
    def fallen(self) -> list[Change]:
        """Rows that are slower by more than `fall`, beyond the spread of the samples."""
        return [change for change in self.changes if change.change < -self.fall and change.apart]

    @property
    def failed(self) -> bool:
        """Whether the second run is not acceptable."""
        return bool(self.fallen or self.broken) or not self.changes

    def text(self) -> str:
        """Everything, in lines."""
        kinds: dict[str, int] = {}
        for change in self.changes:
            kinds[change.by] = kinds.get(change.by, 0) + 1
        lines = [f"{len(self.changes)} rows compared" + "".join(f"; {n} by {by}" for by, n in kinds.items()) + "."]
        if not self.same_device:
            lines.append("The devices differ: only what is relative to the same run means something.")
        if self.only_before:
            lines.append(f"{self.only_before} rows of the first run were not measured in the second.")
        lines += [f"BROKEN  {text}" for text in self.broken]
        for change in sorted(self.changes, key=lambda change: change.change):
            if abs(change.change) > self.fall:
                verdict = "FELL  " if change.change < 0 else "rose  "
                verdict = verdict if change.apart else "spread"
                lines.append(f"{verdict}  {change.change:+.1%}  {change.what}  ({change.by})")
        if any(abs(change.change) > self.fall and not change.apart for change in self.changes):
            lines.append(
                "`spread`: the ranges of the samples overlap, so the change may be noise; it is not held against."
            )
        lines.append("A fall was found." if self.failed else f"Nothing fell by more than {self.fall:.0%}.")
        return "\n".join(lines)


def compare(before: dict[str, Any], after: dict[str, Any], fall: float = 0.05) -> Comparison:
    """Compare the rows of this package in two results.

    Args:
        before: The result to hold on to.
        after: The result in question.
        fall: Part of its speed that a row may lose.
    """
    comparison = Comparison(fall, _name(before) == _name(after))
    newer = {key(row): row for row in after["rows"] if row["provider"] == OURS}
    for old in before["rows"]:
        if old["provider"] != OURS or old["status"] != OK:
            continue
        what = f"{old['workload']}: {old['mode']}"
        new = newer.get(key(old))
        if new is None or new["status"] == SKIPPED:
            comparison.only_before += 1
        elif new["status"] != OK:
            comparison.broken.append(f"{what}: {new['status']}: {new['message']}")
        elif (change := _change(what, old, new)) is not None:
            comparison.changes.append(change)
    return comparison


def _name(result: dict[str, Any]) -> str | None:
    return result["device"] and result["device"]["name"]


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
