"""Dropout: one launcher for the operation and for its derivatives of every order (`primitives.ops.dropout.dropout`).

The noise is drawn inside the kernel, from seed, offset and the place of an element, and never stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.arithmetic import MAX_ALIGN, PHILOX_WORDS, cdiv
from ..runtime.numbers import TL_DTYPES, accumulation_dtype, noise_numbers
from ..runtime.views import device_guard, per_stream
from ..tuning import tunable
from ._dropout_kernels import dropout_kernel
from ._plan import plan_dropout

_NUM_AXES = 4


class _Axis(NamedTuple):
    """Adjacent dims merged into one: its size, and its strides in x and in y."""

    size: int
    x_stride: int
    y_stride: int


def _merge(x: Tensor, y: Tensor, dims: range) -> list[_Axis]:
    """The given dims of x and y as few axes as their strides allow, the last one first; dims of size 1 vanish."""
    axes: list[_Axis] = []
    for dim in reversed(dims):
        axis = _Axis(x.shape[dim], x.stride(dim), y.stride(dim))
        if axis.size == 1:
            continue
        last = axes[-1] if axes else axis
        if axes and (axis.x_stride, axis.y_stride) == (last.size * last.x_stride, last.size * last.y_stride):
            axes[-1] = last._replace(size=last.size * axis.size)
        else:
            axes.append(axis)
    return axes


def _merged_axes(x: Tensor, y: Tensor, batch_ndim: int) -> tuple[list[_Axis], int]:
    """Axes `[outer, inner, rows, columns]` of x and y, more where their strides need more.

    Also how many of them, from the last on, are those of a sample: all if there is one sample alone.
    """
    rest, batch = _merge(x, y, range(batch_ndim, x.dim())) or [_Axis(1, 1, 1)], _merge(x, y, range(batch_ndim))
    axes = [*rest, *batch, *[_Axis(1, 0, 0)] * (_NUM_AXES - len(rest) - len(batch))]
    return axes[::-1], len(rest) if batch else len(axes)


def _adjacent_axis(rows: _Axis, cols: _Axis, strides: Sequence[int]) -> int:
    """Which axis has stride 1: 1 for columns, 2 for rows, or 0."""
    row_stride, col_stride = strides[2:]
    if col_stride == 1 and cols.size > 1:
        return 1
    return 2 if row_stride == 1 and rows.size > 1 else 0


@tunable
def dropout_fwd(x: Tensor, seed: Tensor, offset: Tensor | None, p: float, batch_ndim: int) -> Tensor:
    """Drop elements of `x`, or of a tangent or cotangent, at random, and scale the others.

    The result has the strides of `x`, or dense ones where `x` has gaps or repeats.
    """
    y = torch.empty_like(x)
    if not x.numel():
        return y
    if p == 0.0:
        return y.copy_(x)
    axes, sample_axes = _merged_axes(x, y, batch_ndim)
    if len(axes) > _NUM_AXES:
        return y.copy_(dropout_fwd(x.contiguous(), seed, offset, p, batch_ndim))
    (seeds, seed_stride), (offsets, offset_stride) = per_stream(seed), per_stream(offset)
    outer, inner, rows, cols = axes
    x_strides, y_strides = [axis.x_stride for axis in axes], [axis.y_stride for axis in axes]
    adjacent = [_adjacent_axis(rows, cols, strides) for strides in (x_strides, y_strides)]
    others = [
        stride
        for strides, axis in zip((x_strides, y_strides), adjacent, strict=True)
        if axis
        for stride in (*strides[:2], strides[1 + axis])
    ]
    plan = plan_dropout(rows.size, cols.size, 1 not in adjacent and 2 in adjacent, x.element_size(), x.device)
    num_tiles = cdiv(rows.size, plan.block_rows) * cdiv(cols.size, plan.block_cols)
    with device_guard(x):
        dropout_kernel[(outer.size * inner.size * num_tiles,)](
            *(x, y, seeds, offsets, inner.size, rows.size, cols.size),
            *(*x_strides, *y_strides, seed_stride, offset_stride, *noise_numbers(p)),
            DTYPE=TL_DTYPES[accumulation_dtype(x.dtype)],
            SAMPLE_AXES=sample_axes,
            # A sample of a single row begins at its first word.
            GROUPED=cols.size % PHILOX_WORDS == 0 or sample_axes == 1 or x.numel() == cols.size,
            X_ADJACENT=adjacent[0],
            Y_ADJACENT=adjacent[1],
            ALIGN=math.gcd(MAX_ALIGN, *others),
            ROW_ALIGN=math.gcd(MAX_ALIGN, rows.size) if 2 in adjacent else 1,
            COL_ALIGN=math.gcd(MAX_ALIGN, cols.size) if 1 in adjacent else 1,
            BLOCK_ROWS=plan.block_rows,
            BLOCK_COLS=plan.block_cols,
            num_warps=plan.num_warps,
        )
    return y
