"""Norms of a sum, of a residual stream and of what dropout leaves of x: forward, backward and JVP launchers.

    s = residual + x * noise,      y = norm(s)

with the norm of `layer_norm`, of s as it was rounded; s is the residual of the next layer. The noise is drawn inside
the kernels, as by `dropout`, and never stored; `_add_layer_norm_kernels` has the derivatives. All launchers take what
those of `layer_norm` take, and

    residual, residual_dot        as x; they may be float32 where x is float16 or bfloat16, and s is then
    s, s_bar                      of the forward, and its cotangent; None for zero
    seed, p                       `[*batch]`, int64, and the probability of zero; None for no noise

y and x_bar have the dtype of x, s and residual_bar that of the residual. Nothing more is kept of s and x.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from triton_kernels.norms._add_layer_norm_kernels import (
    FORWARD,
    add_layer_norm_bwd_kernel,
    add_layer_norm_jvp_kernel,
    add_layer_norm_x_bar_kernel,
)
from triton_kernels.norms._layer_norm_rows import layer_norm_operands, plan_rows
from triton_kernels.norms._plan import plan_layer_norm_params
from triton_kernels.rows.launch import NO_SUMS, RowSums, launch_row_sums, launch_rows, num_row_parts, sums_scratch
from triton_kernels.runtime.numbers import accumulation_dtype, noise_numbers
from triton_kernels.runtime.views import device_guard, per_stream
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from triton_kernels.rows.launch import Operands

__all__ = ["add_layer_norm_bwd", "add_layer_norm_fwd", "add_layer_norm_fwd_jvp", "add_layer_norm_jvp"]


@tunable
def add_layer_norm_fwd(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    p: float,
    norm_ndim: int,
    batch_ndim: int,
    eps: float,
    centered: bool = True,
    rounded: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Y, s, and the mean and rstd of s, the mean empty without `centered`; `rounded` as for `layer_norm_fwd`."""
    full_size = {"x": x, "residual": residual, "x_dot": None, "residual_dot": None}
    params = {"weight": weight, "bias": bias, "weight_dot": None, "bias_dot": None}
    given = (full_size, params, seed, p, norm_ndim, batch_ndim, eps, centered, rounded)
    y, s, mean, rstd, *_ = _forward(*given, has_tangent=False)
    return y, s, mean, rstd


@tunable
def add_layer_norm_fwd_jvp(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    x_dot: Tensor | None,
    residual_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    seed: Tensor | None,
    p: float,
    norm_ndim: int,
    batch_ndim: int,
    eps: float,
    centered: bool = True,
    rounded: bool = False,
) -> tuple[Tensor, ...]:
    """Results of `add_layer_norm_fwd`, then y_dot and s_dot: all is read once."""
    full_size = {"x": x, "residual": residual, "x_dot": x_dot, "residual_dot": residual_dot}
    params = {"weight": weight, "bias": bias, "weight_dot": weight_dot, "bias_dot": bias_dot}
    return _forward(full_size, params, seed, p, norm_ndim, batch_ndim, eps, centered, rounded, has_tangent=True)


def _forward(
    full_size: Mapping[str, Any],
    params: Mapping[str, Tensor | None],
    seed: Tensor | None,
    p: float,
    norm_ndim: int,
    batch_ndim: int,
    eps: float,
    centered: bool,
    rounded: bool,
    *,
    has_tangent: bool,
) -> tuple[Tensor, ...]:
    x, residual = full_size["x"], full_size["residual"]
    row_shape = x.shape[: x.dim() - norm_ndim]
    y, s = x.new_empty(x.shape), residual.new_empty(x.shape)
    y_dot, s_dot = x.new_empty(x.shape if has_tangent else 0), residual.new_empty(x.shape if has_tangent else 0)
    rstd = x.new_empty(row_shape, dtype=accumulation_dtype(x.dtype))
    mean = rstd.new_empty(row_shape if centered else 0)
    if x.numel() == 0:
        # As layer norm's.
        return y, s, mean.zero_(), rstd.fill_(math.nan), y_dot, s_dot
    moves = full_size["x_dot"] is not None or full_size["residual_dot"] is not None
    operands = _operands(full_size, params, {}, seed, p, norm_ndim, batch_ndim)
    outputs = {"s": s, "y": y, "y_dot": y_dot if has_tangent else None, "s_dot": s_dot if has_tangent else None}
    operands = operands._replace(outputs=outputs, row_outputs={"mean": mean if centered else None, "rstd": rstd})
    sums = RowSums(4 if moves else 2, operands.names, None, num_anchors=2 * centered).centered_if(centered)
    then = x.dtype if rounded and x.dtype.itemsize == 2 else None
    with device_guard(x):
        launch_rows(FORWARD[centered, then], operands, plan_rows(operands, sums, sums.places), sums, EPS=eps)
    return y, s, mean, rstd, y_dot, s_dot


@tunable
def add_layer_norm_jvp(
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    x_dot: Tensor | None,
    residual_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    seed: Tensor | None,
    p: float,
    y_dtype: torch.dtype,
    norm_ndim: int,
    batch_ndim: int,
    centered: bool = True,
) -> tuple[Tensor, Tensor]:
    """Tangents of y, in `y_dtype`, and of s."""
    y_dot, s_dot = s.new_empty(s.shape, dtype=y_dtype), s.new_empty(s.shape)
    if s.numel() == 0:
        return y_dot, s_dot
    moves = x_dot is not None or residual_dot is not None
    takes_s = moves or weight_dot is not None
    params = {"weight": weight if moves else None, "weight_dot": weight_dot, "bias_dot": bias_dot}
    statistics = {"mean": mean if takes_s and centered else None, "rstd": rstd if takes_s else None}
    full_size = {"s": s, "x_dot": x_dot, "residual_dot": residual_dot}
    operands = _operands(full_size, params, statistics, seed if x_dot is not None else None, p, norm_ndim, batch_ndim)
    sums = RowSums(2, operands.names).centered_if(centered) if moves else NO_SUMS
    plan = plan_rows(operands, sums)
    if not takes_s:
        operands = operands.only(["bias_dot"])
    operands = operands._replace(outputs={"y_dot": y_dot, "s_dot": s_dot})
    with device_guard(s):
        launch_rows(add_layer_norm_jvp_kernel, operands, plan, sums)
    return y_dot, s_dot


@tunable
def add_layer_norm_bwd(
    y_bar: Tensor,
    s_bar: Tensor | None,
    s: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    seed: Tensor | None,
    p: float,
    norm_ndim: int,
    batch_ndim: int,
    wanted: Sequence[bool],
    centered: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of x, in the dtype of y_bar, of the residual, and of weight and bias as from `layer_norm_bwd`."""
    want_x, want_residual, *want_params = wanted
    want_rows = want_x or want_residual
    param_shape = (*s.shape[:batch_ndim], *s.shape[s.dim() - norm_ndim :])
    param_dtype = accumulation_dtype(s.dtype) if weight is None else weight.dtype
    x_bar = y_bar.new_empty(s.shape) if want_x else s.new_empty(0)
    residual_bar = s.new_empty(s.shape if want_residual else 0)
    bars = [s.new_empty(param_shape, dtype=param_dtype) if want else None for want in want_params]
    weight_bar, bias_bar = (s.new_empty(0) if bar is None else bar for bar in bars)
    if s.numel() == 0:
        return x_bar, residual_bar, weight_bar.zero_(), bias_bar.zero_()
    has_sums, statistics = any(want_params), {"mean": mean if centered else None, "rstd": rstd}
    full_size = {"y_bar": y_bar, "s": s, "s_bar": s_bar if want_rows else None}
    params = {"weight": weight if want_rows else None}
    given = (full_size, params, statistics, seed if want_x else None, p, norm_ndim, batch_ndim)
    operands, itemsize = _operands(*given, has_sums=has_sums), s.element_size()
    outputs = {"x_bar": x_bar if want_x else None, "residual_bar": residual_bar if want_residual else None}
    plan = row_plan = None
    if has_sums:
        options = (operands.is_aligned(itemsize), operands.seeds is not None)
        plan = plan_layer_norm_params(*operands.sizes(), itemsize, s.device, *options)
    # Of long rows, the cotangents of rows and the sums are written one after the other.
    is_apart = plan is None or plan.looped
    rows, swept_size, sums = operands, 0, RowSums(2, ("y_bar", "s", "weight")).centered_if(centered)
    if want_rows and is_apart:
        rows = _operands(*given)._replace(outputs=outputs)
        row_plan = plan_rows(rows, sums, 2)
        swept_size = num_row_parts(rows, row_plan, sums)
    num_groups = math.prod(s.shape[:batch_ndim])
    parts, (swept_parts,) = sums_scratch(rstd, *operands.partial_rows(plan), bars, num_groups, swept_size)
    with device_guard(s):
        if row_plan is not None:
            launch_rows(add_layer_norm_x_bar_kernel, rows, row_plan, sums, parts=swept_parts)
        if plan is not None:
            if is_apart:
                operands = operands._replace(seeds=None)
            has_rows = want_rows and not is_apart
            taken = ["y_bar", *["s"] * (has_rows or bars[0] is not None), *["s_bar", "weight"] * has_rows]
            outputs = outputs if has_rows else dict.fromkeys(outputs)
            operands = operands.only(taken)._replace(outputs=outputs)
            totals = {"weight_part": bars[0], "bias_part": bars[1]}
            sums = sums if has_rows else NO_SUMS
            launch_row_sums(add_layer_norm_bwd_kernel, operands, plan, totals, parts, num_groups, sums)
    return x_bar, residual_bar, weight_bar, bias_bar


def _operands(
    full_size: Mapping[str, Tensor | None],
    params: Mapping[str, Tensor | None],
    statistics: Mapping[str, Tensor | None],
    seed: Tensor | None,
    p: float,
    norm_ndim: int,
    batch_ndim: int,
    *,
    has_sums: bool = False,
) -> Operands:
    """Those of layer norm, and a seed for each sample, which is a segment."""
    seed = seed if p else None
    has_streams = seed is not None and seed.numel() > 1
    given = (full_size, params, statistics, norm_ndim, batch_ndim)
    operands = layer_norm_operands(*given, has_sums=has_sums, has_streams=has_streams)
    seeds, stride = per_stream(seed)
    last_dropped, scale_low, scale_high = (0, 0, 0) if seed is None else noise_numbers(p)
    noise = {
        "seed_segment_stride": stride if has_streams else 0,
        "num_stream_rows": operands.view.num_rows if has_streams else 0,
        "last_dropped": last_dropped,
        "scale_low": scale_low,
        "scale_high": scale_high,
    }
    return operands._replace(seeds=seeds, noise=noise)
