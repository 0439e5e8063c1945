"""Tensors seen as rows: `[segments, rows, columns]`, each with strides of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..runtime.arithmetic import ACCESS_BYTES, MAX_ALIGN
from ..runtime.views import collapsed_stride

Strides = tuple[int, int, int]


class RowView(NamedTuple):
    """Tensors of one shape seen as `[num_segments, num_rows, num_cols]`, each with its own three strides.

    Row `r` of segment `s` is row `s * num_rows + r` of the whole. Two levels are what it takes to address the rows of
    an expanded or padded tensor without a copy. New tensors of the shape have `out_strides`. With `along_rows`, tiles
    may run along rows that are adjacent in memory. With a `period`, every so many columns are adjacent, and the column
    stride is the distance of two such runs. The last tensor may be the same for so many segments, one after another, as
    `repeats` says: its first stride leads past all of these.
    """

    num_segments: int
    num_rows: int
    num_cols: int
    tensors: tuple[Tensor | None, ...]
    strides: tuple[tuple[int, int, int], ...]
    out_strides: tuple[int, int, int]
    along_rows: bool = False
    repeats: int | None = None
    period: int = 0

    def axes(self) -> list[int]:
        """The adjacent axis of each tensor, and of the outputs: 1 for columns, 2 for rows, 3 for runs of columns, or 0.

        Rows count only where tiles may run along them.
        """
        if self.period:
            return [3] * (len(self.strides) + 1)
        return [
            1
            if col_stride == 1 and (self.num_cols > 1 or not self.along_rows)
            else 2
            if self.along_rows and row_stride == 1
            else 0
            for _, row_stride, col_stride in (*self.strides, self.out_strides)
        ]

    def alignment(self, *more: int) -> int:
        """Power of two, at most 16, that divides the integers `more` and the distance of all adjacent elements."""
        divisor = math.gcd(MAX_ALIGN, self.period, *more)
        strides = (*self.strides, self.out_strides)
        for (segment_stride, row_stride, col_stride), axis in zip(strides, self.axes(), strict=True):
            if axis:
                divisor = math.gcd(divisor, segment_stride, *(row_stride,) * (axis != 2), *(col_stride,) * (axis != 1))
        return divisor

    def row_alignment(self) -> int:
        """Power of two, at most 16, that divides the rows; it only matters to tiles that run along them."""
        return math.gcd(MAX_ALIGN, self.num_rows) if self.along_rows else 1

    def is_aligned(self, itemsize: int, *more: int) -> bool:
        """Whether rows with elements of `itemsize` bytes can be loaded 16 bytes at a time; `more` as in `alignment`."""
        return all(self.axes()) and self.alignment(*more) * itemsize % ACCESS_BYTES == 0


def row_view(
    tensors: Sequence[Tensor | None], norm_ndim: int, batch_ndim: int | None, max_segments: int | None = None
) -> RowView:
    """View of tensors of one non-empty shape as rows over their last `norm_ndim` dims.

    Args:
        tensors: One at least is not None.
        norm_ndim: Number of trailing dims that form a row.
        batch_ndim: Number of leading dims that form the segments; None leaves the choice to the strides.
        max_segments: Copy rather than use more segments than this, where the strides have the choice.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    shape = present[0].shape
    cols = range(len(shape) - norm_ndim, len(shape))
    cut = batch_ndim or 0
    if batch_ndim is None:
        cut = _fewest_segments(present, cols, range(cols.start), 0, max_segments)
    views = [_as_rows(tensor, cols, cut, single=1) for tensor in tensors]
    num_segments, num_rows = math.prod(shape[:cut]), math.prod(shape[cut : cols.start])
    num_cols = math.prod(shape[cols.start :])
    viewed, strides = zip(*views, strict=True)
    return RowView(num_segments, num_rows, num_cols, viewed, strides, (num_rows * num_cols, num_cols, 1))


def channels_last_views(tensors: Sequence[Tensor | None]) -> tuple[RowView, RowView]:
    """Views of tensors `[*samples, groups, channels, positions]` whose channels are adjacent: as groups, and as planes.

    A sample is a segment. Its rows are its groups, with the channels of a position beside each other, or its planes,
    one of each channel, which are adjacent. Tensors that lie otherwise are copied.
    """
    *samples, groups, channels, positions = next(tensor for tensor in tensors if tensor is not None).shape
    width = groups * channels
    views, strides, plane_strides = [], [], []
    for tensor in tensors:
        at = None if tensor is None else _channels_last_strides(tensor)
        if tensor is not None and at is None:
            tensor = tensor.movedim(-1, -3).contiguous().movedim(-3, -1)
            at = positions * width, width
        sample, position = at or (0, width)
        views.append(tensor)
        strides.append((sample, channels, position))
        plane_strides.append((sample, 1, position))
    num_samples, out = math.prod(samples), (positions * width, channels, width)
    rows = RowView(num_samples, groups, channels * positions, tuple(views), tuple(strides), out, period=channels)
    planes = RowView(num_samples, width, positions, tuple(views), tuple(plane_strides), (0, 1, width), along_rows=True)
    return rows, planes


def _channels_last_strides(tensor: Tensor) -> tuple[int, int] | None:
    """Distances of samples and of positions if all channels of a position are adjacent, else None."""
    sample = collapsed_stride(tensor.shape[:-3], tensor.stride()[:-3])
    if sample is None or collapsed_stride(tensor.shape[-3:-1], tensor.stride()[-3:-1], 1) != 1:
        return None
    return sample, tensor.stride(-1)


def reduction_view(inputs: Sequence[Tensor | None], out: Tensor, dim: int, may_repeat: bool = False) -> RowView:
    """View of tensors of one non-empty shape as rows along `dim`, which the other dims number.

    An input is copied only if no view fits its strides.

    Args:
        inputs: Operands; None entries stay None.
        out: One of the outputs, which are contiguous and have its shape.
        dim: Reduced dim.
        may_repeat: Whether the last input may be one that `repeats`, as a mask that heads share.
    """
    shape, cols = out.shape, range(dim, dim + 1)
    # Contiguous rows lie within a segment for each index of the dims outside `dim`, or one behind the other. Of others
    # that no number of leading dims serves, these are copied least.
    cut = dim if math.prod(shape[dim + 1 :]) > 1 else 0
    present = [tensor for tensor in inputs if tensor is not None]
    cut = _fewest_segments([*present, out], cols, range(max(out.dim() - 1, 1)), cut)
    last, shared = inputs[-1], None
    if may_repeat and last is not None and _row_strides(last, cols, cut) is None:
        shared = _shared_strides(last, [*present[:-1], out], cols)
    if shared is not None:
        cut = shared.cut
    viewed, strides = zip(*(_as_rows(tensor, cols, cut) for tensor in (*inputs[:-1], out)), strict=True)
    of_last = (last, shared.strides) if shared is not None else _as_rows(last, cols, cut)
    viewed, strides = (*viewed[:-1], of_last[0]), (*strides[:-1], of_last[1], strides[-1])
    num_segments = math.prod(_without(shape, cols)[:cut])
    num_rows = out.numel() // (shape[dim] * num_segments)
    view = RowView(num_segments, num_rows, shape[dim], viewed, strides[:-1], strides[-1], along_rows=True)
    return view._replace(along_rows=2 in view.axes(), repeats=None if shared is None else shared.repeats)


class _Shared(NamedTuple):
    """Leading dims that are the segments, how many share a tensor's rows, and its strides, the first past all these."""

    cut: int
    repeats: int
    strides: Strides


def _shared_strides(tensor: Tensor, others: Sequence[Tensor], cols: range) -> _Shared | None:
    """A view of a tensor that expanded dims behind its first ones repeat; None where it or one of others has none."""
    sizes, strides = _without(tensor.shape, cols), _without(tensor.stride(), cols)
    expanded = [i for i, (size, stride) in enumerate(zip(sizes, strides, strict=True)) if size > 1 and stride == 0]
    start, cut = (expanded[0], expanded[-1] + 1) if expanded else (0, 0)
    outer = collapsed_stride(sizes[:start], strides[:start])
    row_stride = collapsed_stride(sizes[cut:], strides[cut:])
    is_shared = all(size == 1 or stride == 0 for size, stride in zip(sizes[start:cut], strides[start:cut], strict=True))
    if not start or outer is None or row_stride is None or not is_shared:
        return None
    if any(_row_strides(other, cols, cut) is None for other in others):
        return None
    return _Shared(cut, math.prod(sizes[start:cut]), (outer, row_stride, tensor.stride(cols.start)))


def _fewest_segments(
    tensors: Sequence[Tensor], cols: range, cuts: range, usual: int, max_segments: int | None = None
) -> int:
    """Fewest leading dims to take as segments so that no tensor needs a copy; the usual if none does."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return usual
    sizes = _without(tensors[0].shape, cols)
    for cut in cuts:
        if max_segments is not None and math.prod(sizes[:cut]) > max_segments:
            break
        if all(_row_strides(tensor, cols, cut) is not None for tensor in tensors):
            return cut
    return usual


def _as_rows(tensor: Tensor | None, cols: range, cut: int, single: int = 0) -> tuple[Tensor | None, Strides]:
    """A tensor whose strides fit, a copy if need be, and its strides."""
    if tensor is None:
        # A column stride of 1 keeps the others' columns adjacent.
        return None, (0, 0, 1)
    strides = _row_strides(tensor, cols, cut, single)
    if strides is not None:
        return tensor, strides
    return _as_rows(tensor.contiguous(), cols, cut, single)


def _row_strides(tensor: Tensor, cols: range, cut: int, single: int = 0) -> Strides | None:
    """Of segments, rows and columns; of rows of one column `single`: 1 is what Triton specializes on."""
    sizes, strides = _without(tensor.shape, cols), _without(tensor.stride(), cols)
    inside = slice(cols.start, cols.stop)
    segment_stride = collapsed_stride(sizes[:cut], strides[:cut])
    row_stride = collapsed_stride(sizes[cut:], strides[cut:])
    col_stride = collapsed_stride(tensor.shape[inside], tensor.stride()[inside], single)
    if segment_stride is None or row_stride is None or col_stride is None:
        return None
    return segment_stride, row_stride, col_stride


def _without(numbers: Sequence[int], dims: range) -> tuple[int, ...]:
    return (*numbers[: dims.start], *numbers[dims.stop :])
