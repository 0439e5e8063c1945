"""Cross-entropy on CPU tensors, on blocks of rows that stay in the cache (see `_cpu`).

Value and vjp beside labels have kernels of their own, which compare no class with a label; for the rest the references
take the blocks.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from primitives._ops._cpu import row_blocks
from primitives._ops._shared import accumulation_dtype, unwanted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor


def _blocks(x: Tensor, target: Tensor, dim: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Rows, and of each block [rows, classes, inner] of x the logits, room for as many, and the labels."""
    shape = (x.shape[:dim].numel(), x.shape[dim], x.shape[dim + 1 :].numel())
    logits, labels = x.contiguous().view(shape), target.reshape(shape[0], 1, shape[2])
    acc, room = accumulation_dtype(x.dtype), None
    for rows in row_blocks(shape[0], shape[1] * shape[2]):
        block = logits[rows].to(acc)
        # Allocated once: fresh memory is slow.
        room = torch.empty_like(block) if room is None else room
        yield rows, block, room[: block.shape[0]], labels[rows]


def value(x: Tensor, target: Tensor, dim: int, smoothing: float) -> tuple[Tensor, Tensor] | None:
    """`cross_entropy_fwd` of labels; `None` of anything else."""
    if target.is_floating_point() or not x.numel():
        return None
    parts = []
    for _, block, room, labels in _blocks(x, target, dim):
        top = block.amax(1, keepdim=True)
        shifted = torch.sub(block, top, out=room)
        product = (1.0 - smoothing) * shifted.gather(1, labels.clamp(min=0))
        if smoothing:
            product += smoothing * shifted.mean(1, keepdim=True)
        log_sum = shifted.exp_().sum(1, keepdim=True).log_()
        parts.append(((log_sum - product).masked_fill_(labels < 0, 0.0), log_sum.add_(top)))
    loss, lse = (torch.cat(column).view(target.shape) for column in zip(*parts, strict=True))
    return loss, lse


def vjp(
    loss_bar: Tensor | None,
    lse_bar: Tensor | None,
    x: Tensor,
    target: Tensor,
    lse: Tensor,
    dim: int,
    smoothing: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor] | None:
    """`cross_entropy_bwd` of labels; `None` of anything else."""
    if target.is_floating_point() or not x.numel() or not wanted[0]:
        return None
    u = torch.zeros_like(lse) if loss_bar is None else loss_bar.to(lse.dtype).masked_fill(target < 0, 0.0)
    shape = (x.shape[:dim].numel(), 1, x.shape[dim + 1 :].numel())
    u, a, logarithm = (t.reshape(shape) for t in (u, u if lse_bar is None else u + lse_bar, lse))
    x_bar = torch.empty(x.shape, dtype=x.dtype)
    out = x_bar.view(shape[0], x.shape[dim], shape[2])
    for rows, block, room, labels in _blocks(x, target, dim):
        work = out[rows] if x.dtype == lse.dtype else room
        torch.sub(block, logarithm[rows], out=work).exp_().mul_(a[rows])
        if smoothing:
            work.sub_(u[rows] * (smoothing / x.shape[dim]))
        work.scatter_add_(1, labels.clamp(min=0), u[rows] * (smoothing - 1.0))
        if work is room:
            out[rows] = work
    return x_bar, unwanted(x)


def in_blocks(
    reference: Callable[..., tuple[Tensor, ...]], of_labels: Callable[..., tuple[Tensor, ...] | None] | None = None
) -> Callable[..., tuple[Tensor, ...] | None]:
    """`reference` by blocks of the first axis, which every tensor argument has, and every result that has elements.

    `of_labels` goes first, which may leave a call by `None`.

    `None`, which leaves the call to the reference itself, where x has no elements.
    """
    names = list(inspect.signature(reference).parameters)
    place_of_x, place_of_dim = names.index("x"), names.index("dim")

    @functools.wraps(reference)
    def kernel(*args: Any) -> tuple[Tensor, ...] | None:
        x, dim = args[place_of_x], args[place_of_dim]
        if not x.numel():
            return None
        found = None if of_labels is None else of_labels(*args)
        if found is not None:
            return found
        # Along the first axis the classes lie in every row.
        blocks = list(row_blocks(x.shape[0], x.shape[1:].numel())) if dim else [slice(None)]
        if len(blocks) == 1:
            return reference(*args)
        parts = (reference(*[arg[rows] if isinstance(arg, torch.Tensor) else arg for arg in args]) for rows in blocks)
        outputs: list[Tensor] = []
        for rows, part in zip(blocks, parts, strict=True):
            # Allocated at once, since pieces that are joined at the end take the memory twice.
            outputs = outputs or [p.new_empty((x.shape[0], *p.shape[1:]) if p.numel() else (0,)) for p in part]
            for output, piece in zip(outputs, part, strict=True):
                if piece.numel():
                    output[rows] = piece
        return tuple(outputs)

    return kernel
