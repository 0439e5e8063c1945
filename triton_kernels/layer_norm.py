"""Layer normalization: forward, backward and JVP launchers.

    x_hat = (x - mean) * rstd,      y = x_hat * weight + bias

with mean and rstd = 1 / sqrt(variance + eps) over the last dims of x. The derivative of x_hat with respect to x is

    P(v) = rstd * (v - mean(v) - x_hat * mean(v * x_hat))

which is symmetric, so one device function serves both modes:

    jvp   y_dot = P(x_dot) * weight + x_hat * weight_dot + bias_dot
    vjp   x_bar = P(y_bar * weight),   weight_bar = sum(y_bar * x_hat),   bias_bar = sum(y_bar)

Every launcher views its tensors as `[segments, rows, columns]`, allocates, plans, and launches. The leading
`batch_ndim` dims of x number the segments, each with parameters of its own; where the parameters are shared, the
segments are whatever lets the strides be used as they are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from triton_kernels import launch
from triton_kernels._layer_norm_kernels import (
    layer_norm_bwd_kernel,
    layer_norm_fwd_kernel,
    layer_norm_jvp_kernel,
    param_reduce_kernel,
)
from triton_kernels._layer_norm_looped import (
    layer_norm_fwd_looped_kernel,
    layer_norm_jvp_looped_kernel,
    layer_norm_param_bar_kernel,
    layer_norm_x_bar_looped_kernel,
)
from triton_kernels._runtime import RowView, accumulation_dtype, device_guard, param_view, row_view, split_scratch
from triton_kernels._split_rows import launch_sweeps, num_partial_results
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["layer_norm_bwd", "layer_norm_fwd", "layer_norm_jvp"]


@tunable
def layer_norm_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, norm_ndim: int, batch_ndim: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm of `x` over its last `norm_ndim` dims.

    Args:
        x: `[*batch, *rest, *norm]`, any strides.
        weight: `[*batch, *norm]`, or None for 1.
        bias: `[*batch, *norm]`, or None for 0.
        norm_ndim: Number of normalized dims.
        batch_ndim: Number of leading dims of `x` along which the parameters differ.
        eps: Added to the variance.

    Returns:
        `y`, contiguous, with the shape and dtype of `x`; `mean` and `rstd`, `[*batch, *rest]` in the accumulation
        dtype.
    """
    row_shape = x.shape[: x.dim() - norm_ndim]
    y = x.new_empty(x.shape)
    mean = x.new_empty(row_shape, dtype=accumulation_dtype(x.dtype))
    rstd = x.new_empty(row_shape, dtype=mean.dtype)
    if x.numel() == 0:
        # Rows without columns: the empty sum and, as in torch, an undefined variance.
        return y, mean.zero_(), rstd.fill_(math.nan)
    weight, weight_stride = param_view(weight, batch_ndim)
    bias, bias_stride = param_view(bias, batch_ndim)
    view = row_view([x], norm_ndim, batch_ndim if weight_stride or bias_stride else None)
    num_rows = view.num_segments * view.num_rows
    plan = launch.plan_layer_norm_rows(num_rows, view.num_cols, x.element_size(), False, x.device)
    tensors = (view.tensors[0], weight, bias, y, mean, rstd)
    arguments = (view.num_rows, *view.strides[0], weight_stride, bias_stride)
    flags = {
        "num_cols": view.num_cols,
        "EPS": eps,
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
        "TWO_LEVEL": view.num_segments > 1,
        "ALIGN": view.alignment(weight_stride, bias_stride),
        "BLOCK_COLS": plan.block_cols,
        **plan.options(),
    }
    with device_guard(x):
        if plan.looped:
            splits = (num_rows, 1, plan.col_splits, 2, mean.dtype)
            launch_sweeps(layer_norm_fwd_looped_kernel, *splits, tensors, arguments, **flags)
        else:
            grid = (launch.cdiv(num_rows, plan.block_rows),)
            layer_norm_fwd_kernel[grid](*tensors, num_rows, *arguments, BLOCK_ROWS=plan.block_rows, **flags)
    return y, mean, rstd


@tunable
def layer_norm_jvp(
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    norm_ndim: int,
    batch_ndim: int,
) -> Tensor:
    """Tangent of `layer_norm_fwd`: `y_dot = P(x_dot) * weight + x_hat * weight_dot + bias_dot`.

    Args:
        x: Input of the forward.
        weight: Weight of the forward, or None.
        mean: Mean of the forward.
        rstd: Reciprocal standard deviation of the forward.
        x_dot: Tangent of `x`, of its shape; None for zero, as for the other tangents.
        weight_dot: Tangent of the weight, `[*batch, *norm]`.
        bias_dot: Tangent of the bias, `[*batch, *norm]`.
        norm_ndim: Number of normalized dims.
        batch_ndim: Number of leading dims of `x` along which the parameters and their tangents differ.

    Returns:
        `y_dot`, contiguous, with the shape and dtype of `x`.
    """
    y_dot = x.new_empty(x.shape)
    if x.numel() == 0:
        return y_dot
    weight, weight_stride = param_view(weight if x_dot is not None else None, batch_ndim)
    weight_dot, weight_dot_stride = param_view(weight_dot, batch_ndim)
    bias_dot, bias_dot_stride = param_view(bias_dot, batch_ndim)
    param_strides = (weight_stride, weight_dot_stride, bias_dot_stride)
    view = row_view([x, x_dot], norm_ndim, batch_ndim if any(param_strides) else None)
    num_rows = view.num_segments * view.num_rows
    plan = launch.plan_layer_norm_rows(num_rows, view.num_cols, x.element_size(), True, x.device)
    tensors = (
        view.tensors[0],
        weight,
        mean.contiguous(),
        rstd.contiguous(),
        view.tensors[1],
        weight_dot,
        bias_dot,
        y_dot,
    )
    arguments = (view.num_rows, *view.strides[0], *view.strides[1], *param_strides)
    flags = {
        "num_cols": view.num_cols,
        "HAS_WEIGHT": weight is not None,
        "HAS_X_DOT": x_dot is not None,
        "HAS_WEIGHT_DOT": weight_dot is not None,
        "HAS_BIAS_DOT": bias_dot is not None,
        "TWO_LEVEL": view.num_segments > 1,
        "ALIGN": view.alignment(*param_strides),
        "BLOCK_COLS": plan.block_cols,
        **plan.options(),
    }
    with device_guard(x):
        if plan.looped:
            splits = (num_rows, 1, plan.col_splits, 0 if x_dot is None else 2, mean.dtype)
            launch_sweeps(layer_norm_jvp_looped_kernel, *splits, tensors, arguments, **flags)
        else:
            grid = (launch.cdiv(num_rows, plan.block_rows),)
            layer_norm_jvp_kernel[grid](*tensors, num_rows, *arguments, BLOCK_ROWS=plan.block_rows, **flags)
    return y_dot


@tunable
def layer_norm_bwd(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    norm_ndim: int,
    batch_ndim: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of the inputs of `layer_norm_fwd`; only the `wanted` ones are computed.

    Args:
        y_bar: Cotangent of `y`, of the shape of `x`, any strides.
        x: Input of the forward.
        weight: Weight of the forward, or None.
        mean: Mean of the forward.
        rstd: Reciprocal standard deviation of the forward.
        norm_ndim: Number of normalized dims.
        batch_ndim: Number of leading dims of `x` over which the parameter cotangents are not summed.
        wanted: Whether `x_bar`, `weight_bar` and `bias_bar` are wanted.

    Returns:
        `x_bar`, contiguous, with the shape and dtype of `x`; `weight_bar` and `bias_bar`, `[*batch, *norm]` in the
        dtype of the weight, or the accumulation dtype without one. What is not wanted is an empty tensor.
    """
    want_x, want_weight, want_bias = wanted
    param_shape = (*x.shape[:batch_ndim], *x.shape[x.dim() - norm_ndim :])
    param_dtype = accumulation_dtype(x.dtype) if weight is None else weight.dtype
    x_bar = x.new_empty(x.shape if want_x else 0)
    weight_bar = x.new_empty(param_shape, dtype=param_dtype) if want_weight else x.new_empty(0)
    bias_bar = x.new_empty(param_shape, dtype=param_dtype) if want_bias else x.new_empty(0)
    if x.numel() == 0:
        return x_bar, weight_bar.zero_(), bias_bar.zero_()
    # The weight only enters x_bar.
    weight, weight_stride = param_view(weight if want_x else None, batch_ndim)
    rows = _Rows(x, y_bar, weight, weight_stride, mean.contiguous(), rstd.contiguous(), norm_ndim, batch_ndim)
    with device_guard(x):
        if want_weight or want_bias:
            _launch_sums(rows, x_bar, weight_bar, bias_bar, wanted)
        elif want_x:
            view, plan = _plan_x_bar(rows)
            _launch_x_bar(rows, view, plan, x_bar)
    return x_bar, weight_bar, bias_bar


class _Rows(NamedTuple):
    """What the kernels of the backward read."""

    x: Tensor
    y_bar: Tensor
    weight: Tensor | None
    weight_stride: int
    mean: Tensor
    rstd: Tensor
    norm_ndim: int
    batch_ndim: int


def _plan_x_bar(rows: _Rows) -> tuple[RowView, launch.LayerNormPlan]:
    """View and plan of the kernel that writes x_bar alone."""
    view = row_view([rows.y_bar, rows.x], rows.norm_ndim, rows.batch_ndim if rows.weight_stride else None)
    sizes, x = (view.num_rows, view.num_cols), rows.x
    return view, launch.plan_layer_norm_rows(*sizes, x.element_size(), True, x.device, view.num_segments)


def _launch_x_bar(
    rows: _Rows, view: RowView, plan: launch.LayerNormPlan, x_bar: Tensor, sweep_parts: Tensor | None = None
) -> None:
    tensors = (*view.tensors, rows.weight, rows.mean, rows.rstd, x_bar)
    strides = (*view.strides[0], *view.strides[1], rows.weight_stride)
    flags = {
        "num_cols": view.num_cols,
        "HAS_WEIGHT": rows.weight is not None,
        "ALIGN": view.alignment(rows.weight_stride),
        "BLOCK_COLS": plan.block_cols,
        **plan.options(),
    }
    if plan.looped:
        splits = (*_x_bar_splits(view, plan), rows.mean.dtype)
        numbers = (view.num_rows, *strides)
        flags["TWO_LEVEL"] = view.num_segments > 1
        launch_sweeps(layer_norm_x_bar_looped_kernel, *splits, tensors, numbers, sweep_parts, **flags)
        return
    # One block of rows per program: the loop of the kernel runs once.
    num_splits = launch.cdiv(view.num_rows, plan.block_rows)
    layer_norm_bwd_kernel[(view.num_segments * num_splits,)](
        *tensors,
        None,
        None,
        view.num_rows,
        num_splits,
        *strides,
        WANT_X=True,
        WANT_WEIGHT=False,
        WANT_BIAS=False,
        BLOCK_ROWS=plan.block_rows,
        LOOP_STAGES=1,
        **flags,
    )


def _x_bar_splits(view: RowView, plan: launch.LayerNormPlan) -> tuple[int, int, int, int]:
    """Blocks of rows, rows of a block, programs that share one, and partial results of each."""
    return view.num_segments * view.num_rows, 1, plan.col_splits, 2


def _launch_sums(rows: _Rows, x_bar: Tensor, weight_bar: Tensor, bias_bar: Tensor, wanted: Sequence[bool]) -> None:
    """Launch the sums over rows, x_bar in the same kernel or, of long rows, before it, and the sum of partial rows."""
    want_x, want_weight, want_bias = wanted
    x, mean = rows.x, rows.mean
    num_groups = math.prod(x.shape[: rows.batch_ndim])
    in_groups = rows.batch_ndim if num_groups > 1 else None
    view = row_view([rows.y_bar, x], rows.norm_ndim, in_groups, launch.LAYER_NORM_MAX_SEGMENTS)
    sizes = (view.num_segments, view.num_rows, view.num_cols, x.element_size())
    plan = launch.plan_layer_norm_params(*sizes, x.device, view.is_aligned(x.element_size(), rows.weight_stride))
    num_parts = view.num_segments * plan.num_splits
    # A group of a single part needs no second sum: its partial row is the result.
    is_partial = num_parts > num_groups
    part_size = num_parts * view.num_cols if is_partial else 0
    swept = _plan_x_bar(rows) if want_x and plan.looped else None
    swept_size = num_partial_results(*_x_bar_splits(*swept)) if swept is not None else 0
    parts: Sequence[Tensor] = (weight_bar, bias_bar)
    sweep_parts = None
    if part_size or swept_size:
        *partial_rows, sweep_parts = split_scratch(mean, part_size * want_weight, part_size * want_bias, swept_size)
        parts = partial_rows if is_partial else parts
    if swept is not None:
        _launch_x_bar(rows, *swept, x_bar, sweep_parts)
    _launch_param_bars(rows, view, plan, x_bar, parts, wanted)
    if is_partial:
        reduce = launch.plan_param_reduce(num_parts // num_groups, mean.element_size(), mean.device)
        grid = (num_groups * launch.cdiv(view.num_cols, reduce.block_cols),)
        param_reduce_kernel[grid](
            *parts,
            weight_bar,
            bias_bar,
            num_parts // num_groups,
            view.num_cols,
            WANT_WEIGHT=want_weight,
            WANT_BIAS=want_bias,
            BLOCK_PARTS=reduce.block_parts,
            BLOCK_COLS=reduce.block_cols,
            num_warps=reduce.num_warps,
        )


def _launch_param_bars(
    rows: _Rows,
    view: RowView,
    plan: launch.LayerNormParamPlan,
    x_bar: Tensor,
    parts: Sequence[Tensor],
    wanted: Sequence[bool],
) -> None:
    """Launch the kernel of the sums, which also writes x_bar unless the plan is looped."""
    want_x, want_weight, want_bias = wanted
    num_parts = view.num_segments * plan.num_splits
    flags = {
        "num_cols": view.num_cols,
        "WANT_WEIGHT": want_weight,
        "WANT_BIAS": want_bias,
        "ALIGN": view.alignment(rows.weight_stride),
        "BLOCK_ROWS": plan.block_rows,
        "BLOCK_COLS": plan.block_cols,
        "LOOP_STAGES": plan.loop_stages,
        "num_warps": plan.num_warps,
    }
    stats, strides = (rows.mean, rows.rstd), (*view.strides[0], *view.strides[1])
    if plan.looped:
        grid = (num_parts * launch.cdiv(view.num_cols, plan.block_cols),)
        numbers = (view.num_rows, plan.num_splits, *strides)
        layer_norm_param_bar_kernel[grid](*view.tensors, *stats, *parts, *numbers, **flags)
        return
    layer_norm_bwd_kernel[(num_parts,)](
        *view.tensors,
        rows.weight,
        *stats,
        x_bar,
        *parts,
        view.num_rows,
        plan.num_splits,
        *strides,
        rows.weight_stride,
        HAS_WEIGHT=rows.weight is not None,
        WANT_X=want_x,
        **flags,
    )
