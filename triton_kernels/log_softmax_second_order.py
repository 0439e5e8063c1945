"""Second-order log-softmax: launchers of the derivatives of its backward and of its JVP.

With p = exp(y) and sums over the reduced dim, the backward and the JVP are the partial derivatives, with respect to
the tangent and to the cotangent, of their pairing

    L = sum(y_bar * x_dot) - sum(y_bar) * sum(p * x_dot)

`log_softmax_pairing` is the gradient of L, which is the vjp of either; its part for y reaches the input through the
backward. `log_softmax_bwd_jvp` is the JVP of the backward. The kernels are in `_log_softmax_second_kernels`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from triton_kernels._log_softmax_second_kernels import (
    log_softmax_bwd_jvp_kernel,
    log_softmax_bwd_jvp_looped_kernel,
    log_softmax_pairing_kernel,
    log_softmax_pairing_looped_kernel,
)
from triton_kernels._reduction_view import ReductionView, launch_reduction, reduction_view
from triton_kernels._runtime import accumulation_dtype
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["log_softmax_bwd_jvp", "log_softmax_pairing"]

_ABSENT_STRIDES = (0, 0, 0)


def _partial_view(inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None], dim: int) -> ReductionView:
    """View of inputs and contiguous outputs of one shape, some absent; the outputs share the last strides."""
    out = next(tensor for tensor in outputs if tensor is not None)
    view = reduction_view([tensor for tensor in inputs if tensor is not None], out, dim)
    present = iter(zip(view.tensors, view.strides, strict=True))
    viewed, strides = zip(*((None, _ABSENT_STRIDES) if t is None else next(present) for t in inputs), strict=True)
    return view._replace(tensors=(*viewed, *outputs), strides=(*strides, view.strides[-1]))


def _compute_dtype(inputs: Sequence[Tensor | None]) -> torch.dtype:
    dtypes = [tensor.dtype for tensor in inputs if tensor is not None]
    return accumulation_dtype(functools.reduce(torch.promote_types, dtypes))


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
    want_y_bar_bar, want_output_bar, want_x_dot_bar = map(bool, wanted)
    outputs = [
        torch.empty(y.shape, dtype=like.dtype, device=y.device) if want else None
        for like, want in zip((y_bar, y, x_dot), wanted, strict=True)
    ]
    if y.numel() > 0 and any(wanted):
        inputs = (
            y_bar if want_output_bar or want_x_dot_bar else None,
            y,
            x_dot if want_y_bar_bar or want_output_bar else None,
        )
        launch_reduction(
            log_softmax_pairing_kernel,
            log_softmax_pairing_looped_kernel,
            2,
            ("Y_BAR", "Y", "X_DOT", "OUT"),
            _partial_view(inputs, outputs, dim),
            _compute_dtype(inputs),
            WANT_Y_BAR_BAR=want_y_bar_bar,
            WANT_OUTPUT_BAR=want_output_bar,
            WANT_X_DOT_BAR=want_x_dot_bar,
        )
    y_bar_bar, output_bar, x_dot_bar = (y.new_empty(0) if out is None else out for out in outputs)
    return y_bar_bar, output_bar, x_dot_bar


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
    if y_bar_dot is None and y_dot is None:
        return torch.zeros(y.shape, dtype=x_dtype, device=y.device)
    x_bar_dot = torch.empty(y.shape, dtype=x_dtype, device=y.device)
    if y.numel() > 0:
        inputs = (None if y_dot is None else y_bar, y, y_bar_dot, y_dot)
        launch_reduction(
            log_softmax_bwd_jvp_kernel,
            log_softmax_bwd_jvp_looped_kernel,
            2,
            ("Y_BAR", "Y", "Y_BAR_DOT", "Y_DOT", "OUT"),
            _partial_view(inputs, (x_bar_dot,), dim),
            _compute_dtype(inputs),
            HAS_Y_BAR_DOT=y_bar_dot is not None,
            HAS_Y_DOT=y_dot is not None,
        )
    return x_bar_dot
