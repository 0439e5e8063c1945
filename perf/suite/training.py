"""A training step of the demo's models: forward, backward and a plain gradient step, under autocast on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import nll_loss

import primitives as pr
from perf.demo import models
from perf.demo.data import IMAGE_SIZE, NUM_CLASSES
from perf.suite.budget import OUT_OF_TIME
from perf.suite.contenders import Contender
from perf.suite.modes import leaves
from perf.suite.providers import COMPILE_MODES, EAGER, OURS, CannotError, LeftOutError
from perf.suite.results import row_for
from perf.suite.sampling import prepare_all, time_prepared
from perf.suite.unit import FIRST_CALL_SECONDS, all_out_of_time, judge, skip_if_spent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from perf.suite.bench import Bench
    from perf.suite.results import Row
    from perf.suite.timers import Step
    from perf.workloads import TrainingWorkload

MODE = "training_step"
# Small enough that the weights of a timed model stay where they are.
LEARNING_RATE = 1e-6
# Of the whole gradient, relative to its length: bfloat16 in a dozen layers, and float32.
TOLERANCES = {"cuda": 5e-2, "cpu": 1e-3}
# So that a first guess fits a step; the calls of a sample follow from the warm-up.
GUESSED_SECONDS = 1e-2
# Of a unit's time, what goes to samples: a model takes long to make and to check.
SHARE = 0.3


def dtype_of(device_type: str) -> str:
    """How the steps compute."""
    return "bfloat16 autocast" if device_type == "cuda" else "float32"


def measure(unit: Mapping[str, Any], workload: TrainingWorkload, names: list[str], bench: Bench) -> list[Row]:
    """The rows of a training step, as `perf.suite.unit.measure` makes those of an operation."""
    timer = bench.timer
    steps: dict[str, Step] = {}
    with bench.lock.shared():
        exact = _flat(_gradient_of(_model(workload, timer.device).double(), workload, timer.device, torch.float64)())
        contenders = [_enter(name, workload, exact, steps, bench) for name in names]
        del exact
        timer.wait()
    with all_out_of_time(contenders, bench), bench.alone():
        try:
            if not skip_if_spent(contenders, bench):
                _time(contenders, steps, unit, bench)
        finally:
            steps.clear()
        timer.release()
    return [row_for(dict(unit), c.name, c.status, c.message, **c.values) for c in contenders]


def _time(contenders: list[Contender], steps: Mapping[str, Step], unit: Mapping[str, Any], bench: Bench) -> None:
    prepared = prepare_all(contenders, lambda contender: [steps[contender.name]], GUESSED_SECONDS, bench)
    time_prepared(contenders, prepared, bench, bench.budget.sampling_seconds(unit["seconds"], SHARE))


def _enter(name: str, workload: TrainingWorkload, exact: Tensor, steps: dict[str, Step], bench: Bench) -> Contender:
    """A provider's first gradient, checked; its step goes into `steps`."""
    contender = Contender(name, values={"tolerance": TOLERANCES[bench.timer.device.type]})
    verdict = bench.compiled(name)
    if verdict is not None:
        contender.status, contender.message = verdict.split(": ", 1)
        return contender
    if bench.budget.spent:
        contender.skip(f"{OUT_OF_TIME}; see --seconds")
        return contender

    def first_call() -> float:
        gradient, steps[name] = make_step(name, workload, bench.timer.device)
        return ((_flat(gradient()) - exact).norm() / exact.norm()).item()

    bench.doing(name)
    error = contender.attempt(first_call, bench.timer, FIRST_CALL_SECONDS)
    bench.doing("")
    if error is not None:
        judge(contender, error, contender.values["tolerance"])
    return contender


def make_step(name: str, workload: TrainingWorkload, device: torch.device) -> tuple[Step, Step]:
    """What computes the gradient, and what also takes the step.

    Raises:
        CannotError: If the provider has no modules.
        LeftOutError: If it would take longer than a run.
    """
    if name not in (OURS, EAGER, *COMPILE_MODES):
        raise CannotError(f"{name} has no layer norm, batch norm and log-softmax modules to convert a model to.")
    if "max-autotune" in name:
        raise LeftOutError("tuning the matrix products of a model takes longer than a run.")
    model = _model(workload, device)
    if name == OURS:
        pr.nn.convert(model)
    params: list[Tensor] = list(model.parameters())
    run = torch.compile(model, mode=COMPILE_MODES[name], dynamic=False) if name in COMPILE_MODES else model
    gradient = _gradient_of(run, workload, device, torch.float32, params)

    def step() -> Tensor:
        found = gradient()
        with torch.no_grad():
            torch._foreach_add_(params, found, alpha=-LEARNING_RATE)
        # A tensor, so that a graph keeps its memory apart from the next step's.
        return found[0]

    return gradient, step


def _model(workload: TrainingWorkload, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    return getattr(models, workload.model)(**workload.sizes).to(device)


def _gradient_of(
    run: Callable[[Tensor], Tensor],
    workload: TrainingWorkload,
    device: torch.device,
    dtype: torch.dtype,
    params: list[Tensor] | None = None,
) -> Callable[[], tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand((workload.batch, 1, IMAGE_SIZE, IMAGE_SIZE), generator=generator).to(device, dtype)
    labels = torch.randint(NUM_CLASSES, (workload.batch,), generator=generator).to(device)
    wanted = list(run.parameters()) if params is None and isinstance(run, torch.nn.Module) else params or []
    mixed = device.type == "cuda" and dtype == torch.float32

    def gradient() -> tuple[Tensor, ...]:
        # The cache of cast weights would outlive a captured graph.
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed, cache_enabled=False):
            loss = nll_loss(run(images).to(dtype), labels)
        return torch.autograd.grad(loss, wanted)

    return gradient


def _flat(gradient: Any) -> Tensor:
    return torch.cat([value.detach().double().flatten() for value in leaves(gradient)])
