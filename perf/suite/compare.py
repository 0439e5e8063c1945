"""Two results against each other: what of this package became slower, stopped being right, or is gone.

Machines differ, and so do days on a shared one. Where both runs have it, a time is therefore compared by what the same
run measured beside it: as a fraction of the speed of a copy of as many bytes, or else over the time of torch eager.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from perf.suite.results import OK
from perf.workloads import OURS

if TYPE_CHECKING:
    from perf.suite.results import Row


def compare(before: dict[str, Any], after: dict[str, Any], fall: float = 0.05) -> tuple[str, bool]:
    """Compare the rows of this package in two results, of which each may lose the part `fall` of its speed.

    Returns:
        The outcome, in words, and whether the second run is not acceptable.
    """
    # The parts besides this package's sources that can have changed a time.
    first, second = _facts(before), _facts(after)
    lines = [
        f"WARNING: {name} differs: {first.get(name)} and then {second.get(name)}."
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]
    kinds, changes, failures = Counter(), [], 0
    older, newer = (
        {f"{row['workload']}: {row['mode']}": row for row in run["rows"] if row["provider"] == OURS}
        for run in (before, after)
    )
    for what in dict.fromkeys([*older, *newer]):
        old, new = older.get(what), newer.get(what)
        if old is None or new is None or not old["status"] == new["status"] == OK:
            word, failed = _fate(old, new)
            lines.append(f"{word:<8}{what}: {'no row' if new is None else new['message'] or new['status']}")
            failures += failed
            continue
        by, change = _change(old, new)
        kinds[by] += 1
        if abs(change) > fall:
            changes.append((change, f"{'rose' if change > 0 else 'FELL':<8}{change:+.1%}  {what}  ({by})"))
            failures += change < 0
    counts = "".join(f"; {count} by {by}" for by, count in kinds.items())
    conclusion = f"{failures} rows broke, are gone or fell by more than {fall:.0%}."
    lines += [f"{sum(kinds.values())} rows compared{counts}.", *(line for _, line in sorted(changes)), conclusion]
    # Runs that share no row that is right in both prove nothing.
    return "\n".join(lines), bool(failures) or not kinds


def _fate(old: Row | None, new: Row | None) -> tuple[str, bool]:
    """The fate of a row that is not right in both runs, and whether it fails the comparison."""
    was_right = old is not None and old["status"] == OK
    if new is None:
        return "GONE", was_right
    if new["status"] == OK:
        return ("new" if old is None else "fixed"), False
    # A row that was not measured before is judged by itself.
    return ("BROKEN", True) if was_right or old is None else ("STILL", False)


def _facts(result: dict[str, Any]) -> dict[str, Any]:
    environment = result["environment"]
    return {
        "device": result["device"]["name"],
        "driver": sorted({asked[0]["driver"] for asked in result["clocks"].values()}),
        **{name: environment[name] for name in ("python", "threads")},
        **environment["packages"],
        "complete": result["complete"],
    }


def _change(old: Row, new: Row) -> tuple[str, float]:
    """The quantity that is compared, and speed of the second run over the first minus one."""
    after = _costs(new)
    # The first that both rows have decides.
    by, cost = next((by, cost) for by, cost in _costs(old).items() if by in after)
    return by, cost / after[by] - 1


def _costs(row: Row) -> dict[str, float]:
    """The costs of a row, lower is better."""
    found: dict[str, float] = {}
    if row["device_us"] and row["fraction_of_copy"]:
        found["device time over a copy"] = 1 / row["fraction_of_copy"]
    for name in ("vs_torch_device", "vs_torch_call", "device_us", "call_us"):
        if row[name]:
            found[name] = row[name]["median"]
    return found
