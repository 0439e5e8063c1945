"""Log-softmax: launchers of `primitives.ops.softmax.log_softmax`, of first and second order, which need only y.

Every launcher views its tensors as `[segments, rows, columns]` with the reduced dim as columns: the rows are the other
dims where the reduced dim comes last, and the dims inside it where it does not. Results are contiguous.
"""

from __future__ import annotations

from ..rows.maps import Part, RowMapKernels
from . import _log_softmax_kernels
from ._forward import forward_of

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
    forward=forward_of,
)
_launchers = LOG_SOFTMAX.launchers()
log_softmax_jvp, log_softmax_bwd, log_softmax_double_backward, log_softmax_bwd_jvp = _launchers[:4]
log_softmax_fwd, log_softmax_fwd_jvp = _launchers[4:]
