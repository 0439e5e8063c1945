"""Speed-ups of a result, and what it says of each target: met, not met, or not measured.

A target speaks of the suite: of the shapes and modes that a full run plans to measure (`perf.suite.plan.suite`), and of
those beyond it that a run was asked for and has. It is met if every one of them was measured and reaches it; it is not
met if one of them does not, or if this package is wrong or fails in one. In between, with rows that were skipped for
lack of time, left out by the options of the run or not there, it is not measured.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from perf.suite.plan import LARGE_BYTES, find, suite
from perf.suite.results import OK, SKIPPED, out_of_time
from perf.workloads import COMPILED, EAGER, OURS, PROVIDERS, TRAINING, TUNED, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from perf.suite.plan import Either
    from perf.suite.results import Row

    Case = dict[str, Row]
    Key = tuple[str, str]
    Values = dict[Key, float]

FASTEST = "fastest"
AGAINST = (EAGER, COMPILED, TUNED, FASTEST)
COPY_FRACTIONS = {"forward": 0.92, "jvp": 0.92, "backward": 0.90}
MIN_OVER_COMPILED = 1.15
# Of a CPU: time over that of torch.nn. A training step is a forward and a backward pass beside other work.
MAX_OVER_TORCH = {"forward": 1.15, "forward_backward": 1.15, "jvp": 1.0, "hvp": 1.0, TRAINING: 1.15}
# Of a case that a peer cannot do, does wrong or is left out of by design: no failure of this package, and nothing that
# it could be faster than.
NO_PEER = math.nan


def by_case(rows: list[Row]) -> dict[Key, Case]:
    """Rows of each workload and mode by provider, in the order of the run."""
    cases: dict[Key, Case] = {}
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


def speedups(result: dict[str, Any]) -> dict[Key, list[float]]:
    """For each mode and side the speed-ups of the cases that have one."""
    cases = by_case(result["rows"])
    # With a single other side the fastest is that one.
    sides = AGAINST[:-1] if len({row["provider"] for row in result["rows"]} - {OURS}) == 1 else AGAINST
    found: dict[Key, list[float]] = {}
    for mode in dict.fromkeys(mode for _, mode in cases):
        for against in sides:
            values = [speedup(case, against) for (_, other), case in cases.items() if other == mode]
            if kept := [value for value in values if value is not None]:
                found[mode, against] = kept
    return found


def is_gpu(result: dict[str, Any]) -> bool:
    """Whether a result is of a GPU."""
    return bool(result["device"]) and result["device"]["type"] == "cuda"


class Verdict(NamedTuple):
    """A target and what was measured, in words, and the verdict; None if it was not measured.

    It is known of `measured` of the `expected` cases what they are like.
    """

    target: str
    figure: str
    met: bool | None
    measured: int
    expected: int

    @property
    def text(self) -> str:
        """The verdict in words."""
        if self.met is None:
            return f"not measured ({self.measured} of {self.expected})" if self.expected else "not measured"
        return "met" if self.met else "NOT MET"


def verdicts(result: dict[str, Any]) -> Iterator[Verdict]:
    """Every target of the kind of device that `result` is of."""
    device = "cuda" if is_gpu(result) else "cpu"
    cases = by_case(result["rows"])
    pairs = suite(device)
    known = {(workload.key, mode) for workload, mode in pairs}
    for key, mode in cases:
        # A workload that the suite has no more is nobody's.
        with contextlib.suppress(KeyError):
            pairs += [(find(key, device), mode)] if (key, mode) not in known else []
    if device == "cuda":
        # Peers that could not be imported are known not to be there; those that were not asked for are not known.
        yield from _gpu(pairs, cases, set(PROVIDERS) <= set(result["providers"]))
    else:
        yield from _cpu(pairs, cases, (result["overhead"] or {}).get("modes", {}))


def _judge(
    target: str,
    keys: list[Key],
    cases: dict[Key, Case],
    value: Callable[[Case], float | None],
    reached: Callable[[Values], bool],
    words: Callable[[Values, list[Key]], str],
) -> Verdict:
    """The verdict on a target.

    Args:
        target: In words.
        keys: Workload and mode of each case that it speaks of.
        cases: Those that the run has.
        value: The figure by which a case is judged in which this package is right; None if that was not measured,
            `NO_PEER` if there is nothing to compare with.
        reached: Whether these figures reach the target.
        words: What to say of the figures, and of the cases without a peer.
    """
    rows = {key: cases.get(key, {}).get(OURS, {"status": SKIPPED}) for key in keys}
    found = {key: value(cases[key]) for key in keys if rows[key]["status"] == OK}
    failed = [key for key in keys if rows[key]["status"] not in {OK, SKIPPED}]
    values = {key: v for key, v in found.items() if v is not None and not math.isnan(v)}
    alone = [key for key, v in found.items() if v is not None and math.isnan(v)]
    expected, measured = len(keys) - len(alone), len(values) + len(failed)
    parts = [words(values, alone)] if found else []
    parts += [f"wrong or failed in {len(failed)}, first {': '.join(failed[0])}"] if failed else []
    met = None
    if failed or (values and not reached(values)):
        met = False
    elif values and measured == expected:
        met = True
    return Verdict(target, "; ".join(filter(None, parts)), met, measured, expected)


def _gpu(pairs: list[tuple[Either, str]], cases: dict[Key, Case], everybody: bool) -> Iterator[Verdict]:
    for mode, least in COPY_FRACTIONS.items():
        target = f"{mode}: at least {least} of copy speed at every shape of 32 MB and more, where one kernel can do it"
        keys = [(w.key, mode) for w, other in pairs if other == mode and _is_copy_bound(w, mode)]
        yield _least(target, keys, cases, lambda case: case[OURS]["fraction_of_copy"], least)

    def over_fastest(case: Case) -> float | None:
        found = speedup(case, FASTEST)
        # A peer that was not measured may be the fastest; one that is faster decides without it.
        if found is not None and found < 1:
            return found
        if not everybody or len(case) == 1 or any(map(out_of_time, case.values())):
            return None
        return NO_PEER if found is None else found

    operations = [(workload.key, mode) for workload, mode in pairs if mode != TRAINING]
    training = [(workload.key, mode) for workload, mode in pairs if mode == TRAINING]
    yield _least("as fast as the fastest peer at each shape", operations, cases, over_fastest, 1.0)
    yield _judge(
        f"{MIN_OVER_COMPILED} times as fast as torch.compile in the geometric mean",
        operations,
        cases,
        lambda case: _over(case, COMPILED),
        lambda values: statistics.geometric_mean(values.values()) >= MIN_OVER_COMPILED,
        lambda values, _: (
            f"{statistics.geometric_mean(values.values()):.2f} over {len(values)} cases" if values else ""
        ),
    )
    yield _least("training_step: as fast as the fastest peer", training, cases, over_fastest, 1.0)


def _is_copy_bound(workload: Either, mode: str) -> bool:
    """Whether one kernel could do a mode, so that a copy is what to compare it with.

    Batch norm needs all of a channel for its sums before it can write any of it, in training and in the backward of
    its evaluation; it is held against peers alone.
    """
    if not isinstance(workload, Workload) or workload.pass_bytes < LARGE_BYTES:
        return False
    return workload.op != "batch_norm" and (workload.op, mode) != ("batch_norm_eval", "backward")


def _least(
    target: str, keys: list[Key], cases: dict[Key, Case], value: Callable[[Case], float | None], least: float
) -> Verdict:
    """The verdict on a target that every case must reach."""

    def words(values: Values, alone: list[Key]) -> str:
        if not values:
            return ""
        key, reached = min(values, key=lambda key: values[key]), sum(v >= least for v in values.values())
        return f"{reached} of {len(keys) - len(alone)} cases, least {values[key]:.2f} ({key[0]})"

    return _judge(target, keys, cases, value, lambda values: min(values.values()) >= least, words)


def _over(case: Case, peer: str) -> float | None:
    """How many times as fast this package is as `peer`."""
    row = case.get(peer)
    if row is None or out_of_time(row):
        return None
    return speedup(case, peer) if row["status"] == OK else NO_PEER


def _cpu(pairs: list[tuple[Either, str]], cases: dict[Key, Case], overheads: dict[str, Any]) -> Iterator[Verdict]:
    def words(values: Values, alone: list[Key]) -> str:
        figures = []
        if values:
            worst, mean = max(values, key=lambda key: values[key]), statistics.geometric_mean(values.values())
            figures.append(f"{mean:.2f} in the mean, at most {values[worst]:.2f} ({worst[0]})")
        for key in alone:
            row = cases[key][EAGER]
            error = f" ({row['error']:.0e})" if row["error"] is not None else ""
            figures.append(f"torch is {row['status']}{error} at {key[0]}")
        return "; ".join(figures)

    for mode, most in MAX_OVER_TORCH.items():
        keys = [(workload.key, other) for workload, other in pairs if other == mode]
        target = f"{mode}: at most {most} of the time of torch.nn" if most != 1 else f"{mode}: faster than torch's"

        def reached(values: Values, most: float = most) -> bool:
            return max(values.values()) <= most

        yield _judge(target, keys, cases, lambda case: (found := _over(case, EAGER)) and 1 / found, reached, words)
    missed = [f"{name} ({found['ratio']:.2f})" for name, found in overheads.items() if found["ratio"] > found["limit"]]
    figure = f"{len(overheads) - len(missed)} of {len(overheads)} comparisons" if overheads else ""
    figure += f"; missed: {', '.join(missed)}" if missed else ""
    yield Verdict("front-end overhead within its limits", figure, not missed if overheads else None, len(overheads), 0)
