"""The dims of an input and an output of dropout as few axes as their strides allow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

NUM_AXES = 4


class Axis(NamedTuple):
    """Adjacent dims merged into one: its size, and its strides in x and in y."""

    size: int
    x_stride: int
    y_stride: int


def _merge(x: Tensor, y: Tensor, dims: range) -> list[Axis]:
    """The given dims of x and y as few axes as their strides allow, the last one first; dims of size 1 vanish."""
    axes: list[Axis] = []
    for dim in reversed(dims):
        axis = Axis(x.shape[dim], x.stride(dim), y.stride(dim))
        if axis.size == 1:
            continue
        if axes and (axis.x_stride, axis.y_stride) == (
            axes[-1].size * axes[-1].x_stride,
            axes[-1].size * axes[-1].y_stride,
        ):
            axes[-1] = axes[-1]._replace(size=axes[-1].size * axis.size)
        else:
            axes.append(axis)
    return axes


def merged_axes(x: Tensor, y: Tensor, batch_ndim: int) -> tuple[list[Axis], int]:
    """Axes `[outer, inner, rows, columns]` of x and y, more where their strides need more, and the rows of a sample."""
    rest = _merge(x, y, range(batch_ndim, x.dim())) or [Axis(1, 1, 1)]
    axes = [*rest, *_merge(x, y, range(batch_ndim))]
    axes += [Axis(1, 0, 0)] * (NUM_AXES - len(axes))
    return axes[::-1], math.prod(axis.size for axis in rest[1:])


def adjacent_axis(rows: Axis, cols: Axis, strides: Sequence[int]) -> str:
    row_stride, col_stride = strides
    if col_stride == 1 and cols.size > 1:
        return "cols"
    return "rows" if row_stride == 1 and rows.size > 1 else "none"
