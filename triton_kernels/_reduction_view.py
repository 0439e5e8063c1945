"""Tensors seen as `[segments, rows, columns]` for a reduction over one dim, and the launch of a kernel over them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from triton_kernels import launch
from triton_kernels._runtime import TL_DTYPES, collapsed_stride, device_guard
from triton_kernels._split_rows import launch_sweeps

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

# What Triton takes a pointer or stride to be divisible by, at most: 16 bytes are 16 elements or fewer.
_MAX_ALIGN = 16


class ReductionView(NamedTuple):
    """Tensors of one shape seen as `[num_segments, num_rows, num_cols]`, each with its own three strides.

    The last strides are those of the outputs. There may be several of these, and absent tensors are None.
    """

    num_segments: int
    num_rows: int
    num_cols: int
    tensors: tuple[Tensor | None, ...]
    strides: tuple[tuple[int, int, int], ...]

    def inputs(self) -> list[Tensor]:
        """The tensors that are read."""
        return [tensor for tensor in self.tensors[: len(self.strides) - 1] if tensor is not None]

    def outputs(self) -> list[Tensor]:
        """The tensors that are written."""
        return [tensor for tensor in self.tensors[len(self.strides) - 1 :] if tensor is not None]

    def adjacent(self) -> list[str]:
        """For each triple of strides, which axis has stride 1."""
        return [
            "cols" if col_stride == 1 and self.num_cols > 1 else "rows" if row_stride == 1 else "none"
            for _, row_stride, col_stride in self.strides
        ]

    def alignment(self, adjacent: Sequence[str]) -> int:
        """Largest power of two, up to 16, that keeps the adjacent elements of every tensor aligned to it."""
        divisor = _MAX_ALIGN
        for (segment_stride, row_stride, col_stride), axis in zip(self.strides, adjacent, strict=True):
            if axis != "none":
                divisor = math.gcd(divisor, segment_stride, row_stride if axis == "cols" else col_stride)
        return divisor


def reduction_view(inputs: Sequence[Tensor], out: Tensor, dim: int) -> ReductionView:
    """View of non-empty tensors of one shape for a reduction over `dim`.

    The last tensor of the view is `out`, which is contiguous; an input is copied only if no view fits its strides.
    """
    shape = out.shape
    num_cols, num_inner = shape[dim], math.prod(shape[dim + 1 :])
    num_outer = out.numel() // (num_cols * num_inner)
    if all(tensor.is_contiguous() for tensor in inputs):
        tensors = (*inputs, out)
        if num_inner == 1:
            return ReductionView(1, num_outer, num_cols, tensors, ((0, num_cols, 1),) * len(tensors))
        strides = (num_cols * num_inner if num_outer > 1 else 0, 1, num_inner)
        return ReductionView(num_outer, num_inner, num_cols, tensors, (strides,) * len(tensors))

    tensors = (*inputs, out)
    cut = _segment_cut(tensors, dim)
    if cut is None:
        cut = dim if num_inner > 1 else 0
        tensors = tuple(t if _strides_at(t, dim, cut) is not None else t.contiguous() for t in tensors)
    num_segments = math.prod(_without(shape, dim)[:cut])
    merged = tuple(_strides_at(tensor, dim, cut) for tensor in tensors)
    strides = tuple(strides for strides in merged if strides is not None)
    return ReductionView(num_segments, num_outer * num_inner // num_segments, num_cols, tensors, strides)


def _segment_cut(tensors: Sequence[Tensor], dim: int) -> int | None:
    """Fewest leading dims, apart from `dim`, to take as segments so that every tensor has a view."""
    for cut in range(max(tensors[0].dim() - 1, 1)):
        if all(_strides_at(tensor, dim, cut) is not None for tensor in tensors):
            return cut
    return None


def _strides_at(tensor: Tensor, dim: int, cut: int) -> tuple[int, int, int] | None:
    sizes, strides = _without(tensor.shape, dim), _without(tensor.stride(), dim)
    segment_stride = collapsed_stride(sizes[:cut], strides[:cut])
    row_stride = collapsed_stride(sizes[cut:], strides[cut:])
    if segment_stride is None or row_stride is None:
        return None
    return segment_stride, row_stride, tensor.stride(dim) if tensor.shape[dim] > 1 else 0


def _without(numbers: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*numbers[:dim], *numbers[dim + 1 :])


def launch_reduction(
    kernel: Any,
    looped_kernel: Any,
    num_sums: int,
    names: Sequence[str],
    view: ReductionView,
    dtype: torch.dtype,
    **flags: Any,
) -> None:
    """Plan and launch one of two kernels over a view.

    Args:
        kernel: Holds whole rows.
        looped_kernel: Does the same to longer ones.
        num_sums: Numbers per row that the looped kernel's first sweep finds.
        names: What the kernels call the triples of strides of `view`.
        view: Tensors.
        dtype: Dtype of the arithmetic.
        **flags: Compile-time constants of both kernels.
    """
    inputs = view.inputs()
    first = inputs[0]
    adjacent = view.adjacent()
    plan = launch.plan_log_softmax(
        (view.num_segments, view.num_rows, view.num_cols),
        "rows" in adjacent,
        first.element_size(),
        dtype.itemsize,
        len(inputs),
        first.device,
        len(view.outputs()),
    )
    numbers = (view.num_rows, *(stride for strides in view.strides for stride in strides))
    flags |= {f"{name}_ADJACENT": axis for name, axis in zip(names, adjacent, strict=True)}
    flags |= {
        "num_cols": view.num_cols,
        "DTYPE": TL_DTYPES[dtype],
        "ALIGN": view.alignment(adjacent),
        # Only where loads run along the rows does it matter where the rows end.
        "ROW_ALIGN": math.gcd(_MAX_ALIGN, view.num_rows) if "rows" in adjacent else 1,
        "BLOCK_ROWS": plan.block_rows,
        "BLOCK_COLS": plan.block_cols,
        **plan.options(),
    }
    num_blocks = view.num_segments * launch.cdiv(view.num_rows, plan.block_rows)
    with device_guard(first):
        if plan.looped:
            splits = (num_blocks, plan.block_rows, plan.col_splits, num_sums, dtype)
            launch_sweeps(looped_kernel, *splits, view.tensors, numbers, **flags)
        else:
            kernel[(num_blocks,)](*view.tensors, *numbers, **flags)
