"""What goes in and out of joint functions and graphs: nothing passes unseen, and nothing comes back stale."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import pickle
import re

import numpy as np
import optree
import pytest
import torch

from primitives.core.errors import DtypeError, LeafError, ShapeError, TreeError
from primitives.tracing import create_joint, trace_joint
from tests.tracing.test_joint import leaf


@dataclasses.dataclass
class Result:
    """A node to nobody."""

    value: object


class ModelOutput(collections.OrderedDict):
    """A dict that optree does not take apart."""


@pytest.mark.parametrize("hold", [Result, lambda x: ModelOutput(value=x)], ids=["dataclass", "dict"])
def test_tensors_inside_what_optree_does_not_take_apart(hold):
    given = leaf(3), hold(torch.ones(3))
    for call, label in (
        (lambda: trace_joint(lambda w: (w.sum(), hold(w * 2)), leaf(3), no_tangents=True), "outs[1]"),
        (lambda: create_joint(lambda w: (w.sum(), hold(w * 2)), no_tangents=True)((leaf(3),)), "outs[1]"),
        (lambda: trace_joint(lambda w, held: w, *given), "held"),
        (lambda: create_joint(lambda w, held: w)(given, None), "held"),
    ):
        text = rf": {re.escape(label)} must be .* with a tensor inside, .* optree\.register_pytree_node"
        with pytest.raises(LeafError, match=text):
            call()


def test_modules_registered_nodes_and_constants():
    with pytest.raises(LeafError, match=r"module\.weight\. For a module, use functional_call"):
        trace_joint(lambda w, module: module(w), leaf(3), torch.nn.Linear(3, 3))

    class Registered(Result):
        """A node to optree."""

    optree.register_pytree_node(
        Registered,
        lambda node: ((node.value,), None, ("value",)),
        lambda _, children: Registered(*children),
        namespace=optree.registry.__GLOBAL_NAMESPACE,
    )
    w = leaf(3)
    graph = trace_joint(lambda w: Registered(w * 2), w)
    out, (bar,) = graph((w,), Registered(torch.ones_like(w)))
    assert type(out) is Registered
    assert torch.equal(bar, 2 * torch.ones_like(w))
    # Without a tensor inside they are constants, a function over tensors too.
    scaled = functools.partial(torch.mul, torch.ones_like(w))
    given = (w, Result(3), torch.nn.ReLU(), scaled, "name")
    trace_joint(lambda w, result, act, scaled, name: scaled(act(w * result.value)), *given)(given, torch.ones_like(w))


def test_what_was_saved():
    """A plain tuple, for a copy of the graph too, and in inference mode."""

    def product(w, x):
        return (w * x).sin() * w

    w, x, y_bar = leaf(3), leaf(3, seed=1).detach(), torch.ones(3, dtype=torch.float64)
    graph = trace_joint(product, w, x)
    expected = graph((w, x), y_bar)[1][0]
    with torch.inference_mode():
        assert torch.equal(trace_joint(product, w, x)((w, x), y_bar)[1][0], expected)
        _, saved = graph.forward_graph()((w, x))
        assert torch.equal(graph.backward_graph()(saved, y_bar)[0], expected)
    _, saved = graph.forward_graph()((w, x))
    for copied in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert torch.equal(copied.backward_graph()(pickle.loads(pickle.dumps(saved)), y_bar)[0], expected)
    with pytest.raises(ValueError, match=r"saved must have \d entries, got 0"):
        graph.backward_graph()((), y_bar)
    for wrong, error in ((torch.ones(3), DtypeError), (leaf(4), ShapeError), (3.0, LeafError)):
        with pytest.raises(error, match=r"saved\[0\] \(w\) must"):
            graph.backward_graph()((wrong, *saved[1:]), y_bar)


def stopped(w):
    """Its gradient holds one of its factors constant."""
    return (w * w.sin().detach() * w).sum()


def test_derivatives_go_through_graphs():
    """Every mode finds what it finds without a graph; leaves alone leave no history."""
    w = leaf(3)
    graph = trace_joint(stopped, w, no_tangents=True)
    forward, backward = graph.forward_graph(), graph.backward_graph()

    def in_parts(w):
        outs, saved = forward((w,))
        return outs, backward(saved)

    def eager(w):
        value, vjp = torch.func.vjp(stopped, w)
        return value, vjp(torch.ones_like(value))

    given = w.detach()
    for call in (lambda w: graph((w,)), in_parts):
        for pick in (lambda pair: pair[0], lambda pair: pair[1][0].exp().sum()):

            def through(w, call=call, pick=pick):
                return pick(call(w))

            wanted = torch.func.grad(lambda w, pick=pick: pick(eager(w)))(given)
            for derivative in (torch.func.grad, torch.func.jacfwd, torch.func.jacrev):
                torch.testing.assert_close(derivative(through)(given), wanted)
            torch.testing.assert_close(torch.autograd.functional.jacobian(through, given), wanted)
            torch.testing.assert_close(torch.autograd.grad(through(w * 1), w)[0], wanted)
        value, (bar,) = call(w)
        assert not value.requires_grad
        assert not bar.requires_grad
    batch = torch.stack([given, 2 * given])
    per_sample = torch.func.vmap(lambda w: graph((w,))[1][0])(batch)
    torch.testing.assert_close(per_sample, torch.func.vmap(torch.func.grad(stopped))(batch))


def test_cotangents_that_are_left_out():
    def fn(w, x):
        return (x * w).mean(0), (x * w).sum(1)

    w, x = leaf(3), leaf(4, 3, seed=2).detach()
    graph = trace_joint(fn, w, leaf(6, 3).detach(), dynamic=(None, 0))
    for tangents in ((torch.ones(3).double(), None), (None, torch.ones(4).double())):
        expected = create_joint(fn)((w, x), tangents)[1][0]
        _, saved = graph.forward_graph()((w, x))
        for bars in (graph((w, x), tangents)[1], graph.backward_graph()(saved, tangents)):
            assert torch.equal(bars[0], expected)
    # Too short, and it would be broadcast.
    with pytest.raises(ShapeError, match=re.escape("tangents[1] must have shape [4], got [1]")):
        graph((w, x), (None, torch.ones(1).double()))
    with pytest.raises(TreeError, match="tangents must have the structure"):
        graph((w, x))


CONSTANTS = [(float("nan"), 2.0), (np.array([1.0, np.nan]), np.ones(2)), (np.ones(3), np.ones(3, dtype=np.float32))]


@pytest.mark.parametrize("constant, other", CONSTANTS)
def test_constants_that_do_not_equal_themselves(constant, other):
    w = leaf(3)
    graph = trace_joint(lambda w, k: (w * 2).sum(), w, constant, no_tangents=True)
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
        graph = trace_joint(fn, w, traced, no_tangents=True, dynamic=False if batch else (None, 0))
        for given in (x, last, x[:, :, None, :, :].squeeze(1).expand(6, 1, 4, 4)):
            assert torch.equal(graph((w, given))[0], fn(w, x))


def test_sizes_that_a_size_is_computed_from():
    def fn(w, x):
        y = x * w
        return y.sum(1)[: y.shape[0] // 2].sum()

    graph = trace_joint(fn, leaf(3), leaf(6, 3).detach(), no_tangents=True, dynamic=(None, 0))
    x = leaf(9, 3).detach()
    assert torch.equal(graph((leaf(3), x))[0], fn(leaf(3), x))
    with pytest.raises(ShapeError, match=r"//2.*does not hold.*got w: \[3\], x: \[2, 3\]"):
        graph((leaf(3), leaf(2, 3).detach()))
