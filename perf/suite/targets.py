"""Speed-ups of a result, and what it says of each target: met, not met, or not measured.

A target speaks of the shapes and modes that a full run measures, and of those beyond it that a run was asked for and
has. It is met if every one of them was measured and reaches it; it is not met if one of them does not, or if this
package is wrong or fails in one. In between it is not measured.
"""

from __future__ import annotations

import math
import statistics
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from perf.ops.workload import Workload
from perf.suite.plan import Options, all_workloads, make_plan
from perf.suite.results import OK
from perf.workloads import COMPILED, COMPOSED_OPS, EAGER, MATH, MATMUL_OPS, OURS, PROVIDERS, TRAINING, TUNED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from perf.suite.results import Row

    Case = dict[str, Row]
    Key = tuple[str, str]

FASTEST = "fastest of all others"
AGAINST = (EAGER, MATH, COMPILED, TUNED, FASTEST)
# Of a tensor; the targets in copy speed speak of these, smaller ones are bound by launches and caches.
LARGE_BYTES = 32e6
COPY_FRACTIONS = {"forward": 0.92, "jvp": 0.92, "backward": 0.90}
MIN_OVER_COMPILED = 1.15
# Of a CPU: time over that of torch.nn. A training step is a forward and a backward pass beside other work.
MAX_OVER_TORCH = {"forward": 1.15, "forward_backward": 1.15, "jvp": 1.0, "hvp": 1.0, TRAINING: 1.15}
# Of attention's second order, which torch's own choice of a backend cannot do, on a CPU over its MATH backend.
MAX_OVER_MATH = {"jvp": 1.0, "hvp": 1.0, "double_backward": 1.0, "backward_of_jvp": 1.0}
# Of attention on a GPU over the time of its forward: the operator of its tangent takes 3 times as long at most, its
# backward 4, double backward and the backward of (o, o_dot) 11, and forward over reverse 12. A jvp has the forward in
# it too, and a Hessian-vector product all of first order.
MAX_OVER_FORWARD = {"jvp": 1 + 3, "backward": 4, "backward_of_jvp": 11, "double_backward": 11, "hvp": 1 + 3 + 4 + 12}
# Of a case that a peer cannot do or does wrong: no failure of this package, and nothing that it could be faster than.
NO_PEER = math.nan


def by_case(rows: list[Row]) -> dict[Key, Case]:
    """Rows of each workload and mode by provider, in the order of the run."""
    cases: dict[Key, Case] = {}
    for row in rows:
        cases.setdefault((row["workload"], row["mode"]), {})[row["provider"]] = row
    return cases


def speedup(case: Case, against: str) -> float | None:
    """How many times as fast this package is in a case as another provider, or as the fastest of all others."""
    if against == FASTEST:
        found = [speedup(case, name) for name in case if name != OURS]
        return min((value for value in found if value is not None), default=None)
    ours, row = case.get(OURS), case.get(against)
    if ours is None or row is None or not ours["status"] == row["status"] == OK:
        return None
    kind = "device" if ours["device_us"] else "call"
    # Round by round, which a drifting clock does not touch.
    if against == EAGER and (ratio := ours[f"vs_torch_{kind}"]):
        return 1 / ratio["median"]
    return row[f"{kind}_us"]["median"] / ours[f"{kind}_us"]["median"]


def speedups(result: dict[str, Any]) -> dict[Key, list[float]]:
    """For each mode and side the speed-ups of the cases that have one."""
    cases = by_case(result["rows"])
    # With a single other side, but for torch's own choice of a backend, the fastest is that one.
    sides = AGAINST[:-1] if len({row["provider"] for row in result["rows"]} - {OURS, MATH}) == 1 else AGAINST
    found: dict[Key, list[float]] = {}
    for mode in dict.fromkeys(mode for _, mode in cases):
        for against in sides:
            values = [speedup(case, against) for (_, other), case in cases.items() if other == mode]
            if kept := [value for value in values if value is not None]:
                found[mode, against] = kept
    return found


class Verdict(NamedTuple):
    """A target, what was measured, and whether it is met, in words."""

    target: str
    figure: str
    text: str


def verdicts(result: dict[str, Any]) -> Iterator[Verdict]:
    """Every target of the kind of device that `result` is of."""
    device, cases = result["device"]["type"], by_case(result["rows"])
    workloads = {workload.key: workload for workload in all_workloads(device)}
    suite = [(workload.key, mode) for workload, mode in make_plan(Options(device))]
    # A workload that the suite has no more counts nowhere.
    keys = [key for key in dict.fromkeys([*suite, *cases]) if key[0] in workloads]
    # Who makes logits anew, and never keeps them, is held to no time.
    keys = [key for key in keys if getattr(workloads[key[0]], "op", None) not in COMPOSED_OPS]
    of_attention = {key for key in keys if getattr(workloads[key[0]], "op", None) in MATMUL_OPS}

    def time(case: Case, peer: str = EAGER) -> float | None:
        return (found := _over(case, peer)) and 1 / found

    if device == "cpu":
        for mode, most in MAX_OVER_TORCH.items():
            words = f"at most {most} of the time of torch.nn" if most != 1 else "faster than torch's"
            chosen = [key for key in keys if key[1] == mode and not (key in of_attention and mode in MAX_OVER_MATH)]
            yield _judge(f"{mode}: {words}", chosen, cases, time, most=most)
        for mode, most in MAX_OVER_MATH.items():
            target = f"{mode} of attention: at most the time of torch's MATH backend"
            chosen = [key for key in keys if key[1] == mode and key in of_attention]
            yield _judge(target, chosen, cases, partial(time, peer=MATH), most=most)
        yield _overhead((result["overhead"] or {}).get("modes", {}))
        return
    for mode, least in COPY_FRACTIONS.items():
        target = f"{mode}: at least {least} of copy speed at every shape of 32 MB and more, where one kernel can do it"
        chosen = [key for key in keys if key[1] == mode and _is_copy_bound(workloads[key[0]], mode)]
        yield _judge(target, chosen, cases, lambda case: case[OURS]["fraction_of_copy"], least)
    # Peers that could not be imported are known not to be there; those that were not asked for may be the fastest.
    everybody = set(PROVIDERS) - {TUNED} <= set(result["providers"])

    def over_fastest(case: Case) -> float | None:
        found = _over(case, FASTEST)
        return found if everybody or (found is not None and found < 1) else None

    def over_compiled(case: Case) -> float | None:
        return _over(case, COMPILED)

    target = f"{MIN_OVER_COMPILED} times as fast as torch.compile in the geometric mean"
    others = [key for key in keys if key not in of_attention]
    operations, training = ([key for key in others if (key[1] == TRAINING) == is_step] for is_step in (False, True))
    yield _judge("as fast as the fastest peer at each shape", operations, cases, over_fastest, 1.0)
    yield _judge(target, operations, cases, over_compiled, MIN_OVER_COMPILED, by_mean=True)
    yield _judge("training_step: as fast as the fastest peer", training, cases, over_fastest, 1.0)

    def over_forward(case: Case) -> float | None:
        ours = case[OURS]
        forward = cases.get((ours["workload"], "forward"), {}).get(OURS, {}).get("device_us")
        return ours["device_us"]["median"] / forward["median"] if ours["device_us"] and forward else None

    for mode, most in MAX_OVER_FORWARD.items():
        chosen = [key for key in keys if key[1] == mode and key in of_attention]
        yield _judge(f"{mode} of attention: at most {most} times its forward", chosen, cases, over_forward, most=most)


def _over(case: Case, peer: str) -> float | None:
    """How many times as fast this package is as `peer`; None if that was not measured."""
    if len(case) == 1 or (peer != FASTEST and peer not in case):
        return None
    found = speedup(case, peer)
    return NO_PEER if found is None else found


def _is_copy_bound(workload: Any, mode: str) -> bool:
    """Whether one kernel could do a mode, so that a copy is what to compare it with.

    Batch norm needs all of a channel for its sums before it can write any of it, in training and in the backward of
    its evaluation, and instance norm has its kernels; they are held against peers alone.
    """
    if not isinstance(workload, Workload) or workload.pass_bytes < LARGE_BYTES:
        return False
    if workload.op.endswith("_eval"):
        return mode != "backward"
    return not workload.record.has_channels and workload.op not in MATMUL_OPS


def _judge(
    target: str,
    keys: list[Key],
    cases: dict[Key, Case],
    value: Callable[[Case], float | None],
    least: float = 0.0,
    most: float = math.inf,
    by_mean: bool = False,
) -> Verdict:
    """The verdict on a target that speaks of `keys`, by the figure `value` of each case in which this package is right.

    None as a figure says that it was not measured, `NO_PEER` that there is nothing to compare with. Every figure must
    be within `least` and `most`, or else their geometric mean.
    """
    ours = {key: cases[key][OURS] for key in keys if OURS in cases.get(key, ())}
    failed = [key for key, row in ours.items() if row["status"] != OK]
    found = {key: value(cases[key]) for key, row in ours.items() if row["status"] == OK}
    alone = [key for key, figure in found.items() if figure is not None and math.isnan(figure)]
    values = {key: figure for key, figure in found.items() if figure is not None and key not in alone}
    parts, reached = [], True
    if values:
        mean, limited = statistics.geometric_mean(values.values()), math.isfinite(most)
        worst = (max if limited else min)(values, key=lambda key: values[key])
        parts.append(f"{mean:.2f} in the mean, at {'most' if limited else 'least'} {values[worst]:.2f} ({worst[0]})")
        reached = least <= (mean if by_mean else values[worst]) <= most
    for key in alone if math.isfinite(most) else ():
        torch = cases[key][EAGER]
        error = f" ({torch['error']:.0e})" if torch["error"] is not None else ""
        parts.append(f"torch is {torch['status']}{error} at {key[0]}")
    parts += [f"wrong or failed in {len(failed)}, first {': '.join(failed[0])}"] if failed else []
    measured, expected = len(values) + len(failed), len(keys) - len(alone)
    text = f"not measured ({measured} of {expected})"
    if failed or not reached:
        text = "NOT MET"
    elif values and measured == expected:
        text = "met"
    return Verdict(target, "; ".join(parts), text)


def _overhead(found: dict[str, Any]) -> Verdict:
    missed = [f"{name} ({one['ratio']:.2f})" for name, one in found.items() if one["ratio"] > one["limit"]]
    figure = f"{len(found) - len(missed)} of {len(found)} comparisons" if found else ""
    figure += f"; missed: {', '.join(missed)}" if missed else ""
    text = ("NOT MET" if missed else "met") if found else "not measured"
    return Verdict("front-end overhead within its limits", figure, text)
