"""A step of each mode of the suite launches the kernels that the time model counts."""

from __future__ import annotations

import pytest
import torch

import primitives as pr
from perf import model
from perf.suite.modes import make_sample, make_steps
from perf.workloads import Workload
from triton_kernels._kernel import observe

WORKLOADS = {
    "layer_norm": Workload("small", "layer_norm", (40, 64), dtype="float32"),
    "log_softmax": Workload("small", "log_softmax", (8, 64), dtype="float32"),
    "batch_norm": Workload("small", "batch_norm", (4, 3, 4, 4), dtype="float32"),
}
FUNCTIONS = {
    "layer_norm": lambda x, weight, bias: pr.functional.layer_norm(x, x.shape[-1:], weight, bias),
    "log_softmax": lambda x: pr.functional.log_softmax(x, -1),
    "batch_norm": lambda x, weight, bias: pr.functional.batch_norm(x, None, None, weight, bias, training=True),
}


@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("mode", model.MODES)
@pytest.mark.parametrize("op", WORKLOADS)
def test_steps_launch_what_is_predicted(op: str, mode: str) -> None:
    workload = WORKLOADS[op]
    step = make_steps(mode, FUNCTIONS[op], lambda function: function)(make_sample(workload, mode, torch.device("cpu")))
    launched = []
    with observe(lambda kernel, grid, args, constants: launched.append(kernel.__name__)):
        step()
    assert len(launched) == sum(call.launches for call in model.calls_of(workload, mode)), launched
