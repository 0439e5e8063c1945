"""Times of plain eager calls on the CPU: torch, this package's modules, torch repaired, and repaired after a JVP.

Run: `python -m perf eager`. Operators that the repair leaves alone, as softmax, show what the figures are good for.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import primitives as pr
from perf.compiled_losses import convnet, penalty, vision_transformer
from perf.measuring import in_turns, timer
from perf.pages import line, table

# The ratio that each line may have, but for the last column: an operation's, a whole training step's, and that of one
# with `create_graph=True`.
OPERATION_BOUND, STEP_BOUND, PENALTY_BOUND = 1.5, 1.05, 2.0
BLOCKS, BURSTS, BURST_SECONDS = 25, 10, 0.0005
TORCH, PRIMITIVES, REPAIRED, AFTER_A_JVP = COLUMNS = ("torch", "primitives", "repaired", "after a JVP")


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


def _step(model: nn.Module) -> Callable[[], None]:
    images, labels = torch.randn(64, 1, 8, 8), torch.randint(10, (64,))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        F.nll_loss(model(images), labels).backward()
        optimizer.step()

    return step


def _penalty(space: Any) -> Callable[[], None]:
    net = nn.Sequential(nn.Linear(2, 32), space.LayerNorm(32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(1000, 2)
    return lambda: penalty(net, x).backward()


def _sampler(column: str, run: Callable[[], Any]) -> Callable[[], float]:
    """What takes the least seconds of a call in a block of short bursts.

    The switch comes before a block, and is as much work as thousands of calls: the first bursts after it take longer.
    """
    ones, clock = torch.ones(1), timer(run)

    def least() -> float:
        switch = pr.repair_torch() if column in (REPAIRED, AFTER_A_JVP) else None
        if column == AFTER_A_JVP:
            torch.func.jvp(torch.sin, (ones,), (ones,))
        count = max(1, int(BURST_SECONDS / min(clock.timeit(1).mean for _ in range(BURSTS))))
        seconds = min(clock.timeit(count).mean for _ in range(BURSTS))
        if switch is not None:
            switch.undo()
        return seconds

    return least


def _times(make: Callable[[Any], Callable[[], Any]], columns: Sequence[str] = COLUMNS) -> dict[str, float]:
    """Seconds of one call in each column, of what is made from torch's modules or from this package's."""
    runs = {column: make(pr.nn if column == PRIMITIVES else nn) for column in columns}
    blocks = in_turns({column: _sampler(column, run) for column, run in runs.items()}, 0.0, BLOCKS)
    return {column: statistics.median(seconds) for column, seconds in blocks.items()}


def measure() -> Iterator[tuple[str, float, dict[str, float]]]:
    """Lines: a name, the bound, and the seconds by column."""
    torch.manual_seed(0)
    # Torch before any repair, after which recorded backward passes of norms stay repaired.
    times = _times(_penalty, COLUMNS[:1]) | _times(_penalty, COLUMNS[1:])
    yield "gradient penalty of a network with LayerNorm", PENALTY_BOUND, times
    for name, (x, make) in _operations().items():
        x.requires_grad_()
        yield f"{name}, forward", OPERATION_BOUND, _times(lambda space, x=x, make=make: partial(make(space), x))
        both = _times(lambda space, x=x, make=make: _with_backward(make(space), x))
        yield f"{name}, with backward", OPERATION_BOUND, both
    for model in (convnet, vision_transformer):
        times = _times(lambda space, model=model: _step(model() if space is nn else pr.nn.convert(model())))
        yield f"{model.__name__.replace('_', ' ')}, training step", STEP_BOUND, times


def main() -> int:
    """Print the table, and return 1 if a bound is missed."""
    torch.set_num_threads(1)
    missed = 0
    print(table([f"{'us':48}", TORCH, *(head for column in COLUMNS[1:] for head in (column, "ratio")), "bound"], []))
    for name, bound, seconds in measure():
        ratios = {column: seconds[column] / seconds[TORCH] for column in COLUMNS[1:]}
        missed += max(ratios[PRIMITIVES], ratios[REPAIRED]) > bound
        figures = [
            cell for column, ratio in ratios.items() for cell in (f"{1e6 * seconds[column]:.4g}", f"{ratio:.2f}")
        ]
        print(line([f"{name:48}", f"{1e6 * seconds[TORCH]:.4g}", *figures, str(bound)]), flush=True)
    return int(missed > 0)
