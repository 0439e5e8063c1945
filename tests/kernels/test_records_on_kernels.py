"""The records on the Triton kernels: they are held to what the reference is."""

import contextlib
import dataclasses

import pytest
import torch

import primitives as pr
from perf.ops import CASES, FAMILIES
from perf.ops.samples import DTYPES
from primitives.kernels.runtime.chips import Limits, use_limits
from tests.call_properties import check_call, check_vmap_of_call, fullest
from tests.properties import check_jvp, check_outputs, check_vjp, lie_anew, second_order, tiny_function
from tests.support import assert_close, dtype_id, nested

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# Other ops on the same primitives call the kernels of these, and their calls are checked one by one.
every_family = pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)

# A chip that holds almost nothing: rows of more than 16 columns are swept and split, channels take several tiles.
TINY = {
    **{f.name: 16 for f in dataclasses.fields(Limits) if f.name.endswith(("_cols", "_tile"))},
    "layer_norm_fwd_bytes": 64,
    "double_divisor": 1,
    "channel_tile_bytes": 256,
    "max_row_splits": 4,
}
CHIPS = {"usual": contextlib.nullcontext, "tiny": lambda: use_limits(**TINY)}
# The interpreter takes a thousand times as long for a tile as for its elements.
MOST_ON_TINY = 200

# Samples meet dtypes, chips and halves of their calls in turns, out of step with each other and with the layouts, of
# which there are four too.
SAMPLES = [
    (
        *(case, sample, DTYPES[(i + i // 4) % 4]),
        *("tiny" if i % 3 == 0 and sample.numel <= MOST_ON_TINY else "usual", i // 3 % 2),
    )
    for case in CASES
    for i, sample in enumerate(case.samples)
]


def recorded(case, sample, dtype, device):
    """Calls of all orders, made by the reference, which is faster."""
    with pr.use_backend("reference"):
        return second_order(case, sample, dtype, device, case.perturbable(sample))[1]


def is_anew(case, sample):
    return sample in lie_anew(case.samples)


# Nightly those that differ from others in sizes alone, which plans of launchers meet in tests of these.
@pytest.mark.parametrize(
    "case, sample, dtype, chip, half",
    [
        pytest.param(
            *each,
            id=f"{each[0].name}-{each[1]}-{dtype_id(each[2])}-{each[3]}",
            marks=[pytest.mark.nightly] * (not is_anew(*each[:2])),
        )
        for each in SAMPLES
    ],
)
def test_calls_of_all_orders(case, sample, dtype, chip, half, device):
    calls = recorded(case, sample, dtype, device)
    with pr.use_backend("triton"), CHIPS[chip]():
        for call in calls[half::2] or calls:
            # The interpreter cuts bfloat16 off instead of rounding it: half a unit in the last place more.
            once = case.is_rounded_once(call.overload)
            roundings, fake = 1 + (dtype is torch.bfloat16), is_anew(case, sample)
            check_call(call, fake=fake, roundings=roundings, rounds_once=once)


@pytest.mark.usefixtures("backend")
@every_case
def test_values_and_derivatives_from_the_public_function_down(case, device):
    """Backward kernels read what forward kernels have left for them."""
    inputs = case.inputs(case.small, torch.float32, device)
    check_outputs(case, case.small, inputs)
    check_vjp(case, case.small, inputs, case.differentiable)
    check_jvp(case, case.small, inputs, case.differentiable)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("takes_turns", [True, pytest.param(False, marks=pytest.mark.nightly)])
@every_family
def test_vmap_over_half_of_the_arguments_and_all(case, takes_turns, device):
    """So that each is batched beside some that are not, and the other way round: rules are tested without kernels."""
    calls = recorded(case, case.small, torch.float64, device)
    for i, primitive in enumerate((*case.first_order, *case.second_order)):
        call = fullest(calls, primitive)
        count = len(call.tensors)
        chosen = [*filter(len, (range(0, count, 2), range(1, count, 2), range(count)))]
        check_vmap_of_call(call, -1, chosen[i % len(chosen) :][:1] if takes_turns else chosen)


# Rules call the same operators on every implementation, and `test_every_nesting` holds those of all orders.
@pytest.mark.usefixtures("backend")
@every_family
def test_a_nesting_in_the_input(case, device):
    function, args = tiny_function(case, device)
    found, truth = (use(nested(function, "frf"))(*args) for use in (lambda f: f, pr.use_backend("reference")))
    assert_close(found, truth, order=3)
