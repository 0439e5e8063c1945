"""Values: outputs, cotangents and tangents against the definition in float64, for every dtype, size and layout."""

from __future__ import annotations

import pytest
import torch

from tests.op_cases import CASES
from tests.properties import check_fake, check_jvp, check_outputs, check_vjp, leaves, recorded_calls
from tests.support import dtype_id, like

SAMPLES = [pytest.param(case, sample, id=f"{case.name}-{sample}") for case in CASES for sample in case.samples]
SMALL = [pytest.param(case, id=case.name) for case in CASES]
every_dtype = pytest.mark.parametrize(
    "dtype", sorted({d for case in CASES for d in case.dtypes}, key=str), ids=dtype_id
)


@every_dtype
@pytest.mark.parametrize("case, sample", SAMPLES)
def test_outputs_are_those_of_the_definition(case, sample, dtype, device):
    check_outputs(case, sample, case.inputs(sample, dtype, device))


@every_dtype
@pytest.mark.parametrize("case, sample", SAMPLES)
def test_cotangents_are_those_of_the_definition(case, sample, dtype, device):
    check_vjp(case, sample, case.inputs(sample, dtype, device), case.perturbable(sample))


@every_dtype
@pytest.mark.parametrize("case, sample", SAMPLES)
def test_tangents_are_those_of_the_definition(case, sample, dtype, device):
    check_jvp(case, sample, case.inputs(sample, dtype, device), case.perturbable(sample))


@pytest.mark.parametrize("case, sample", SAMPLES)
def test_fake_outputs_have_the_layout_of_real_ones(case, sample, device):
    """Shape, dtype and stride of the forward, vjp and jvp primitives, for single arguments and all of them."""
    inputs = case.inputs(sample, torch.bfloat16, device)
    for call in recorded_calls(case, sample, inputs):
        check_fake(call)


@pytest.mark.parametrize("case", SMALL)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_nan_and_infinity_propagate_as_in_torch(case, value, device):
    """Torch's own op says where: the definition overflows in places where a stable formula does not."""
    inputs = case.inputs(case.small, torch.float32, device)
    inputs["x"].view(-1)[1] = value
    y = case.outputs(inputs, case.small)[0]
    expected = case.torch_function(*inputs.values(), **dict(case.small.options))
    assert not y.isfinite().all()
    torch.testing.assert_close(y, expected, equal_nan=True)


@pytest.mark.parametrize("case", SMALL)
def test_two_runs_agree_bitwise(case, device):
    inputs = case.inputs(case.samples[-1], torch.float32, device)
    names = case.perturbable(case.samples[-1])

    def run() -> list[torch.Tensor]:
        prepared = leaves(inputs, names)
        outputs = case.outputs(prepared, case.samples[-1])
        bars = torch.autograd.grad(outputs[0], [prepared[n] for n in names], like(outputs[0], seed=1))
        return [*outputs, *bars]

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("case", SMALL)
def test_arguments_are_not_written(case, device):
    inputs = case.inputs(case.small, torch.float32, device)
    copies = {name: value.clone() for name, value in inputs.items()}
    for call in recorded_calls(case, case.small, inputs):
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in call.args]
        call.outputs()
        assert all(torch.equal(a, b) for a, b in zip(call.args, before, strict=True) if isinstance(a, torch.Tensor))
    assert all(torch.equal(inputs[name], copy) for name, copy in copies.items())
