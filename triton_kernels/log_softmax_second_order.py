"""Second-order log-softmax: launchers of the derivatives of its backward and of its JVP.

With p = exp(y) and sums over the reduced dim, the backward and the JVP are the partial derivatives, with respect to
the tangent and to the cotangent, of their pairing

    L = sum(y_bar * x_dot) - sum(y_bar) * sum(p * x_dot)

`log_softmax_pairing` is the gradient of L, which is the vjp of either; its part for y reaches the input through the
backward. `log_softmax_bwd_jvp` is the JVP of the backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_kernels._log_softmax_rows import bwd_jvp_of, pairing_of
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

__all__ = ["log_softmax_bwd_jvp", "log_softmax_pairing"]


@tunable
def log_softmax_pairing(
    y_bar: Tensor, y: Tensor, x_dot: Tensor, dim: int, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the pairing of a cotangent with a tangent of the output of log-softmax.

    Args:
        y_bar: Cotangent of `y`, with its shape.
        y: Output of the forward.
        x_dot: Tangent of the input, with the shape of `y`.
        dim: Reduced dim, not negative.
        wanted: Which of the three results to compute; only what these take is read.

    Returns:
        `(y_bar_bar, output_bar, x_dot_bar)`, contiguous, with the shape of `y`; an unwanted one is empty, of the dtype
        of `y`:

        - `y_bar_bar = x_dot - sum(p * x_dot)`, in the dtype of `y_bar`;
        - `output_bar = -p * x_dot * sum(y_bar)`, in the dtype of `y`;
        - `x_dot_bar = y_bar - p * sum(y_bar)`, in the dtype of `x_dot`.
    """
    return pairing_of(y_bar, y, x_dot, dim, wanted)


@tunable
def log_softmax_bwd_jvp(
    y_bar: Tensor, y: Tensor, y_bar_dot: Tensor | None, y_dot: Tensor | None, dim: int, x_dtype: torch.dtype
) -> Tensor:
    """Tangent of `log_softmax_bwd`: `x_bar_dot = y_bar_dot - p * (y_dot * sum(y_bar) + sum(y_bar_dot))`.

    Args:
        y_bar: Cotangent of `y`, with its shape; read only if there is a `y_dot`.
        y: Output of the forward.
        y_bar_dot: Tangent of `y_bar`, or None for zero.
        y_dot: Tangent of `y`, or None for zero.
        dim: Reduced dim, not negative.
        x_dtype: Dtype of the input of the forward.

    Returns:
        `x_bar_dot`, contiguous, with the shape of `y` and dtype `x_dtype`.
    """
    return bwd_jvp_of(y_bar, y, y_bar_dot, y_dot, dim, x_dtype)
