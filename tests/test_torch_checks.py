"""Export and activation checkpointing of every record."""

import pytest
import torch

from perf.ops import FAMILIES
from tests.support import assert_close


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
