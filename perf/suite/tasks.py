"""What all providers do in a unit: one operation in one mode, or a training step of one of the demo's models.

A training step is a forward and a backward pass and a plain gradient step, under autocast on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import nll_loss

import primitives as pr
from perf.demo import models
from perf.demo.data import IMAGE_SIZE, NUM_CLASSES
from perf.suite import reference
from perf.suite.bytes import minimum_bytes
from perf.suite.modes import leaves, make_sample, make_steps
from perf.suite.plan import find
from perf.suite.providers import COMPILE_MODES, CannotError, LeftOutError, provider
from perf.workloads import EAGER, OURS, TUNED, TrainingWorkload, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from perf.suite.modes import Sample, Step
    from perf.suite.plan import Unit

    StepMaker = Callable[[int], list[Step]]

# Small enough that the weights of a timed model stay where they are.
LEARNING_RATE = 1e-6
# Of the whole gradient, relative to its length: bfloat16 in a dozen layers, and float32.
TOLERANCES = {"cuda": 5e-2, "cpu": 1e-3}


class Task(ABC):
    """One unit's work.

    Attributes:
        tolerance: The largest error that is right.
    """

    tolerance: float

    @abstractmethod
    def enter(self, name: str) -> tuple[StepMaker, Any]:
        """What makes a provider's steps for so many sets of tensors, and its first result.

        Raises:
            CannotError: If the provider does not have it.
            LeftOutError: If it would take longer than a run.
        """

    @abstractmethod
    def errors(self, results: Mapping[str, Any]) -> dict[str, float]:
        """How far off the results of the providers are."""


def make_task(unit: Unit, device: torch.device) -> Task:
    """The task of a unit."""
    workload = find(unit["workload"], device.type)
    if isinstance(workload, TrainingWorkload):
        return TrainingStep(workload, device)
    return Operation(workload, unit["mode"], device)


class Operation(Task):
    """One operation in one mode.

    Attributes:
        bytes: What it cannot do without.
    """

    def __init__(self, workload: Workload, mode: str, device: torch.device) -> None:
        self.workload, self.mode = workload, mode
        self.tolerance = reference.TOLERANCES[workload.dtype]
        self.bytes = minimum_bytes(workload, mode)
        self.samples = [make_sample(workload, mode, device)]

    def enter(self, name: str) -> tuple[StepMaker, Any]:  # noqa: D102 - inherited
        side = provider(name)
        make = make_steps(self.mode, side.function(self.workload), side.wrap)

        def make_step(sample: Sample) -> Step:
            return make(sample if side.param_dtype is None else sample.with_params(side.param_dtype))

        def make_all(count: int) -> list[Step]:
            self.samples += [self.samples[0].map(torch.clone) for _ in range(count - len(self.samples))]
            return [make_step(sample) for sample in self.samples]

        return make_all, make_step(self.samples[0])()

    def errors(self, results: Mapping[str, Any]) -> dict[str, float]:  # noqa: D102 - inherited
        return reference.errors(self.workload, self.mode, self.samples[0], results)


class TrainingStep(Task):
    """A training step of one model: the gradient is checked, the step is timed."""

    def __init__(self, workload: TrainingWorkload, device: torch.device) -> None:
        self.workload, self.device = workload, device
        self.tolerance = TOLERANCES[device.type]

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

    def enter(self, name: str) -> tuple[StepMaker, Any]:  # noqa: D102 - inherited
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

    def errors(self, results: Mapping[str, Any]) -> dict[str, float]:  # noqa: D102 - inherited
        # Relative to the length of the gradient in float64.
        model = self._model().double()
        exact = _flat(self._gradient(model, list(model.parameters()), torch.float64)())
        return {name: ((_flat(found) - exact).norm() / exact.norm()).item() for name, found in results.items()}


def _flat(gradient: Any) -> Tensor:
    return torch.cat([value.detach().double().flatten() for value in leaves(gradient)])
