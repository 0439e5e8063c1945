"""Softmax on CPU tensors: ATen's kernels for the value and the map of both derivatives, blocks of rows for the rest.

The formulas are those of `softmax.py`, with `P(v) = y * (v - sum(y * v))`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from primitives.ops.cpu import cast
from primitives.ops.rules import LOW_PRECISION, accumulation_dtype, empty_output, masked
from primitives.ops.softmax.cpu_log_softmax import row_blocks_along, sums_are_short

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def fwd(x: Tensor, mask: Tensor | None, dim: int, scale: float, output_dtype: torch.dtype | None) -> Tensor | None:
    """By one call of ATen, of u if that is not x; where sums are long row by row."""
    if x.numel() == 0:
        return None
    y_dtype = output_dtype or x.dtype
    x = cast(x.contiguous(), y_dtype)
    # Along any axis but the last ATen rounds exponentials to half precision.
    if mask is None and scale == 1.0 and (x.dtype not in LOW_PRECISION or dim == x.dim() - 1):
        return _softmax(x, dim)
    x = cast(x, accumulation_dtype(y_dtype))
    if mask is None:
        u = masked(x, None, scale)
    elif mask.dtype == torch.bool or scale != 1.0:
        u = torch.mul(x, scale)
        u = u.add_(mask) if mask.dtype != torch.bool else torch.where(mask, u, u.new_tensor(-torch.inf), out=u)
    else:
        u = x + mask
    y = _softmax(u, dim)
    # NaN in a row is NaN in all of it: without a position that takes part, or of x where the mask is -inf.
    if mask is not None and y.select(dim, 0).isnan().any():
        u = masked(x, mask, scale)
        y = _softmax(u, dim).masked_fill_(u.amax(dim, keepdim=True) == -torch.inf, 0.0)
    return cast(y, y_dtype)


def _softmax(x: Tensor, dim: int) -> Tensor:
    """Of contiguous x."""
    if sums_are_short(x, dim):
        return torch._softmax(x, dim, False)
    out = torch.empty_like(x)
    for (x_block,), (out_block,), _ in row_blocks_along(dim, [x], [out]):
        torch.sub(x_block, x_block.amax(1, keepdim=True), out=out_block).exp_()
        out_block.div_(out_block.sum(1, keepdim=True))
    return out


def bwd(y_bar: Tensor, y: Tensor, dim: int, scale: float, x_dtype: torch.dtype) -> Tensor | None:
    """The map of y_bar."""
    if y.numel() == 0:
        return None
    # A scale would round twice.
    rounds_once = scale == 1.0 or y.dtype not in LOW_PRECISION
    if rounds_once and y_bar.dtype == y.dtype and sums_are_short(y, dim):
        u_bar = torch._softmax_backward_data(y_bar.contiguous(), y.contiguous(), dim, y.dtype)
        return cast(u_bar if scale == 1.0 else u_bar.mul_(scale), x_dtype)
    out = torch.empty(y.shape, dtype=x_dtype)
    for (y_block, y_bar_block), (out_block,), spare in row_blocks_along(dim, [y, y_bar], [out]):
        _project(y_bar_block, y_block, spare, out_block, scale)
    return out


def _project(v: Tensor, y: Tensor, spare: Tensor, out: Tensor, scale: float) -> None:
    """Write scale * P(v)."""
    total = torch.mul(v, y, out=spare).sum(1, keepdim=True)
    torch.sub(v, total, out=out).mul_(y)
    if scale != 1.0:
        out.mul_(scale)


def jvp(x_dot: Tensor, y: Tensor, dim: int, scale: float) -> Tensor | None:
    """The map of x_dot."""
    return bwd(x_dot, y, dim, scale, y.dtype)


def pairing(
    y_bar: Tensor, y: Tensor, x_dot: Tensor, dim: int, scale: float, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """P(x_dot), y_bar * (x_dot - sum(y * x_dot)) - x_dot * sum(y * y_bar), and P(y_bar), all times scale."""
    if y.numel() == 0 or not any(wanted):
        return None
    made = [torch.empty(y.shape, dtype=t.dtype) for t, want in zip((y_bar, y, x_dot), wanted, strict=True) if want]
    for (y_block, y_bar_block, x_dot_block), out_blocks, spare in row_blocks_along(dim, [y, y_bar, x_dot], made):
        targets = iter(out_blocks)
        if wanted[0]:
            _project(x_dot_block, y_block, spare, next(targets), scale)
        if wanted[1]:
            total, dot_total = (
                torch.mul(y_block, v, out=spare).sum(1, keepdim=True).mul_(scale) for v in (y_bar_block, x_dot_block)
            )
            target = torch.mul(y_bar_block, x_dot_block, out=next(targets)).mul_(scale)
            target.addcmul_(y_bar_block, dot_total, value=-1).addcmul_(x_dot_block, total, value=-1)
        if wanted[2]:
            _project(y_bar_block, y_block, spare, next(targets), scale)
    outputs = iter(made)
    y_bar_bar, output_bar, x_dot_bar = (next(outputs) if want else empty_output(y) for want in wanted)
    return y_bar_bar, output_bar, x_dot_bar


def bwd_jvp(
    y_bar: Tensor,
    y: Tensor,
    y_bar_dot: Tensor | None,
    y_dot: Tensor | None,
    dim: int,
    scale: float,
    x_dtype: torch.dtype,
) -> Tensor | None:
    """P(y_bar_dot) - y * sum(y_dot * y_bar) + y_dot * (y_bar - sum(y * y_bar)), times scale."""
    if y.numel() == 0:
        return None
    if y_dot is None:
        return None if y_bar_dot is None else bwd(y_bar_dot, y, dim, scale, x_dtype)
    out = torch.empty(y.shape, dtype=x_dtype)
    inputs = [y, y_dot, y_bar, *([] if y_bar_dot is None else [y_bar_dot])]
    for (y_block, y_dot_block, y_bar_block, *y_bar_dots), (out_block,), spare in row_blocks_along(dim, inputs, [out]):
        both = torch.mul(y_dot_block, y_bar_block, out=out_block).sum(1, keepdim=True)
        total = torch.mul(y_block, y_bar_block, out=spare).sum(1, keepdim=True)
        out_block.addcmul_(y_dot_block, total, value=-1)
        for dot in y_bar_dots:
            both += torch.mul(y_block, dot, out=spare).sum(1, keepdim=True)
            out_block.add_(spare)
        out_block.addcmul_(y_block, both, value=-1)
        if scale != 1.0:
            out_block.mul_(scale)
    return out
