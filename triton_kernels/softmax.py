"""Softmax with a scale and a mask: launchers of first and second order.

    y = exp(u) / sum(exp(u)),      u = scale * x + mask

with the sum over one dim. The derivative of y with respect to u is the symmetric map `P(v) = y * (v - sum(y * v))`, so
all derivatives need only y. The kernels and launches are those of log-softmax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_kernels._log_softmax_rows import SOFTMAX, forward_of
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

__all__ = ["softmax_bwd", "softmax_bwd_jvp", "softmax_fwd", "softmax_fwd_jvp", "softmax_jvp", "softmax_pairing"]


@tunable
def softmax_fwd(x: Tensor, mask: Tensor | None, dim: int, scale: float, output_dtype: torch.dtype | None) -> Tensor:
    """Softmax of `scale * x + mask` over `dim`.

    Args:
        x: Input, at least one dim.
        mask: Of the shape of `x`: boolean, true where a position takes part, or added; None for none.
        dim: Reduced dim, not negative.
        scale: Factor of `x`.
        output_dtype: Dtype to which `x` is rounded before anything else, and dtype of the output; None for that of `x`.

    Returns:
        `y`, contiguous, with the shape of `x`. With a mask, a row in which no position takes part is 0; without one, a
        row of which all elements are -inf is NaN.
    """
    (y,) = forward_of(x, mask, None, dim, output_dtype, scale)
    return y


@tunable
def softmax_fwd_jvp(
    x: Tensor, mask: Tensor | None, x_dot: Tensor, dim: int, scale: float, output_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """`softmax_fwd` and its tangent `scale * P(x_dot)` at once: the probabilities are not those of a rounded y."""
    y, y_dot = forward_of(x, mask, x_dot, dim, output_dtype, scale)
    return y, y_dot


@tunable
def softmax_jvp(x_dot: Tensor, y: Tensor, dim: int, scale: float) -> Tensor:
    """Tangent of `softmax_fwd` by its output: `scale * P(x_dot)`, in the dtype of `y`."""
    return SOFTMAX.gradients(None, y, x_dot, dim, (True, False, False), scale)[0]


@tunable
def softmax_bwd(y_bar: Tensor, y: Tensor, dim: int, scale: float, x_dtype: torch.dtype) -> Tensor:
    """Cotangent of the input of `softmax_fwd` by its output: `scale * P(y_bar)`, in the dtype `x_dtype`."""
    return SOFTMAX.gradients(y_bar, y, None, dim, (False, False, True), scale, x_dtype=x_dtype)[2]


@tunable
def softmax_pairing(
    y_bar: Tensor, y: Tensor, x_dot: Tensor, dim: int, scale: float, wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    """Wanted gradients of `sum(y_bar * y_dot)`, in the dtypes of `y_bar`, `y` and `x_dot`; the others are empty.

    `y_bar_bar = scale * P(x_dot)`, `x_dot_bar = scale * P(y_bar)` and `output_bar = scale * (y_bar * (x_dot - sum(y *
    x_dot)) - x_dot * sum(y * y_bar))`, which comes second.
    """
    return SOFTMAX.pairing_of(y_bar, y, x_dot, dim, wanted, scale)


@tunable
def softmax_bwd_jvp(
    y_bar: Tensor,
    y: Tensor,
    y_bar_dot: Tensor | None,
    y_dot: Tensor | None,
    dim: int,
    scale: float,
    x_dtype: torch.dtype,
) -> Tensor:
    """Tangent of `softmax_bwd` for those of `y_bar` and `y`, or None for zero; `y_bar` is read only beside `y_dot`."""
    return SOFTMAX.bwd_jvp_of(y_bar, y, y_bar_dot, y_dot, dim, x_dtype, scale)
