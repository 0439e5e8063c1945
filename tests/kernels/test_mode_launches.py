"""A step of each mode of the suite launches what the time model counts and the table of machine code has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import primitives as pr
from perf import model
from perf.machine_code import cases
from perf.suite.modes import make_sample, make_steps
from perf.workloads import KERNEL_MODES, Workload
from triton_kernels._kernel import intercept, observe

if TYPE_CHECKING:
    from collections.abc import Callable

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


def variants(run: Callable[[], object]) -> set[str]:
    """The variants of kernels that `run` would launch: what there is among the operands, of which dtype, and flags."""
    found = set()

    def note(kernel, grid, args, constants):
        operands = [arg.dtype if isinstance(arg, torch.Tensor) else arg is None for arg in args]
        found.add(f"{kernel.__name__} {operands} {sorted(constants.items(), key=str)}")

    with intercept(note):
        run()
    return found


@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("op", WORKLOADS)
def test_the_table_of_machine_code_has_what_steps_launch(op: str) -> None:
    workload = WORKLOADS[op]
    shape = cases.Shape(op, workload.shape, "float32")

    def launch_cases(*modes: str) -> None:
        for mode in modes:
            cases.launch_mode(shape, mode)

    def run_steps() -> None:
        for mode in model.MODES:
            make_steps(mode, FUNCTIONS[op], lambda function: function)(
                make_sample(workload, mode, torch.device("cpu"))
            )()

    launched = variants(run_steps)
    assert len(launched) >= 5
    assert launched <= variants(lambda: launch_cases(*KERNEL_MODES))
    in_reverse = variants(lambda: hessian_in_reverse(op, workload))
    assert in_reverse <= variants(lambda: launch_cases("forward", "backward", "gradient_backward"))


def hessian_in_reverse(op: str, workload: Workload) -> None:
    """The gradient of the gradient's product with a vector, as training with a penalty on all gradients takes it."""
    sample = make_sample(workload, "double_backward", torch.device("cpu"))
    inputs = [value.requires_grad_() for value in (sample.x, *sample.params)]
    gradients = torch.autograd.grad(FUNCTIONS[op](*inputs), inputs, sample.y_bar, create_graph=True)
    torch.autograd.grad(gradients, inputs[:2], [torch.ones_like(g) for g in gradients])
