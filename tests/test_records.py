"""Every record on every implementation: values and derivatives of two orders, and each call that these make."""

import pytest
import torch

from perf.ops import CASES
from perf.ops.log_softmax import LOG_SOFTMAX
from tests.call_properties import check_call
from tests.properties import check_jvp, check_not_finite, check_outputs, check_second_order, check_vjp, lie_anew
from tests.support import dtype_id


def in_turns(parity):
    """Parameters `case, sample, dtype`: float64 for the samples of this parity in each case.

    The others have the narrower dtypes; sums of large ones may overflow in half precision. Backends take turns.
    """
    params = []
    for case in CASES:
        narrower = [case.narrower[i // 2 % len(case.narrower)] for i in range(len(case.samples))]
        narrower += [torch.float32] * len(case.large)
        for i, sample in enumerate([*case.samples, *case.large]):
            dtype = torch.float64 if i % 2 == parity else narrower[i]
            name, turn = f"{case.name}-{sample}-{dtype_id(dtype)}", pytest.mark.in_turns(i // 2)
            params.append(pytest.param(case, sample, dtype, id=name, marks=turn))
    return pytest.mark.parametrize("case, sample, dtype", params)


# float64 shows a wrong formula, the others a wrong rounding. Where one order takes the one, the other takes the other;
# among the calls that the second order makes are those of the first.
first_order, second_order = in_turns(1), in_turns(0)


@first_order
@pytest.mark.usefixtures("backend")
def test_values_and_derivatives_are_those_of_the_definition(case, sample, dtype, device):
    inputs, names = case.inputs(sample, dtype, device), case.perturbable(sample)
    check_outputs(case, sample, inputs)
    check_vjp(case, sample, inputs, names)
    check_jvp(case, sample, inputs, names)


@second_order
def test_second_derivatives_and_the_calls_that_they_make(case, sample, dtype, backend, device):
    # Of the samples of narrower dtypes.
    fake = dtype is not torch.float64 and sample in lie_anew(case.samples[1::2])
    for call in check_second_order(case, sample, dtype, device, case.perturbable(sample)):
        # ATen rounds the logarithm of the sum too.
        twice = backend == "cpu" and call.overload is LOG_SOFTMAX.forward.overload
        check_call(call, fake=fake, roundings=1 + twice, rounds_once=case.is_rounded_once(call.overload))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_nan_and_infinity_propagate_as_in_torch(case, value, device):
    check_not_finite(case, value, device)
