"""Softmax with a scale and a mask: launchers of `primitives.ops.softmax.softmax`, launched as those of log-softmax."""

from __future__ import annotations

from ..rows.maps import Part, RowMapKernels
from . import _softmax_kernels
from ._forward import forward_of

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
    forward=forward_of,
    inputs=("x", "mask"),
)
softmax_jvp, softmax_bwd, softmax_double_backward, softmax_bwd_jvp, softmax_fwd, softmax_fwd_jvp = SOFTMAX.launchers()
