"""Tensors seen as rows: `[segments, rows, columns]`, each with strides of its own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from triton_kernels._runtime import collapsed_stride
from triton_kernels.launch._arithmetic import ACCESS_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# The longest vector load in elements that any dtype needs.
_MAX_ALIGN = 16
# Of a tensor that is None; a column stride of 1 keeps the others' columns adjacent.
ABSENT_STRIDES = (0, 0, 1)


class RowView(NamedTuple):
    """Tensors of one shape seen as `[num_segments, num_rows, num_cols]`, each with its own three strides.

    Row `r` of segment `s` is row `s * num_rows + r` of the whole. Two levels are what it takes to address the rows of
    an expanded or padded tensor without a copy. New tensors of the shape have `out_strides`. With `along_rows`, tiles
    may run along rows that are adjacent in memory.
    """

    num_segments: int
    num_rows: int
    num_cols: int
    tensors: tuple[Tensor | None, ...]
    strides: tuple[tuple[int, int, int], ...]
    out_strides: tuple[int, int, int]
    along_rows: bool = False

    def axes(self) -> list[int]:
        """The adjacent axis of each tensor, and of the outputs: 1 for columns, 2 for rows, 0 for neither.

        Rows count only where tiles may run along them.
        """
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
        divisor = math.gcd(_MAX_ALIGN, *more)
        strides = (*self.strides, self.out_strides)
        for (segment_stride, row_stride, col_stride), axis in zip(strides, self.axes(), strict=True):
            if axis:
                divisor = math.gcd(divisor, segment_stride, row_stride if axis == 1 else col_stride)
        return divisor

    def row_alignment(self) -> int:
        """Power of two, at most 16, that divides the rows; it only matters to tiles that run along them."""
        return math.gcd(_MAX_ALIGN, self.num_rows) if self.along_rows else 1

    def is_aligned(self, itemsize: int, *more: int) -> bool:
        """Whether rows with elements of `itemsize` bytes can be loaded 16 bytes at a time; `more` as in `alignment`."""
        return all(self.axes()) and self.alignment(*more) * itemsize % ACCESS_BYTES == 0


def row_view(
    tensors: Sequence[Tensor | None], norm_ndim: int, batch_ndim: int | None, max_segments: int | None = None
) -> RowView:
    """View of tensors of one shape as rows over their last `norm_ndim` dims.

    Args:
        tensors: Tensors of one non-empty shape; None entries stay None. At least one is a tensor.
        norm_ndim: Number of trailing dims that form a row.
        batch_ndim: Number of leading dims that form the segments; None leaves the choice to the strides.
        max_segments: Copy rather than use more segments than this, where the strides have the choice.
    """
    first = next(tensor for tensor in tensors if tensor is not None)
    row_ndim = first.dim() - norm_ndim
    shape = first.shape
    num_cols = math.prod(shape[row_ndim:])
    contiguous = all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    cut = batch_ndim or 0
    if batch_ndim is None and not contiguous:
        cut = segment_cut([tensor for tensor in tensors if tensor is not None], row_ndim, max_segments)
    viewed, strides = zip(*(_as_rows(tensor, cut, row_ndim) for tensor in tensors), strict=True)
    num_segments, num_rows = math.prod(shape[:cut]), math.prod(shape[cut:row_ndim])
    return RowView(num_segments, num_rows, num_cols, viewed, strides, (num_rows * num_cols, num_cols, 1))


def _as_rows(tensor: Tensor | None, cut: int, row_ndim: int) -> tuple[Tensor | None, tuple[int, int, int]]:
    if tensor is None:
        return None, ABSENT_STRIDES
    strides = _row_strides(tensor, cut, row_ndim)
    if strides is not None:
        return tensor, strides
    num_cols = math.prod(tensor.shape[row_ndim:])
    num_rows = math.prod(tensor.shape[cut:row_ndim])
    return tensor.contiguous(), (num_rows * num_cols, num_cols, 1)


def _row_strides(tensor: Tensor, cut: int, row_ndim: int) -> tuple[int, int, int] | None:
    sizes, strides = tensor.shape, tensor.stride()
    segment_stride = collapsed_stride(sizes[:cut], strides[:cut])
    row_stride = collapsed_stride(sizes[cut:row_ndim], strides[cut:row_ndim])
    # A stride of 1 is what Triton specializes on, so rows of one column report it too.
    col_stride = collapsed_stride(sizes[row_ndim:], strides[row_ndim:], single=1)
    if segment_stride is None or row_stride is None or col_stride is None:
        return None
    return segment_stride, row_stride, col_stride


def segment_cut(tensors: Sequence[Tensor], row_ndim: int, max_segments: int | None) -> int:
    """Fewest leading dims to take as segments so that no tensor needs a copy; 0 where every choice needs one.

    Args:
        tensors: Of one shape.
        row_ndim: Number of leading dims that number the rows.
        max_segments: No dims that make more segments than this are taken.
    """
    num_segments = 1
    for cut in range(row_ndim):
        if max_segments is not None and num_segments > max_segments:
            break
        if all(_row_strides(tensor, cut, row_ndim) is not None for tensor in tensors):
            return cut
        num_segments *= tensors[0].shape[cut]
    return 0
