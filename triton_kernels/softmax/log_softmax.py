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

from primitives.kernels.rows.maps import Part, RowMapKernels
from primitives.kernels.softmax import _log_softmax_kernels
from primitives.kernels.softmax._forward import forward_of
from primitives.kernels.tuning import tunable

if TYPE_CHECKING:
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


LOG_SOFTMAX = RowMapKernels(
    __name__,
    vars(_log_softmax_kernels),
    "y",
    pairing=(
        Part((1,), ("y", "x_dot"), ("x_dot",)),
        Part((0,), ("y_bar",), ("y", "x_dot")),
        Part((0,), ("y_bar",), ("y_bar", "y")),
    ),
    bwd_jvp=(Part((1,), ("y_bar_dot",), ("y", "y_bar_dot")), Part((0,), ("y_bar",), ("y", "y_dot"))),
)
log_softmax_jvp, log_softmax_bwd, log_softmax_pairing, log_softmax_bwd_jvp = LOG_SOFTMAX.launchers()
