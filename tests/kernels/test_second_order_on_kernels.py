"""The generic properties of second order on the Triton kernels: they are held to what the reference is."""

from __future__ import annotations

import pytest
import torch

import primitives as pr
from tests.kernels.samples import samples_in_turns
from tests.op_cases import CASES
from tests.properties import alone_and_together, check_fake, check_vmap_of_call, layout_of
from tests.second_order import check_second_order, fullest, second_order_calls
from tests.support import assert_close, subsets

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
with_primitives = pytest.mark.parametrize("case", [c for c in CASES if c.second_order], ids=lambda case: case.name)
pytestmark = pytest.mark.usefixtures("on_kernels")


@pytest.mark.parametrize("case, sample, dtype", samples_in_turns(step=3))
def test_second_derivatives_are_those_of_the_definition(case, sample, dtype, device):
    check_second_order(case, sample, case.inputs(sample, dtype, device), case.perturbable(sample))


@with_primitives
def test_every_subset_of_perturbed_arguments(case, device):
    inputs = case.inputs(case.small, torch.float32, device)
    for names in subsets(case.perturbable(case.small)):
        check_second_order(case, case.small, inputs, names)


@with_primitives
def test_kernels_fakes_and_reference_agree(case, device):
    """In value, and in shape, dtype and strides of every output, the unwanted ones included.

    Half of the calls of each sample: each of them meets every second sample.
    """
    for turn, sample in enumerate(case.samples[1::9]):
        inputs = case.inputs(sample, torch.float32, device)
        for call in second_order_calls(case, sample, inputs, case.perturbable(sample))[turn % 2 :: 2]:
            check_fake(call)
            actual = call.outputs()
            with pr.use_backend("reference"):
                expected = call.outputs()
            assert [layout_of(x) for x in actual] == [layout_of(x) for x in expected], str(call)
            for i, (got, want) in enumerate(zip(actual, expected, strict=True)):
                assert_close(got, want, order=2, what=f"{call}, output {i}")


@with_primitives
def test_vmap_over_each_argument_and_all(case, device):
    inputs = case.inputs(case.small, torch.float64, device)
    calls = second_order_calls(case, case.small, inputs, case.perturbable(case.small))
    for primitive in case.second_order:
        call = fullest(calls, primitive)
        check_vmap_of_call(call, -1, alone_and_together(call))
