"""Log-softmax: launchers of first and second order.

    y = x - log(sum(exp(x)))

with the sum over one dim. With p = exp(y), the derivative of y with respect to x and its transpose are

    jvp   y_dot = x_dot - sum(p * x_dot)
    vjp   x_bar = y_bar - p * sum(y_bar)

so both need only y. They are the partial derivatives, with respect to the tangent and the cotangent, of their pairing

    L = sum(y_bar * x_dot) - sum(y_bar) * sum(p * x_dot)

whose gradient `log_softmax_pairing` is: the vjp of either, of which the part for y reaches the input through the
backward. All tensors have one shape, and `dim` is not negative; tangents are None for zero. Results are contiguous.

Every launcher views its tensors as `[segments, rows, columns]` with the reduced dim as columns:
the rows are the other dims where the reduced dim comes last, and the dims inside it where it does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from triton_kernels._log_softmax_rows import bwd_jvp_of, launch_forward, launch_pairing, pairing_of
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "log_softmax_bwd",
    "log_softmax_bwd_jvp",
    "log_softmax_fwd",
    "log_softmax_fwd_jvp",
    "log_softmax_jvp",
    "log_softmax_pairing",
]


@tunable
def log_softmax_fwd(x: Tensor, dim: int, output_dtype: torch.dtype | None) -> Tensor:
    """Logarithm of the softmax of `x`, which is rounded to `output_dtype` before anything else, if there is one.

    A row of which all elements are -inf, or one is +inf or NaN, is NaN.
    """
    y = torch.empty(x.shape, dtype=output_dtype or x.dtype, device=x.device)
    launch_forward(x, None, None, y, None, dim)
    return y


@tunable
def log_softmax_fwd_jvp(x: Tensor, x_dot: Tensor, dim: int, output_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """`log_softmax_fwd` and its tangent at once: the probabilities are those of x, and not of a rounded y."""
    y, y_dot = (torch.empty(x.shape, dtype=output_dtype or x.dtype, device=x.device) for _ in range(2))
    launch_forward(x, None, x_dot, y, y_dot, dim)
    return y, y_dot


@tunable
def log_softmax_jvp(x_dot: Tensor, y: Tensor, dim: int) -> Tensor:
    """Tangent of `log_softmax_fwd`, in the dtype of `y`."""
    y_dot = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    launch_pairing(None, y, x_dot, dim, (y_dot, None, None))
    return y_dot


@tunable
def log_softmax_bwd(y_bar: Tensor, y: Tensor, dim: int, x_dtype: torch.dtype) -> Tensor:
    """Cotangent of the input of `log_softmax_fwd`, in the dtype `x_dtype`."""
    x_bar = torch.empty(y.shape, dtype=x_dtype, device=y.device)
    launch_pairing(y_bar, y, None, dim, (None, None, x_bar))
    return x_bar


@tunable
def log_softmax_pairing(
    y_bar: Tensor, y: Tensor, x_dot: Tensor, dim: int, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of L that are wanted, in the dtypes of `y_bar`, `y` and `x_dot`; the others are empty.

    `y_bar_bar = x_dot - sum(p * x_dot)`, `output_bar = -p * x_dot * sum(y_bar)`, `x_dot_bar = y_bar - p * sum(y_bar)`.
    """
    return pairing_of(y_bar, y, x_dot, dim, wanted)


@tunable
def log_softmax_bwd_jvp(
    y_bar: Tensor, y: Tensor, y_bar_dot: Tensor | None, y_dot: Tensor | None, dim: int, x_dtype: torch.dtype
) -> Tensor:
    """Tangent of `log_softmax_bwd`: `x_bar_dot = y_bar_dot - p * (y_dot * sum(y_bar) + sum(y_bar_dot))`.

    Only beside a `y_dot` is `y_bar` read.
    """
    return bwd_jvp_of(y_bar, y, y_bar_dot, y_dot, dim, x_dtype)
