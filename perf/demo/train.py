"""Training one model, and the duel: the same model with torch.nn and converted, in float64 and in float32."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

import primitives as pr

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from perf.demo.data import Digits
    from perf.demo.models import ConvNet, VisionTransformer

    Model = ConvNet | VisionTransformer

WEIGHT_DECAY = 0.1
# The first steps pay for allocations and, on a GPU, for compiling kernels.
WARMUP_STEPS = 5


class Contest(NamedTuple):
    """One model of the demo: how to make it, how long it trains, and what it has to reach."""

    name: str
    make_model: Callable[[], Model]
    learning_rate: float
    epochs: int
    min_accuracy: float

    def num_steps(self, digits: Digits) -> int:
        """Training steps of a whole run."""
        return self.epochs * digits.num_batches


class Run(NamedTuple):
    """The result of one training run: the model, its loss at each step, and how long a step took (median, seconds)."""

    model: Model
    losses: list[float]
    step_seconds: float


class Duel(NamedTuple):
    """The four runs of one model: float32 to the end and float64 for the first steps, torch.nn and converted."""

    contest: Contest
    torch_run: Run
    our_run: Run
    torch_run_float64: Run
    our_run_float64: Run
    torch_accuracy: float
    our_accuracy: float

    def differences(self, *, float64: bool) -> list[float]:
        """How far apart the two loss curves are at each step."""
        runs = (self.torch_run_float64, self.our_run_float64) if float64 else (self.torch_run, self.our_run)
        return [abs(a - b) for a, b in zip(*(run.losses for run in runs), strict=True)]


def run_duel(
    contest: Contest, digits: Digits, device: torch.device, seed: int, float64_steps: int, on_step: Callable[[], None]
) -> Duel:
    """Train the model of `contest` four times from the same seed, in float64 for `float64_steps` of a whole run."""

    def train(dtype: torch.dtype, steps: int, converted: bool) -> Run:
        torch.manual_seed(seed)
        model = contest.make_model().to(device, dtype)
        if converted and not pr.nn.converted(pr.nn.convert(model)):
            raise RuntimeError(f"{contest.name}: primitives.nn.convert changed no module.")
        return _train(contest, model, digits.to(device, dtype), seed, steps, on_step)

    # Convolutions that give the same bits each time, so that two runs differ only by what is compared.
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        first, second = (train(torch.float64, float64_steps, converted) for converted in (False, True))
        plain, ours = (train(torch.float32, contest.num_steps(digits), converted) for converted in (False, True))
    moved = digits.to(device, torch.float32)
    return Duel(contest, plain, ours, first, second, accuracy(plain.model, moved), accuracy(ours.model, moved))


def _train(contest: Contest, model: Model, digits: Digits, seed: int, steps: int, on_step: Callable[[], None]) -> Run:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=contest.learning_rate, weight_decay=WEIGHT_DECAY)
    total = contest.num_steps(digits)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, contest.learning_rate, total_steps=total)
    losses, durations = [], []
    for (images, labels), _ in zip(digits.batches(seed), range(steps), strict=False):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        # Reading the loss waits for the device, so the clock sees the whole step.
        losses.append(loss.item())
        durations.append(time.perf_counter() - start)
        schedule.step()
        on_step()
    return Run(model, losses, statistics.median(durations[min(WARMUP_STEPS, steps - 1) :]))


def predict(model: nn.Module, images: Tensor) -> Tensor:
    """Most probable digit of each image."""
    model.eval()
    with torch.no_grad():
        return model(images).argmax(-1)


def accuracy(model: nn.Module, digits: Digits) -> float:
    """Fraction of the held-out images that `model` names rightly."""
    return (predict(model, digits.test_images) == digits.test_labels).double().mean().item()
