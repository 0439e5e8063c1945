"""One unit: every provider at one workload in one mode, checked, then timed against each other."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import nll_loss

import primitives as pr
from perf.demo import models
from perf.demo.data import IMAGE_SIZE, NUM_CLASSES
from perf.ops.workload import Workload
from perf.suite import reference
from perf.suite.modes import flops, make_sample, make_steps, minimum_bytes
from perf.suite.providers import provider
from perf.suite.results import CANNOT, ERROR, OK, WRONG, Row, row_for
from perf.suite.timing import calls_per_sample, copies, describe, interleave, spread
from perf.workloads import EAGER, ONLY_OP, OURS, TrainingWorkload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from perf.suite.plan import Unit
    from perf.suite.timing import CpuTimer, Prepared, Step

    StepMaker = Callable[[int], list[Step]]

WARM_UP_SECONDS = 0.2
# Who takes turns with the providers: a copy of the minimum of bytes.
COPY = "copy"
# Small enough that the weights of a timed model stay where they are.
LEARNING_RATE = 1e-6
# Of the whole gradient, relative to its length: bfloat16 in a dozen layers, and float32.
GRADIENT_TOLERANCES = {"cuda": 5e-2, "cpu": 1e-3}
# How a process ends that can measure nothing more; xdist goes on with another one.
UNFIT = 70


class Operation:
    """One operation in one mode: the largest error that is right, and the bytes that it cannot do without."""

    def __init__(self, workload: Workload, mode: str, device: torch.device) -> None:
        self.workload, self.mode = workload, mode
        self.tolerance = reference.TOLERANCES[workload.dtype]
        self.bytes, self.flops = minimum_bytes(workload, mode), flops(workload, mode)
        self.samples = [make_sample(workload, mode, device)]

    def enter(self, name: str) -> tuple[StepMaker, Any]:
        """The maker of a provider's steps for so many sets of tensors, and its first result."""
        side = provider(name)
        with self.samples[0].x.device:
            function = side.function(self.workload)
        make = make_steps(self.mode, function, side.wrap)

        def make_all(count: int) -> list[Step]:
            missing, device = range(count - len(self.samples)), self.samples[0].x.device
            self.samples += [make_sample(self.workload, self.mode, device) for _ in missing]
            return [make(sample) for sample in self.samples]

        return make_all, make(self.samples[0])()

    def errors(self, results: Mapping[str, Any]) -> dict[str, float]:
        """How far off the results of the providers are."""
        return reference.errors(self.workload, self.mode, self.samples[0], results)


class TrainingStep:
    """Forward, backward, under autocast on a GPU, and a gradient step; the gradient is checked, the step is timed."""

    bytes = flops = None

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
        """As that of an operation."""
        model = self._model()
        if name == OURS:
            pr.nn.convert(model)
        params: list[Tensor] = list(model.parameters())
        gradient = self._gradient(provider(name).wrap(model), params, torch.float32)

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
    return torch.cat([value.detach().double().flatten() for value in gradient])


@contextlib.contextmanager
def _laid_at(row: Row, timer: CpuTimer) -> Iterator[None]:
    """Have what goes wrong be the answer of a provider: of ours an error, a peer just cannot do it."""
    try:
        yield
        # Lays what goes wrong on the device at the right door.
        timer.wait()
    except Exception as error:
        machine = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        row.update(status=ERROR if row["provider"] == OURS or machine else CANNOT, message=describe(error))
        try:
            timer.wait()
        # Errors of kernels stay with the process, which can measure nothing more: a new one goes on.
        except Exception:
            os._exit(UNFIT)


def measure(unit: Unit, names: Sequence[str], timer: CpuTimer, seconds: float) -> list[Row]:
    """The rows of a unit, one for each of the providers `names` that have it, with samples for so many seconds."""
    workload, mode = unit
    op = workload.op if isinstance(workload, Workload) else None
    rows = {name: row_for(unit, name) for name in names if ONLY_OP.get(name, op) == op}
    prepared = {}
    # Only the order of magnitude of a step's seconds matters, for a capture.
    if isinstance(workload, TrainingWorkload):
        task, sets, estimate = TrainingStep(workload, timer.device), 1, 1e-2
    else:
        task = Operation(workload, mode, timer.device)
        sets, estimate = 1, 1e-2
        if task.bytes is not None:
            sets, estimate = timer.num_sets(task.bytes), max(task.bytes / 4e12, (task.flops or 0) / 4e14)
            prepared[COPY] = timer.prepare(copies(timer.device, task.bytes, sets), estimate)
    makers = _right(task, rows, timer)
    for name, make in makers.items():
        with _laid_at(rows[name], timer):
            prepared[name] = timer.prepare(make(sets), estimate)
    prepared = {name: ready for name, ready in prepared.items() if name == COPY or rows[name]["status"] == OK}
    samples = _samples(prepared, timer, seconds)
    for name in prepared.keys() - {COPY}:
        _note(rows[name], samples, task.bytes, task.flops)
    return list(rows.values())


def _right(task: Operation | TrainingStep, rows: Mapping[str, Row], timer: CpuTimer) -> dict[str, StepMaker]:
    """The maker of the steps of each provider whose result is right."""
    makers, results = {}, {}
    for name, row in rows.items():
        row["tolerance"] = task.tolerance
        with _laid_at(row, timer):
            makers[name], results[name] = task.enter(name)
    errors = task.errors({name: results[name] for name in results if rows[name]["status"] == OK})
    for name, error in errors.items():
        rows[name]["error"] = error if math.isfinite(error) else None
        if not error <= task.tolerance:
            rows[name].update(status=WRONG, message=f"error {error:.1e}, at most {task.tolerance:.0e} is right")
    return {name: make for name, make in makers.items() if rows[name]["status"] == OK}


def _samples(prepared: Mapping[str, Prepared], timer: CpuTimer, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Seconds of calls, and on the device, of all in turn."""
    single = {name: partial(timer.call_seconds, ready, 1) for name, ready in prepared.items()}
    once = interleave(single, WARM_UP_SECONDS, sys.maxsize, min_rounds=2)
    # As many calls of one provider in every round, so that a round is one stretch of time for each.
    calls = {name: calls_per_sample(samples[-1], timer.sample_seconds) for name, samples in once.items()}
    samples = {}
    for kind, take in timer.kinds.items():
        samplers = {name: partial(take, ready, calls[name]) for name, ready in prepared.items()}
        samples[kind] = interleave(samplers, seconds / len(timer.kinds), timer.max_rounds)
    return samples


def _note(
    row: Row, samples: Mapping[str, Mapping[str, list[float]]], minimum: int | None, num_flops: int | None
) -> None:
    """Write times, ratios to torch and bandwidths into a row."""
    name, times, taken = row["provider"], {}, {}
    for kind, taken in samples.items():
        row[f"{kind}_us"] = times = spread(taken[name], 1e6)
        if name != EAGER and EAGER in taken:
            # Round by round, which a drifting clock does not touch.
            row[f"vs_torch_{kind}"] = spread([a / b for a, b in zip(taken[name], taken[EAGER], strict=True)])
    if minimum:
        copy_us = spread(taken[COPY], 1e6)["median"]
        row.update(minimum_bytes=minimum, gbps=minimum / times["median"] * 1e-3, copy_gbps=minimum / copy_us * 1e-3)
        row["fraction_of_copy"] = copy_us / times["median"]
    if num_flops:
        row["gflops"] = num_flops / times["median"] * 1e-3


def clean() -> None:
    """Leave no compiled function and no graph behind for the next unit."""
    # Each unit compiles the same functions anew, of which Dynamo keeps only so many versions.
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
