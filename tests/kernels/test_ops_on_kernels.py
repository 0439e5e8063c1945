"""The generic properties on the Triton kernels, from the public function down: they are held to what the reference is.

On a GPU the same records run on the kernels without this file: `pytest tests --device cuda`.
"""

from __future__ import annotations

import pytest
import torch
from torch.func import jacfwd, jvp, vmap

import primitives as pr
from tests.kernels.samples import samples_in_turns
from tests.op_cases import CASES
from tests.properties import (
    BATCH,
    alone_and_together,
    batched,
    check_fake,
    check_jvp,
    check_outputs,
    check_vjp,
    check_vmap,
    check_vmap_of_call,
    layout_of,
    leaves,
    recorded_calls,
)
from tests.support import assert_close, like, subsets
from tests.test_nestings import check_nesting, flattened, nested, nestings, single_argument, true_derivative

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
pytestmark = pytest.mark.usefixtures("on_kernels")


def thinned(chosen):
    """All of up to seven, else every third and the last."""
    chosen = list(chosen)
    return chosen if len(chosen) <= 7 else [*chosen[:-1:3], chosen[-1]]


@pytest.mark.parametrize("case, sample, dtype", samples_in_turns())
def test_outputs_cotangents_and_tangents_are_those_of_the_definition(case, sample, dtype, device):
    inputs = case.inputs(sample, dtype, device)
    check_outputs(case, sample, inputs)
    check_vjp(case, sample, inputs, case.perturbable(sample))
    check_jvp(case, sample, inputs, case.perturbable(sample))


@every_case
def test_subsets_of_perturbed_arguments(case, device):
    """Up to three arguments in every combination; of the 31 of five arguments, every third and all at once."""
    inputs = case.inputs(case.small, torch.float32, device)
    for names in thinned(subsets(case.differentiable)):
        check_vjp(case, case.small, inputs, names)
        check_jvp(case, case.small, inputs, names)


@every_case
def test_fake_outputs_have_the_layout_of_the_kernels(case, device):
    """What a compiler is told is what a kernel returns: shape, dtype and stride, unwanted outputs included."""
    for sample in case.samples[1::9]:
        for call in recorded_calls(case, sample, case.inputs(sample, torch.bfloat16, device)):
            check_fake(call)


@every_case
def test_kernels_and_reference_return_the_same_layouts(case, device):
    for sample in case.samples[1::9]:
        for call in recorded_calls(case, sample, case.inputs(sample, torch.float32, device)):
            actual = call.outputs()
            with pr.use_backend("reference"):
                expected = call.outputs()
            assert [layout_of(x) for x in actual] == [layout_of(x) for x in expected], str(call)


@every_case
def test_vmap_over_subsets_of_arguments(case, device):
    """Up to three arguments in every combination; of the 31 of five arguments, every third and all at once."""
    inputs = case.inputs(case.small, torch.float64, device)

    def outputs(*values):
        return case.outputs(dict(zip(case.arguments, values, strict=True)), case.small)

    values = list(inputs.values())
    for positions in thinned(subsets(range(len(values)))):
        check_vmap(outputs, values, positions, 0, case.name)


@every_case
def test_vmap_of_derivative_primitives(case, device):
    """Each wanted cotangent and each tangent over all tensors; where all are wanted, over each tensor alone too."""
    for call in recorded_calls(case, case.small, case.inputs(case.small, torch.float64, device))[1:]:
        mask = call.argument("wanted") if "wanted" in call.names else [a is not None for a in call.args]
        chosen = alone_and_together(call)
        check_vmap_of_call(call, -1, chosen if all(mask) else chosen[-1:])


@every_case
def test_vmap_of_vmap(case, device):
    """Both levels batch every argument: two batch axes reach the kernels."""
    inputs = case.inputs(case.small, torch.float64, device)
    names = case.differentiable
    twice = [batched(batched(inputs[name], 0), 0) for name in names]
    function = case.of(names, inputs, case.small)
    dots = tuple(like(value, seed=3) for value in twice)
    y, y_dot = jvp(vmap(vmap(function)), tuple(twice), dots)
    for i in range(BATCH):
        for j in range(BATCH):
            primals, tangents = tuple(v[i, j] for v in twice), tuple(d[i, j] for d in dots)
            expected, expected_dot = jvp(function, primals, tangents)
            assert_close(y[i, j], expected)
            assert_close(y_dot[i, j], expected_dot)


# Derivatives of order four launch no kernel that those of order three do not: of these, one of each kind and two mixed.
# All of them, and all of the third order in each argument, are in `test_nestings`, on the reference.
@every_case
@pytest.mark.parametrize("word", [*nestings(1, 2, 3), "ffff", "rrrr", "frfr", "rffr"])
def test_nestings_in_the_input(case, word, device):
    check_nesting(case, device, word, (0,) * len(word))


@single_argument
@pytest.mark.parametrize("word", [*nestings(2), "fff", "rrr"])
def test_nestings_in_each_other_argument(case, position, word, device):
    check_nesting(case, device, word, (position,) * len(word))


@every_case
@pytest.mark.parametrize("word", [*nestings(2), "frf", "rfr"])
def test_nestings_in_all_arguments_at_once(case, word, device):
    """Every mixed partial derivative of a weighted sum: those of each output would take several times the programs."""
    function, vector = flattened(case, device, true=False)
    weights = like(function(vector), seed=9)
    actual = nested(lambda vector: (function(vector) * weights).sum(), word)(vector)
    expected = torch.tensordot(weights, true_derivative(case, device, None, len(word)), weights.dim())
    assert_close(actual, expected, order=len(word), what=word)


@every_case
def test_per_sample_jacobians(case, device):
    inputs = case.inputs(case.tiny, torch.float64, device)
    stack = batched(inputs["x"], 0)
    actual = vmap(jacfwd(case.of(["x"], inputs, case.tiny)))(stack)
    truth = case.of(["x"], inputs, case.tiny, true=True)
    for got, x in zip(actual, stack, strict=True):
        assert_close(got, jacfwd(truth)(x))


@every_case
def test_opcheck(case, device):
    for call in recorded_calls(case, case.small, case.inputs(case.small, torch.float32, device))[-1:]:
        torch.library.opcheck(call.overload, call.args, test_utils=("test_schema", "test_faketensor"))


@every_case
def test_two_runs_agree_bitwise(case, device):
    inputs = case.inputs(case.samples[0], torch.float32, device)
    for sample in case.samples[2::9]:
        inputs = case.inputs(sample, torch.float32, device)
        names = case.perturbable(sample)

        def run(inputs=inputs, names=names, sample=sample):
            prepared = leaves(inputs, names)
            outputs = case.outputs(prepared, sample)
            return [*outputs, *torch.autograd.grad(outputs[0], [prepared[n] for n in names], like(outputs[0], seed=1))]

        for first, second in zip(run(), run(), strict=True):
            assert torch.equal(first, second)
