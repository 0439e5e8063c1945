"""Log-softmax: forward, backward and JVP launchers.

    y = x - log(sum(exp(x)))

with the sum over one dim. With p = exp(y), the derivative of y with respect to x and its transpose are

    jvp   y_dot = x_dot - sum(p * x_dot)
    vjp   x_bar = y_bar - p * sum(y_bar)

so both need only y. Every launcher views its tensors as `[segments, rows, columns]` with the reduced dim as columns:
the rows are the other dims where the reduced dim comes last, and the dims inside it where it does not. The kernels
are in `_log_softmax_kernels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from triton_kernels._log_softmax_kernels import (
    log_softmax_fwd_kernel,
    log_softmax_fwd_looped_kernel,
    log_softmax_linear_kernel,
    log_softmax_linear_looped_kernel,
)
from triton_kernels._reduction_view import launch_reduction, reduction_view
from triton_kernels._runtime import accumulation_dtype
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["log_softmax_bwd", "log_softmax_fwd", "log_softmax_jvp"]


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
    if x.numel() > 0:
        view = reduction_view((x,), y, dim)
        compute_dtype = accumulation_dtype(y.dtype)
        launch_reduction(log_softmax_fwd_kernel, log_softmax_fwd_looped_kernel, 2, ("X", "Y"), view, compute_dtype)
    return y


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
    return _apply_derivative(x_dot, y, dim, y.dtype, transposed=False)


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
    return _apply_derivative(y_bar, y, dim, x_dtype, transposed=True)


def _apply_derivative(v: Tensor, y: Tensor, dim: int, out_dtype: torch.dtype, *, transposed: bool) -> Tensor:
    out = torch.empty(y.shape, dtype=out_dtype, device=y.device)
    if y.numel() > 0:
        view = reduction_view((v, y), out, dim)
        dtype = accumulation_dtype(torch.promote_types(v.dtype, y.dtype))
        kernels, names = (log_softmax_linear_kernel, log_softmax_linear_looped_kernel), ("V", "Y", "OUT")
        launch_reduction(*kernels, 1, names, view, dtype, TRANSPOSED=transposed)
    return out
