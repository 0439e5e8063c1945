"""Launchers of second-order batch norm in training: derivatives of its backward and of its jvp.

`batch_norm` says what they take, and in which dtypes they return. The backward and the jvp are the partial derivatives
of the pairing of a cotangent with a tangent of y, `L = <y_bar, y_dot>`. Per channel, with u~ for an operand minus its
mean, `x_hat = x~ * rstd` and

    A = mean(x_dot * x_hat),  B = mean(y_bar * x_hat),  D = mean(y_bar_dot * x_hat)
    P(u) = rstd * (u~ - x_hat * mean(u * x_hat)),  S = mean(y_bar * P(x_dot)) = rstd * (mean(y_bar~ * x_dot~) - A * B)
    scale = weight * rstd,  alpha = rstd * (weight_dot - scale * A),  beta = -scale * rstd * B

the gradient of `L`, with the tangent of the vjp's results along (y_bar_dot, x_dot, weight_dot) beside it, is

    y_bar_bar  = scale * x_dot~ + alpha * x~ + bias_dot
    x_dot_bar  = scale * y_bar~ + beta * x~
    x_bar      = alpha * y_bar~ + beta * x_dot~ - rstd * (alpha * B + beta * A + scale * S) * x~
    x_bar_dot  = x_bar + scale * (y_bar_dot~ - D * x_hat)
    weight_bar = sum(y_bar * P(x_dot)) = n * S,  weight_bar_dot = weight_bar + n * D

No term assumes that the mean square of `x_hat` is 1, so eps enters through rstd alone. One kernel reads each operand
once and sums, one merges the sums into the coefficients and the per-channel results, one reads each operand once more
and writes. The mean of `y_bar~ * x_dot~` is a difference of means: two operands whose means are both large against
their spread lose digits there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_kernels._batch_norm_steps import Operands, Params, Results, derivatives
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["batch_norm_bwd_jvp", "batch_norm_pairing"]


@tunable
def batch_norm_pairing(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    batch_ndim: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Gradient of the pairing of a cotangent with a tangent of the output of batch norm in training.

    Returns:
        `(y_bar_bar, x_bar, weight_bar, x_dot_bar, weight_dot_bar, bias_dot_bar)`; what the pairing does not depend on
        has a gradient of zeros.
    """
    y_bar_bar, x_bar, weight_bar, x_dot_bar, weight_dot_bar, bias_dot_bar = wanted
    # The pairing is linear in y_bar and in the tangents: its gradients there are the jvp and the vjp.
    want = Results(
        y_dot=y_bar_bar,
        x_bar=x_dot_bar,
        x_bar_dot=x_bar,
        weight_bar=weight_dot_bar,
        bias_bar=bias_dot_bar,
        weight_bar_dot=weight_bar,
    )
    params = Params(mean, rstd, weight, None, weight_dot, bias_dot)
    out = derivatives(x, Operands(y_bar, x, x_dot), params, want, batch_ndim, (x if weight is None else weight).dtype)
    return out.y_dot, out.x_bar_dot, out.weight_bar_dot, out.x_bar, out.weight_bar, out.bias_bar


@tunable
def batch_norm_bwd_jvp(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    y_bar_dot: Tensor | None,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    batch_ndim: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Tangents `(x_bar_dot, weight_bar_dot, bias_bar_dot)` of the cotangents that `batch_norm_train_bwd` computes."""
    x_bar_dot, weight_bar_dot, bias_bar_dot = wanted
    want = Results(x_bar_dot=x_bar_dot, weight_bar_dot=weight_bar_dot, bias_bar_dot=bias_bar_dot)
    params, dtype = Params(mean, rstd, weight, None, weight_dot), (x if weight is None else weight).dtype
    out = derivatives(x, Operands(y_bar, x, x_dot, y_bar_dot), params, want, batch_ndim, dtype)
    return out.x_bar_dot, out.weight_bar_dot, out.bias_bar_dot
