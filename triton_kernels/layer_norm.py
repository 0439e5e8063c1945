"""Layer normalization: forward, backward and JVP launchers.

    x_hat = (x - mean) * rstd,      y = x_hat * weight + bias

with mean and rstd = 1 / sqrt(variance + eps) over the last dims of x. The derivative of x_hat with respect to x is

    P(v) = rstd * (v - mean(v) - x_hat * mean(v * x_hat))

which is symmetric, so one device function serves both modes:

    jvp   y_dot = P(x_dot) * weight + x_hat * weight_dot + bias_dot
    vjp   x_bar = P(y_bar * weight),   weight_bar = sum(y_bar * x_hat),   bias_bar = sum(y_bar)

Without `centered`, which makes RMS norm of it, x_hat = x * rstd, and P(v) = rstd * (v - x_hat * mean(v * x_hat)).

Every launcher views its tensors as `[segments, rows, columns]`, allocates, plans, and launches. The leading
`batch_ndim` dims of x number the segments, each with parameters of its own; where the parameters are shared, the
segments are whatever lets the strides be used as they are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from triton_kernels import launch
from triton_kernels._layer_norm_kernels import (
    layer_norm_bwd_kernel,
    layer_norm_fwd_kernel,
    layer_norm_jvp_kernel,
    layer_norm_x_bar_kernel,
)
from triton_kernels._layer_norm_rows import layer_norm_operands, plan_rows
from triton_kernels._row_launch import (
    NO_SUMS,
    RowSums,
    launch_row_sums,
    launch_rows,
    num_row_parts,
    sums_scratch,
)
from triton_kernels._runtime import accumulation_dtype, device_guard
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from triton_kernels._row_launch import Operands
    from triton_kernels.launch import RowPlan

__all__ = ["layer_norm_bwd", "layer_norm_fwd", "layer_norm_fwd_jvp", "layer_norm_jvp"]


@tunable
def layer_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm_ndim: int,
    batch_ndim: int,
    eps: float,
    centered: bool = True,
    rounded: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm of `x` over its last `norm_ndim` dims.

    Args:
        x: `[*batch, *rest, *norm]`, any strides.
        weight: `[*batch, *norm]`, or None for 1.
        bias: `[*batch, *norm]`, or None for 0.
        norm_ndim: Number of normalized dims.
        batch_ndim: Number of leading dims of `x` along which the parameters differ.
        eps: Added to the variance.
        centered: Whether the mean is subtracted.
        rounded: Whether x_hat of a float16 or bfloat16 `x` is rounded to its dtype before it is multiplied.

    Returns:
        `y`, contiguous, with the shape and dtype of `x`; `mean` and `rstd`, `[*batch, *rest]` in the accumulation
        dtype; without `centered` the mean is empty.
    """
    options = (norm_ndim, batch_ndim, eps, centered, rounded)
    y, mean, rstd, _ = _forward(x, weight, bias, None, None, None, *options, has_tangent=False)
    return y, mean, rstd


@tunable
def layer_norm_fwd_jvp(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    norm_ndim: int,
    batch_ndim: int,
    eps: float,
    centered: bool = True,
    rounded: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`layer_norm_fwd` and its tangent at once: x is read once for both.

    Args:
        x: As for `layer_norm_fwd`.
        weight: Likewise.
        bias: Likewise.
        x_dot: Tangent of `x`, of its shape; None for zero, as for the other tangents, of which one is given.
        weight_dot: Tangent of the weight, `[*batch, *norm]`.
        bias_dot: Tangent of the bias, `[*batch, *norm]`.
        norm_ndim: As for `layer_norm_fwd`.
        batch_ndim: Likewise.
        eps: Likewise.
        centered: Likewise.
        rounded: Likewise, of `y` alone.

    Returns:
        `y`, `mean` and `rstd` of `layer_norm_fwd`, and `y_dot`, like `y`.
    """
    options = (norm_ndim, batch_ndim, eps, centered, rounded)
    return _forward(x, weight, bias, x_dot, weight_dot, bias_dot, *options, has_tangent=True)


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    norm_ndim: int,
    batch_ndim: int,
    eps: float,
    centered: bool,
    rounded: bool,
    *,
    has_tangent: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row_shape = x.shape[: x.dim() - norm_ndim]
    y, y_dot = x.new_empty(x.shape), x.new_empty(x.shape if has_tangent else 0)
    rstd = x.new_empty(row_shape, dtype=accumulation_dtype(x.dtype))
    mean = rstd.new_empty(row_shape if centered else 0)
    if x.numel() == 0:
        # Rows without columns: the empty sum and, as in torch, an undefined variance.
        return y, mean.zero_(), rstd.fill_(math.nan), y_dot
    params = {"weight": weight, "bias": bias, "weight_dot": weight_dot, "bias_dot": bias_dot}
    operands = layer_norm_operands({"x": x, "x_dot": x_dot}, params, {}, norm_ndim, batch_ndim)
    outputs = {"y": y, "y_dot": y_dot if has_tangent else None}
    operands = operands._replace(outputs=outputs, row_outputs={"mean": mean if centered else None, "rstd": rstd})
    places = 2 if x_dot is None else 4
    sums = RowSums(places, ("x", "x_dot"), places if centered else places // 2, has_anchor=centered)
    rounded = rounded and x.dtype.itemsize == 2
    with device_guard(x):
        launch_rows(layer_norm_fwd_kernel, operands, plan_rows(operands, sums), sums, EPS=eps, ROUNDED=rounded)
    return y, mean, rstd, y_dot


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
    centered: bool = True,
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
        centered: As for `layer_norm_fwd`; the mean is not looked at without it, as by the other launchers.

    Returns:
        `y_dot`, contiguous, with the shape and dtype of `x`.
    """
    y_dot = x.new_empty(x.shape)
    if x.numel() == 0:
        return y_dot
    # A weight multiplies the tangent of x alone, and bias_dot stands alone.
    takes_x = x_dot is not None or weight_dot is not None
    params = {"weight": None if x_dot is None else weight, "weight_dot": weight_dot, "bias_dot": bias_dot}
    statistics = {"mean": mean if takes_x and centered else None, "rstd": rstd if takes_x else None}
    operands = layer_norm_operands({"x": x, "x_dot": x_dot}, params, statistics, norm_ndim, batch_ndim)
    sums = NO_SUMS if x_dot is None else RowSums(2, ("x", "x_dot"), 2 if centered else 1)
    plan = plan_rows(operands, sums)
    if not takes_x:
        operands = operands._replace(view=operands.view._replace(tensors=(None, None)))
    operands = operands._replace(outputs={"y_dot": y_dot})
    with device_guard(x):
        launch_rows(layer_norm_jvp_kernel, operands, plan, sums)
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
    centered: bool = True,
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
        centered: As for `layer_norm_fwd`.

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
    given = (y_bar, x, weight, mean if centered else None, rstd, norm_ndim, batch_ndim)
    with device_guard(x):
        if want_weight or want_bias:
            bars = (weight_bar if want_weight else None, bias_bar if want_bias else None)
            _launch_sums(*given, x_bar if want_x else None, bars)
        elif want_x:
            operands = _bwd_operands(*given)
            _launch_x_bar(operands, plan_rows(operands, _x_bar_sums(operands)), x_bar)
    return x_bar, weight_bar, bias_bar


def _bwd_operands(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    norm_ndim: int,
    batch_ndim: int,
    *,
    has_sums: bool = False,
) -> Operands:
    full_size, statistics = {"y_bar": y_bar, "x": x}, {"mean": mean, "rstd": rstd}
    return layer_norm_operands(full_size, {"weight": weight}, statistics, norm_ndim, batch_ndim, has_sums=has_sums)


def _x_bar_sums(operands: Operands) -> RowSums:
    return RowSums(2, ("y_bar", "x", "weight"), 1 if operands.statistics["mean"] is None else 2)


def _launch_x_bar(operands: Operands, plan: RowPlan, x_bar: Tensor, parts: Tensor | None = None) -> None:
    operands = operands._replace(outputs={"x_bar": x_bar})
    launch_rows(layer_norm_x_bar_kernel, operands, plan, _x_bar_sums(operands), parts=parts)


def _launch_sums(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    norm_ndim: int,
    batch_ndim: int,
    x_bar: Tensor | None,
    bars: tuple[Tensor | None, Tensor | None],
) -> None:
    """Launch the sums over rows, x_bar in the same kernel or, of long rows, before it, and the sum of partial rows."""
    # The weight only enters x_bar.
    weight = None if x_bar is None else weight
    given = (y_bar, x, weight, mean, rstd, norm_ndim, batch_ndim)
    operands = _bwd_operands(*given, has_sums=True)
    view, itemsize, strides = operands.view, x.element_size(), [stride for _, stride in operands.params.values()]
    sizes = (view.num_segments, view.num_rows, view.num_cols, itemsize)
    plan = launch.plan_layer_norm_params(*sizes, x.device, view.is_aligned(itemsize, *strides))
    num_groups = math.prod(x.shape[:batch_ndim])
    swept = _bwd_operands(*given) if x_bar is not None and plan.looped else None
    row_plan = None if swept is None else plan_rows(swept, _x_bar_sums(swept))
    swept_size = 0 if swept is None or row_plan is None else num_row_parts(swept, row_plan, _x_bar_sums(swept))
    parts, (swept_parts,) = sums_scratch(rstd, view, plan, bars, num_groups, swept_size)
    if swept is not None and row_plan is not None and x_bar is not None:
        _launch_x_bar(swept, row_plan, x_bar, swept_parts)
    if plan.looped:
        operands = operands._replace(params={"weight": (None, 0)})
    if bars[0] is None and (plan.looped or x_bar is None):
        operands = operands._replace(
            view=view._replace(tensors=(view.tensors[0], None)), statistics={"mean": None, "rstd": None}
        )
    operands = operands._replace(outputs={"x_bar": None if plan.looped else x_bar})
    totals = {"weight_part": bars[0], "bias_part": bars[1]}
    launch_row_sums(layer_norm_bwd_kernel, operands, plan, totals, parts, num_groups)
