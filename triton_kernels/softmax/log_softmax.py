"""Log-softmax: launchers of `primitives.ops.softmax.log_softmax`, of first and second order, which need only y.

Every launcher views its tensors as `[segments, rows, columns]` with the reduced dim as columns: the rows are the other
dims where the reduced dim comes last, and the dims inside it where it does not. Results are contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rows.maps import Part, RowMapKernels
from ..tuning import tunable
from . import _log_softmax_kernels
from ._forward import forward_of

__all__ = [
    "log_softmax_bwd",
    "log_softmax_bwd_jvp",
    "log_softmax_double_backward",
    "log_softmax_fwd",
    "log_softmax_fwd_jvp",
    "log_softmax_jvp",
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
    double_backward=(
        Part((1,), ("y", "x_dot"), ("x_dot",)),
        Part((0,), ("y_bar",), ("y", "x_dot")),
        Part((0,), ("y_bar",), ("y_bar", "y")),
    ),
    bwd_jvp=(Part((1,), ("y_bar_dot",), ("y", "y_bar_dot")), Part((0,), ("y_bar",), ("y", "y_dot"))),
)
log_softmax_jvp, log_softmax_bwd, log_softmax_double_backward, log_softmax_bwd_jvp = LOG_SOFTMAX.launchers()
