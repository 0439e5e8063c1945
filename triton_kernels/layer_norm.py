"""Layer normalization: forward, backward and JVP launchers.

    x_hat = (x - mean) * rstd,      y = x_hat * weight + bias

with mean and rstd = 1 / sqrt(variance + eps) over the last dims of x. The derivative of x_hat with respect to x is

    P(v) = rstd * (v - mean(v) - x_hat * mean(v * x_hat))

which is symmetric, so one device function serves both modes:

    jvp   y_dot = P(x_dot) * weight + x_hat * weight_dot + bias_dot
    vjp   x_bar = P(y_bar * weight),   weight_bar = sum(y_bar * x_hat),   bias_bar = sum(y_bar)

Without `centered`, which makes RMS norm of it, x_hat = x * rstd, and P(v) = rstd * (v - x_hat * mean(v * x_hat)).

All launchers, those of second order too, take

    x, y_bar, x_dot, y_bar_dot    [*batch, *rest, *norm], any strides; a tangent that is None is zero
    weight, bias, their tangents  [*batch, *norm]; a weight that is None is 1, a bias 0
    mean, rstd                    [*batch, *rest], of the forward; a norm that is not centered does not look at the mean
    norm_ndim, batch_ndim         how many dims are normalized, and along how many the parameters differ
    grouped                       whether x is `[*batch, *rest, groups, channels, positions]`, of which the last two are
                                  normalized, and parameters are `[*batch, groups, channels]`, as of a group norm; 2
                                  where channels are adjacent in memory, as they then are in results of that shape
    wanted                        which results to compute; only what these take is read

and return dense tensors: of full size in the dtype of x, statistics in that of sums. What is not wanted is empty.
Each launcher views its tensors as `[segments, rows, columns]`, allocates, plans, and launches. The batch dims number
the segments; where the parameters are shared, the segments are whatever lets the strides be used as they are. Of a
group norm the cotangents of parameters are sums of planes, one of each channel of each sample, and sums of these few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_kernels._layer_norm_launches import cotangents, forward, tangent
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from collections.abc import Sequence

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
) -> tuple[Tensor, Tensor, Tensor]:
    """Y, mean and rstd, the mean empty without `centered`.

    With `rounded`, x_hat of a float16 or bfloat16 `x` is rounded to its dtype before it is multiplied.
    """
    params = {"weight": weight, "bias": bias, "weight_dot": None, "bias_dot": None}
    return forward(x, None, params, norm_ndim, batch_ndim, eps, centered, rounded, grouped, has_tangent=False)[:3]


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Results of `layer_norm_fwd`, and y_dot: x is read once for both; y alone takes a rounded x_hat."""
    params = {"weight": weight, "bias": bias, "weight_dot": weight_dot, "bias_dot": bias_dot}
    return forward(x, x_dot, params, norm_ndim, batch_ndim, eps, centered, rounded, grouped)


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
) -> Tensor:
    """Tangent of y: `y_dot = P(x_dot) * weight + x_hat * weight_dot + bias_dot`."""
    # A weight multiplies the tangent of x alone.
    params = {"weight": None if x_dot is None else weight, "weight_dot": weight_dot, "bias_dot": bias_dot}
    return tangent(x, mean, rstd, x_dot, {**params, "bias": None}, norm_ndim, batch_ndim, centered, grouped)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of x, weight and bias, those of parameters in the dtype of the weight, or of sums without one."""
    return cotangents(y_bar, x, weight, None, mean, rstd, norm_ndim, batch_ndim, wanted, centered, grouped)
