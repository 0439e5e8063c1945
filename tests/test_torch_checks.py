"""Torch's own checkers and the older interfaces of autograd, run over every record."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from perf.ops import FAMILIES
from perf.ops.attention import ATTENTION, MASKED_ATTENTION
from tests.call_properties import CallRecorder, fullest
from tests.properties import leaves, second_order
from tests.support import assert_close

every_family = pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
EVERYTHING = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def differentiated(case, sample, device):
    """A function of all differentiable arguments of a sample, and these as leaves."""
    names = case.perturbable(sample)
    inputs = leaves(case.inputs(sample, torch.float64, device), names)
    return case.of(names, inputs, sample), [inputs[name] for name in names]


@every_family
def test_gradcheck(case, device):
    everything = dict.fromkeys(("check_forward_ad", "check_batched_grad", "check_batched_forward_grad"), True)
    assert torch.autograd.gradcheck(*differentiated(case, case.small, device), **everything)


@every_family
def test_gradgradcheck(case, device):
    everything = dict.fromkeys(("check_fwd_over_rev", "check_rev_over_rev", "check_batched_grad"), True)
    assert torch.autograd.gradgradcheck(*differentiated(case, case.tiny, device), **everything)


def calls(case, device):
    """The fullest call of each primitive."""
    case = MASKED_ATTENTION if case is ATTENTION else case
    made = second_order(case, case.small, torch.float32, device, case.perturbable(case.small))[1]
    return {primitive: fullest(made, primitive) for primitive in (*case.first_order, *case.second_order)}


# Torch 2.15 warns of what its checker does itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@every_family
@pytest.mark.parametrize("utilities", [EVERYTHING[:3], pytest.param(EVERYTHING[3:], marks=pytest.mark.nightly)])
def test_opcheck(case, utilities, device):
    """All arguments of first order require grad, where the op has derivatives in them.

    By day symbolic sizes are left to the training step of test_torch_compile.py, which two sizes share.
    """
    # Statistics that a derivative receives are values of x, not variables: its own derivative has none for them.
    frozen = {*case.arguments, *case.forward.spec.statistics} - set(case.differentiable)
    for primitive, call in calls(case, device).items():
        args = [
            a.clone().requires_grad_()
            if isinstance(a, torch.Tensor) and a.is_floating_point() and name not in frozen
            else a
            for name, a in zip(call.names, call.args, strict=True)
        ]
        # The last utility differentiates the sum of all outputs, which a primitive with statistics refuses.
        plain = utilities == EVERYTHING[3:] and (primitive.spec.statistics or primitive in case.second_order)
        torch.library.opcheck(call.overload, call.args if plain else tuple(args), test_utils=utilities)


class Block(torch.nn.Module):
    """A record's op between two other operations."""

    def __init__(self, case, inputs):
        super().__init__()
        self.case = case
        self.parameters_in_order = case.arguments[1:]
        for name in self.parameters_in_order:
            self.register_buffer(name, inputs[name])

    def forward(self, x):
        values = {name: getattr(self, name) for name in self.parameters_in_order}
        return self.case.outputs({"x": x.sin(), **values}, self.case.small)[0] * 2


# torch.export deprecates a spelling that it uses itself.
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize(
    "case, strict",
    # Strict export is Dynamo, which a training step of tests/test_torch_compile.py takes for each op.
    [pytest.param(case, i == 1, id=f"{case.name}-strict={i == 1}") for i, case in enumerate(FAMILIES)],
)
def test_export(case, strict, device):
    inputs = case.inputs(case.small, torch.float32, device)
    block, x = Block(case, inputs), inputs["x"]
    program = torch.export.export(block, (x,), strict=strict)
    for exported in (program, program.run_decompositions()):
        assert any(node.target is case.forward.overload for node in exported.graph.nodes)
        assert_close(exported.module()(x), block(x))


@every_family
def test_activation_checkpointing(case, device):
    function, args = differentiated(case, case.small, device)
    expected = torch.autograd.grad(function(*args).sin().sum(), args)
    with CallRecorder() as recorder:
        y = checkpoint(lambda *values: function(*values).sin(), *args, use_reentrant=False)
        actual = torch.autograd.grad(y.sum(), args)
    overloads = [call.overload for call in recorder.calls]
    assert overloads == [case.forward.overload, case.forward.overload, case.bwd.overload]
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
