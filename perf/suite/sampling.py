"""Samples of all contenders of a unit in turn, and what is noted of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from perf.suite.budget import OUT_OF_TIME
from perf.suite.providers import EAGER, OURS
from perf.suite.results import MICROSECONDS, OK
from perf.suite.timers import WARM_UP_SECONDS, Prepared, calls_per_sample, interleave, quantiles, ratios, warm_up

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from perf.suite.bench import Bench
    from perf.suite.contenders import Contender
    from perf.suite.timers import Quantiles, Step

# Share of the sampling time that device times get; the calls of large workloads take longer than their replays.
DEVICE_SHARE = 0.5
_TIMES = ("device_us", "call_us", "vs_torch_device", "vs_torch_call", "peak_bytes", "launches")


class CaptureError(RuntimeError):
    """A step of this package cannot be captured in a CUDA graph."""


def prepare_all(
    contenders: Sequence[Contender], steps: Callable[[Contender], list[Step]], fastest: float, bench: Bench
) -> dict[str, Prepared]:
    """What can be timed, by name of the contender; the others say why not.

    A peer that cannot be captured still has its call time, and says why it has no device time. This package must be.
    """
    prepared: dict[str, Prepared] = {}
    for contender in contenders:
        if contender.status != OK:
            continue
        if bench.budget.spent:
            contender.skip(f"{OUT_OF_TIME}; see --seconds")
            continue
        bench.doing(contender.name)
        ready = contender.attempt(
            lambda c=contender: bench.timer.prepare(steps(c), fastest), bench.timer, bench.budget.call_seconds()
        )
        bench.doing("")
        if ready is not None and ready.obstacle is not None:
            contender.message = f"no device time: {ready.obstacle}"
            if contender.name == OURS:
                contender.fail(CaptureError(ready.obstacle))
        if ready is not None and contender.status == OK:
            prepared[contender.name] = ready
    return prepared


def time_prepared(
    contenders: Sequence[Contender], prepared: Mapping[str, Prepared], bench: Bench, seconds: float
) -> None:
    """Write device and call times, ratios to torch, memory and launches into the contenders' values.

    Args:
        contenders: All of the unit.
        prepared: Those that can be timed, by name.
        bench: What they are timed with.
        seconds: For all samples together.
    """
    timer = bench.timer
    running = [contender for contender in contenders if contender.name in prepared]
    if timer.has_device_time:
        on_device = [c for c in running if prepared[c.name].obstacle is None]
        device = {c.name: _guarded(c, lambda p=prepared[c.name]: timer.device_seconds(p), bench) for c in on_device}
        warm_up(device, WARM_UP_SECONDS)
        _note(on_device, _interleaved(device, seconds * DEVICE_SHARE, bench), "device")
        seconds *= 1 - DEVICE_SHARE
    single = {c.name: _guarded(c, lambda p=prepared[c.name]: timer.call_seconds(p, 1), bench) for c in running}
    # A device is warm by then.
    once = warm_up(single, 0.0 if timer.has_device_time else WARM_UP_SECONDS)
    running = [c for c in running if c.status == OK]
    # As many calls of one provider in every round, so that a round is one stretch of time for each.
    calls = {c.name: calls_per_sample(once[c.name], timer.sample_seconds) for c in running}
    call = {
        c.name: _guarded(c, lambda p=prepared[c.name], n=calls[c.name]: timer.call_seconds(p, n), bench)
        for c in running
    }
    _note(running, _interleaved(call, seconds, bench), "call")
    for contender in running:
        ready = prepared[contender.name]
        peak = contender.attempt(lambda p=ready: timer.peak_bytes(p), timer, bench.budget.call_seconds())
        contender.values.update(peak_bytes=peak, launches=ready.launches)
    forget_times(contenders)


def forget_times(contenders: Sequence[Contender]) -> None:
    """Drop the times of contenders that are out: what was timed before one failed is no result of it."""
    for contender in contenders:
        if contender.status != OK:
            for name in _TIMES:
                contender.values.pop(name, None)


def _interleaved(samplers: Mapping[str, Callable[[], float]], seconds: float, bench: Bench) -> dict[str, list[float]]:
    return interleave(samplers, seconds, max_rounds=bench.timer.max_rounds, out_of_time=lambda: bench.budget.spent)


def _guarded(contender: Contender, take: Callable[[], float], bench: Bench) -> Callable[[], float]:
    """A sampler that takes its contender out if it raises; the others go on."""

    def sample() -> float:
        if contender.status != OK:
            return math.nan
        found = contender.attempt(take, bench.timer, bench.budget.call_seconds())
        return math.nan if found is None else found

    return sample


def _note(contenders: Sequence[Contender], samples: Mapping[str, list[float]], kind: str) -> None:
    right = {c.name for c in contenders if c.status == OK}
    for contender in contenders:
        if contender.name not in right:
            continue
        taken: Any = samples[contender.name]
        contender.values[f"{kind}_us"] = quantiles(taken).scaled(MICROSECONDS)
        if EAGER in right and contender.name != EAGER:
            over: Quantiles = ratios(taken, samples[EAGER])
            contender.values[f"vs_torch_{kind}"] = over.scaled(1.0)
