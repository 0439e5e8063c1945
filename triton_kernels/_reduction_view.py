"""Tensors seen as rows along one dim, which need not be the last."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from triton_kernels._row_view import ABSENT_STRIDES, RowView
from triton_kernels._runtime import collapsed_stride

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def reduction_view(inputs: Sequence[Tensor | None], out: Tensor, dim: int) -> RowView:
    """View of tensors of one non-empty shape as rows along `dim`, which the other dims number.

    An input is copied only if no view fits its strides.

    Args:
        inputs: Operands; None entries stay None.
        out: One of the outputs, which are contiguous and have its shape.
        dim: Reduced dim.
    """
    shape = out.shape
    present = [tensor for tensor in inputs if tensor is not None]
    # Contiguous rows lie within a segment for each index of the dims outside `dim`, or one behind the other.
    cut = dim if math.prod(shape[dim + 1 :]) > 1 else 0
    if not all(tensor.is_contiguous() for tensor in present):
        # As few leading dims as do without a copy; where there is no such number, these do with the fewest copies.
        cuts = (cut for cut in range(max(out.dim() - 1, 1)) if all(_strides(t, dim, cut) for t in (*present, out)))
        cut = next(cuts, cut)
    viewed, strides = zip(*(_as_rows(tensor, dim, cut) for tensor in (*inputs, out)), strict=True)
    num_segments = math.prod(_without(shape, dim)[:cut])
    num_rows = out.numel() // (shape[dim] * num_segments)
    view = RowView(num_segments, num_rows, shape[dim], viewed[:-1], strides[:-1], strides[-1], along_rows=True)
    return view._replace(along_rows=2 in view.axes())


def _as_rows(tensor: Tensor | None, dim: int, cut: int) -> tuple[Tensor | None, tuple[int, int, int]]:
    if tensor is None:
        return None, ABSENT_STRIDES
    strides = _strides(tensor, dim, cut)
    return _as_rows(tensor.contiguous(), dim, cut) if strides is None else (tensor, strides)


def _strides(tensor: Tensor, dim: int, cut: int) -> tuple[int, int, int] | None:
    sizes, strides = _without(tensor.shape, dim), _without(tensor.stride(), dim)
    segment_stride = collapsed_stride(sizes[:cut], strides[:cut])
    row_stride = collapsed_stride(sizes[cut:], strides[cut:])
    if segment_stride is None or row_stride is None:
        return None
    return segment_stride, row_stride, tensor.stride(dim) if tensor.shape[dim] > 1 else 0


def _without(numbers: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*numbers[:dim], *numbers[dim + 1 :])
