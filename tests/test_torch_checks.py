"""Export and activation checkpointing of every record."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from perf.ops import FAMILIES
from tests.call_properties import CallRecorder
from tests.properties import leaves
from tests.support import assert_close

every_family = pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)


def differentiated(case, sample, device):
    """A function of all differentiable arguments of a sample, and these as leaves."""
    names = case.perturbable(sample)
    inputs = leaves(case.inputs(sample, torch.float64, device), names)
    return case.of(names, inputs, sample), [inputs[name] for name in names]


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
