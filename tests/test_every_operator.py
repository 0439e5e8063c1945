"""`check_rules`, as users have it, on every operator of the package: values, derivatives, batching, layouts, fakes."""

import functools

import pytest
import torch

import primitives as pr
from perf.ops import FAMILIES
from perf.ops.attention import ATTENTION, CAUSAL_ATTENTION, MASKED_ATTENTION
from primitives.testing import check_rules
from tests.call_properties import fullest
from tests.properties import second_order

# Attention by each of its options.
RECORDS = {case.name: case for case in FAMILIES if case is not ATTENTION}
RECORDS |= {"causal attention": CAUSAL_ATTENTION, "masked attention": MASKED_ATTENTION}
OPERATORS = {
    f"{name}: {primitive.name}": (case, primitive)
    for name, case in RECORDS.items()
    for primitive in (*case.first_order, *case.second_order)
}
# A second each. By day `test_records` holds their values, and `test_vmap` their batches; here each record has one
# operator, and another one than the record before it. Those with more around a norm have its rules.
NIGHTLY = {*OPERATORS} - {
    f"{name}: {case.first_order[i % len(case.first_order)].name}"
    for i, (name, case) in enumerate(RECORDS.items())
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
