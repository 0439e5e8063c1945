"""The inputs and outputs of joint functions and graphs: trees, memory that is shared, histories, copies."""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
import re

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import primitives as pr
from primitives._core.errors import DtypeError, LeafError, MutationError, ShapeError, TreeError
from primitives.tracing import create_joint, functionalize_mutations, trace_joint, unwrap_subclasses
from tests.custom_ops import NAMESPACE, Affine
from tests.tracing.test_joint_graph import leaf, same


@dataclasses.dataclass
class Result:
    """A class that neither optree nor torch takes apart."""

    value: object


class ModelOutput(collections.OrderedDict):
    """A dict that optree does not take apart."""


@pytest.mark.parametrize("hold", [Result, lambda x: ModelOutput(value=x)], ids=["dataclass", "dict"])
def test_tensors_inside_what_optree_does_not_take_apart(hold):
    given = leaf(3), hold(torch.ones(3))
    for call, label in (
        (lambda: trace_joint(lambda w: (w.sum(), hold(w * 2)), (leaf(3),), no_cotangents=True), "outs[1]"),
        (lambda: create_joint(lambda w: (w.sum(), hold(w * 2)), no_cotangents=True)((leaf(3),)), "outs[1]"),
        (lambda: trace_joint(lambda w, held: w, given), "held"),
        (lambda: create_joint(lambda w, held: w)(given, None), "held"),
    ):
        text = rf": {re.escape(label)} must be .* with a tensor inside, .* optree\.register_pytree_node"
        with pytest.raises(LeafError, match=text):
            call()


def test_keywords_are_the_last_primals_and_nodes_may_have_a_namespace_of_their_own():
    def fn(params, *, dynamic, scale):
        return Affine(params.weight * dynamic, params.bias.sin() * scale)

    params, dynamic = Affine(leaf(3), leaf(3, seed=1)), leaf(3, seed=2)
    graph = trace_joint(fn, (params,), {"dynamic": dynamic, "scale": 2.0}, namespace=NAMESPACE)
    assert graph.primal_names == ("params.weight", "params.bias", "dynamic")
    bars = Affine(torch.ones(3).double(), torch.ones(3).double())
    expected = params.weight * dynamic, params.bias.sin() * 2.0
    wanted = torch.autograd.grad(expected, (params.weight, params.bias, dynamic), (bars.weight, bars.bias))
    joint = create_joint(lambda params, dynamic, scale: fn(params, dynamic=dynamic, scale=scale), namespace=NAMESPACE)
    other = pickle.loads(pickle.dumps(graph))
    for outs, (params_bar, dynamic_bar, _) in (each((params, dynamic, 2.0), bars) for each in (graph, joint, other)):
        same((outs.weight, outs.bias), expected)
        same((params_bar.weight, params_bar.bias, dynamic_bar), wanted)

    def update(params, *, by):
        params.weight.add_(by)
        return params

    state = Affine(torch.zeros(3), torch.zeros(3))
    outs, mutated = functionalize_mutations(update, namespace=NAMESPACE)(state, by=torch.ones(3))
    assert [*mutated] == ["args[0].weight"]
    assert torch.equal(outs.weight, mutated["args[0].weight"])
    assert not state.weight.any()
    unwrapped = unwrap_subclasses(fn, (Affine(TwoTensor(state.weight, state.bias), state.bias),), {
        "dynamic": torch.ones(3), "scale": 2.0}, namespace=NAMESPACE)  # fmt: skip
    assert type(unwrapped.args[0].weight) is dict
    assert type(unwrapped.wrap(unwrapped.fn(*unwrapped.args, **unwrapped.kwargs)).weight) is TwoTensor
    for call in (trace_joint, unwrap_subclasses):
        with pytest.raises(TypeError, match="args must be a tuple of arguments, got Tensor"):
            call(torch.sin, leaf(3))


def test_what_was_saved():
    """A plain tuple, in inference mode too."""

    def product(w, x):
        return (w * x).sin() * w

    w, x, y_bar = leaf(3), leaf(3, seed=1).detach(), torch.ones(3, dtype=torch.float64)
    graph = trace_joint(product, (w, x))
    expected = graph((w, x), y_bar)[1][0]
    with torch.inference_mode():
        assert torch.equal(trace_joint(product, (w, x))((w, x), y_bar)[1][0], expected)
        _, saved = graph.forward_graph()((w, x))
        assert torch.equal(graph.backward_graph()(saved, y_bar)[0], expected)
    _, saved = graph.forward_graph()((w, x))
    with pytest.raises(ValueError, match=r"saved must have \d entries, got 0"):
        graph.backward_graph()((), y_bar)
    for wrong, error in ((torch.ones(3), DtypeError), (leaf(4), ShapeError), (3.0, LeafError)):
        with pytest.raises(error, match=r"saved\[0\] \(w\) must"):
            graph.backward_graph()((wrong, *saved[1:]), y_bar)


def stopped(w):
    """Its gradient holds one of its factors constant."""
    return (w * w.sin().detach() * pr.functional.layer_norm(w, (3,))).sum()


def test_derivatives_go_through():
    """Every mode finds what it finds without a joint function or graph; leaves alone leave no history."""
    w = leaf(3)
    given, graph = w.detach(), trace_joint(stopped, (w,), no_cotangents=True)
    forward, backward = graph.forward_graph(), graph.backward_graph()

    def in_parts(w):
        outs, saved = forward((w,))
        return outs, backward(saved)

    def eager(w):
        value, vjp = torch.func.vjp(stopped, w)
        return value, vjp(torch.ones_like(value))

    joint, autograd = create_joint(stopped, no_cotangents=True), torch.autograd
    modes = [
        torch.func.grad,
        lambda f: lambda w: autograd.functional.jacobian(f, w),
        lambda f: lambda w: create_joint(f, no_cotangents=True)((w.clone().requires_grad_(),))[1][0],
    ]
    for call in (lambda w: joint((w,)), lambda w: graph((w,)), in_parts):
        for pick in (lambda pair: pair[0], lambda pair: pair[1][0].exp().sum()):

            def through(w, call=call, pick=pick):
                return pick(call(w))

            wanted = torch.func.grad(lambda w, pick=pick: pick(eager(w)))(given)
            for derivative in modes:
                torch.testing.assert_close(derivative(through)(given), wanted)
            torch.testing.assert_close(autograd.grad(through(w * 1), w)[0], wanted)
        # To forward mode a joint function has no input that requires grad.
        modes = [*modes, torch.func.jacfwd]
        value, (bar,) = call(w)
        assert not value.requires_grad
        assert not bar.requires_grad
    batch = torch.stack([given, 2 * given])
    per_sample = torch.func.vmap(lambda w: graph((w,))[1][0])(batch)
    torch.testing.assert_close(per_sample, torch.func.vmap(torch.func.grad(stopped))(batch))


CONSTANTS = [
    (float("nan"), 2.0),
    (0.0, -0.0),
    (np.float32(0.0), np.float32(-0.0)),
    (frozenset({1}), frozenset({True})),
    (complex(0.0, 0.0), complex(0.0, -0.0)),
    (np.array([1.0, np.nan]), np.ones(2)),
    (np.ones(3), np.ones(3, dtype=np.float32)),
]


@pytest.mark.parametrize("constant, other", CONSTANTS)
def test_constants_are_those_that_were_traced(constant, other):
    w = leaf(3)
    graph = trace_joint(lambda w, k: (w * 2).sum(), (w, constant), no_cotangents=True)
    assert torch.equal(graph((w, copy.deepcopy(constant)))[0], (w * 2).sum())
    with pytest.raises(TreeError, match=r"k must be the traced constant"):
        graph((w, other))


@pytest.mark.parametrize("batch", [6, None])
def test_the_stride_of_an_axis_of_one_element(batch):
    def fn(w, x):
        return (w * x.view(x.shape[0], -1).sum(1, keepdim=True)).sum()

    w, x = leaf(3), leaf(6, 1, 4, 4).detach()
    last = x.to(memory_format=torch.channels_last)
    for traced in (x, last):
        graph = trace_joint(fn, (w, traced), no_cotangents=True, dynamic=False if batch else (None, 0))
        for given in (x, last, x[:, :, None, :, :].squeeze(1).expand(6, 1, 4, 4)):
            assert torch.equal(graph((w, given))[0], fn(w, x))


def test_sizes_that_a_size_is_computed_from():
    def fn(w, x):
        y = x * w
        return y.sum(1)[: y.shape[0] // 2].sum()

    graph = trace_joint(fn, (leaf(3), leaf(6, 3).detach()), no_cotangents=True, dynamic=(None, 0))
    x = leaf(9, 3).detach()
    assert torch.equal(graph((leaf(3), x))[0], fn(leaf(3), x))
    with pytest.raises(ShapeError, match=r"//2.*does not hold.*got w: \[3\], x: \[2, 3\]"):
        graph((leaf(3), leaf(2, 3).detach()))


# Memory.


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.float64)


def add_in_place(w, a, b):
    a.add_(1)
    return (w * b.sum()).sum()


PURE = functionalize_mutations(add_in_place)
WITHIN = functionalize_mutations(lambda w, a, b: PURE(w, a, b)[0])


@pytest.mark.parametrize("fn", [add_in_place, lambda w, a, b: PURE(w, a, b)[0], lambda w, a, b: WITHIN(w, a, b)[0]])
def test_inputs_that_share_memory_with_one_that_is_written_to(fn):
    base, w = zeros(4), leaf(2)
    for a, b in ((base, base[:2]), (base[2:], base[1:3]), (base, base)):
        with pytest.raises(MutationError, match=re.escape("a, b share memory, and a is written to")):
            trace_joint(fn, (w, a, b), no_cotangents=True)
    # Views of one memory without an element in common are unrelated, and so is what is only read.
    graph = trace_joint(fn, (w, base[2:], base[:2]), no_cotangents=True)
    trace_joint(lambda w, a, b: (w * a.sum() * b.sum()).sum(), (w, base, base), no_cotangents=True)((w, base, base))
    for call, b in ((graph, base[1:3]), (graph.forward_graph(), base[:2])):
        with pytest.raises(MutationError, match=r"Graph: a, b share memory, and a is written to"):
            call((w, base[:2], b))
    same(graph((w, base[:2], base[2:]))[1][0], torch.zeros(2, dtype=w.dtype))
    # Not even where the tensor that is given has to be laid out anew.
    turned = zeros(3, 3)
    with pytest.raises(MutationError, match="share memory"):
        trace_joint(fn, (w, zeros(3, 3), zeros(3, 3)), no_cotangents=True)((w, turned.t(), turned))


def test_lazy_conjugates():
    def fn(z):
        return (z * z.real).abs().sum()

    z = leaf(3, dtype=torch.complex128)
    graph = trace_joint(fn, (z,), no_cotangents=True)
    same(graph((z.conj(),)), graph((z.conj().resolve_conj(),)))
    same(trace_joint(fn, (z.detach().conj().requires_grad_(),), no_cotangents=True)((z,)), graph((z,)))


def test_writes_of_create_joint():
    """To metadata of what requires no grad, and to a part of the memory that an input lies in."""
    table = zeros(1, 3)
    joint = create_joint(lambda w, table: w * table.t_().add_(1).sum(), no_cotangents=True)
    _, (bar, _) = joint((leaf(1)[0].detach().requires_grad_(), table))
    assert (tuple(table.shape), float(bar)) == ((3, 1), 3.0)
    base = zeros(4)
    create_joint(lambda w, state: (w + state.add_(1)).sum(), no_cotangents=True)(
        (base[:2].requires_grad_(), base.detach()[2:])
    )
    assert base.tolist() == [0, 0, 1, 1]


SCALE = torch.linspace(0, 1, 4, dtype=torch.float64)
COPIES = {
    "pickle": lambda graph: pickle.loads(pickle.dumps(graph)),
    "deepcopy": copy.deepcopy,
    "parts": lambda graph: pickle.loads(pickle.dumps((graph, graph.backward_graph())))[0],
}


@pytest.mark.parametrize("name, dynamic", [*((name, False) for name in COPIES), ("pickle", (None, 0, None))])
def test_copies_of_graphs(name, dynamic):
    def counted(w, batch, count):
        count.add_(1)
        return pr.functional.layer_norm(batch["x"] * SCALE, (4,), w, None).sin().sum(-1) * count

    primals = leaf(4), {"x": leaf(5, 4, seed=1)}, zeros()
    graph = trace_joint(counted, primals, dynamic=dynamic)
    other = COPIES[name](graph)
    assert str(other) == str(graph)
    assert "test_joint_boundary.py" in str(other)
    assert other.code == graph.code
    for size in (5, 7) if dynamic else (5,):
        given = leaf(4), {"x": leaf(size, 4, seed=2)}, zeros()
        cotangents = torch.ones(size, dtype=torch.float64), collections.OrderedDict(count=None)
        same(other(given, cotangents), graph(given, cotangents))
        outs, saved = other.forward_graph()(given)
        same((outs, other.backward_graph()(pickle.loads(pickle.dumps(saved)), cotangents)), graph(given, cotangents))
    assert other.forward_graph().saved == graph.forward_graph().saved
    with pytest.raises(ShapeError):
        other((leaf(4), {"x": leaf(1, 4)}, zeros()), cotangents)
