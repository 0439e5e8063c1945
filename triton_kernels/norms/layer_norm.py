"""Layer normalization: forward, backward and JVP launchers.

    x_hat = (x - mean) * rstd,      y = x_hat * weight + bias

with mean and rstd = 1 / sqrt(variance + eps) over the last dims of x; `_layer_norm_steps` has the derivatives. Without
`centered`, which makes RMS norm of it, x_hat = x * rstd.

All launchers, those of second order too, take

    x, y_bar, x_dot, y_bar_dot    [*batch, *rest, *norm], any strides; a tangent that is None is zero
    weight, bias, their tangents  [*batch, *norm]; a weight that is None is 1, a bias 0
    mean, rstd                    [*batch, *rest], of the forward; a norm that is not centered does not look at the mean
    norm_ndim, batch_ndim         how many dims are normalized, and along how many the parameters differ
    grouped                       whether x is `[*batch, *rest, groups, channels, positions]`, of which the last two are
                                  normalized, and parameters are `[*batch, groups, channels]`, as of a group norm; 2
                                  where channels are adjacent in memory, as they then are in results of that shape
    silu                          whether SiLU follows, of groups and in first order; its derivatives take the bias too
    wanted                        which results to compute; only what these take is read

and return dense tensors: of full size in the dtype of x, statistics in that of sums. An unwanted one is empty.
Each launcher views its tensors as `[segments, rows, columns]`, allocates, plans, and launches. The batch dims number
the segments; where the parameters are shared, the segments are whatever lets the strides be used as they are. Of a
group norm the cotangents of parameters are sums of planes, one of each channel of each sample, and sums of these few.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from triton_kernels.norms._layer_norm_kernels import FORWARD, JVP, PLANES, X_BAR, layer_norm_bwd_kernel
from triton_kernels.norms._layer_norm_rows import Planes, empty_like_x, layer_norm_operands, plan_rows
from triton_kernels.norms._plan import plan_layer_norm_params
from triton_kernels.rows.launch import NO_SUMS, RowSums, launch_row_sums, launch_rows, num_row_parts, sums_scratch
from triton_kernels.runtime.numbers import accumulation_dtype
from triton_kernels.runtime.views import device_guard
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

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
    grouped: int = 0,
    silu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Y, mean and rstd, the mean empty without `centered`.

    With `rounded`, x_hat of a float16 or bfloat16 `x` is rounded to its dtype before it is multiplied.
    """
    params = {"weight": weight, "bias": bias, "weight_dot": None, "bias_dot": None}
    options = (norm_ndim, batch_ndim, eps, centered, rounded, grouped, silu)
    return _forward(x, None, params, *options, has_tangent=False)[:3]


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
    grouped: int = 0,
    silu: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Results of `layer_norm_fwd`, and y_dot: x is read once for both; y alone takes a rounded x_hat."""
    params = {"weight": weight, "bias": bias, "weight_dot": weight_dot, "bias_dot": bias_dot}
    return _forward(x, x_dot, params, norm_ndim, batch_ndim, eps, centered, rounded, grouped, silu, has_tangent=True)


def _forward(
    x: Tensor,
    x_dot: Tensor | None,
    params: Mapping[str, Tensor | None],
    norm_ndim: int,
    batch_ndim: int,
    eps: float,
    centered: bool,
    rounded: bool,
    grouped: int,
    silu: bool,
    *,
    has_tangent: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row_shape = x.shape[: x.dim() - norm_ndim]
    y, y_dot = empty_like_x(x, grouped), empty_like_x(x, grouped) if has_tangent else x.new_empty(0)
    rstd = x.new_empty(row_shape, dtype=accumulation_dtype(x.dtype))
    mean = rstd.new_empty(row_shape if centered else 0)
    if x.numel() == 0:
        # Rows without columns: the empty sum and, as in torch, an undefined variance.
        return y, mean.zero_(), rstd.fill_(math.nan), y_dot
    operands = layer_norm_operands({"x": x, "x_dot": x_dot}, params, {}, norm_ndim, batch_ndim, grouped)
    outputs = {"y": y, "y_dot": y_dot if has_tangent else None}
    operands = operands._replace(outputs=outputs, row_outputs={"mean": mean if centered else None, "rstd": rstd})
    sums = RowSums(2 if x_dot is None else 4, ("x", "x_dot"), None, num_anchors=int(centered)).centered_if(centered)
    then = "silu" if silu else x.dtype if rounded and x.dtype.itemsize == 2 else None
    with device_guard(x):
        launch_rows(FORWARD[centered, then], operands, plan_rows(operands, sums), sums, EPS=eps)
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
    grouped: int = 0,
    bias: Tensor | None = None,
    silu: bool = False,
) -> Tensor:
    """Tangent of y: `y_dot = P(x_dot) * weight + x_hat * weight_dot + bias_dot`."""
    y_dot = empty_like_x(x, grouped)
    if x.numel() == 0:
        return y_dot
    # Without SiLU, a weight multiplies the tangent of x alone, and bias_dot stands alone.
    has_weight, takes_x = silu or x_dot is not None, silu or x_dot is not None or weight_dot is not None
    params = {"weight": weight if has_weight else None, "bias": bias if silu else None}
    params |= {"weight_dot": weight_dot, "bias_dot": bias_dot}
    statistics = {"mean": mean if takes_x and centered else None, "rstd": rstd if takes_x else None}
    operands = layer_norm_operands({"x": x, "x_dot": x_dot}, params, statistics, norm_ndim, batch_ndim, grouped)
    sums = NO_SUMS if x_dot is None else RowSums(2, ("x", "x_dot")).centered_if(centered)
    plan = plan_rows(operands, sums)
    operands = (operands if takes_x else operands.only(["bias_dot"]))._replace(outputs={"y_dot": y_dot})
    with device_guard(x):
        launch_rows(JVP[silu], operands, plan, sums)
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
    grouped: int = 0,
    bias: Tensor | None = None,
    silu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of x, weight and bias, those of parameters in the dtype of the weight, or of sums without one."""
    want_x, *want_params = wanted
    param_shape = (*x.shape[:batch_ndim], *(x.shape[-3:-1] if grouped else x.shape[x.dim() - norm_ndim :]))
    param_dtype = accumulation_dtype(x.dtype) if weight is None else weight.dtype
    x_bar = empty_like_x(x, grouped) if want_x else x.new_empty(0)
    bars = [x.new_empty(param_shape, dtype=param_dtype) if want else None for want in want_params]
    weight_bar, bias_bar = (x.new_empty(0) if bar is None else bar for bar in bars)
    if x.numel() == 0:
        return x_bar, weight_bar.zero_(), bias_bar.zero_()
    has_sums, statistics = any(want_params), {"mean": mean if centered else None, "rstd": rstd}
    # Without SiLU the weight enters x_bar alone.
    params = {"weight": weight if want_x or silu else None, "bias": bias if silu else None}
    given = ({"y_bar": y_bar, "x": x}, params, statistics, norm_ndim, batch_ndim, grouped)
    operands, itemsize = layer_norm_operands(*given, has_sums=has_sums and not grouped), x.element_size()
    plan = row_plan = None
    if has_sums and not grouped:
        plan = plan_layer_norm_params(*operands.sizes(), itemsize, x.device, operands.is_aligned(itemsize))
    # Of long rows, and of groups, x_bar and the sums are written one after the other.
    is_apart = plan is None or plan.looped
    rows, swept_size, sums = operands, 0, RowSums(2, ("y_bar", "x", "weight", "bias")).centered_if(centered)
    if want_x and is_apart:
        rows = layer_norm_operands(*given)._replace(outputs={"x_bar": x_bar})
        row_plan = plan_rows(rows, sums)
        swept_size = num_row_parts(rows, row_plan, sums)
    num_groups = math.prod(x.shape[:batch_ndim])
    planes, plane_size, partial = None, 0, operands.partial_rows(plan)
    if has_sums and grouped:
        taken = ["y_bar", *["x"] * (silu or bars[0] is not None), *["weight", "bias"] * silu]
        planes = Planes.of(operands.only(taken), bars, batch_ndim)
        plane_size, partial = planes.num_parts(), planes.partial_rows()
    parts, (swept_parts, plane_parts) = sums_scratch(rstd, *partial, bars, num_groups, swept_size, plane_size)
    totals = {"weight_part": bars[0], "bias_part": bars[1]}
    with device_guard(x):
        if row_plan is not None:
            launch_rows(X_BAR[silu], rows, row_plan, sums, parts=swept_parts)
        if planes is not None:
            planes.launch(PLANES[silu], totals, parts, num_groups, plane_parts)
        if plan is not None:
            has_x_bar = want_x and not is_apart
            taken = ["y_bar", *["x"] * (has_x_bar or bars[0] is not None), *["weight"] * has_x_bar]
            operands = operands.only(taken)._replace(outputs={"x_bar": x_bar if has_x_bar else None})
            sums = sums if has_x_bar else NO_SUMS
            launch_row_sums(layer_norm_bwd_kernel, operands, plan, totals, parts, num_groups, sums)
    return x_bar, weight_bar, bias_bar
