"""Rules: what they compute, what they are asked for, what they keep, and where they are not called at all."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import primitives as pr
from primitives.core import registered_primitives
from tests.op_cases import CASES
from tests.properties import CallRecorder, check_jvp, check_vjp, jvp_call, leaves, vjp_call
from tests.support import DIFFERENCE_TOLERANCE, assert_close, like, subsets, tolerance

# Every argument alone, every pair and so on: rules see each combination of perturbed arguments.
SUBSETS = [
    pytest.param(case, names, id=f"{case.name}-{'+'.join(names)}")
    for case in CASES
    for names in subsets(case.differentiable)
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_subset = pytest.mark.parametrize("case, names", SUBSETS)


def directions(inputs, names, seed):
    """A random direction for each argument in `names`."""
    return tuple(like(inputs[name], seed + i) for i, name in enumerate(names))


@every_subset
def test_jvp_is_the_directional_derivative(case, names, device):
    inputs = case.inputs(case.small, torch.float64, device)
    function, primals = case.of(names, inputs, case.small), tuple(inputs[name] for name in names)
    dots = directions(inputs, names, seed=5)
    _, y_dot = torch.func.jvp(function, primals, dots)

    def at(step: float) -> torch.Tensor:
        return function(*[x + step * x_dot for x, x_dot in zip(primals, dots, strict=True)])

    h = 1e-3
    difference = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
    assert (y_dot - difference).abs().max() < DIFFERENCE_TOLERANCE


@every_subset
def test_vjp_is_the_transpose_of_jvp(case, names, device):
    inputs = case.inputs(case.small, torch.float64, device)
    function, primals = case.of(names, inputs, case.small), tuple(inputs[name] for name in names)
    dots = directions(inputs, names, seed=9)
    _, y_dot = torch.func.jvp(function, primals, dots)
    y, vjp = torch.func.vjp(function, *primals)
    y_bar = like(y, seed=21)
    pairing = sum((x_bar * x_dot).sum() for x_bar, x_dot in zip(vjp(y_bar), dots, strict=True))
    torch.testing.assert_close((y_bar * y_dot).sum(), pairing, rtol=tolerance(torch.float64), atol=1e-12)


@every_subset
def test_only_what_is_wanted_is_computed(case, names, device):
    inputs = case.inputs(case.small, torch.float32, device)
    check_vjp(case, case.small, inputs, names)
    call = vjp_call(case, case.small, inputs, names)
    assert call.overload is case.bwd.overload
    if "wanted" in call.names:
        assert list(call.argument("wanted")) == [name in names for name in case.differentiable]
    for name, output in zip(case.differentiable, call.outputs(), strict=True):
        assert output.shape == (inputs[name].shape if name in names else (0,)), name


@every_subset
def test_an_absent_tangent_is_none(case, names, device):
    inputs = case.inputs(case.small, torch.float32, device)
    check_jvp(case, case.small, inputs, names)
    call = jvp_call(case, case.small, inputs, names)
    # A linear operation is its own jvp: it takes the tangent as its argument, and there is none to leave out.
    for name in [] if case.is_linear else case.differentiable:
        assert (call.argument(f"{name}_dot") is not None) == (name in names), name


@every_case
def test_absent_arguments_get_no_cotangent(case, device):
    for sample in case.samples:
        if not sample.absent:
            continue
        inputs = case.inputs(sample, torch.float32, device)
        call = vjp_call(case, sample, inputs, case.perturbable(sample))
        for name, output in zip(case.differentiable, call.outputs(), strict=True):
            assert name in case.perturbable(sample) or output.shape == (0,), name


@every_case
def test_what_is_kept_for_the_backward_pass(case, device):
    inputs = leaves(case.inputs(case.small, torch.float32, device), case.differentiable)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        y = case.outputs(inputs, case.small)[0]
    storages = {x.data_ptr() for x in kept}
    assert kept, "nothing was saved"
    for name in case.not_kept:
        value = y if name == "y" else inputs[name]
        assert value.data_ptr() not in storages, f"{name} is kept"
    full_size = sum(x.numel() == y.numel() for x in kept)
    assert full_size == (0 if case.is_linear else 1), f"{full_size} tensors of the size of x are kept"


@pytest.fixture
def no_rules(monkeypatch):
    """Every derivative rule fails when it is called."""

    def fail(*args):
        pytest.fail("a derivative rule was called")

    for primitive in registered_primitives().values():
        for kind in ("vjp", "jvp"):
            if primitive.has_rule(kind):
                monkeypatch.setitem(primitive.rules.given, kind, fail)


@every_case
@pytest.mark.usefixtures("no_rules")
def test_rules_are_not_called_where_nothing_is_differentiated(case, device):
    inputs = case.inputs(case.small, torch.float32, device)
    case.outputs(inputs, case.small)
    with torch.no_grad():
        y = case.outputs(leaves(inputs, case.differentiable), case.small)[0]
    assert not y.requires_grad
    with forward_ad.dual_level():
        case.outputs(inputs, case.small)
    torch.vmap(case.of(["x"], inputs, case.small))(torch.stack([inputs["x"]] * 2))
    # A tensor that needs no gradient beside a transform that differentiates something else.
    torch.func.grad(lambda z: (case.outputs(inputs, case.small)[0] * z).sum())(torch.ones((), device=device))


@every_case
def test_inference_mode_and_detached_arguments(case, device):
    inputs = case.inputs(case.small, torch.float32, device)
    expected = case.outputs(inputs, case.small)[0]
    with torch.inference_mode():
        assert torch.equal(case.outputs(inputs, case.small)[0], expected)
    detached = {name: value.detach() for name, value in leaves(inputs, case.differentiable).items()}
    assert not case.outputs(detached, case.small)[0].requires_grad


@every_case
def test_jvp_inside_no_grad_and_grad_outside_it(case, device):
    """`no_grad` ends reverse mode and leaves forward mode alone."""
    inputs = case.inputs(case.small, torch.float64, device)
    x_dot = like(inputs["x"], seed=1)
    function = case.of(["x"], inputs, case.small)
    _, expected = torch.func.jvp(function, (inputs["x"],), (x_dot,))
    with torch.no_grad():
        _, actual = torch.func.jvp(function, (inputs["x"].clone().requires_grad_(),), (x_dot,))
    assert_close(actual, expected)


@every_case
def test_each_level_calls_one_rule(case, device):
    """A gradient is one forward and one backward primitive, a tangent one more: nothing runs twice."""
    inputs = leaves(case.inputs(case.small, torch.float32, device), ["x"])
    with CallRecorder() as recorder:
        y = case.outputs(inputs, case.small)[0]
        torch.autograd.grad(y.sum(), inputs["x"])
    assert [call.overload for call in recorder.calls] == [case.forward.overload, case.bwd.overload]
    with CallRecorder() as recorder:
        torch.func.jvp(case.of(["x"], inputs, case.small), (inputs["x"].detach(),), (like(inputs["x"], seed=1),))
    assert [call.overload for call in recorder.calls] == [case.forward.overload, case.jvp.overload]


@every_case
def test_a_graph_that_may_be_differentiated_again_calls_the_backward_primitive(case, device):
    """torch.func.grad always asks for such a graph: without this, no gradient of it would reach a fused kernel."""
    inputs = leaves(case.inputs(case.small, torch.float32, device), ["x"])
    function = case.of(["x"], inputs, case.small)
    gradients = {
        "torch.func.grad": lambda: torch.func.grad(lambda x: function(x).sin().sum())(inputs["x"].detach()),
        "create_graph": lambda: torch.autograd.grad(function(inputs["x"]).sum(), inputs["x"], create_graph=True),
    }
    for name, gradient in gradients.items():
        with CallRecorder() as recorder:
            gradient()
        assert [call.overload for call in recorder.calls] == [case.forward.overload, case.bwd.overload], name


@every_case
def test_statistics_refuse_to_be_differentiated(case, device):
    """Reverse and forward mode alike; a statistic that nobody differentiates does no harm."""
    if not case.forward.spec.statistics:
        pytest.skip(f"{case.name} has no statistics")
    inputs = case.inputs(case.small, torch.float32, device)
    with CallRecorder() as recorder:
        case.outputs(inputs, case.small)
    (call,) = recorder.calls
    args = [a.clone().requires_grad_() if name == "x" else a for name, a in zip(call.names, call.args, strict=True)]
    outputs = dict(zip(case.forward.spec.outputs, call.outputs(args), strict=True))
    torch.autograd.grad(outputs["y"].sum(), args[0], retain_graph=True)
    for name in case.forward.spec.statistics:
        index = case.forward.spec.outputs.index(name)
        with pytest.raises(pr.MissingRuleError, match=name):
            torch.autograd.grad(outputs[name].sum(), args[0], retain_graph=True)
        with pytest.raises(pr.MissingRuleError, match=name):
            torch.func.jvp(
                lambda x, index=index: call.outputs([x, *call.args[1:]])[index] * 2,
                (call.args[0],),
                (like(call.args[0], seed=1),),
            )
