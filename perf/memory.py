"""Peak memory of the losses of a language model on the CPU, where the profiler of torch counts every allocation."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

import primitives as pr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

TOKENS, CLASSES = 4096, 128256
# A narrow stream: x and the weight are the same for everybody, and products take most of the time.
WIDTH = 64
# Torch holds logits of all tokens at once: of so many times fewer, its peak without arguments is as many times smaller.
FEWER = 16


def peak(run: Callable[[], Any]) -> int:
    """The most bytes that are alive at one time while it runs, of what it allocates."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        run()
    profiler: Any = profile.profiler
    events = profiler.kineto_results.events()
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]")
    return max(itertools.accumulate(change for *_, change in changes))


def lines(tokens: int = TOKENS, classes: int = CLASSES) -> Iterator[str]:
    """Each mode in x and weight by chunks, and the gradients by torch's full logits."""
    yield f"{tokens:,} tokens x {classes:,} classes, width {WIDTH}, float32"
    yield f"logits: {tokens * classes * 4 / 1e6:,.0f} MB; arguments, tangents and gradients are in what follows"

    def given(tokens: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        return (torch.randn(tokens, WIDTH), torch.randn(classes, WIDTH)), torch.randint(classes, (tokens,))

    rows, arguments = tokens // FEWER, 4 * WIDTH * (tokens + classes)
    point, target = given(tokens)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return pr.functional.linear_cross_entropy(x, weight, target, chunk_rows=rows)

    gradients = torch.func.grad(loss, (0, 1))
    # The point is its own tangent, which takes no memory.
    modes: dict[str, Callable[[], Any]] = {
        "loss": lambda: loss(*point),
        "loss and gradients": lambda: gradients(*point),
        "loss and its jvp": lambda: torch.func.jvp(loss, point, point),
        "gradients and a Hessian-vector product": lambda: torch.func.jvp(gradients, point, point),
    }
    for name, run in modes.items():
        yield f"linear_cross_entropy, chunk_rows={rows}, {name}: {(peak(run) + arguments) / 1e6:,.0f} MB"
    of_weight = 4 * WIDTH * classes
    few, target = given(rows)
    full = torch.func.grad(lambda x, weight: F.cross_entropy(F.linear(x, weight), target), (0, 1))
    used = FEWER * (peak(lambda: full(*few)) - of_weight) + of_weight + arguments
    yield f"torch, full logits, loss and gradients: {used / 1e6:,.0f} MB ({FEWER} times that of {rows} tokens)"
