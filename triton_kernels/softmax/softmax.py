"""Softmax with a scale and a mask: launchers of first and second order.

    y = exp(u) / sum(exp(u)),      u = scale * x + mask

with the sum over one dim. The derivative of y with respect to u is the symmetric map `P(v) = y * (v - sum(y * v))`, so
all derivatives need only y. The kernels and launches are those of log-softmax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from primitives.kernels.rows.maps import Part, RowMapKernels
from primitives.kernels.softmax import _softmax_kernels
from primitives.kernels.softmax._forward import forward_of
from primitives.kernels.tuning import tunable

if TYPE_CHECKING:
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


SOFTMAX = RowMapKernels(
    __name__,
    vars(_softmax_kernels),
    "y",
    pairing=(
        Part((1,), ("y", "x_dot"), ("y", "x_dot")),
        Part((0, 1), ("y_bar", "y", "x_dot"), ("y_bar", "x_dot")),
        Part((0,), ("y_bar", "y"), ("y_bar", "y")),
    ),
    bwd_jvp=(
        Part((1,), ("y", "y_bar_dot"), ("y", "y_bar_dot")),
        Part((0, 1), ("y_bar", "y", "y_dot"), ("y_bar", "y", "y_dot")),
    ),
    options=("dim", "scale"),
)
softmax_jvp, softmax_bwd, softmax_pairing, softmax_bwd_jvp = SOFTMAX.launchers()
