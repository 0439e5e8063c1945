"""The dims of an input and an output of dropout as few axes as their strides allow."""

from __future__ import annotations

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
    """Axes `[outer, inner, rows, columns]` of x and y, more where their strides need more.

    Also how many of them, from the last on, are those of a sample: all if there is one sample alone.
    """
    rest, batch = _merge(x, y, range(batch_ndim, x.dim())) or [Axis(1, 1, 1)], _merge(x, y, range(batch_ndim))
    axes = [*rest, *batch, *[Axis(1, 0, 0)] * (NUM_AXES - len(rest) - len(batch))]
    return axes[::-1], len(rest) if batch else len(axes)


def adjacent_axis(rows: Axis, cols: Axis, strides: Sequence[int]) -> int:
    """Which axis has stride 1: 1 for columns, 2 for rows, or 0."""
    row_stride, col_stride = strides
    if col_stride == 1 and cols.size > 1:
        return 1
    return 2 if row_stride == 1 and rows.size > 1 else 0
