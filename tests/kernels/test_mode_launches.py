"""A step of each mode of the bench launches no kernel that the table of machine code lacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from perf.machine_code import cases
from perf.ops import CASES
from perf.steps import make_sample, make_step
from perf.test_bench import OURS, function_of
from tests.kernels.calls import launched_by

CPU = torch.device("cpu")
# Of the operations that the bench measures.
WORKLOADS = [w for case in CASES if case.gpu_workloads for w in case.small_workloads if not w.masked]


def launches(run: Callable[[], object]) -> set[str]:
    """The variants of kernels that `run` would launch: what there is among the operands, of which dtype, and flags."""
    return {
        f"{kernel.__name__} {[arg.dtype if isinstance(arg, torch.Tensor) else arg is None for arg in args]} "
        f"{sorted(constants.items(), key=str)}"
        for kernel, _, args, constants in launched_by(run)
    }


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.key)
def test_steps_launch_what_the_table_of_machine_code_has(workload):
    in_table = launches(lambda: [cases.launch_mode(workload, mode) for mode in workload.modes])
    sample = make_sample(workload, CPU)
    for mode in (*workload.modes, "forward_backward"):
        launched = launches(make_step(mode, function_of(OURS, workload, CPU), sample))
        assert launched, mode
        assert in_table >= launched, mode
