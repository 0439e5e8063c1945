"""Times of plain eager calls on the CPU: torch, torch repaired, and this package's modules, in bursts by turns.

Run: `python -m perf eager`. Ratios are of the least times of one process, since a machine may be shared.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

import primitives as pr
from perf.models import ConvNet, VisionTransformer

if TYPE_CHECKING:
    from collections.abc import Callable

# The ratio that each line may have: an operation's, and a whole training step's.
OPERATION_BOUND, STEP_BOUND = 1.5, 1.05
BURSTS, SECONDS = 40, 0.004


def _operations() -> dict[str, tuple[torch.Tensor, Callable[[Any], Any]]]:
    """Inputs and makers of a module by the namespace that it is from."""
    rows, image, q = torch.randn(64, 32), torch.randn(8, 8, 8, 8), torch.randn(8, 4, 16, 8)
    labels = torch.randint(10, (64,))

    def attention(space: Any) -> Callable:
        function = (F if space is nn else pr.functional).scaled_dot_product_attention
        return lambda q: function(q, q, q)

    def cross_entropy(space: Any) -> Callable:
        loss = space.CrossEntropyLoss()
        return lambda x: loss(x[:, :10], labels)

    return {
        "LayerNorm [64, 32]": (rows, lambda space: space.LayerNorm(32)),
        "RMSNorm [64, 32]": (rows, lambda space: space.RMSNorm(32)),
        "BatchNorm1d [64, 32]": (rows, lambda space: space.BatchNorm1d(32)),
        "BatchNorm2d [8, 8, 8, 8]": (image, lambda space: space.BatchNorm2d(8)),
        "GroupNorm [8, 8, 8, 8]": (image, lambda space: space.GroupNorm(2, 8)),
        "Softmax [64, 32]": (rows, lambda space: space.Softmax(-1)),
        "LogSoftmax [64, 32]": (rows, lambda space: space.LogSoftmax(-1)),
        "CrossEntropyLoss [64, 10]": (rows, cross_entropy),
        "attention [8, 4, 16, 8]": (q, attention),
    }


def _with_backward(function: Callable, x: torch.Tensor) -> Callable[[], None]:
    y_bar = torch.randn_like(function(x))
    return lambda: function(x).backward(y_bar)


def _step(make: Callable[[], nn.Module]) -> Callable[[], None]:
    model, images, labels = make(), torch.randn(64, 1, 8, 8), torch.randint(10, (64,))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        F.nll_loss(model(images), labels).backward()
        optimizer.step()

    return step


def _repaired(run: Callable[[], Any]) -> Callable[[], Any]:
    """`run`, before whose bursts `_least` repairs torch: the switch itself is not timed."""
    run.repaired = True  # type: ignore[attr-defined] - read by `_least`
    return run


def _least(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of one call of each, the least of many bursts taken by turns."""
    counts, least = {}, dict.fromkeys(runs, float("inf"))
    for name, run in runs.items():
        run()
        start = time.perf_counter()
        run()
        counts[name] = max(1, int(SECONDS / (time.perf_counter() - start)))
    for _ in range(BURSTS):
        for name, run in runs.items():
            switch = pr.repair_torch() if getattr(run, "repaired", False) else None
            seconds = _burst(run, counts[name])
            if switch is not None:
                switch.undo()
            least[name] = min(least[name], seconds)
    return least


def _burst(run: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count


def measure() -> dict[str, dict[str, float]]:
    """Seconds by row and column: `"torch"`, `"repaired"` and `"primitives"`."""
    torch.manual_seed(0)
    rows = {}
    for name, (x, make) in _operations().items():
        modules = {"torch": make(nn), "repaired": make(nn), "primitives": make(pr.nn)}
        leaf = x.requires_grad_()
        forward: dict[str, Callable] = {column: functools.partial(module, leaf) for column, module in modules.items()}
        both = {column: _with_backward(module, leaf) for column, module in modules.items()}
        for suffix, runs in ((", forward", forward), (", with backward", both)):
            runs["repaired"] = _repaired(lambda run=runs["repaired"]: run())
            rows[name + suffix] = _least(runs)
    for name, make in {"ConvNet of the demo": ConvNet, "VisionTransformer of the demo": VisionTransformer}.items():
        runs = {"torch": _step(make), "repaired": _repaired(_step(make))}
        runs["primitives"] = _step(lambda make=make: pr.nn.convert(make()))
        rows[f"{name}, training step"] = _least(runs)
    return rows


def main() -> int:
    """Print the table, and return 1 if a bound is missed."""
    torch.set_num_threads(1)
    missed = 0
    print(f"| {'us':48} | torch | repaired | ratio | primitives | ratio | bound |\n|---|---|---|---|---|---|---|")
    for name, seconds in measure().items():
        bound = STEP_BOUND if name.endswith("step") else OPERATION_BOUND
        ratios = [seconds[column] / seconds["torch"] for column in ("repaired", "primitives")]
        missed += max(ratios) > bound
        figures = [1e6 * seconds["torch"]]
        for column, ratio in zip(("repaired", "primitives"), ratios, strict=True):
            figures += [1e6 * seconds[column], ratio]
        print(f"| {name:48} | " + " | ".join(f"{figure:.4g}" for figure in figures) + f" | {bound} |", flush=True)
    return int(missed > 0)
