"""Log-softmax: forward, backward and JVP launchers.

    y = x - log(sum(exp(x)))

with the sum over one dim. With p = exp(y), the derivative of y with respect to x and its transpose are

    jvp   y_dot = x_dot - sum(p * x_dot)
    vjp   x_bar = y_bar - p * sum(y_bar)

so both need only y. Every launcher views its tensors as `[segments, rows, columns]` with the reduced dim as columns:
the rows are the other dims where the reduced dim comes last, and the dims inside it where it does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from triton_kernels._log_softmax_rows import launch_forward, launch_pairing
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["log_softmax_bwd", "log_softmax_fwd", "log_softmax_fwd_jvp", "log_softmax_jvp"]


@tunable
def log_softmax_fwd(x: Tensor, dim: int, output_dtype: torch.dtype | None) -> Tensor:
    """Logarithm of the softmax of `x` over `dim`.

    Args:
        x: Input, at least one dim.
        dim: Reduced dim, not negative.
        output_dtype: Dtype to which `x` is rounded before anything else, and dtype of the output; None for that of `x`.

    Returns:
        `y`, contiguous, with the shape of `x`. A row of which all elements are -inf, or one is +inf or NaN, is NaN.
    """
    y = torch.empty(x.shape, dtype=output_dtype or x.dtype, device=x.device)
    launch_forward(x, None, None, y, None, dim)
    return y


@tunable
def log_softmax_fwd_jvp(x: Tensor, x_dot: Tensor, dim: int, output_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """`log_softmax_fwd` and its tangent at once: the probabilities are those of x, and not of a rounded y.

    Args:
        x: As for `log_softmax_fwd`.
        x_dot: Tangent of `x`, of its shape.
        dim: As for `log_softmax_fwd`.
        output_dtype: Likewise; `x_dot` is not rounded before.

    Returns:
        `y` of `log_softmax_fwd`, and `y_dot = x_dot - sum(exp(y) * x_dot)`, like `y`.
    """
    y, y_dot = (torch.empty(x.shape, dtype=output_dtype or x.dtype, device=x.device) for _ in range(2))
    launch_forward(x, None, x_dot, y, y_dot, dim)
    return y, y_dot


@tunable
def log_softmax_jvp(x_dot: Tensor, y: Tensor, dim: int) -> Tensor:
    """Tangent of `log_softmax_fwd`: `y_dot = x_dot - sum(exp(y) * x_dot)`.

    Args:
        x_dot: Tangent of the input, with the shape of `y`.
        y: Output of the forward.
        dim: Reduced dim, not negative.

    Returns:
        `y_dot`, contiguous, with the shape and dtype of `y`.
    """
    y_dot = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    launch_pairing(None, y, x_dot, dim, (y_dot, None, None))
    return y_dot


@tunable
def log_softmax_bwd(y_bar: Tensor, y: Tensor, dim: int, x_dtype: torch.dtype) -> Tensor:
    """Cotangent of the input of `log_softmax_fwd`: `x_bar = y_bar - exp(y) * sum(y_bar)`.

    Args:
        y_bar: Cotangent of `y`, with its shape.
        y: Output of the forward.
        dim: Reduced dim, not negative.
        x_dtype: Dtype of the input of the forward.

    Returns:
        `x_bar`, contiguous, with the shape of `y` and dtype `x_dtype`.
    """
    x_bar = torch.empty(y.shape, dtype=x_dtype, device=y.device)
    launch_pairing(y_bar, y, None, dim, (None, None, x_bar))
    return x_bar
