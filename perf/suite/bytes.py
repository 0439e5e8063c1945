"""Bytes that a mode cannot do without, and bytes that this package's kernels for it cannot do without.

The minimum of a mode reads every full-size operand once and writes every result once, parameters and statistics
included. A public call may take several operators: `torch.func.jvp` computes y first, and then y_dot from x and x_dot,
which reads x twice. What these operators read and write at least is the second figure: the time of the mode over that
of a copy of so many bytes says how good the kernels are, whatever a fused one would save.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from perf.workloads import ITEMSIZES

if TYPE_CHECKING:
    from perf.workloads import Workload


class Passes(NamedTuple):
    """Full-size tensors that are read and written, and how many vectors of parameters and of statistics are touched."""

    reads: int
    writes: int
    params: int
    statistics: int


# x is read and y written; with them go weight and bias, and mean and rstd (log-softmax keeps neither).
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


# Full-size tensors that an operator reads and writes.
KERNEL_PASSES = {"": 2, "_bwd": 3, "_jvp": 3, "_bwd_jvp": 4, "_pairing": 5}
# The operators of this package that a mode calls, by what follows the name of the op.
KERNELS = {
    "forward": ("",),
    "backward": ("_bwd",),
    "forward_backward": ("", "_bwd"),
    "jvp": ("", "_jvp"),
    "hvp": ("", "_jvp", "_bwd", "_bwd_jvp"),
    "double_backward": ("_pairing",),
}


def kernels(workload: Workload, mode: str) -> tuple[str, ...]:
    """Names of the operators that this package calls in a mode."""
    names = tuple(workload.op + suffix for suffix in KERNELS[mode])
    # It keeps y and not x, so a cotangent of y goes on to x.
    keeps_output = workload.op == "log_softmax" and mode == "double_backward"
    return (*names, "log_softmax_bwd") if keeps_output else names


def kernel_bytes(workload: Workload, mode: str) -> int:
    """Bytes that the kernels of this package read and write at least in a mode; parameters are left out."""
    return workload.pass_bytes * sum(KERNEL_PASSES[name.removeprefix(workload.op)] for name in kernels(workload, mode))


def minimum_bytes(workload: Workload, mode: str) -> int:
    """Bytes of `mode` of `workload` at least."""
    passes = PASSES[mode]
    full = (passes.reads + passes.writes) * workload.pass_bytes
    params = passes.params * workload.num_params * ITEMSIZES[workload.param_dtype]
    if workload.op == "log_softmax":
        return full
    # Statistics are float32.
    return full + params + passes.statistics * 4 * (workload.num_elements // workload.num_cols)
