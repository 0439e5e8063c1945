"""Norms of a residual stream and what dropout leaves of x: launchers as `primitives.ops.norms.add_layer_norm` has them.

The noise is drawn inside the kernels, as by `dropout`, and never stored; nothing is kept of x and the residual but s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..rows.tiles import ParamLayout
from ..tuning import tunable
from ._add_layer_norm_kernels import BACKWARD, FORWARD, JVP
from ._launch import Norm, backward, forward, jvp

_PER_COLUMN = ParamLayout.PER_COLUMN


@tunable
def add_layer_norm_fwd(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, seed: Tensor | None,
    p: float, norm_ndim: int, batch_ndim: int, eps: float, centered: bool = True, rounded: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Y, s, and the mean and rstd of s, the mean empty without `centered`; `rounded` as for `layer_norm_fwd`."""
    norm = Norm(norm_ndim, batch_ndim, centered, _PER_COLUMN, seed, p)
    full_size = {"x": x, "residual": residual, "x_dot": None, "residual_dot": None}
    params = {"weight": weight, "bias": bias, "weight_dot": None, "bias_dot": None}
    outputs = {"s": residual.new_empty(x.shape), "y": x.new_empty(x.shape), "y_dot": None, "s_dot": None}
    then = x.dtype if rounded and x.dtype.itemsize == 2 else None
    return outputs["y"], outputs["s"], *forward(FORWARD, norm, full_size, params, outputs, eps, then)


@tunable
def add_layer_norm_fwd_jvp(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None,
    x_dot: Tensor | None, residual_dot: Tensor | None, weight_dot: Tensor | None, bias_dot: Tensor | None,
    seed: Tensor | None,
    p: float, norm_ndim: int, batch_ndim: int, eps: float, centered: bool = True, rounded: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Results of `add_layer_norm_fwd`, then y_dot and s_dot: all is read once."""
    norm = Norm(norm_ndim, batch_ndim, centered, _PER_COLUMN, seed, p)
    full_size = {"x": x, "residual": residual, "x_dot": x_dot, "residual_dot": residual_dot}
    params = {"weight": weight, "bias": bias, "weight_dot": weight_dot, "bias_dot": bias_dot}
    y, y_dot = x.new_empty(x.shape), x.new_empty(x.shape)
    s, s_dot = residual.new_empty(x.shape), residual.new_empty(x.shape)
    then = x.dtype if rounded and x.dtype.itemsize == 2 else None
    outputs = {"s": s, "y": y, "y_dot": y_dot, "s_dot": s_dot}
    return y, s, *forward(FORWARD, norm, full_size, params, outputs, eps, then), y_dot, s_dot


@tunable
def add_layer_norm_jvp(
    s: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    x_dot: Tensor | None, residual_dot: Tensor | None, weight_dot: Tensor | None, bias_dot: Tensor | None,
    seed: Tensor | None,
    p: float, y_dtype: torch.dtype, norm_ndim: int, batch_ndim: int, centered: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tangents of y, in `y_dtype`, and of s."""
    y_dot, s_dot = s.new_empty(s.shape, dtype=y_dtype), s.new_empty(s.shape)
    norm = Norm(norm_ndim, batch_ndim, centered, _PER_COLUMN, seed if x_dot is not None else None, p)
    full_size = {"s": s, "x_dot": x_dot, "residual_dot": residual_dot}
    params = {"weight": weight, "weight_dot": weight_dot, "bias_dot": bias_dot}
    jvp(JVP, norm, full_size, params, (mean, rstd), {"s_dot": s_dot, "y_dot": y_dot})
    return y_dot, s_dot


@tunable
def add_layer_norm_bwd(
    y_bar: Tensor, s_bar: Tensor | None, s: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    seed: Tensor | None,
    p: float, norm_ndim: int, batch_ndim: int, output_mask: Sequence[bool], centered: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Cotangents of x, in the dtype of y_bar, of the residual, and of weight and bias as from `layer_norm_bwd`."""
    want_x, want_residual, *want_params = output_mask
    norm = Norm(norm_ndim, batch_ndim, centered, _PER_COLUMN, seed if want_x else None, p)
    x_bar, residual_bar = y_bar.new_empty(s.shape if want_x else 0), s.new_empty(s.shape if want_residual else 0)
    full_size = {"y_bar": y_bar, "s": s, "s_bar": s_bar if want_x or want_residual else None}
    outputs = {"x_bar": x_bar if want_x else None, "residual_bar": residual_bar if want_residual else None}
    bars = backward(BACKWARD, norm, full_size, {"weight": weight}, (mean, rstd), outputs, want_params)
    return x_bar, residual_bar, *bars
