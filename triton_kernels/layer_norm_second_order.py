"""Second-order layer normalization: launchers of the derivatives of its backward and of its JVP.

The backward and the JVP are the partial derivatives, with respect to the tangents and to the cotangent, of their
pairing L = <y_bar, y_dot>. `layer_norm_pairing` is the gradient of L, which is the vjp of either. `layer_norm_bwd_jvp`
is the JVP of the backward: the gradient of L + <y_bar_dot, y> with respect to the inputs of the forward. One kernel
computes both; the formulas stand in `_layer_norm_second_kernels`.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from triton_kernels import launch
from triton_kernels._layer_norm_second_kernels import layer_norm_second_kernel
from triton_kernels._layer_norm_second_looped import layer_norm_second_looped_kernel, layer_norm_second_param_kernel
from triton_kernels._layer_norm_second_operands import Operands, Results, needed_operands, num_row_means
from triton_kernels._row_launch import add_partial_rows
from triton_kernels._row_view import row_view
from triton_kernels._runtime import device_guard, param_view, split_scratch
from triton_kernels._split_rows import launch_sweeps, num_partial_results
from triton_kernels.launch import plan_layer_norm_second, plan_layer_norm_second_columns
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from triton_kernels._row_view import RowView
    from triton_kernels.launch import LayerNormColumnPlan, LayerNormSecondPlan

    _Shape = tuple[tuple[int, ...], torch.dtype]

__all__ = ["layer_norm_bwd_jvp", "layer_norm_pairing"]


class _Rows(NamedTuple):
    """The views that the kernels are launched on: full-size operands in the order of `Operands`, and parameters."""

    view: RowView
    params: tuple[Tensor | None, ...]
    param_strides: tuple[int, ...]
    mean: Tensor
    rstd: Tensor


@tunable
def layer_norm_pairing(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    norm_ndim: int,
    batch_ndim: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Gradient of the pairing `<y_bar, y_dot>` of a cotangent with the tangent that `layer_norm_jvp` computes.

    Args:
        y_bar: Cotangent of `y`, of the shape of `x`, any strides.
        x: Input of the forward.
        weight: Weight of the forward, or None.
        mean: Mean of the forward.
        rstd: Reciprocal standard deviation of the forward.
        x_dot: Tangent of `x`, of its shape; None for zero, as for the other tangents.
        weight_dot: Tangent of the weight, `[*batch, *norm]`.
        bias_dot: Tangent of the bias, `[*batch, *norm]`.
        norm_ndim: Number of normalized dims.
        batch_ndim: Number of leading dims of `x` along which the parameters differ.
        wanted: Which of the six results are wanted; only what these take is read.

    Returns:
        `(y_bar_bar, x_bar, weight_bar, x_dot_bar, weight_dot_bar, bias_dot_bar)`, contiguous: those of full size with
        the shape and dtype of `x`, those of parameters `[*batch, *norm]` in the dtype of the weight, or of `x` without
        one. What is not wanted is an empty tensor; what the pairing does not depend on is zero.
    """
    full_size, param = _shapes(x, weight, norm_ndim, batch_ndim)
    has_tangent = x_dot is not None or weight_dot is not None
    outputs, computed = _allocate(
        x,
        (full_size, full_size, param, full_size, param, param),
        wanted,
        depends=(has_tangent or bias_dot is not None, has_tangent, x_dot is not None, True, True, True),
    )
    y_bar_bar, x_bar, weight_bar, x_dot_bar, weight_dot_bar, bias_dot_bar = computed
    results = Results(y_bar_bar, x_bar, x_dot_bar, weight_bar, weight_dot_bar, bias_dot_bar)
    operands = Operands(y_bar, x, None, x_dot, weight, weight_dot, bias_dot)
    _differentiate(x, operands, results, mean, rstd, norm_ndim, batch_ndim)
    return outputs


@tunable
def layer_norm_bwd_jvp(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    y_bar_dot: Tensor | None,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    norm_ndim: int,
    batch_ndim: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Tangents of the cotangents that `layer_norm_bwd` computes (forward over reverse).

    Args:
        y_bar: Cotangent of `y`, of the shape of `x`, any strides.
        x: Input of the forward.
        weight: Weight of the forward, or None.
        mean: Mean of the forward.
        rstd: Reciprocal standard deviation of the forward.
        y_bar_dot: Tangent of `y_bar`, of its shape; None for zero, as for the other tangents.
        x_dot: Tangent of `x`, of its shape.
        weight_dot: Tangent of the weight, `[*batch, *norm]`.
        norm_ndim: Number of normalized dims.
        batch_ndim: Number of leading dims of `x` over which the parameter cotangents are not summed.
        wanted: Which of the three results are wanted; only what these take is read.

    Returns:
        `(x_bar_dot, weight_bar_dot, bias_bar_dot)`, contiguous, with the shapes and dtypes of `x_bar`, `weight_bar`
        and `bias_bar`. What is not wanted is an empty tensor; what no given tangent moves is zero.
    """
    full_size, param = _shapes(x, weight, norm_ndim, batch_ndim)
    moves_sums = y_bar_dot is not None or x_dot is not None
    outputs, computed = _allocate(
        x,
        (full_size, param, param),
        wanted,
        depends=(moves_sums or weight_dot is not None, moves_sums, y_bar_dot is not None),
    )
    x_bar_dot, weight_bar_dot, bias_bar_dot = computed
    results = Results(None, x_bar_dot, None, weight_bar_dot, None, bias_bar_dot)
    operands = Operands(y_bar, x, y_bar_dot, x_dot, weight, weight_dot, None)
    _differentiate(x, operands, results, mean, rstd, norm_ndim, batch_ndim)
    return outputs


def _shapes(x: Tensor, weight: Tensor | None, norm_ndim: int, batch_ndim: int) -> tuple[_Shape, _Shape]:
    """Shape and dtype of full-size outputs, and of parameter-size ones."""
    param_shape = (*x.shape[:batch_ndim], *x.shape[x.dim() - norm_ndim :])
    return (tuple(x.shape), x.dtype), (param_shape, x.dtype if weight is None else weight.dtype)


def _allocate(
    x: Tensor, shapes: Sequence[_Shape], wanted: Sequence[bool], depends: Sequence[bool]
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """The outputs, and those of them that a kernel must write."""
    outputs, computed = [], []
    for (shape, dtype), want, depend in zip(shapes, wanted, depends, strict=True):
        compute = bool(want and depend and x.numel() > 0)
        if compute:
            outputs.append(x.new_empty(shape, dtype=dtype))
        else:
            outputs.append(x.new_zeros(shape, dtype=dtype) if want else x.new_empty(0))
        computed.append(outputs[-1] if compute else None)
    return tuple(outputs), tuple(computed)


def _differentiate(
    x: Tensor, operands: Operands, results: Results, mean: Tensor, rstd: Tensor, norm_ndim: int, batch_ndim: int
) -> None:
    """Write the results: in one launch, or a second one for sums that do not fit in it, and those of partial rows."""
    if all(tensor is None for tensor in results):
        return
    needed = needed_operands(operands, results)
    params, param_strides = zip(*(param_view(param, batch_ndim) for param in needed[4:]), strict=True)
    sums = results[3:]
    num_sums = sum(tensor is not None for tensor in sums)
    num_groups = math.prod(x.shape[:batch_ndim])
    in_groups = any(param_strides) or (num_sums > 0 and num_groups > 1)
    view = row_view(
        (needed.y_bar, x, needed.y_bar_dot, needed.x_dot),
        norm_ndim,
        batch_ndim if in_groups else None,
        launch.LAYER_NORM_MAX_SEGMENTS if num_sums else None,
    )
    sizes = (view.num_segments, view.num_rows, view.num_cols, x.element_size())
    is_aligned = view.is_aligned(x.element_size(), *param_strides)
    plan = plan_layer_norm_second(*sizes, num_sums > 0, x.device, is_aligned)
    columns = None if plan.fused or num_sums == 0 else plan_layer_norm_second_columns(*sizes, x.device, is_aligned)
    rows = _Rows(view, params, param_strides, mean.contiguous(), rstd.contiguous())
    # A group of a single part needs no second sum: its partial row is the result.
    num_parts = view.num_segments * (columns or plan).num_splits
    part_size = num_parts * view.num_cols if num_sums and num_parts > num_groups else 0
    work, column_work = (_Work(needed, results), None) if columns is None else _divided(operands, results)
    takes_means = column_work is not None and column_work.needed.x_dot is not None
    scratch = _Scratch.of(rows, plan, sums, part_size, takes_means, num_row_means(*work))
    parts = scratch.parts if part_size else sums
    with device_guard(x):
        if takes_means or any(tensor is not None for tensor in work.results):
            _launch_rows(rows, plan, work, (None,) * len(sums) if column_work else parts, scratch)
        if column_work is not None and columns is not None:
            _launch_columns(rows, columns, column_work, parts, scratch.x_dot_means)
        if part_size:
            add_partial_rows(parts, sums, num_groups, view.num_cols)


class _Work(NamedTuple):
    """What a kernel reads and writes."""

    needed: Operands
    results: Results


def _divided(operands: Operands, results: Results) -> tuple[_Work, _Work]:
    """The work of the kernel over rows, and of the one over columns, which makes the sums.

    The first finds the means of x_dot that the second one takes.
    """
    of_rows, of_columns = (
        _Work(needed_operands(operands, part), part) for part in (results.of_rows(), results.of_columns())
    )
    if of_columns.needed.x_dot is not None:
        of_rows = of_rows._replace(needed=of_rows.needed._replace(x=operands.x, x_dot=operands.x_dot))
    return of_rows, of_columns


class _Scratch(NamedTuple):
    """Memory that one kernel leaves to another, out of one allocation; None where there is nothing to leave.

    Attributes:
        parts: Partial rows of each of the three sums.
        x_dot_means: The two means of x_dot of each row.
        sweep_parts: What programs that share a row find out about it.
    """

    parts: tuple[Tensor | None, ...]
    x_dot_means: Tensor | None
    sweep_parts: Tensor | None

    @classmethod
    def of(
        cls,
        rows: _Rows,
        plan: LayerNormSecondPlan,
        sums: Sequence[Tensor | None],
        part_size: int,
        takes_means: bool,
        num_means: int,
    ) -> _Scratch:
        """As much as is needed: `part_size` elements for each of the `sums`, `num_means` results of a sweep per row."""
        num_rows = rows.view.num_segments * rows.view.num_rows
        swept_size = num_partial_results(num_rows, 1, plan.rows.col_splits, num_means) if plan.rows.looped else 0
        sizes = [0 if tensor is None else part_size for tensor in sums] + [2 * num_rows * takes_means, swept_size]
        if not any(sizes):
            return cls((None,) * len(sums), None, None)
        *parts, means, swept = [
            memory if size else None for size, memory in zip(sizes, split_scratch(rows.mean, *sizes), strict=True)
        ]
        return cls(tuple(parts), means, swept)


def _launch_rows(
    rows: _Rows,
    plan: LayerNormSecondPlan,
    work: _Work,
    parts: Sequence[Tensor | None],
    scratch: _Scratch,
) -> None:
    """Launch the kernel that owns whole rows."""
    (needed, results), x_dot_means = work, scratch.x_dot_means
    view = rows.view
    num_rows = view.num_segments * view.num_rows
    flags = {
        **_read_flags(rows, needed),
        "HAS_WEIGHT": needed.weight is not None,
        "HAS_WEIGHT_DOT": needed.weight_dot is not None,
        "HAS_BIAS_DOT": needed.bias_dot is not None,
        "WANT_Y_BAR": results.y_bar_bar is not None,
        "WANT_X": results.x_bar is not None,
        "WANT_X_DOT": results.x_dot_bar is not None,
        "WANT_X_DOT_MEANS": x_dot_means is not None,
        "BLOCK_COLS": plan.rows.block_cols,
        "num_warps": plan.rows.num_warps,
    }
    inputs = (*view.tensors, *rows.params, rows.mean, rows.rstd, *results[:3])
    strides = (*itertools.chain(*view.strides), *rows.param_strides)
    if plan.rows.looped:
        splits = (num_rows, 1, plan.rows.col_splits, num_row_means(needed, results), rows.mean.dtype)
        tensors, numbers = (*inputs, x_dot_means), (num_rows, view.num_rows, *strides)
        flags["TWO_LEVEL"] = view.num_segments > 1
        launch_sweeps(layer_norm_second_looped_kernel, *splits, tensors, numbers, scratch.sweep_parts, **flags)
        return
    layer_norm_second_kernel[(view.num_segments * plan.num_splits,)](
        *inputs,
        *parts,
        x_dot_means,
        num_rows,
        view.num_rows,
        plan.num_splits,
        *strides,
        **_sum_flags(results),
        BLOCK_ROWS=plan.rows.block_rows,
        LOOP_STAGES=plan.loop_stages,
        **flags,
    )


def _launch_columns(
    rows: _Rows,
    columns: LayerNormColumnPlan,
    work: _Work,
    parts: Sequence[Tensor | None],
    x_dot_means: Tensor | None,
) -> None:
    """Launch the kernel that owns columns and makes the sums."""
    view = rows.view
    num_rows = view.num_segments * view.num_rows
    col_blocks = launch.cdiv(view.num_cols, columns.block_cols)
    layer_norm_second_param_kernel[(view.num_segments * columns.num_splits * col_blocks,)](
        *view.tensors,
        rows.mean,
        rows.rstd,
        x_dot_means,
        *parts,
        num_rows,
        view.num_rows,
        columns.num_splits,
        *itertools.chain(*view.strides),
        **_read_flags(rows, work.needed),
        **_sum_flags(work.results),
        BLOCK_ROWS=columns.block_rows,
        BLOCK_COLS=columns.block_cols,
        LOOP_STAGES=columns.loop_stages,
        num_warps=columns.num_warps,
    )


def _read_flags(rows: _Rows, needed: Operands) -> dict[str, int]:
    strides = [stride for of_tensor in rows.view.strides for stride in of_tensor[:2]]
    return {
        "num_cols": rows.view.num_cols,
        "READ_X": needed.x is not None,
        "READ_Y_BAR": needed.y_bar is not None,
        "HAS_Y_BAR_DOT": needed.y_bar_dot is not None,
        "HAS_X_DOT": needed.x_dot is not None,
        # The kernels divide all strides of rows by it, also where columns are apart.
        "ALIGN": rows.view.alignment(*rows.param_strides, rows.view.num_cols, *strides),
    }


def _sum_flags(results: Results) -> dict[str, bool]:
    return {
        "WANT_WEIGHT": results.weight_bar is not None,
        "WANT_WEIGHT_DOT": results.weight_dot_bar is not None,
        "WANT_BIAS": results.bias_bar is not None,
    }
