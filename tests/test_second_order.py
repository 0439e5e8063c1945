"""Second derivatives of every op, and the primitives that compute them, held to the definition."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.op_cases import CASES
from tests.properties import alone_and_together, check_fake, check_vmap_of_call, recorded_calls
from tests.second_order import check_second_order, fullest, second_order_calls
from tests.support import dtype_id, subsets

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
with_primitives = pytest.mark.parametrize("case", [c for c in CASES if c.second_order], ids=lambda case: case.name)


@functools.cache
def calls(case, device, dtype=torch.float64):
    """Calls of the second-order primitives, for every subset of perturbed arguments."""
    inputs = case.inputs(case.small, dtype, device)
    names = case.perturbable(case.small)
    return [call for chosen in subsets(names) for call in second_order_calls(case, case.small, inputs, chosen)]


@pytest.mark.parametrize(
    "case, sample, dtype",
    [
        pytest.param(case, sample, dtype, id=f"{case.name}-{sample}-{dtype_id(dtype)}")
        for case in CASES
        for sample in case.samples
        for dtype in case.dtypes
    ],
)
def test_second_derivatives_are_those_of_the_definition(case, sample, dtype, device):
    check_second_order(case, sample, case.inputs(sample, dtype, device), case.perturbable(sample))


@every_case
def test_every_subset_of_perturbed_arguments(case, device):
    inputs = case.inputs(case.small, torch.float64, device)
    for names in subsets(case.perturbable(case.small)):
        check_second_order(case, case.small, inputs, names)


@with_primitives
def test_second_derivatives_run_on_the_primitives(case, device):
    """One operator for the reverse derivatives of both modes, one for forward over reverse."""
    names = case.perturbable(case.small)
    recorded = second_order_calls(case, case.small, case.inputs(case.small, torch.float64, device), names)
    pairing, bwd_jvp = (primitive.overload for primitive in case.second_order)
    assert [call.overload for call in recorded] == [pairing, bwd_jvp, bwd_jvp, pairing]


@with_primitives
def test_fake_outputs_have_the_real_layout(case, device):
    for sample in case.samples[::2]:
        inputs = case.inputs(sample, torch.bfloat16, device)
        for call in second_order_calls(case, sample, inputs, case.perturbable(sample)):
            check_fake(call)


@with_primitives
def test_vmap_over_every_subset_of_arguments(case, device):
    for primitive in case.second_order:
        call = fullest(calls(case, device), primitive)
        check_vmap_of_call(call, -1, subsets(range(len(call.tensors))))


@with_primitives
def test_vmap_for_every_mask(case, device):
    for call in calls(case, device):
        check_vmap_of_call(call, 0, alone_and_together(call))


@with_primitives
def test_opcheck(case, device):
    everything = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for primitive in case.second_order:
        call = fullest(calls(case, device), primitive)
        torch.library.opcheck(call.overload, call.args, test_utils=everything)


@with_primitives
def test_unwanted_outputs_are_empty(case, device):
    """Only what is wanted is computed: what is not takes no memory, and what is has the value that it has alone."""
    for primitive in case.second_order:
        call = fullest(calls(case, device), primitive)
        if "wanted" not in call.names:
            continue
        position, everything = call.names.index("wanted"), [True] * len(call.argument("wanted"))
        full = call.outputs([*call.args[:position], everything, *call.args[position + 1 :]])
        for chosen in [(), *subsets(range(len(everything)))]:
            mask = [i in chosen for i in range(len(everything))]
            outputs = call.outputs([*call.args[:position], mask, *call.args[position + 1 :]])
            for i, (got, want) in enumerate(zip(outputs, full, strict=True)):
                if mask[i]:
                    torch.testing.assert_close(got, want, msg=lambda text, i=i, mask=mask: f"{mask}, {i}: {text}")
                else:
                    assert got.numel() == 0, f"{call}, wanted {mask}: output {i}"


@with_primitives
def test_cotangents_of_unwanted_outputs_mean_nothing(case, device):
    """A backward primitive's stand-in for an output that nobody asked for takes part in no derivative."""
    inputs = case.inputs(case.small, torch.float64, device)
    names = case.perturbable(case.small)
    for call in recorded_calls(case, case.small, inputs):
        if call.overload is not case.bwd.overload or "wanted" not in call.names or len(names) == 1:
            continue
        args = [a.clone().requires_grad_() if i == call.names.index("x") else a for i, a in enumerate(call.args)]
        outputs, mask = call.outputs(args), call.argument("wanted")
        bars = [torch.ones_like(out) for out in outputs]
        (everything,) = torch.autograd.grad(
            outputs, args[call.names.index("x")], bars, retain_graph=True, allow_unused=True
        )
        chosen = [i for i, want in enumerate(mask) if want]
        (expected,) = torch.autograd.grad(
            [outputs[i] for i in chosen], args[call.names.index("x")], [bars[i] for i in chosen], allow_unused=True
        )
        assert torch.equal(everything, expected) if expected is not None else not everything.any()
