"""Log-softmax on CPU tensors: ATen's kernels for the value and the vjp, blocks of rows for the rest.

The formulas are those of `log_softmax.py`: sums over the axis with p = exp(y).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from primitives.ops.cpu import cast, row_blocks
from primitives.ops.rules import accumulation_dtype, empty_output

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


# ATen adds up in running sums of float32, of which n numbers of one sign lose up to n * 2**-26. Along any axis but the
# last it has one for each position beside it, along the last one for each lane of a vector, eight in AVX2. So at these
# lengths sum(y_bar) of one sign loses up to 3e-5 and 1.2e-4 of itself, and x_bar that times p; y is as far off where x
# is of few values. Blocks of rows lose nothing but take 1.7 times as long, so that vocabularies of 50,000 stay below.
LONGEST_SUM = 2**11
LONGEST_ROW = 2**16


class _Block(NamedTuple):
    """Rows [rows, length of the axis, inner] of inputs and of outputs in the dtype of sums, and room for one tensor."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    spare: Tensor


def row_blocks_along(dim: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Iterator[_Block]:
    """Blocks of rows; what all of them need beside the tensors is allocated once, since fresh memory is slow."""
    y = outputs[0]
    shape = (y.shape[:dim].numel(), y.shape[dim], y.shape[dim:].numel() // y.shape[dim])
    rows_in, rows_out = [t.contiguous().view(shape) for t in inputs], [t.view(shape) for t in outputs]
    acc = accumulation_dtype(inputs[0].dtype)
    slices = list(row_blocks(shape[0], shape[1] * shape[2]))
    room = (min(shape[0], slices[0].stop), *shape[1:])
    cast = [None if t.dtype == acc else torch.empty(room, dtype=acc) for t in (*rows_in, *rows_out)]
    spare = torch.empty(room, dtype=acc)
    for rows in slices:
        count = min(rows.stop, shape[0]) - rows.start
        tensors = [t[rows] for t in (*rows_in, *rows_out)]
        blocks = [t if room is None else room[:count] for t, room in zip(tensors, cast, strict=True)]
        split = len(inputs)
        for source, block in zip(tensors[:split], blocks[:split], strict=True):
            if source is not block:
                block.copy_(source)
        yield _Block(blocks[:split], blocks[split:], spare[:count])
        for target, block in zip(tensors[split:], blocks[split:], strict=True):
            # An operation that casts its result as it writes it is slower than a copy that does.
            if target is not block:
                target.copy_(block)


def fwd(x: Tensor, dim: int, output_dtype: torch.dtype | None) -> Tensor | None:
    """By one call of ATen, unless sums are long."""
    if x.numel() == 0:
        return None
    x = cast(x.contiguous(), output_dtype or x.dtype)
    if sums_are_short(x, dim):
        return torch._log_softmax(x, dim, False)
    out = torch.empty_like(x)
    for (x_block,), (out_block,), spare in row_blocks_along(dim, [x], [out]):
        torch.sub(x_block, x_block.amax(1, keepdim=True), out=out_block)
        out_block.sub_(torch.exp(out_block, out=spare).sum(1, keepdim=True).log_())
    return out


def sums_are_short(y: Tensor, dim: int) -> bool:
    """Whether `dim` is so short that ATen's own log-softmax may add it up."""
    return y.shape[dim] <= (LONGEST_ROW if dim == y.dim() - 1 else LONGEST_SUM)


def bwd(y_bar: Tensor, y: Tensor, dim: int, x_dtype: torch.dtype) -> Tensor | None:
    """x_bar = y_bar - p * sum(y_bar)."""
    if y.numel() == 0:
        return None
    if sums_are_short(y, dim):
        return cast(torch._log_softmax_backward_data(y_bar.contiguous(), y.contiguous(), dim, y.dtype), x_dtype)
    out = torch.empty(y.shape, dtype=x_dtype)
    for (y_block, y_bar_block), (out_block,), _ in row_blocks_along(dim, [y, y_bar], [out]):
        # Without the spare room, since one tensor more leaves the cache.
        p, total = torch.exp(y_block, out=out_block), y_bar_block.sum(1, keepdim=True)
        torch.addcmul(y_bar_block, p, total, value=-1, out=out_block)
    return out


def jvp(x_dot: Tensor, y: Tensor, dim: int) -> Tensor | None:
    """y_dot = x_dot - sum(p * x_dot)."""
    if y.numel() == 0:
        return None
    out = torch.empty(y.shape, dtype=y.dtype)
    for (y_block, x_dot_block), (out_block,), spare in row_blocks_along(dim, [y, x_dot], [out]):
        total = torch.exp(y_block, out=spare).mul_(x_dot_block).sum(1, keepdim=True)
        torch.sub(x_dot_block, total, out=out_block)
    return out


def pairing(
    y_bar: Tensor, y: Tensor, x_dot: Tensor, dim: int, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """y_dot, -p * x_dot * sum(y_bar) and x_bar."""
    if y.numel() == 0 or not any(wanted):
        return None
    made = [torch.empty(y.shape, dtype=t.dtype) for t, want in zip((y_bar, y, x_dot), wanted, strict=True) if want]
    for (y_block, y_bar_block, x_dot_block), out_blocks, spare in row_blocks_along(dim, [y, y_bar, x_dot], made):
        targets = iter(out_blocks[::-1])
        p, total = torch.exp(y_block, out=spare), y_bar_block.sum(1, keepdim=True)
        if wanted[2]:
            torch.addcmul(y_bar_block, p, total, value=-1, out=next(targets))
        p_dot = p.mul_(x_dot_block)
        if wanted[1]:
            torch.mul(p_dot, -total, out=next(targets))
        if wanted[0]:
            torch.sub(x_dot_block, p_dot.sum(1, keepdim=True), out=next(targets))
    outputs = iter(made)
    y_bar_bar, output_bar, x_dot_bar = (next(outputs) if want else empty_output(y) for want in wanted)
    return y_bar_bar, output_bar, x_dot_bar


def bwd_jvp(
    y_bar: Tensor, y: Tensor, y_bar_dot: Tensor | None, y_dot: Tensor | None, dim: int, x_dtype: torch.dtype
) -> Tensor | None:
    """x_bar_dot = y_bar_dot - p * (y_dot * sum(y_bar) + sum(y_bar_dot))."""
    if y.numel() == 0:
        return None
    if y_dot is None:
        return None if y_bar_dot is None else bwd(y_bar_dot, y, dim, x_dtype)
    out = torch.empty(y.shape, dtype=x_dtype)
    inputs = [y, y_dot, y_bar, *([] if y_bar_dot is None else [y_bar_dot])]
    for (y_block, y_dot_block, y_bar_block, *y_bar_dots), (out_block,), spare in row_blocks_along(dim, inputs, [out]):
        factor = y_dot_block * y_bar_block.sum(1, keepdim=True)
        if not y_bar_dots:
            torch.mul(torch.exp(y_block, out=spare).neg_(), factor, out=out_block)
            continue
        factor += y_bar_dots[0].sum(1, keepdim=True)
        torch.addcmul(y_bar_dots[0], torch.exp(y_block, out=spare), factor, value=-1, out=out_block)
    return out
