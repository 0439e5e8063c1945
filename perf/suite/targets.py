"""The targets, and what a result says of each: met, not met, or not measured.

A target speaks of the suite: of the shapes and modes that a full run plans to measure (`perf.suite.plan.suite`), and of
those beyond it that a run was asked for and has. It is met if every one of them was measured and reaches it; it is not
met if one of them does not, or if this package is wrong or fails in one. In between, with rows that were skipped for
lack of time, left out by the options of the run or not there, it is not measured.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from perf.suite.bytes import is_multi_pass
from perf.suite.plan import LARGE_BYTES, find, suite
from perf.suite.results import OK, SKIPPED, geometric_mean, out_of_time
from perf.suite.tables import FASTEST, by_case, speedup
from perf.workloads import COMPILED, EAGER, OURS, PROVIDERS, TRAINING, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from perf.suite.plan import Either
    from perf.suite.results import Row

    Case = dict[str, Row]
    Key = tuple[str, str]

COPY_FRACTIONS = {"forward": 0.92, "jvp": 0.92, "hvp": 0.92, "double_backward": 0.92, "backward": 0.90}
MIN_OVER_COMPILED = 1.15
# Of a CPU: time over that of torch.nn. A training step is a forward and a backward pass beside other work.
MAX_OVER_TORCH = {"forward": 1.15, "forward_backward": 1.15, "jvp": 1.0, "hvp": 1.0, TRAINING: 1.15}
# Of a case that a peer cannot do, does wrong or is left out of by design: no failure of this package, and nothing that
# it could be faster than.
NO_PEER = math.nan


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


class _Tally:
    """The cases that a target speaks of: values of those that were measured, and what became of the others.

    Args:
        keys: Workload and mode of each.
        cases: Those that the run has.
        value: The figure by which a case is judged in which this package is right; None if that was not measured,
            `NO_PEER` if there is nothing to compare with.
    """

    def __init__(self, keys: list[Key], cases: dict[Key, Case], value: Callable[[Case], float | None]) -> None:
        rows = {key: cases.get(key, {}).get(OURS, {"status": SKIPPED}) for key in keys}
        found = {key: value(cases[key]) for key in keys if rows[key]["status"] == OK}
        self.failed = [key for key in keys if rows[key]["status"] not in {OK, SKIPPED}]
        self.values = {key: v for key, v in found.items() if v is not None and not math.isnan(v)}
        self.without_peer = [key[0] for key, v in found.items() if v is not None and math.isnan(v)]
        self.missing = len(keys) - len(self.failed) - len(self.values) - len(self.without_peer)

    def verdict(self, target: str, figure: str, reached: bool) -> Verdict:
        """The verdict, given whether what was measured reaches the target."""
        parts = [figure] if figure else []
        if self.failed:
            parts.append(f"wrong or failed in {len(self.failed)}, first {': '.join(self.failed[0])}")
        measured = len(self.values) + len(self.failed)
        met = None
        if self.failed or (self.values and not reached):
            met = False
        elif self.values and not self.missing:
            met = True
        return Verdict(target, "; ".join(parts), met, measured, measured + self.missing)

    def extreme(self, best: Callable[..., Key]) -> tuple[float, str]:
        """The least or largest value, and its workload."""
        key = best(self.values, key=lambda key: self.values[key])
        return self.values[key], key[0]


def verdicts(result: dict[str, Any]) -> Iterator[Verdict]:
    """Every target of the kind of device that `result` is of."""
    device = "cuda" if result["device"] and result["device"]["type"] == "cuda" else "cpu"
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


def _gpu(pairs: list[tuple[Either, str]], cases: dict[Key, Case], everybody: bool) -> Iterator[Verdict]:
    for mode, least in COPY_FRACTIONS.items():
        large = [w for w, other in pairs if other == mode and isinstance(w, Workload) and w.pass_bytes >= LARGE_BYTES]
        for multi_pass in (False, True):
            keys = [(w.key, mode) for w in large if is_multi_pass(w.op, mode) == multi_pass]
            if keys:
                yield _copy_speed(mode, least, multi_pass, keys, cases)
    operations = [(workload.key, mode) for workload, mode in pairs if mode != TRAINING]
    training = [(workload.key, mode) for workload, mode in pairs if mode == TRAINING]
    yield _over_fastest("as fast as the fastest peer at each shape", operations, cases, everybody)
    tally = _Tally(operations, cases, lambda case: _over(case, COMPILED))
    mean = geometric_mean(list(tally.values.values()))
    figure = "" if mean is None else f"{mean:.2f} over {len(tally.values)} cases"
    target = f"{MIN_OVER_COMPILED} times as fast as torch.compile in the geometric mean"
    yield tally.verdict(target, figure, mean is not None and mean >= MIN_OVER_COMPILED)
    yield _over_fastest("training_step: as fast as the fastest peer", training, cases, everybody)


def _over(case: Case, peer: str) -> float | None:
    """How many times as fast this package is as `peer`."""
    row = case.get(peer)
    if row is None or out_of_time(row):
        return None
    return speedup(case, peer) if row["status"] == OK else NO_PEER


def _copy_speed(mode: str, least: float, multi_pass: bool, keys: list[Key], cases: dict[Key, Case]) -> Verdict:
    names = {"fraction_of_copy": "minimum bytes", "kernel_fraction": "its own passes"}
    credit, other = reversed(names) if multi_pass else names
    tally = _Tally(keys, cases, lambda case: case[OURS][credit])
    target = f"{mode}: at least {least} of copy speed at every shape of 32 MB and more, by {names[credit]}"
    target += " (kernels of several passes)" if multi_pass else ""
    if not tally.values:
        return tally.verdict(target, "", False)
    reached = sum(value >= least for value in tally.values.values())
    others = [value for key in tally.values if (value := cases[key][OURS][other]) is not None]
    figure = f"{reached} of {len(keys)} shapes, least {{:.2f}} ({{}})".format(*tally.extreme(min))
    figure += f"; by {names[other]} least {min(others):.2f}" if others else ""
    return tally.verdict(target, figure, reached == len(tally.values))


def _over_fastest(target: str, keys: list[Key], cases: dict[Key, Case], everybody: bool) -> Verdict:
    def value(case: Case) -> float | None:
        found = speedup(case, FASTEST)
        # A peer that was not measured may be the fastest; one that is faster decides without it.
        if found is not None and found < 1:
            return found
        if not everybody or len(case) == 1 or any(map(out_of_time, case.values())):
            return None
        return NO_PEER if found is None else found

    tally = _Tally(keys, cases, value)
    reached = sum(value >= 1 for value in tally.values.values())
    figure = ""
    if tally.values:
        figure = f"{reached} of {len(keys) - len(tally.without_peer)} cases, least {{:.2f}} ({{}})".format(
            *tally.extreme(min)
        )
    return tally.verdict(target, figure, reached == len(tally.values))


def _cpu(pairs: list[tuple[Either, str]], cases: dict[Key, Case], overheads: dict[str, Any]) -> Iterator[Verdict]:
    for mode, most in MAX_OVER_TORCH.items():
        keys = [(workload.key, other) for workload, other in pairs if other == mode]
        tally = _Tally(keys, cases, lambda case: (found := _over(case, EAGER)) and 1 / found)
        values = tally.values
        target = f"{mode}: at most {most} of the time of torch.nn" if most != 1 else f"{mode}: faster than torch's"
        figures = []
        if values:
            mean = geometric_mean(list(values.values()))
            figures.append(f"{mean:.2f} in the mean, at most {{:.2f}} ({{}})".format(*tally.extreme(max)))
        for workload in tally.without_peer:
            row = cases[workload, mode][EAGER]
            error = f" ({row['error']:.0e})" if row["error"] is not None else ""
            figures.append(f"torch is {row['status']}{error} at {workload}")
        yield tally.verdict(target, "; ".join(figures), all(value <= most for value in values.values()))
    missed = [f"{name} ({found['ratio']:.2f})" for name, found in overheads.items() if found["ratio"] > found["limit"]]
    figure = f"{len(overheads) - len(missed)} of {len(overheads)} comparisons" if overheads else ""
    figure += f"; missed: {', '.join(missed)}" if missed else ""
    yield Verdict("front-end overhead within its limits", figure, not missed if overheads else None, len(overheads), 0)
