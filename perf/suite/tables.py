"""Tables of a result: one line for each workload and provider, and geometric means for each mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perf.suite.results import OK, geometric_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from perf.suite.results import Row

OURS, EAGER, COMPILED = "primitives", "torch", "torch.compile"
AGAINST = (EAGER, COMPILED, "torch.compile max-autotune", "fastest")


def microseconds(row: Row) -> float | None:
    """The time by which a row is compared: of the device where it has one, else of the call."""
    times = row["device_us"] or row["call_us"]
    return times["median"] if times else None


def by_case(rows: list[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """Rows of each workload and mode by provider, in the order of the run."""
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row["workload"], row["mode"]), {})[row["provider"]] = row
    return cases


def speedup(case: dict[str, Row], against: str) -> float | None:
    """How many times as fast this package is in a case as another provider, or as the fastest of all others.

    Times of the same kind are compared: of the device where both sides have one, else of calls.
    """
    ours = case.get(OURS)
    if ours is None or ours["status"] != OK:
        return None
    if against == "fastest":
        found = [speedup(case, name) for name in case if name != OURS]
        return min((value for value in found if value is not None), default=None)
    row = case.get(against)
    if row is None or row["status"] != OK:
        return None
    kind = "device" if ours["device_us"] and row["device_us"] else "call"
    # Round by round, which a drifting clock does not touch.
    if against == EAGER and (ratio := ours[f"vs_torch_{kind}"]):
        return 1 / ratio["median"]
    mine, theirs = ours[f"{kind}_us"], row[f"{kind}_us"]
    return theirs["median"] / mine["median"] if mine and theirs else None


def means(result: dict[str, Any]) -> Iterator[tuple[str, str, float, float, int]]:
    """For each mode and side: geometric mean and least of the speed-ups, and of how many cases."""
    cases = by_case(result["rows"])
    # With a single other side the fastest is that one.
    alone = len({row["provider"] for row in result["rows"]} - {OURS}) == 1
    for mode in dict.fromkeys(mode for _, mode in cases):
        for against in AGAINST[:-1] if alone else AGAINST:
            found = [speedup(case, against) for (_, other), case in cases.items() if other == mode]
            values = [value for value in found if value is not None]
            mean = geometric_mean(values)
            if mean is not None:
                yield mode, against, mean, min(values), len(values)


def print_summary(result: dict[str, Any]) -> None:
    """The means, and everything of this package that is not right."""
    device = result["device"]["name"] if result["device"] else "nothing was measured"
    seconds = result["seconds"]
    print(f"{device}: {len(result['rows'])} rows in {seconds['total']:.0f} s (compiling {seconds['compile']:.0f} s)")
    print(f"{'mode':<18}{'against':<28}{'speed-up':>9}{'least':>7}{'cases':>7}")
    for mode, against, mean, least, count in means(result):
        print(f"{mode:<18}{against:<28}{mean:>9.2f}{least:>7.2f}{count:>7}")
    counts: dict[str, int] = {}
    for row in result["rows"]:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
        if row["provider"] == OURS and row["status"] not in {OK, "skipped"}:
            print(f"{row['status'].upper()}: {row['workload']}: {row['mode']}: {row['message']}")
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if not result["complete"]:
        print("The run is not complete: see the rows that are skipped.")
