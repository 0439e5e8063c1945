"""Two results against each other: what of this package became slower, stopped being right, or is gone.

Machines differ, and so do days on a shared one. Where both runs have it, a time is therefore compared by what the same
run measured beside it: as a fraction of the speed of a copy of as many bytes, or else over the time of torch eager.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from perf.suite.results import OK, SKIPPED, Row, key
from perf.workloads import OURS


class Comparison(NamedTuple):
    """What came out, in words, and whether the second run is not acceptable."""

    text: str
    failed: bool


def compare(before: dict[str, Any], after: dict[str, Any], fall: float = 0.05) -> Comparison:
    """Compare the rows of this package in two results.

    Args:
        before: The result to hold on to.
        after: The result in question.
        fall: Part of its speed that a row may lose, by the medians.
    """
    lines = [f"WARNING: {text}" for text in _differences(before, after)]
    failures, kinds = Counter(), Counter()
    changes: list[tuple[float, str]] = []
    older, newer = ({key(row): row for row in run["rows"] if row["provider"] == OURS} for run in (before, after))
    for where in dict.fromkeys([*older, *newer]):
        what, old, new = f"{where[0]}: {where[1]}", older.get(where), newer.get(where)
        if old is None or new is None or not old["status"] == new["status"] == OK:
            word, said, failure = _fate(old, new)
            lines += [f"{word:<8}{what}: {said}"] if word else []
            failures.update([failure] if failure else [])
            continue
        by, change, apart = _change(old, new)
        kinds[by] += 1
        if abs(change) > fall:
            word = "rose" if change > 0 else "FELL"
            spread = "" if apart else "; within the spread of both runs: measure again"
            changes.append((change, f"{word:<8}{change:+.1%}  {what}  ({by}{spread})"))
            failures.update([f"fell by more than {fall:.0%}"] if word == "FELL" else [])
    lines.append(f"{sum(kinds.values())} rows compared" + "".join(f"; {n} by {by}" for by, n in kinds.items()) + ".")
    lines += [line for _, line in sorted(changes)]
    if failures:
        conclusion = f"Failed: of the rows, {', '.join(f'{count} {verb}' for verb, count in failures.items())}."
    elif not kinds:
        conclusion = "Failed: no row is right in both runs."
    else:
        conclusion = f"Nothing fell by more than {fall:.0%}."
    return Comparison("\n".join([*lines, conclusion]), bool(failures) or not kinds)


def _fate(old: Row | None, new: Row | None) -> tuple[str, str, str]:
    """What became of a row that is not right in both runs, what it says, and how it fails the comparison."""
    was = None if old is None else old["status"]
    now = SKIPPED if new is None else new["status"]
    said = "no row" if new is None else now + (f": {new['message']}" if new["message"] else "")
    if now not in {OK, SKIPPED}:
        # A row that was not measured before is judged by itself.
        return ("BROKEN", said, "broke") if was in {OK, SKIPPED, None} else ("STILL", said, "")
    if was == OK:
        return "GONE", said, "are gone"
    if was is None:
        return "new", said, ""
    return ("fixed", f"was {was}", "") if now == OK else ("", "", "")


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
    return found + [f"the {name} run is not complete." for name, run in runs.items() if not run["complete"]]


def _facts(result: dict[str, Any]) -> dict[str, Any]:
    environment = result["environment"] or {}
    return {
        "device": (result["device"] or {}).get("name"),
        "driver": sorted({asked[0].get("driver_version") for asked in result["clocks"].values() if asked}),
        **{name: environment.get(name) for name in ("python", "cuda", "threads")},
        **environment.get("packages", {}),
        "options": {name: value for name, value in result["options"].items() if name not in {"seconds", "workers"}},
    }


def _change(old: Row, new: Row) -> tuple[str, float, bool]:
    """What is compared, speed of the second run over the first minus one, and whether their ranges are apart."""
    kinds = [(_costs(old)[by], _costs(new)[by], by) for by in _costs(old)]
    first, second, by = next(kind for kind in kinds if kind[0] and kind[1])
    return by, first["median"] / second["median"] - 1, first["p80"] < second["p20"] or second["p80"] < first["p20"]


def _costs(row: Row) -> dict[str, Any]:
    """The costs of a row, lower is better; the first that both rows have decides."""
    copies = None
    if row["device_us"] and row["copy_gbps"] and row["minimum_bytes"]:
        copy_us = row["minimum_bytes"] / row["copy_gbps"] * 1e-3
        copies = {name: row["device_us"][name] / copy_us for name in ("median", "p20", "p80")}
    return {
        "device time over a copy": copies,
        "device time over torch": row["vs_torch_device"],
        "call time over torch": row["vs_torch_call"],
        "device time": row["device_us"],
        "call time": row["call_us"],
    }
