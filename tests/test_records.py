"""Every record on every implementation: values and derivatives of two orders, and each call that these make.

Then every nesting of higher orders against the plain formula, batches against the loop, and `check_rules` as users have
it on every operator.
"""

import functools

import pytest
import torch
from torch.func import grad, jvp, vmap

import primitives as pr
from perf.ops import CASES, FAMILIES
from perf.ops.attention import ATTENTION, CAUSAL_ATTENTION, MASKED_ATTENTION
from perf.ops.log_softmax import LOG_SOFTMAX
from primitives.testing import check_rule, check_rules
from tests import properties
from tests.call_properties import BATCH, alone_and_together, check_call, check_vmap_of_call, distinct, fullest
from tests.properties import second_order
from tests.support import assert_close, dtype_id, like, subsets

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


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
of_one_order, of_two_orders = in_turns(1), in_turns(0)


@of_one_order
@pytest.mark.usefixtures("backend")
def test_values_and_derivatives_are_those_of_the_definition(case, sample, dtype, device):
    inputs, names = case.inputs(sample, dtype, device), case.perturbable(sample)
    properties.check_outputs(case, sample, inputs)
    properties.check_vjp(case, sample, inputs, names)
    properties.check_jvp(case, sample, inputs, names)


@of_two_orders
def test_second_derivatives_and_the_calls_that_they_make(case, sample, dtype, backend, device):
    # Of the samples of narrower dtypes.
    fake = dtype is not torch.float64 and sample in properties.lie_anew(case.samples[1::2])
    for call in properties.check_second_order(case, sample, dtype, device, case.perturbable(sample)):
        # ATen rounds the logarithm of the sum too.
        twice = backend == "cpu" and call.overload is LOG_SOFTMAX.forward.overload
        check_call(call, fake=fake, roundings=1 + twice, rounds_once=case.is_rounded_once(call.overload))


@pytest.mark.usefixtures("backend")
@every_case
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_nan_and_infinity_propagate_as_in_torch(case, value, device):
    properties.check_not_finite(case, value, device)


# Derivatives of higher order.


# Attention by each of its options.
OF_FUNCTIONS = {case.name: case for case in CASES}
OF_FUNCTIONS |= {"causal attention": CAUSAL_ATTENTION, "masked attention": MASKED_ATTENTION}


# From the third order on both backends differentiate the references. `tests/test_rules.py` has each set of arguments.
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    "name, order",
    [
        pytest.param(name, order, marks=[pytest.mark.in_turns(i), *[pytest.mark.nightly] * (order > 3)])
        for order in (3, 4)
        for i, name in enumerate(OF_FUNCTIONS)
    ],
)
def test_every_nesting(name, order, device):
    function, args = properties.tiny_function(OF_FUNCTIONS[name], device)
    check_rule(function, "nestings", args, order=order, devices=device)


@every_case
def test_a_product_of_a_loss_by_a_number(case, device):
    """Torch makes a float64 tangent of its float32 cotangent."""
    inputs = case.inputs(case.small, torch.float32, device)
    x, x_dot = inputs["x"], like(inputs["x"], seed=3)

    def loss(x):
        return (0.5 * case.of(["x"], inputs, case.small)(x).sin().sum()).exp()

    product = jvp(grad(loss), (x,), (x_dot,))[1]
    assert_close(product.float(), grad(lambda x: jvp(loss, (x,), (x_dot,))[1])(x), order=2)


# Batches.


def calls_of_subsets(case, device):
    """Calls of all orders, in float64, one for each subset of perturbed arguments."""
    names = case.perturbable(case.small)
    chosen = [some for some in subsets(names) if len(names) < 4 or len(some) in (1, len(names))]
    return distinct(c for some in chosen for c in second_order(case, case.small, torch.float64, device, some)[1])


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)
def test_primitives_for_every_mask(case, device):
    """Each set of wanted cotangents and of present tangents, batched over two of the arguments in turns, and all."""
    for turn, call in enumerate(calls_of_subsets(case, device)):
        *alone, together = alone_and_together(call)
        check_vmap_of_call(call, 0, {alone[turn % len(alone)], alone[turn // 2 % len(alone)], together})


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0)], ids=["seeds", "masks", "both"])
def test_third_derivatives_of_attention_for_batched_masks_and_seeds(in_dims, device):
    """These differentiate the reference, which sees the batch, where a primitive would have folded it away."""
    q, k, v = (MASKED_ATTENTION.inputs(MASKED_ATTENTION.small, torch.float64, device)[name] for name in ("x", "k", "v"))

    def third(seed, mask):
        def of(q):
            return pr.functional.attention(q, k, v, mask=mask, dropout_p=0.4, seed=seed).sin().sum()

        return jvp(lambda q: jvp(grad(of), (q,), (v.sum() * q,))[1], (q,), (q.cos(),))[1]

    full = torch.arange(BATCH, device=device), torch.tensor([[True, True, False, True], [False, True, True, True]])
    args = [x.to(device) if d == 0 else x[0].to(device) for x, d in zip(full, in_dims, strict=True)]
    actual = vmap(third, in_dims)(*args)
    for i in range(BATCH):
        assert_close(actual[i], third(*[x if d is None else x[i] for x, d in zip(args, in_dims, strict=True)]), order=3)


# Operators.

OF_OPERATORS = {name: case for name, case in OF_FUNCTIONS.items() if not case.family and case is not ATTENTION}
OPERATORS = {
    f"{name}: {primitive.name}": (case, primitive)
    for name, case in OF_OPERATORS.items()
    for primitive in (*case.first_order, *case.second_order)
}
# A second each. By day their values and batches are held above; here each record has one
# operator, and another one than the record before it. Those with more around a norm have its rules.
NIGHTLY = {*OPERATORS} - {
    f"{name}: {case.first_order[i % len(case.first_order)].name}"
    for i, (name, case) in enumerate(OF_OPERATORS.items())
    if name not in ("batch_norm_relu", "batch_norm_relu_eval", "add_layer_norm")
}


@functools.cache
def calls(case):
    """Calls of all orders, each argument perturbed."""
    return second_order(case, case.small, torch.float64, torch.device("cpu"), case.perturbable(case.small))[1]


def arguments(case, primitive):
    """Those of the call with the most tensors, away from where a function has no derivative."""
    call = fullest(calls(case), primitive)
    args = dict(zip(call.names, call.args, strict=True))
    if case.kink is not None and "y" in args:
        # The derivatives of a ReLU ask of y alone whether it is positive.
        args["y"] = args["y"].where(args["y"] > 0, -1.0)
    if primitive is ATTENTION.forward and args["mask"] is not None:
        # An lse of minus infinity has no differences.
        args["mask"] = args["mask"] | ~args["mask"].any(-1, keepdim=True)
    return tuple(args.values())


# Torch 2.15 warns of what its checker does itself.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "name, compile",
    [pytest.param(name, False, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in OPERATORS]
    + [pytest.param(name, True, marks=pytest.mark.nightly) for name in OPERATORS],
)
def test_the_rules_of_an_operator_hold(name, compile):
    case, primitive = OPERATORS[name]
    # Its reference calls layer norm's operators, whose kernels take statistics as given where s alone is moved.
    with pr.use_backend("reference" if case.name == "add_layer_norm" else "auto"):
        check_rules(primitive, arguments(case, primitive), compile=compile)
