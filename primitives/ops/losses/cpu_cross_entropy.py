"""Cross-entropy on CPU tensors, on blocks of rows that stay in the cache (see `_cpu`).

Beside labels everything has kernels of its own, which compare no class with a label; beside probabilities the
references take the blocks.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from primitives.ops.cpu import row_blocks
from primitives.ops.rules import accumulation_dtype, empty_output

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor


def _rows(t: Tensor, dim: int) -> Tensor:
    """`t` as [rows, classes, inner]."""
    return t.contiguous().view(t.shape[:dim].numel(), t.shape[dim], -1)


def _blocks(x: Tensor, target: Tensor, dim: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Rows, and of each block [rows, classes, inner] of x the logits, room for as many, and the labels."""
    logits, room = _rows(x, dim), None
    labels = target.reshape(logits.shape[0], 1, logits.shape[2])
    for rows in row_blocks(logits.shape[0], logits[0].numel()):
        block = logits[rows].to(accumulation_dtype(x.dtype))
        # Allocated once: fresh memory is slow.
        room = torch.empty_like(block) if room is None else room
        yield rows, block, room[: block.shape[0]], labels[rows]


def _of_target(v: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """The sum of t * v."""
    product = (1.0 - smoothing) * v.gather(1, labels.clamp(min=0))
    return product.add_(smoothing * v.mean(1, keepdim=True)) if smoothing else product


def value(x: Tensor, target: Tensor, dim: int, smoothing: float) -> tuple[Tensor, Tensor] | None:
    """`cross_entropy_fwd` of labels; `None` of anything else."""
    if target.is_floating_point() or not x.numel():
        return None
    parts = []
    for _, block, room, labels in _blocks(x, target, dim):
        top = block.amax(1, keepdim=True)
        shifted = torch.sub(block, top, out=room)
        product = _of_target(shifted, labels, smoothing)
        log_sum = shifted.exp_().sum(1, keepdim=True).log_()
        parts.append(((log_sum - product).masked_fill_(labels < 0, 0.0), log_sum.add_(top)))
    loss, lse = (torch.cat(column).view(target.shape) for column in zip(*parts, strict=True))
    return loss, lse


def jvp(
    x: Tensor,
    target: Tensor,
    lse: Tensor,
    x_dot: Tensor | None,
    target_dot: Tensor | None,
    dim: int,
    smoothing: float,
) -> tuple[Tensor, Tensor] | None:
    """`cross_entropy_jvp` of labels; `None` of anything else."""
    if target.is_floating_point() or not x.numel() or x_dot is None:
        return None
    dots, parts = _rows(x_dot, dim), []
    logarithm = lse.reshape(len(dots), 1, -1)
    for rows, block, room, labels in _blocks(x, target, dim):
        dot = dots[rows].to(lse.dtype)
        mean = torch.sub(block, logarithm[rows], out=room).exp_().mul_(dot).sum(1, keepdim=True)
        parts.append(((mean - _of_target(dot, labels, smoothing)).masked_fill_(labels < 0, 0.0), mean))
    loss_dot, lse_dot = (torch.cat(column).view(target.shape) for column in zip(*parts, strict=True))
    return loss_dot, lse_dot


def vjp(
    loss_bar: Tensor | None, lse_bar: Tensor | None, x: Tensor, target: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, Tensor] | None:
    """`cross_entropy_bwd` of labels, which is linear in the cotangents; `None` of anything else."""
    return vjp_jvp(None, None, x, target, lse, loss_bar, lse_bar, None, None, *args)


def vjp_jvp(
    loss_bar: Tensor | None,
    lse_bar: Tensor | None,
    x: Tensor,
    target: Tensor,
    lse: Tensor,
    loss_bar_dot: Tensor | None,
    lse_bar_dot: Tensor | None,
    x_dot: Tensor | None,
    target_dot: Tensor | None,
    dim: int,
    smoothing: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor] | None:
    """`cross_entropy_bwd_jvp` of labels, p * (a * (x_dot - m) + a_dot) - loss_bar_dot * t; `None` of anything else."""
    if target.is_floating_point() or not x.numel() or not wanted[0]:
        return None
    change = torch.empty(x.shape, dtype=x.dtype)
    out, dots = _rows(change, dim), None if x_dot is None else _rows(x_dot, dim)

    def per_row(of_loss: Tensor | None, of_lse: Tensor | None) -> tuple[Tensor, Tensor]:
        u = torch.zeros_like(lse) if of_loss is None else of_loss.to(lse.dtype).masked_fill(target < 0, 0.0)
        u, a = (t.reshape(len(out), 1, -1) for t in (u, u if of_lse is None else u + of_lse))
        return u, a

    logarithm = lse.reshape(len(out), 1, -1)
    (_, a), (u_dot, a_dot) = per_row(loss_bar, lse_bar), per_row(loss_bar_dot, lse_bar_dot)
    for rows, block, room, labels in _blocks(x, target, dim):
        work = out[rows] if x.dtype == lse.dtype else room
        if dots is None:
            torch.sub(block, logarithm[rows], out=work).exp_().mul_(a_dot[rows])
        else:
            p = torch.sub(block, logarithm[rows], out=torch.empty_like(room) if work is room else room).exp_()
            dot = dots[rows].to(lse.dtype)
            mean = torch.mul(p, dot, out=work).sum(1, keepdim=True)
            torch.addcmul(a_dot[rows], torch.sub(dot, mean, out=work), a[rows], out=work).mul_(p)
        if smoothing:
            work.sub_(u_dot[rows] * (smoothing / x.shape[dim]))
        work.scatter_add_(1, labels.clamp(min=0), u_dot[rows] * (smoothing - 1.0))
        if work is room:
            out[rows] = work
    return change, empty_output(x)


def in_blocks(
    reference: Callable[..., tuple[Tensor, ...]], of_labels: Callable[..., tuple[Tensor, ...] | None]
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
        found = of_labels(*args)
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
