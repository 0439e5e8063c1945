"""One unit: every provider at one workload in one mode, checked, then timed against each other."""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import nll_loss

import primitives as pr
from perf.demo import models
from perf.demo.data import IMAGE_SIZE, NUM_CLASSES
from perf.suite import reference
from perf.suite.modes import leaves, make_sample, make_steps, minimum_bytes
from perf.suite.plan import find
from perf.suite.providers import COMPILE_MODES, CannotError, LeftOutError, provider
from perf.suite.results import CANNOT, ERROR, OK, OUT_OF_TIME, SKIPPED, WRONG, Row, row_for
from perf.suite.timing import WARM_UP_SECONDS, calibrate, calls_per_sample, describe, interleave, spread, warm_up
from perf.workloads import EAGER, OURS, TUNED, TrainingWorkload, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from perf.suite.modes import Sample
    from perf.suite.plan import Unit
    from perf.suite.timing import CpuTimer, Prepared, Step

    Samplers = dict[str, Callable[[], float]]
    StepMaker = Callable[[int], list[Step]]

# Small enough that the weights of a timed model stay where they are.
LEARNING_RATE = 1e-6
# Of the whole gradient, relative to its length: bfloat16 in a dozen layers, and float32.
GRADIENT_TOLERANCES = {"cuda": 5e-2, "cpu": 1e-3}
MICROSECONDS = 1e6
# Share of the sampling time that device times get; the calls of large workloads take longer than their replays.
DEVICE_SHARE = 0.5
# How a process ends that can measure nothing more; xdist goes on with another one.
UNFIT = 70


class Operation:
    """One operation in one mode.

    Attributes:
        tolerance: The largest error that is right.
        bytes: What it cannot do without.
    """

    def __init__(self, workload: Workload, mode: str, device: torch.device) -> None:
        self.workload, self.mode = workload, mode
        self.tolerance = reference.TOLERANCES[workload.dtype]
        self.bytes = minimum_bytes(workload, mode)
        self.samples = [make_sample(workload, mode, device)]

    def enter(self, name: str) -> tuple[StepMaker, Any]:
        """What makes a provider's steps for so many sets of tensors, and its first result.

        Raises:
            CannotError: If the provider does not have it.
        """
        side = provider(name)
        make = make_steps(self.mode, side.function(self.workload), side.wrap)

        def make_step(sample: Sample) -> Step:
            return make(sample if side.param_dtype is None else sample.with_params(side.param_dtype))

        def make_all(count: int) -> list[Step]:
            self.samples += [self.samples[0].map(torch.clone) for _ in range(count - len(self.samples))]
            return [make_step(sample) for sample in self.samples]

        return make_all, make_step(self.samples[0])()

    def errors(self, results: Mapping[str, Any]) -> dict[str, float]:
        """How far off the results of the providers are."""
        return reference.errors(self.workload, self.mode, self.samples[0], results)


class TrainingStep:
    """A forward and a backward pass of a model, under autocast on a GPU, and a plain gradient step.

    The gradient is checked, the step is timed.
    """

    def __init__(self, workload: TrainingWorkload, device: torch.device) -> None:
        self.workload, self.device = workload, device
        self.tolerance = GRADIENT_TOLERANCES[device.type]

    def _model(self) -> nn.Module:
        torch.manual_seed(0)
        return getattr(models, self.workload.model)(**self.workload.sizes).to(self.device)

    def _gradient(self, run: Callable[[Tensor], Tensor], params: list[Tensor], dtype: torch.dtype) -> Step:
        generator = torch.Generator().manual_seed(0)
        shape = (self.workload.batch, 1, IMAGE_SIZE, IMAGE_SIZE)
        images = torch.rand(shape, generator=generator).to(self.device, dtype)
        labels = torch.randint(NUM_CLASSES, shape[:1], generator=generator).to(self.device)
        mixed = self.device.type == "cuda" and dtype == torch.float32

        def gradient() -> tuple[Tensor, ...]:
            # The cache of cast weights would outlive a captured graph.
            with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed, cache_enabled=False):
                loss = nll_loss(run(images).to(dtype), labels)
            return torch.autograd.grad(loss, params)

        return gradient

    def enter(self, name: str) -> tuple[StepMaker, Any]:
        """As that of an operation; a provider may also be left out.

        Raises:
            CannotError: If the provider does not have it.
            LeftOutError: If it would take longer than a run.
        """
        if name not in (OURS, EAGER, *COMPILE_MODES):
            raise CannotError(f"{name} has no layer norm, batch norm and log-softmax modules to convert a model to.")
        if name == TUNED:
            raise LeftOutError("tuning the matrix products of a model takes longer than a run.")
        model = self._model()
        if name == OURS:
            pr.nn.convert(model)
        params: list[Tensor] = list(model.parameters())
        run = torch.compile(model, mode=COMPILE_MODES[name], dynamic=False) if name in COMPILE_MODES else model
        gradient = self._gradient(run, params, torch.float32)

        def step() -> Tensor:
            found = gradient()
            with torch.no_grad():
                torch._foreach_add_(params, found, alpha=-LEARNING_RATE)
            # A tensor, so that a graph keeps its memory apart from the next step's.
            return found[0]

        return lambda count: [step] * count, gradient()

    def errors(self, results: Mapping[str, Any]) -> dict[str, float]:
        """How far off the gradients are, relative to the length of that in float64."""
        model = self._model().double()
        exact = _flat(self._gradient(model, list(model.parameters()), torch.float64)())
        return {name: ((_flat(found) - exact).norm() / exact.norm()).item() for name, found in results.items()}


def _flat(gradient: Any) -> Tensor:
    return torch.cat([value.detach().double().flatten() for value in leaves(gradient)])


@dataclass
class Contender:
    """A provider in a unit: how it makes steps for so many sets of tensors, and what has come of it."""

    name: str
    make_steps: Callable[[int], list[Step]] | None = None
    result: Any = None
    status: str = OK
    message: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def leave(self, status: str, message: str) -> None:
        """Take it out, if it is still in."""
        if self.status == OK:
            self.status, self.message, self.make_steps, self.result = status, message, None, None

    def fail(self, error: Exception) -> None:
        """Take it out, with what it said.

        Of this package an error is one; a peer just cannot do it, unless the machine was too small.
        """
        if isinstance(error, (LeftOutError, ImportError)):
            self.leave(SKIPPED, f"left out: {error}")
        elif self.name == OURS or isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            self.leave(ERROR, describe(error))
        else:
            self.leave(CANNOT, describe(error))


@dataclass
class Bench:
    """What a unit is measured with.

    Attributes:
        timer: Of the device.
        seconds: For all samples of the unit.
        deadline: Of the run, in seconds of `time.time`.
        doing: File that says who is under way, for whoever finds that this process died.
        against: Status and message of providers that must not be tried.
        calibrations: Copy speeds by bytes, of this device in this run.
    """

    timer: CpuTimer
    seconds: float
    deadline: float
    doing: Path
    against: Mapping[str, Sequence[str]]
    calibrations: dict[str, dict[str, float]]

    def attempt(self, contender: Contender, function: Callable[[], Any], note: bool = True) -> Any:
        """What `function` returns; None if it raises, which is the answer of this provider.

        A process whose device answers nothing but errors ends here, so that a new one can go on without the provider.

        Args:
            contender: The provider.
            function: Does what it is asked for.
            note: Whether to say who is under way. A file is written for it, which no sample should come after.
        """
        if note:
            self.doing.write_text(contender.name, encoding="utf-8")
        found = None
        try:
            found = function()
            # What goes wrong on the device is laid at the right door.
            self.timer.wait()
        except Exception as error:
            contender.fail(error)
            found = None
            try:
                self.timer.wait()
            # Errors of kernels stay with the process: every further call reports them.
            except Exception:
                self.doing.write_text(contender.name, encoding="utf-8")
                os._exit(UNFIT)
        if note:
            self.doing.write_text("", encoding="utf-8")
        return found

    def enter(self, task: Operation | TrainingStep, name: str) -> Contender:
        """A provider's first call, which may compile for a while, and its result."""
        contender = Contender(name)
        if name in self.against:
            contender.leave(*self.against[name])
        elif time.time() >= self.deadline:
            contender.leave(SKIPPED, f"{OUT_OF_TIME}; see --seconds")
        elif (found := self.attempt(contender, lambda: task.enter(name))) is not None:
            contender.make_steps, contender.result = found
        return contender

    def copy_speed(self, total_bytes: int) -> float:
        """GB/s of a copy of as many bytes, measured once for each size."""
        size = str(total_bytes)
        if size not in self.calibrations:
            self.calibrations[size] = calibrate(self.timer, total_bytes)
        return self.calibrations[size]["copy_gbps"]


def measure(unit: Unit, names: Sequence[str], bench: Bench) -> list[Row]:
    """The rows of a unit, one for each of the providers `names`."""
    timer, workload = bench.timer, find(unit["workload"], bench.timer.device.type)
    if isinstance(workload, TrainingWorkload):
        task = TrainingStep(workload, timer.device)
    else:
        task = Operation(workload, unit["mode"], timer.device)
    contenders = [bench.enter(task, name) for name in names]
    check(contenders, task)
    # Only the order of magnitude matters: samples follow from what the warm-up takes.
    sets, seconds = 1, 1e-2
    if isinstance(task, Operation):
        copy_gbps = bench.copy_speed(task.bytes)
        sets, seconds = timer.num_sets(task.bytes), task.bytes / copy_gbps * 1e-9
        for contender in contenders:
            contender.values.update(minimum_bytes=task.bytes, copy_gbps=copy_gbps)
    _time(contenders, _prepare(contenders, sets, seconds, bench), bench)
    return [row_for(unit, c.name, c.status, c.message, **_rated(c, timer)) for c in contenders]


def check(contenders: Sequence[Contender], task: Operation | TrainingStep) -> None:
    """Take out every contender whose result is wrong, and drop the results."""
    results = {c.name: c.result for c in contenders if c.status == OK}
    errors = task.errors(results) if results else {}
    for contender in contenders:
        contender.result = None
        contender.values["tolerance"] = task.tolerance
        if contender.name in errors:
            error = errors[contender.name]
            contender.values["error"] = error if math.isfinite(error) else None
            if not error <= task.tolerance:
                contender.leave(WRONG, f"error {error:.1e}, at most {task.tolerance:.0e} is right")


def _prepare(contenders: Sequence[Contender], sets: int, seconds: float, bench: Bench) -> dict[str, Prepared]:
    """What can be timed, by name of the contender; the others say why not.

    A peer that cannot be captured still has its call time, and says why it has no device time. This package must be.
    """
    prepared: dict[str, Prepared] = {}
    for contender in contenders:
        make_steps = contender.make_steps
        if make_steps is None:
            continue
        if time.time() >= bench.deadline:
            contender.leave(SKIPPED, f"{OUT_OF_TIME}; see --seconds")
            continue
        ready = bench.attempt(contender, lambda make=make_steps: bench.timer.prepare(make(sets), seconds))
        if ready is not None and ready.obstacle is not None:
            contender.message = f"no device time: {ready.obstacle}"
            if contender.name == OURS:
                contender.leave(ERROR, f"it cannot be captured in a CUDA graph: {ready.obstacle}")
        if ready is not None and contender.status == OK:
            prepared[contender.name] = ready
    return prepared


def _time(contenders: Sequence[Contender], prepared: Mapping[str, Prepared], bench: Bench) -> None:
    """Write device and call times, ratios to torch, memory and launches into the contenders' values."""
    timer, seconds = bench.timer, bench.seconds
    running = [contender for contender in contenders if contender.name in prepared]
    if timer.has_device_time:
        on_device = [c for c in running if prepared[c.name].obstacle is None]
        device = _samplers(on_device, lambda name: timer.device_seconds(prepared[name]), bench)
        warm_up(device, WARM_UP_SECONDS)
        _note(on_device, interleave(device, seconds * DEVICE_SHARE, timer.max_rounds), "device")
        seconds *= 1 - DEVICE_SHARE
    # A device is warm by then.
    single = _samplers(running, lambda name: timer.call_seconds(prepared[name], 1), bench)
    once = warm_up(single, 0.0 if timer.has_device_time else WARM_UP_SECONDS)
    # As many calls of one provider in every round, so that a round is one stretch of time for each.
    running = [c for c in running if c.status == OK]
    calls = {c.name: calls_per_sample(once[c.name], timer.sample_seconds) for c in running}
    call = _samplers(running, lambda name: timer.call_seconds(prepared[name], calls[name]), bench)
    _note(running, interleave(call, seconds, timer.max_rounds), "call")
    for contender in running:
        peak = bench.attempt(contender, lambda name=contender.name: timer.peak_bytes(prepared[name]))
        contender.values.update(peak_bytes=peak, launches=prepared[contender.name].launches)


def _samplers(contenders: Sequence[Contender], take: Callable[[str], float], bench: Bench) -> Samplers:
    """Samplers that take their contender out if they raise; the others go on."""

    def sample(contender: Contender) -> float:
        if contender.status != OK:
            return math.nan
        found = bench.attempt(contender, lambda: take(contender.name), note=False)
        return math.nan if found is None else found

    return {contender.name: partial(sample, contender) for contender in contenders}


def _note(contenders: Sequence[Contender], samples: Mapping[str, list[float]], kind: str) -> None:
    right = {c.name: samples[c.name] for c in contenders if c.status == OK}
    for contender in contenders:
        if (taken := right.get(contender.name)) is None:
            continue
        contender.values[f"{kind}_us"] = spread(taken, MICROSECONDS)
        if contender.name != EAGER and EAGER in right:
            # Round by round, which a drifting clock does not touch.
            ratios = [a / b for a, b in zip(taken, right[EAGER], strict=True)]
            contender.values[f"vs_torch_{kind}"] = spread(ratios)


def _rated(contender: Contender, timer: CpuTimer) -> dict[str, Any]:
    """The values of a row, with bandwidths from the time that memory traffic shows in; without times if it is out."""
    values = contender.values
    if contender.status != OK:
        kept = ("error", "tolerance", "minimum_bytes", "copy_gbps")
        return {name: value for name, value in values.items() if name in kept}
    times = values.get("device_us" if timer.has_device_time else "call_us")
    if times and "minimum_bytes" in values:
        values["gbps"] = values["minimum_bytes"] / times["median"] * 1e-3
        values["fraction_of_copy"] = values["gbps"] / values["copy_gbps"]
    return values


def clean(timer: CpuTimer) -> None:
    """Leave no compiled function and no graph behind for the next unit."""
    # Each unit compiles the same functions anew, of which Dynamo keeps only so many versions.
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
    gc.collect()
    timer.release()
