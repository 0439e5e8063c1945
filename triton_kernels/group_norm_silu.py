"""Group norm and SiLU behind it: forward, backward and JVP launchers, on the kernels of layer norm.

    z = x_hat * weight + bias,      y = z * sigmoid(z)

The arguments are those of the launchers of layer norm, of which `grouped` is 1 or 2: x, y_bar and x_dot are `[*batch,
*rest, groups, channels, positions]`, and parameters are `[*batch, groups, channels]`. The
derivatives compute z anew. Their own derivatives are those of layer norm and products with derivatives of SiLU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_kernels._layer_norm_launches import cotangents, forward, tangent
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["group_norm_silu_bwd", "group_norm_silu_fwd", "group_norm_silu_fwd_jvp", "group_norm_silu_jvp"]

_NORM_NDIM = 2


@tunable
def group_norm_silu_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, batch_ndim: int, eps: float, grouped: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Y, mean and rstd."""
    params = {"weight": weight, "bias": bias, "weight_dot": None, "bias_dot": None}
    return forward(x, None, params, _NORM_NDIM, batch_ndim, eps, True, False, grouped, has_tangent=False, silu=True)[:3]


@tunable
def group_norm_silu_fwd_jvp(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    batch_ndim: int,
    eps: float,
    grouped: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Results of `group_norm_silu_fwd`, and y_dot: x is read once for both."""
    params = {"weight": weight, "bias": bias, "weight_dot": weight_dot, "bias_dot": bias_dot}
    return forward(x, x_dot, params, _NORM_NDIM, batch_ndim, eps, True, False, grouped, silu=True)


@tunable
def group_norm_silu_jvp(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    batch_ndim: int,
    grouped: int = 1,
) -> Tensor:
    """Tangent of y."""
    params = {"weight": weight, "weight_dot": weight_dot, "bias_dot": bias_dot, "bias": bias}
    return tangent(x, mean, rstd, x_dot, params, _NORM_NDIM, batch_ndim, True, grouped, silu=True)


@tunable
def group_norm_silu_bwd(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    batch_ndim: int,
    wanted: Sequence[bool],
    grouped: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of x, weight and bias, in the dtypes that `layer_norm_bwd` gives them."""
    given = (y_bar, x, weight, bias, mean, rstd, _NORM_NDIM, batch_ndim, wanted)
    return cotangents(*given, True, grouped, silu=True)
