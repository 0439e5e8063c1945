"""A step of each mode of the suite launches what its calls declare and the table of machine code has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from perf.machine_code import cases
from perf.ops import CASES
from perf.ops.record import STEPS
from perf.suite.modes import make_sample, make_steps
from perf.suite.providers import provider
from tests.kernels.calls import launched_by

# Of the operations that the suite measures.
WORKLOADS = [w for case in CASES if case.gpu_workloads for w in case.small_workloads if not w.masked]


def launches(run: Callable[[], object]) -> list[str]:
    """The variants of kernels that `run` would launch: what there is among the operands, of which dtype, and flags."""
    return [
        f"{kernel.__name__} {[arg.dtype if isinstance(arg, torch.Tensor) else arg is None for arg in args]} "
        f"{sorted(constants.items(), key=str)}"
        for kernel, _, args, constants in launched_by(run)
    ]


def test_every_mode_is_looked_at():
    assert {mode for workload in WORKLOADS for mode in (*workload.modes, "forward_backward")} == set(STEPS)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.key)
def test_steps_launch_what_is_declared_and_what_the_table_of_machine_code_has(workload):
    in_table = set(launches(lambda: [cases.launch_mode(workload, mode) for mode in workload.modes]))
    side = provider("primitives")
    for mode in (*workload.modes, "forward_backward"):
        steps = make_steps(mode, side.function(workload), side.wrap)
        launched = launches(steps(make_sample(workload, mode, torch.device("cpu"))))
        assert len(launched) == sum(call.cost().launches for call in cases.calls_of_steps(workload, mode)), (
            mode,
            launched,
        )
        assert in_table.issuperset(launched), mode
