"""Bytes that a mode cannot do without, and bytes of the passes that this package's kernels make in it.

The minimum of a mode reads every full-size operand once and writes every result once, parameters and statistics
included. A public call may take several operators: `torch.func.jvp` computes y first, and then y_dot from x and x_dot,
which reads x twice. The passes of this package's own kernels come from `triton_kernels.costs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from perf.workloads import CHANNEL_OPS, ITEMSIZES

if TYPE_CHECKING:
    import torch

    from perf.workloads import Workload


class Passes(NamedTuple):
    """Full-size tensors that are read and written, and how many vectors of parameters and of statistics are touched."""

    reads: int
    writes: int
    params: int
    statistics: int

    @property
    def full(self) -> int:
        """Passes over tensors of full size."""
        return self.reads + self.writes


# x is read and y written; with them go weight and bias, and mean and rstd (log-softmax and dropout have neither).
PASSES = {
    "forward": Passes(1, 1, 2, 2),
    # x (or y) and y_bar give x_bar, weight_bar and bias_bar.
    "backward": Passes(2, 1, 3, 2),
    # x and x_dot give y and y_dot.
    "jvp": Passes(2, 2, 4, 0),
    # x, y_bar and x_dot give x_bar and its tangent.
    "hvp": Passes(3, 2, 8, 0),
    # x, y_bar and the cotangent of x_bar give the cotangents of x, weight and y_bar.
    "double_backward": Passes(3, 2, 2, 2),
    "forward_backward": Passes(3, 2, 5, 4),
}
# y_bar alone gives x_bar: what is dropped is drawn anew.
DROPOUT_PASSES = {"backward": Passes(1, 1, 0, 0), "forward_backward": Passes(2, 2, 0, 0)}


def passes_of(op: str, mode: str) -> Passes:
    """Passes that `mode` of `op` cannot do without."""
    return DROPOUT_PASSES.get(mode, PASSES[mode]) if op == "dropout" else PASSES[mode]


def minimum_bytes(workload: Workload, mode: str) -> int:
    """Bytes of `mode` of `workload` at least."""
    passes = passes_of(workload.op, mode)
    full = passes.full * workload.pass_bytes
    if workload.op in {"log_softmax", "dropout"}:
        return full
    params = passes.params * workload.num_params * ITEMSIZES[workload.param_dtype]
    # Statistics are float32.
    return full + params + passes.statistics * 4 * (workload.num_elements // workload.num_cols)


def is_multi_pass(op: str, mode: str) -> bool:
    """Whether the kernels of `mode` of `op` are declared to make more passes over memory than its minimum.

    Batch norm in training needs all of a channel for its sums before it can write any of it, and so does the backward
    of its evaluation; derivatives of second order are made of several operators.
    """
    return op == "batch_norm" or mode in {"hvp", "double_backward"} or (op, mode) == ("batch_norm_eval", "backward")


def kernel_bytes(workload: Workload, mode: str, device: torch.device) -> int:
    """Bytes of the passes that the kernels of this package are declared to make in a mode.

    Rows that are swept twice count once: the second sweep finds them in a cache. Channels count as often as they are
    read.
    """
    # The costs of kernels need triton, which is there wherever the kernels run.
    from perf import model
    from triton_kernels import launch

    with launch.use_chip(launch.chip_of(device)):
        calls = model.calls_of(workload, mode)
    rereads = workload.op in CHANNEL_OPS
    return sum(call.bytes_moved if rereads else call.minimum_bytes for call in calls)
