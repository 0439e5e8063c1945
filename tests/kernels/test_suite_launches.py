"""Steps of the suite's dropouts and of batch norm in evaluation launch what the time model counts."""

from __future__ import annotations

import pytest
import torch

from perf import model
from perf.suite.modes import make_sample, make_steps
from perf.suite.providers import provider
from perf.workloads import Workload
from triton_kernels._kernel import observe

WORKLOADS = {
    "dropout": Workload("small", "dropout", (8, 64), dtype="float32"),
    "batch_norm_eval": Workload("small", "batch_norm_eval", (4, 3, 4, 4), dtype="float32"),
}


@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("mode", ["forward", "backward", "forward_backward", "jvp"])
@pytest.mark.parametrize("op", WORKLOADS)
def test_steps_launch_what_is_predicted(op: str, mode: str) -> None:
    workload = WORKLOADS[op]
    side = provider("primitives")
    step = make_steps(mode, side.function(workload), side.wrap)(make_sample(workload, mode, torch.device("cpu")))
    launched = []
    with observe(lambda kernel, grid, args, constants: launched.append(kernel.__name__)):
        step()
    assert len(launched) == sum(call.launches for call in model.calls_of(workload, mode)), launched
