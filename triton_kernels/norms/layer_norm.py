"""Layer normalization: forward, backward and JVP launchers.

Arguments and formulas are those of `primitives.ops.norms.layer_norm`, for all launchers of norms, of second order too.
With `silu`, of groups and in first order, SiLU follows, and derivatives take the bias too. Tensors may have any
strides, results are dense; what `output_mask` leaves out is empty, and only what the others take is read.

Each launcher views its tensors as `[segments, rows, columns]`, allocates, plans, and launches. The batch dims number
the segments; where the parameters are shared, the segments are whatever lets the strides be used as they are. Of a
group norm the cotangents of parameters are sums of planes, one of each channel of each sample, and sums of these few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..rows.tiles import ParamLayout
from ..tuning import tunable
from ._launch import Norm, backward, forward, jvp
from ._layer_norm_kernels import BACKWARD, FORWARD, JVP


@tunable
def layer_norm_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None,
    norm_ndim: int, batch_ndim: int, eps: float, centered: bool = True, rounded: bool = False, grouped: int = 0,
    silu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Y, mean and rstd, the mean empty without `centered`.

    With `rounded`, x_hat of a float16 or bfloat16 `x` is rounded to its dtype before it is multiplied.
    """
    norm, then = Norm(norm_ndim, batch_ndim, centered, ParamLayout(grouped)), _then(x, rounded, silu)
    params = {"weight": weight, "bias": bias, "weight_dot": None, "bias_dot": None}
    y = norm.empty_like(x)
    return y, *forward(FORWARD, norm, {"x": x, "x_dot": None}, params, {"y": y, "y_dot": None}, eps, then)


@tunable
def layer_norm_fwd_jvp(
    x: Tensor, weight: Tensor | None, bias: Tensor | None,
    x_dot: Tensor | None, weight_dot: Tensor | None, bias_dot: Tensor | None,
    norm_ndim: int, batch_ndim: int, eps: float, centered: bool = True, rounded: bool = False, grouped: int = 0,
    silu: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Results of `layer_norm_fwd`, and y_dot: x is read once for both; y alone takes a rounded x_hat."""
    norm, then = Norm(norm_ndim, batch_ndim, centered, ParamLayout(grouped)), _then(x, rounded, silu)
    params = {"weight": weight, "bias": bias, "weight_dot": weight_dot, "bias_dot": bias_dot}
    y, y_dot = norm.empty_like(x), norm.empty_like(x)
    mean, rstd = forward(FORWARD, norm, {"x": x, "x_dot": x_dot}, params, {"y": y, "y_dot": y_dot}, eps, then)
    return y, mean, rstd, y_dot


def _then(x: Tensor, rounded: bool, silu: bool) -> Any:
    """What follows x_hat, as `FORWARD` has it."""
    return "silu" if silu else x.dtype if rounded and x.dtype.itemsize == 2 else None


@tunable
def layer_norm_jvp(
    x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    x_dot: Tensor | None, weight_dot: Tensor | None, bias_dot: Tensor | None,
    norm_ndim: int, batch_ndim: int, centered: bool = True, grouped: int = 0, bias: Tensor | None = None,
    silu: bool = False,
) -> Tensor:  # fmt: skip
    """Tangent of y: `y_dot = P(x_dot) * weight + x_hat * weight_dot + bias_dot`."""
    norm = Norm(norm_ndim, batch_ndim, centered, ParamLayout(grouped))
    y_dot = norm.empty_like(x)
    params = {"weight": weight, "bias": bias if silu else None, "weight_dot": weight_dot, "bias_dot": bias_dot}
    jvp(JVP[silu], norm, {"x": x, "x_dot": x_dot}, params, (mean, rstd), {"y_dot": y_dot}, silu)
    return y_dot


@tunable
def layer_norm_bwd(
    y_bar: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    norm_ndim: int, batch_ndim: int, output_mask: Sequence[bool], centered: bool = True, grouped: int = 0,
    bias: Tensor | None = None, silu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Cotangents of x, weight and bias, those of parameters in the dtype of the weight, or of sums without one."""
    norm, (want_x, *want_params) = Norm(norm_ndim, batch_ndim, centered, ParamLayout(grouped)), output_mask
    x_bar = norm.empty_like(x) if want_x else x.new_empty(0)
    full_size, params = {"y_bar": y_bar, "x": x}, {"weight": weight, "bias": bias if silu else None}
    outputs = {"x_bar": x_bar if want_x else None}
    return x_bar, *backward(BACKWARD[silu], norm, full_size, params, (mean, rstd), outputs, want_params, silu)
