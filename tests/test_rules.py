"""Rules: what they are asked for, what they keep, and where they are not called at all."""

import functools

import pytest
import torch
from torch.autograd import forward_ad

from perf.ops import CASES
from tests.call_properties import CallRecorder, check_call
from tests.properties import check_second_order, jvp_call, leaves, vjp_call
from tests.support import assert_close, like, subsets

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def by_day(names, case):
    """All sets of up to three arguments; of more, those in which any two meet in all four ways."""
    count = len(case.differentiable)
    return count < 4 or len(names) in (1, count - 1, count)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    "case, names",
    [
        pytest.param(
            *(case, names),
            id=f"{case.name}-{'+'.join(names)}",
            marks=[pytest.mark.in_turns(turn), *[pytest.mark.nightly] * (not by_day(names, case))],
        )
        for case in CASES
        for turn, names in enumerate(subsets(case.differentiable))
        # Ops that share primitives differ in the arguments that these have.
        if not case.family or len(names) == 1
    ],
)
@pytest.mark.usefixtures("watched")
def test_only_what_is_wanted_is_computed(case, names, device):
    """Each combination of perturbed arguments has its derivatives, and asks for no others."""
    inputs = case.inputs(case.small, torch.float64, device)
    for call in check_second_order(case, case.small, torch.float64, device, names):
        check_call(call)
    call = vjp_call(case, case.small, inputs, names)
    bars = call.outputs()
    # Cotangents of parameters that only other ops of the family have are never wanted.
    arguments = [*case.differentiable, *[""] * (len(bars) - len(case.differentiable))]
    if "output_mask" in call.names:
        assert list(call.argument("output_mask")) == [name in names for name in arguments]
    # Group norm and instance norm give their primitives x in another shape.
    is_same = case.first not in call.names or call.argument(case.first).shape == inputs["x"].shape
    for name, output in zip(arguments, bars, strict=True):
        assert bool(output.numel()) == (name in names), name
        assert output.shape == (inputs[name].shape if name in names else (0,)) or not is_same, name
    call = jvp_call(case, case.small, inputs, names)
    # A linear operation is its own jvp: it takes the tangent as its argument, and there is none to leave out.
    for name in [] if case.is_linear else case.differentiable:
        assert (call.argument(f"{case.first if name == 'x' else name}_dot") is not None) == (name in names), name


@every_case
@pytest.mark.usefixtures("watched")
def test_what_is_kept_for_the_backward_pass(case, device):
    inputs = leaves(case.inputs(case.small, torch.float32, device), case.differentiable)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        y = case.outputs(inputs, case.small)[0]
    storages = {x.data_ptr() for x in kept}
    assert kept or not case.num_kept, "nothing was saved"
    for name in case.not_kept:
        value = y if name == "y" else inputs[name]
        assert value.data_ptr() not in storages, f"{name} is kept"
    full_size = sum(x.numel() == y.numel() for x in kept)
    assert full_size == case.num_kept, f"{full_size} tensors of the size of x are kept"


def called(function, *args, **options):
    """Operators of this package that a call runs, in order."""
    with CallRecorder() as recorder:
        function(*args, **options)
    return [call.overload for call in recorder.calls]


@every_case
def test_each_level_runs_one_primitive(case, device):
    """A gradient is one forward and one backward primitive, a tangent one more or, with the value, one: no more run.

    torch.func.grad always asks for a graph that may be differentiated again; so may a backward pass.
    """
    inputs = leaves(case.inputs(case.small, torch.float32, device), ["x"])
    function, x = case.of(["x"], inputs, case.small), inputs["x"]
    reverse = [case.forward.overload, case.bwd.overload]
    assert called(lambda: torch.autograd.grad(function(x).sum(), x)) == reverse
    assert called(lambda: torch.autograd.grad(function(x).sum(), x, create_graph=True)) == reverse
    assert called(torch.func.grad(lambda x: function(x).sin().sum()), x.detach()) == reverse
    tangent = functools.partial(torch.func.jvp, function, (x.detach(),), (like(x, seed=1),))
    forward = [p.overload for p in ([case.fwd_jvp] if case.fwd_jvp else [case.forward, case.jvp])]
    assert called(tangent) == forward
    # `no_grad` ends reverse mode and leaves forward mode alone.
    with torch.no_grad():
        assert called(tangent) == forward
        x_dot = tangent()[1]
    assert_close(x_dot, tangent()[1])


def in_forward_mode(case, device):
    """Name, what is differentiated, and whether value and tangent come from one call, for each way to ask for both."""
    inputs = case.inputs(case.small, torch.float32, device)
    function, x, x_dot = case.of(["x"], inputs, case.small), inputs["x"], like(inputs["x"], seed=1)
    leaf = leaves(inputs, ["x"])["x"]

    def push(function, x=x):
        return torch.func.jvp(function, (x,), (x_dot.expand(x.shape),))[1]

    def dual(x):
        with forward_ad.dual_level():
            function(forward_ad.make_dual(x, x_dot))

    yield "torch.func.jvp", lambda: push(function), True
    yield "dual numbers", lambda: dual(x), True
    yield "of a batch", lambda: push(torch.vmap(function), torch.stack([x] * 2)), True
    yield "of a gradient", lambda: push(torch.func.grad(lambda x: function(x).sin().sum())), True
    yield "in a gradient", lambda: torch.func.grad(lambda x: push(function, x).sin().sum())(x), True
    yield "in a loss", lambda: torch.autograd.grad(push(function, leaf).sin().sum(), leaf), True
    # A batch of tangents has one value, and a gradient at the same level takes each by itself.
    yield "in a batch", lambda: torch.func.jacfwd(function)(x), False
    jacobian = functools.partial(torch.autograd.functional.jacobian, strategy="forward-mode", vectorize=True)
    yield "in a batch of the older vmap", lambda: jacobian(function, x), False
    yield "dual numbers that require grad", lambda: dual(leaf), False


pushed_at_once = pytest.mark.parametrize("case", [case for case in CASES if case.fwd_jvp], ids=lambda case: case.name)


@pushed_at_once
def test_value_and_tangent_come_from_one_call_where_forward_mode_is_outermost(case, device):
    for name, run, expected in in_forward_mode(case, device):
        found = called(run)
        assert [found.count(p.overload) for p in (case.fwd_jvp, case.forward, case.jvp)] == (
            [1, 0, 0] if expected else [0, 1, 1]
        ), (name, found)


@pushed_at_once
def test_a_value_keeps_nothing_of_its_tangent(case, device):
    """A loss may drop the graph of the tangent."""
    inputs = case.inputs(case.small, torch.float32, device)
    x_dot = like(inputs["x"], seed=1).requires_grad_()
    y, y_dot = torch.func.jvp(case.of(["x"], inputs, case.small), (inputs["x"],), (x_dot,))
    assert (y.requires_grad, y_dot.requires_grad) == (False, True)


# Torch's own tracer says so.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pushed_at_once
def test_a_linear_map_computes_no_value_again(case, device):
    """torch.func.linearize keeps what depends on the primals alone."""
    inputs = case.inputs(case.small, torch.float32, device)
    x_dot = like(inputs["x"], seed=1)
    push = torch.func.linearize(case.of(["x"], inputs, case.small), inputs["x"])[1]
    push(x_dot)
    assert called(push, x_dot) == [case.jvp.overload]
