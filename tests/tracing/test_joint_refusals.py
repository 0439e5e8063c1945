"""What a trace would get wrong without a word: `.grad`, seeds, shapes changed in place, collectives."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from primitives.core.errors import LeafError, MutationError
from primitives.tracing import TraceError, create_joint, functionalize_mutations, trace_joint, unwrap_subclasses
from tests.tracing.test_joint import leaf

LINE = r"test_joint_refusals\.py:\d+: "
CALLS = {
    "trace_joint": lambda fn, *args: trace_joint(fn, *args, no_tangents=True),
    "create_joint": lambda fn, *args: create_joint(fn, no_tangents=True)(args),
    "create_joint, traced": lambda fn, *args: make_fx(create_joint(fn, no_tangents=True))(args),
    "functionalize_mutations": lambda fn, *args: functionalize_mutations(fn)(*args),
    "functionalize_mutations, traced": lambda fn, *args: make_fx(functionalize_mutations(fn))(*args),
    "in_place": lambda fn, *args: functionalize_mutations(fn).in_place(*args),
}
TRACES = ("trace_joint", "create_joint, traced", "functionalize_mutations, traced")


def accumulates(w):
    (w * w).sum().backward()
    return w.sum()


def assigns(w):
    w.grad = torch.ones_like(w)
    return w.sum()


def reads(w):
    return (w if w.grad is None else 2 * w).sum()


@pytest.mark.filterwarnings("ignore:Error detected in torch..autograd..AccumulateGrad:UserWarning")
@pytest.mark.parametrize("fn", [accumulates, assigns, reads])
@pytest.mark.parametrize("name", [name for name in CALLS if "joint" in name])
def test_the_grad_of_an_input(name, fn):
    w = leaf(3)
    w.grad = before = torch.ones_like(w) if fn is reads else None
    with pytest.raises(MutationError, match=r"\.grad of (primals|args)\[0\].*" + LINE):
        CALLS[name](fn, w)
    assert w.grad is before


@pytest.mark.parametrize("name", CALLS)
def test_the_grad_of_what_is_made_inside(name):
    def fn(w):
        inner = w.detach().requires_grad_()
        (inner * inner).sum().backward()
        return (w * inner.grad).sum()

    w = leaf(3)
    CALLS[name](fn, w)
    assert w.grad is None
    # Nothing is left behind that would refuse the caller's own backward pass.
    (w * w).sum().backward()
    assert torch.equal(w.grad, 2 * w)


def seeds(w):
    torch.manual_seed(12)
    return (w * torch.rand(3, dtype=w.dtype)).sum()


def seeds_alike(w):
    torch.manual_seed(torch.initial_seed())
    return (w * torch.rand(3, dtype=w.dtype)).sum()


def passes_a_generator(w):
    return (w * torch.rand(3, dtype=w.dtype, generator=torch.Generator().manual_seed(0))).sum()


@pytest.mark.parametrize("fn", [seeds, passes_a_generator])
@pytest.mark.parametrize("name", TRACES[:2])
def test_seeds_inside(name, fn):
    torch.manual_seed(5)
    with pytest.raises(TraceError, match=rf"{name.split(',')[0]}: .*(seeded|generator is passed).*" + LINE):
        CALLS[name](fn, leaf(3))


def test_seeds_leave_the_generator_alone():
    for functionalize_rng in (False, True):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        with pytest.raises(TraceError, match="generator is seeded by the function"):
            trace_joint(seeds_alike, leaf(3), no_tangents=True, functionalize_rng=functionalize_rng)
        trace_joint(lambda w: (w * torch.rand_like(w)).sum(), leaf(3), no_tangents=True)
        assert torch.equal(torch.get_rng_state(), before)
    # Outside a trace it is the function's own business.
    assert torch.equal(create_joint(seeds, no_tangents=True)((leaf(3),))[0], seeds(leaf(3)))


def coefficients():
    return torch.arange(9.0, dtype=torch.float64).reshape(3, 3)


def base_reshaped(a, w):
    b = a * w
    v = b.t()
    b.t_()
    return (v.exp() * b * coefficients()).sum()


def base_reshaped_and_written(a, w):
    b = a * w
    v = b[1]
    b.t_()
    b.mul_(coefficients())
    return (b * v).sum()


def view_reshaped_and_written(a, w):
    b = a * w
    v = b.view(3, 3)
    v.t_()
    v.mul_(coefficients())
    return (b * coefficients()).sum()


def view_reshaped_and_base_written(a, w):
    b = a * w
    v = b.view(3, 3)
    v.t_()
    b.mul_(coefficients())
    return (v * v * coefficients()).sum()


def input_reshaped(a, w):
    a.add_(w.sum())
    v = a.transpose(0, -1)
    a.unsqueeze_(0)
    return (a * a).sum() + (v * v).sum()


def view_is_returned(a, w):
    b = a * w
    v = b.t()
    b.t_()
    return b.sum(), v


@pytest.mark.parametrize(
    "fn",
    [
        base_reshaped,
        base_reshaped_and_written,
        view_reshaped_and_written,
        view_reshaped_and_base_written,
        input_reshaped,
        view_is_returned,
    ],
)
@pytest.mark.parametrize("functionalize", [True, False])
def test_shapes_changed_in_place_beside_views(fn, functionalize):
    with pytest.raises(TraceError, match="trace_joint: the shape of a tensor is changed in place.*" + LINE):
        trace_joint(fn, leaf(3, 3).detach(), leaf(3), no_tangents=True, functionalize=functionalize)
    joint = create_joint(fn, no_tangents=True)
    with pytest.raises(TraceError, match="the shape of a tensor is changed in place.*" + LINE):
        make_fx(joint, tracing_mode="fake")((leaf(3, 3).detach(), leaf(3)))


def alone(a, w):
    b = a * w
    b.t_()
    b.mul_(coefficients())
    return (b * coefficients()).sum()


def view_reshaped(a, w):
    b = a * w
    v = b.view(3, 3)
    v.t_()
    return (b * b).sum() + (v * v * coefficients()).sum()


@pytest.mark.parametrize("fn", [alone, view_reshaped])
def test_shapes_changed_in_place_that_are_no_danger(fn):
    a, w = leaf(3, 3).detach(), leaf(3)
    (expected,) = torch.autograd.grad(fn(a, w), w)
    torch.testing.assert_close(trace_joint(fn, a, w, no_tangents=True)((a, w))[1][1], expected)


@pytest.mark.parametrize("name", ["trace_joint"])
def test_a_view_that_functionalization_cannot_make(name):
    def fn(w):
        x = w * 2
        v = x.t()
        v.masked_fill_(v > 0.5, 0.25)
        return x.reshape(-1).sum()

    with pytest.raises(MutationError, match=r"(cannot be viewed|cannot be made pure).*" + LINE):
        CALLS[name](fn, leaf(3, 4))


def reduces(w, x):
    distributed.all_reduce(x)
    return (w * x).sum()


@pytest.fixture
def world():
    """A process group of one."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_collectives_that_write_in_place():
    w, x = leaf(3), torch.ones(3, dtype=torch.float64)
    for name in TRACES[:2]:
        with pytest.raises(TraceError, match=rf"{name.split(',')[0]}: the collective .*allreduce_.*" + LINE):
            CALLS[name](reduces, w, x)
    # Outside a trace they are writes like any other.
    _, mutated = functionalize_mutations(reduces)(w, x)
    assert list(mutated) == ["args[1]"]


def test_writes_to_subclasses_made_inside():
    def fn(t):
        return torch.nn.functional.relu(t.sin().add_(1) * t, inplace=True).sum()

    t = TwoTensor(leaf(3).detach(), leaf(3, seed=1).detach()).requires_grad_()
    unwrapped = unwrap_subclasses(fn, t)
    graph = trace_joint(unwrapped.fn, *unwrapped.args)
    ones = torch.ones((), dtype=torch.float64)
    _, bars = graph(unwrapped.args, {"a": ones, "b": ones})
    found = unwrapped.wrap_gradients(*bars)[0]
    for name in ("a", "b"):
        part = getattr(t, name).detach().requires_grad_()
        torch.testing.assert_close(getattr(found, name), torch.autograd.grad(fn(part), part)[0])


def test_subclasses_from_elsewhere():
    constant = TwoTensor(torch.ones(3), torch.ones(3))
    with pytest.raises(MutationError, match="is written to and is no input"):
        trace_joint(lambda w: (constant.mul_(2), w.sum())[1], leaf(3), no_tangents=True)
    captured = TwoTensor(torch.ones(3), torch.ones(3)).requires_grad_()
    with pytest.raises(LeafError, match="captured requires grad and is no input"):
        trace_joint(lambda w: (torch.mul(captured, captured).a * w).sum(), leaf(3), no_tangents=True)
