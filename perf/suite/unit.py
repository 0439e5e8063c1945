"""One unit: every provider at one workload in one mode, checked, then timed against each other."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from perf.suite import modes, reference
from perf.suite.bytes import kernel_bytes, minimum_bytes
from perf.suite.calibration import calibrate
from perf.suite.providers import EAGER, OURS, provider
from perf.suite.results import CANNOT, ERROR, MICROSECONDS, OK, SKIPPED, WRONG, Row, finite, row_for
from perf.suite.timers import WARM_UP_SECONDS, Prepared, calls_per_sample, interleave, quantiles, ratios, warm_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from perf.suite.modes import Sample
    from perf.suite.timers import Quantiles, Step, Timer
    from perf.workloads import Workload

# Share of the sampling time that device times get; the calls of large workloads take longer than their replays.
DEVICE_SHARE = 0.5
MESSAGE_CHARACTERS = 500


@dataclass
class Contender:
    """A provider in a unit: how it makes steps of samples, and what has come of it."""

    name: str
    make_step: Callable[[Sample], Step] | None = None
    result: Any = None
    status: str = OK
    message: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def attempt(self, function: Callable[[], Any]) -> Any:
        """What `function` returns; None if it raises, which is the answer of this provider."""
        try:
            return function()
        except Exception as error:
            self.fail(error)
            return None

    def fail(self, error: BaseException) -> None:
        """Take it out, with what it said. Of this package an error is one; a peer just cannot do it."""
        self.status = ERROR if self.name == OURS else CANNOT
        self.message = describe(error)
        self.make_step = self.result = None


def describe(error: BaseException) -> str:
    """Type and first paragraph of an error, short enough for a table."""
    text = str(error).strip().split("\n\n")[0]
    return f"{type(error).__name__}: {text}"[:MESSAGE_CHARACTERS]


def measure(
    unit: Mapping[str, Any],
    workload: Workload,
    names: list[str],
    timer: Timer,
    lock: contextlib.AbstractContextManager,
    directory: Path,
    compiled: Callable[[str], str | None],
) -> list[Row]:
    """The rows of a unit.

    Args:
        unit: Its record in the plan, with `seconds`, the sampling time.
        workload: What it measures.
        names: Providers.
        timer: Of the device.
        lock: Held while anything is timed.
        directory: Of the run, where calibrations are kept.
        compiled: Says of a provider why it must not be tried here: None, or `status: message`.
    """
    mode = unit["mode"]
    sample = modes.make_sample(workload, mode, timer.device)
    contenders = [_enter(name, workload, mode, sample, compiled(name)) for name in names]
    tolerance = reference.TOLERANCES[workload.dtype]
    with lock:
        check(contenders, workload, mode, sample, tolerance)
        running = [contender for contender in contenders if contender.status == OK]
        total_bytes = minimum_bytes(workload, mode)
        bandwidth = calibrate(timer, total_bytes, directory)
        for contender in contenders:
            contender.values.update(minimum_bytes=total_bytes, copy_gbps=bandwidth["copy_gbps"], tolerance=tolerance)
            if contender.name == OURS:
                contender.values["kernel_bytes"] = kernel_bytes(workload, mode)
        samples = [sample.map(torch.clone) for _ in range(timer.num_sets(total_bytes) - 1)]
        _time(running, [sample, *samples], timer, unit["seconds"], total_bytes / bandwidth["copy_gbps"] * 1e-9)
    for contender in running:
        _rate(contender.values)
    return [row_for(dict(unit), c.name, c.status, c.message, **c.values) for c in contenders]


def _enter(name: str, workload: Workload, mode: str, sample: Sample, verdict: str | None) -> Contender:
    """A provider's first call, which may compile for a while, and its result."""
    contender = Contender(name)
    if verdict is not None:
        contender.status, contender.message = verdict.split(": ", 1)
        return contender
    contender.make_step = contender.attempt(lambda: _step_maker(name, workload, mode))
    if contender.make_step is not None:
        make_step = contender.make_step
        step = contender.attempt(lambda: make_step(sample))
        contender.result = None if step is None else contender.attempt(step)
    return contender


def _step_maker(name: str, workload: Workload, mode: str) -> Callable[[Sample], Step]:
    side = provider(name)
    make = modes.make_steps(mode, side.function(workload), side.wrap)
    dtype = side.param_dtype
    return make if dtype is None else lambda sample: make(sample.with_params(dtype))


def first_call(name: str, workload: Workload, mode: str, device: torch.device) -> Contender:
    """Compile what `name` needs for `mode` of `workload`, into the caches on disk, and say what came of it."""
    return _enter(name, workload, mode, modes.make_sample(workload, mode, device), None)


def check(contenders: list[Contender], workload: Workload, mode: str, sample: Sample, tolerance: float) -> None:
    """Take out every contender whose result is wrong, and drop the results."""
    results = {contender.name: contender.result for contender in contenders if contender.status == OK}
    errors = reference.errors(workload, mode, sample, results) if results else {}
    for contender in contenders:
        contender.result = None
        if contender.name in errors:
            judge(contender, errors[contender.name], tolerance)


def judge(contender: Contender, error: float, tolerance: float) -> None:
    """Note the error of a contender, and take it out if that is too large."""
    contender.values["error"] = finite(error)
    if not error <= tolerance:
        contender.status = WRONG
        contender.message = f"error {error:.1e}, at most {tolerance:.0e} is right"
        contender.make_step = None


def _time(contenders: list[Contender], samples: list[Sample], timer: Timer, budget: float, fastest: float) -> None:
    prepared: dict[str, Prepared] = {}
    for contender in contenders:
        make_step = contender.make_step
        if make_step is not None:
            # A capture refuses some of what a call may do; that is an answer too.
            ready = contender.attempt(lambda make=make_step: timer.prepare([make(s) for s in samples], fastest))
            if ready is not None:
                prepared[contender.name] = ready
    time_prepared([c for c in contenders if c.name in prepared], prepared, timer, budget)


def time_prepared(contenders: list[Contender], prepared: Mapping[str, Prepared], timer: Timer, budget: float) -> None:
    """Write device and call times, ratios to torch, memory and launches into the contenders' values."""
    if timer.has_device_time:
        device = {c.name: lambda p=prepared[c.name]: timer.device_seconds(p) for c in contenders}
        warm_up(device, WARM_UP_SECONDS)
        _note(contenders, interleave(device, budget * DEVICE_SHARE), "device")
        budget *= 1 - DEVICE_SHARE
    single = {c.name: lambda p=prepared[c.name]: timer.call_seconds(p, 1) for c in contenders}
    # A device is warm by then.
    once = warm_up(single, 0.0 if timer.has_device_time else WARM_UP_SECONDS)
    # As many calls for all, so that a round is one stretch of time for each.
    calls = {name: calls_per_sample(seconds) for name, seconds in once.items()}
    call = {c.name: lambda p=prepared[c.name], n=calls[c.name]: timer.call_seconds(p, n) for c in contenders}
    _note(contenders, interleave(call, budget), "call")
    for contender in contenders:
        contender.values["peak_bytes"] = timer.peak_bytes(prepared[contender.name])
        contender.values["launches"] = prepared[contender.name].launches


def _note(contenders: list[Contender], samples: Mapping[str, list[float]], kind: str) -> None:
    for contender in contenders:
        taken = samples[contender.name]
        contender.values[f"{kind}_us"] = quantiles(taken).scaled(MICROSECONDS)
        if EAGER in samples and contender.name != EAGER:
            over: Quantiles = ratios(taken, samples[EAGER])
            contender.values[f"vs_torch_{kind}"] = over.scaled(1.0)


def _rate(values: dict[str, Any]) -> None:
    times = values.get("device_us") or values.get("call_us")
    if times:
        values["gbps"] = values["minimum_bytes"] / times["median"] * 1e-3
        values["fraction_of_copy"] = values["gbps"] / values["copy_gbps"]
        if "kernel_bytes" in values:
            values["kernel_fraction"] = values["fraction_of_copy"] * values["kernel_bytes"] / values["minimum_bytes"]


@contextlib.contextmanager
def cleaned(timer: Timer | None) -> Iterator[None]:
    """Leave no compiled function, graph or cached memory behind for the next unit."""
    try:
        yield
    finally:
        # Each unit compiles the same functions anew, of which Dynamo keeps only so many versions.
        if dynamo := sys.modules.get("torch._dynamo"):
            dynamo.reset()
        gc.collect()
        if timer is not None and timer.has_device_time:
            torch.cuda.empty_cache()


def guarded(unit: Mapping[str, Any], names: list[str], run: Callable[[], list[Row]]) -> list[Row]:
    """The rows that `run` makes; if it fails, a row for each provider that says how."""
    try:
        return run()
    # The unit is lost, the run is not.
    except Exception as error:
        traceback.print_exc()
        # What the machine lacks is no fault of anybody.
        status = CANNOT if isinstance(error, ImportError) else ERROR
        return [row_for(dict(unit), name, status, describe(error)) for name in names]


def skipped_after(deadline: float, unit: Mapping[str, Any], names: list[str]) -> list[Row] | None:
    """Rows for a unit whose turn comes after the deadline, else None."""
    if time.time() < deadline:
        return None
    return [row_for(dict(unit), name, SKIPPED, "no time left; see --seconds") for name in names]
