"""A step of each mode of the suite launches what the time model counts and the table of machine code has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from perf import model
from perf.machine_code import cases
from perf.suite.modes import make_sample, make_steps
from perf.suite.providers import provider
from perf.workloads import GPU_WORKLOADS, KERNEL_MODES, OPS, Workload
from triton_kernels._kernel import intercept, observe

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_ORDER = ("forward", "backward", "jvp")
# Small ones of every op, layout and kind of parameters that the suite has.
WORKLOADS = (
    Workload("small", "layer_norm", (40, 64), dtype="float32"),
    Workload("bare", "layer_norm", (40, 64), dtype="float32", affine=False),
    Workload("small", "log_softmax", (8, 64), dtype="float32"),
    Workload("across", "log_softmax", (2, 8, 64), dtype="float32", dim=1, modes=FIRST_ORDER),
    Workload("small", "batch_norm", (4, 3, 4, 4), dtype="float32"),
    Workload("last", "batch_norm", (4, 3, 4, 4), dtype="float32", channels_last=True),
    Workload("small", "batch_norm_eval", (4, 3, 4, 4), dtype="float32", modes=FIRST_ORDER),
    Workload("last", "batch_norm_eval", (4, 3, 4, 4), dtype="float32", channels_last=True, modes=FIRST_ORDER),
    Workload("small", "dropout", (8, 64), dtype="float32", modes=FIRST_ORDER),
)
OF_SECOND_ORDER = [workload for workload in WORKLOADS if workload.modes == KERNEL_MODES]


def modes_of(workload: Workload) -> tuple[str, ...]:
    """The modes that are predicted of a workload."""
    return (*workload.modes, "forward_backward")


def step_of(workload: Workload, mode: str) -> Callable[[], object]:
    """One step of this package's side of the suite."""
    side = provider("primitives")
    return make_steps(mode, side.function(workload), side.wrap)(make_sample(workload, mode, torch.device("cpu")))


def key_of(value: Workload | str) -> str:
    """Name of a parameter."""
    return value.key if isinstance(value, Workload) else value


def test_every_op_and_mode_is_looked_at() -> None:
    assert {workload.op for workload in WORKLOADS} == set(OPS)
    assert {mode for workload in WORKLOADS for mode in modes_of(workload)} == set(model.MODES)


@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("workload, mode", [(w, mode) for w in WORKLOADS for mode in modes_of(w)], ids=key_of)
def test_steps_launch_what_is_predicted(workload: Workload, mode: str) -> None:
    step = step_of(workload, mode)
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


def variants_of_cases(workload: Workload, *modes: str) -> set[str]:
    """The variants that the cases of the table would launch."""
    shape = cases.Shape(
        workload.op, workload.shape, workload.dtype, workload.dim, workload.affine, workload.channels_last
    )
    return variants(lambda: [cases.launch_mode(shape, mode) for mode in modes])


def test_the_cases_have_every_workload_of_the_suite() -> None:
    fields = ("op", "shape", "dtype", "dim", "affine", "channels_last", "modes")
    found = {tuple(getattr(shape, name) for name in fields) for shape in cases.shapes()}
    assert {tuple(getattr(workload, name) for name in fields) for workload in GPU_WORKLOADS} <= found


@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("workload", WORKLOADS, ids=key_of)
def test_the_table_of_machine_code_has_what_steps_launch(workload: Workload) -> None:
    launched = variants(lambda: [step_of(workload, mode)() for mode in modes_of(workload)])
    assert launched
    assert launched <= variants_of_cases(workload, *workload.modes)


@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("workload", OF_SECOND_ORDER, ids=key_of)
def test_the_table_of_machine_code_has_hessians_in_reverse(workload: Workload) -> None:
    in_reverse = variants(lambda: hessian_in_reverse(workload))
    assert in_reverse <= variants_of_cases(workload, "forward", "backward", "gradient_backward")


def hessian_in_reverse(workload: Workload) -> None:
    """The gradient of the gradient's product with a vector, as training with a penalty on all gradients takes it."""
    sample = make_sample(workload, "double_backward", torch.device("cpu"))
    inputs = [value.requires_grad_() for value in (sample.x, *sample.params)]
    y = provider("primitives").function(workload)(*inputs)
    gradients = torch.autograd.grad(y, inputs, sample.y_bar, create_graph=True)
    torch.autograd.grad(gradients, inputs[:2], [torch.ones_like(g) for g in gradients])
