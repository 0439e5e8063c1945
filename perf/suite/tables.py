"""Speed-ups of a result, case by case and in the mean, and what a run prints of itself."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from perf.suite.results import OK, SKIPPED, geometric_mean
from perf.workloads import COMPILED, EAGER, OURS, TUNED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perf.suite.results import Row

    Case = dict[str, Row]

FASTEST = "fastest"
AGAINST = (EAGER, COMPILED, TUNED, FASTEST)


def by_case(rows: list[Row]) -> dict[tuple[str, str], Case]:
    """Rows of each workload and mode by provider, in the order of the run."""
    cases: dict[tuple[str, str], Case] = {}
    for row in rows:
        cases.setdefault((row["workload"], row["mode"]), {})[row["provider"]] = row
    return cases


def speedup(case: Case, against: str) -> float | None:
    """How many times as fast this package is in a case as another provider, or as the fastest of all others.

    Times of the same kind are compared: of the device where both sides have one, else of calls.
    """
    if against == FASTEST:
        found = [speedup(case, name) for name in case if name != OURS]
        return min((value for value in found if value is not None), default=None)
    ours, row = case.get(OURS), case.get(against)
    if ours is None or row is None or not ours["status"] == row["status"] == OK:
        return None
    kind = "device" if ours["device_us"] and row["device_us"] else "call"
    # Round by round, which a drifting clock does not touch.
    if against == EAGER and (ratio := ours[f"vs_torch_{kind}"]):
        return 1 / ratio["median"]
    return row[f"{kind}_us"]["median"] / ours[f"{kind}_us"]["median"]


def sides(rows: list[Row]) -> tuple[str, ...]:
    """Against whom this package is held. With a single other side the fastest is that one."""
    return AGAINST[:-1] if len({row["provider"] for row in rows} - {OURS}) == 1 else AGAINST


def speedups(result: dict[str, Any]) -> Iterator[tuple[str, str, list[float]]]:
    """For each mode and side the speed-ups of the cases that have one."""
    cases = by_case(result["rows"])
    for mode in dict.fromkeys(mode for _, mode in cases):
        for against in sides(result["rows"]):
            found = [speedup(case, against) for (_, other), case in cases.items() if other == mode]
            yield mode, against, [value for value in found if value is not None]


def means(result: dict[str, Any]) -> Iterator[tuple[str, str, float, float, int]]:
    """For each mode and side: geometric mean and least of the speed-ups, and of how many cases."""
    for mode, against, values in speedups(result):
        if (mean := geometric_mean(values)) is not None:
            yield mode, against, mean, min(values), len(values)


def print_summary(result: dict[str, Any]) -> None:
    """Print the means, and everything of this package that is not right."""
    seconds = result["seconds"]
    print(f"{result['device']['name']}: {len(result['rows'])} rows in {seconds['total']:.0f} s ", end="")
    print(f"(compiling {seconds['compile']:.0f} s)")
    print(f"{'mode':<18}{'against':<28}{'speed-up':>9}{'least':>7}{'cases':>7}")
    for mode, against, mean, least, count in means(result):
        print(f"{mode:<18}{against:<28}{mean:>9.2f}{least:>7.2f}{count:>7}")
    for row in result["rows"]:
        if row["provider"] == OURS and row["status"] not in {OK, SKIPPED}:
            print(f"{row['status'].upper()}: {row['workload']}: {row['mode']}: {row['message']}")
    print(", ".join(f"{count} {status}" for status, count in Counter(row["status"] for row in result["rows"]).items()))
    if not result["complete"]:
        print("The run is not complete: see the rows that are skipped.")
