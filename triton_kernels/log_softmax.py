"""Log-softmax: launchers of first and second order.

    y = x - log(sum(exp(x)))

with the sum over one dim; `_log_softmax_kernels` has the derivatives, which need only y. The jvp and the vjp are the
partial derivatives, with respect to the tangent and the cotangent, of their pairing

    L = sum(y_bar * y_dot)

whose gradient `log_softmax_pairing` is: the vjp of either, of which the part for y reaches the input through the
backward. All tensors have one shape, and `dim` is not negative; tangents are None for zero. Results are contiguous.

Every launcher views its tensors as `[segments, rows, columns]` with the reduced dim as columns:
the rows are the other dims where the reduced dim comes last, and the dims inside it where it does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_kernels._log_softmax_rows import LOG_SOFTMAX, forward_of
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
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
    (y,) = forward_of(x, None, None, dim, output_dtype)
    return y


@tunable
def log_softmax_fwd_jvp(x: Tensor, x_dot: Tensor, dim: int, output_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """`log_softmax_fwd` and its tangent at once: the probabilities are those of x, and not of a rounded y."""
    y, y_dot = forward_of(x, None, x_dot, dim, output_dtype)
    return y, y_dot


@tunable
def log_softmax_jvp(x_dot: Tensor, y: Tensor, dim: int) -> Tensor:
    """Tangent of `log_softmax_fwd`, in the dtype of `y`."""
    return LOG_SOFTMAX.gradients(None, y, x_dot, dim, (True, False, False))[0]


@tunable
def log_softmax_bwd(y_bar: Tensor, y: Tensor, dim: int, x_dtype: torch.dtype) -> Tensor:
    """Cotangent of the input of `log_softmax_fwd`, in the dtype `x_dtype`."""
    return LOG_SOFTMAX.gradients(y_bar, y, None, dim, (False, False, True), x_dtype=x_dtype)[2]


@tunable
def log_softmax_pairing(
    y_bar: Tensor, y: Tensor, x_dot: Tensor, dim: int, wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    """Gradients of L that are wanted, in the dtypes of `y_bar`, `y` and `x_dot`; the others are empty.

    `y_bar_bar = x_dot - sum(p * x_dot)`, `output_bar = -p * x_dot * sum(y_bar)`, `x_dot_bar = y_bar - p * sum(y_bar)`.
    """
    return LOG_SOFTMAX.pairing_of(y_bar, y, x_dot, dim, wanted)


@tunable
def log_softmax_bwd_jvp(
    y_bar: Tensor, y: Tensor, y_bar_dot: Tensor | None, y_dot: Tensor | None, dim: int, x_dtype: torch.dtype
) -> Tensor:
    """Tangent of `log_softmax_bwd`: `x_bar_dot = y_bar_dot - p * (y_dot * sum(y_bar) + sum(y_bar_dot))`.

    Only beside a `y_dot` is `y_bar` read.
    """
    return LOG_SOFTMAX.bwd_jvp_of(y_bar, y, y_bar_dot, y_dot, dim, x_dtype)
