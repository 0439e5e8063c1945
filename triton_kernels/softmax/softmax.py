"""Softmax with a scale and a mask: launchers of `primitives.ops.softmax.softmax`, launched as those of log-softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rows.maps import Part, RowMapKernels
from ..tuning import tunable
from . import _softmax_kernels
from ._forward import forward_of

__all__ = ["softmax_bwd", "softmax_bwd_jvp", "softmax_double_backward", "softmax_fwd", "softmax_fwd_jvp", "softmax_jvp"]


@tunable
def softmax_fwd(x: Tensor, mask: Tensor | None, dim: int, scale: float, output_dtype: torch.dtype | None) -> Tensor:
    """Softmax of `scale * x + mask` over `dim`, contiguous; `x` is first rounded to `output_dtype`, if there is one."""
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
    double_backward=(
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
softmax_jvp, softmax_bwd, softmax_double_backward, softmax_bwd_jvp = SOFTMAX.launchers()
