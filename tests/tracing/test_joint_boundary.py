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
from torch.utils import _pytree

from primitives.core.errors import DtypeError, LeafError, MissingRuleError, MutationError, ShapeError, TreeError
from primitives.tracing import TraceError, create_joint, functionalize_mutations, trace_joint
from tests.tracing.test_joint import leaf


@dataclasses.dataclass
class Result:
    """A node to nobody."""

    value: object


class ModelOutput(collections.OrderedDict):
    """A dict that optree does not take apart."""


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class ForTorch:
    """A node to torch alone."""

    __slots__ = ("__hidden",)

    def __init__(self, value):
        self.__hidden = value

    def flatten(self):
        """Its only child."""
        return [self.__hidden], None


_pytree.register_pytree_node(ForTorch, ForTorch.flatten, lambda children, _: ForTorch(*children))
HOLDERS = {
    "dataclass": Result,
    "dict": lambda x: ModelOutput(value=x),
    "slots": Slotted,
    "set": lambda x: {x},
    "torch": ForTorch,
    "nested": lambda x: Result([{"a": x}]),
}
FUNCTIONS = {
    "closure": lambda x: lambda: x,
    "partial": lambda x: functools.partial(torch.add, x),
    "method": lambda x: x.sin,
    "iterator": lambda x: iter([x]),
    "generator": lambda x: (y for y in [x]),
}


@pytest.mark.parametrize("holder", [*HOLDERS, *FUNCTIONS])
def test_tensors_inside_outputs_that_optree_does_not_take_apart(holder):
    hold = {**HOLDERS, **FUNCTIONS}[holder]

    def fn(w):
        return w.sum(), hold(w * 2)

    for call in (
        lambda: trace_joint(fn, leaf(3), no_tangents=True),
        lambda: create_joint(fn, no_tangents=True)((leaf(3),)),
        lambda: functionalize_mutations(fn)(leaf(3)),
    ):
        with pytest.raises(LeafError, match=r": outs\[1\] must be a tensor, a constant or a container"):
            call()


@pytest.mark.parametrize("holder", HOLDERS)
def test_tensors_inside_inputs_that_optree_does_not_take_apart(holder):
    held = HOLDERS[holder](torch.ones(3))
    calls = {
        "primals[1]": (
            lambda: trace_joint(torch.mul, leaf(3), held),
            lambda: create_joint(torch.mul)((leaf(3), held), None),
        ),
        "args[1]": (lambda: functionalize_mutations(torch.mul)(leaf(3), held),),
    }
    for label, each in calls.items():
        for call in each:
            with pytest.raises(LeafError, match=rf": {re.escape(label)} must be .* optree\.register_pytree_node"):
                call()


def test_modules_registered_nodes_and_constants():
    with pytest.raises(LeafError, match=r"primals\[1\]\.weight\. For a module, use functional_call"):
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


def test_what_is_computed_is_not_kept():
    kept = []

    def fn(w):
        kept.append(w * 2)
        return w.sum()

    with pytest.raises(TraceError, match=r"stores a tensor that it computes in kept\[0\]"):
        trace_joint(fn, leaf(3), no_tangents=True)


def product(w, x):
    return (w * x).sin() * w


def test_saved_tensors_that_are_written_to():
    w, x, y_bar = leaf(3), leaf(3, seed=1).detach(), torch.ones(3, dtype=torch.float64)
    graph = trace_joint(product, w, x)
    forward, backward = graph.forward_graph(), graph.backward_graph()
    expected, original = graph((w, x), y_bar)[1][0], x.clone()
    _, before = forward((w, x))
    x.add_(1)
    with pytest.raises(MutationError, match=r"saved\[\d\] \(x\) was written to in place after the forward pass"):
        backward(before, y_bar)
    # The same tensor, saved by a later run, is what that run read.
    _, saved = forward((w, x))
    assert torch.equal(backward(saved, y_bar)[0], graph((w, x), y_bar)[1][0])
    # A copy is what it was.
    x.copy_(original)
    _, saved = forward((w, x))
    stored = pickle.loads(pickle.dumps(saved))
    x.add_(1)
    assert type(stored) is tuple
    assert torch.equal(backward(stored, y_bar)[0], expected)


def test_outputs_that_are_saved_and_written_to():
    w, ones = leaf(3), torch.ones(3, dtype=torch.float64)
    graph = trace_joint(torch.exp, w)
    out, saved = graph.forward_graph()((w,))
    out.div_(2)
    with pytest.raises(MutationError, match=r"saved\[0\] \(outs\)"):
        graph.backward_graph()(saved, ones)
    with torch.inference_mode():
        out, saved = graph.forward_graph()((w,))
        assert torch.equal(graph.backward_graph()(saved, ones)[0], w.exp())


def test_what_was_saved_elsewhere():
    w, x, y_bar = leaf(3), leaf(3, seed=1).detach(), torch.ones(3, dtype=torch.float64)
    graph, other = trace_joint(product, w, x), trace_joint(product, w, x)
    _, saved = graph.forward_graph()((w, x))
    for copied in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        assert torch.equal(copied.backward_graph()(saved, y_bar)[0], graph((w, x), y_bar)[1][0])
    with pytest.raises(ValueError, match="saved by another forward graph"):
        other.backward_graph()(saved, y_bar)
    with pytest.raises(ValueError, match="or stood at another place"):
        graph.backward_graph()(saved[::-1], y_bar)
    with pytest.raises(ValueError, match=r"saved must have \d entries, got 0"):
        graph.backward_graph()((), y_bar)
    for wrong, error in ((torch.ones(3), DtypeError), (leaf(4), ShapeError), (3.0, LeafError)):
        with pytest.raises(error, match=r"saved\[0\] \(w\) must"):
            graph.backward_graph()((wrong, *saved[1:]), y_bar)


def test_forward_mode_goes_through_the_parts():
    w, x = leaf(3).detach(), leaf(3, seed=1).detach()
    graph = trace_joint(product, w.clone().requires_grad_(), x)

    def in_parts(w):
        _, saved = graph.forward_graph()((w, x))
        return graph.backward_graph()(saved, torch.ones_like(w))[0]

    def whole(w):
        return torch.func.vjp(lambda w: product(w, x), w)[1](torch.ones_like(w))[0]

    for actual, expected in zip(*(torch.func.jvp(fn, (w,), (x,)) for fn in (in_parts, whole)), strict=True):
        torch.testing.assert_close(actual, expected)


def test_reverse_mode_through_a_joint_function():
    w = leaf(3)
    graph = trace_joint(lambda w: (w * w).sum(), w, no_tangents=True)
    joint = create_joint(lambda w: (w * w).sum(), no_tangents=True)
    forward, backward = graph.forward_graph(), graph.backward_graph()
    _, saved = forward((w,))
    functional = torch.autograd.functional
    for name, fn in {
        "JointGraph": lambda w: graph((w,))[0],
        "create_joint": lambda w: joint((w,))[0],
        "BackwardGraph": lambda w: backward((w,))[0].sum(),
    }.items():
        for transform in (torch.func.grad, torch.func.hessian, torch.func.jacrev):
            with pytest.raises(MissingRuleError, match=f"{name}: its results have no history"):
                transform(fn)(w.detach())
        with pytest.raises(MissingRuleError, match=f"{name}: its results have no history"):
            functional.jacobian(fn, w.detach())
    assert len(saved) == 1
    # Constants of the transform are no concern, nor are the others.
    batch = torch.stack([w.detach(), 2 * w.detach()])
    per_sample = torch.func.vmap(torch.func.grad(lambda x: (x * graph((w.detach(),))[1][0]).sum()))(batch)
    assert torch.equal(per_sample[0], 2 * w.detach())
    assert torch.equal(torch.func.vmap(lambda w: graph((w,))[1][0])(batch), 2 * batch)
    assert torch.equal(torch.func.jvp(lambda w: graph((w,))[0], (w.detach(),), (batch[1],))[1], 2 * w @ batch[1])


@pytest.mark.parametrize("parts", [False, True])
def test_cotangents_that_are_left_out(parts):
    def fn(w, x):
        return (x * w).mean(0), (x * w).sum(1)

    w = leaf(3)
    graph = trace_joint(fn, w, leaf(6, 3).detach(), dynamic=(None, 0))
    x = leaf(4, 3, seed=2).detach()
    for tangents in ((torch.ones(3).double(), None), (None, torch.ones(4).double())):
        expected = create_joint(fn)((w, x), tangents)[1][0]
        if parts:
            bars = graph.backward_graph()(graph.forward_graph()((w, x))[1], tangents)
        else:
            bars = graph((w, x), tangents)[1]
        assert torch.equal(bars[0], expected)
    # Too short, and it would be broadcast.
    with pytest.raises(ShapeError, match=re.escape("tangents[1] must be viewable as [4], got [1]")):
        graph((w, x), (None, torch.ones(1).double()))
    with pytest.raises(TreeError, match="tangents must have the structure"):
        graph((w, x))


@pytest.mark.parametrize(
    "constant, other",
    [
        (float("nan"), 2.0),
        (np.ones(3), np.zeros(3)),
        (np.array([1.0, np.nan]), np.ones(2)),
        (np.ones(3), np.ones(3, dtype=np.float32)),
        (np.array(["a"]), np.array(["b"])),
        (range(3), range(4)),
    ],
)
def test_constants_that_do_not_equal_themselves(constant, other):
    w = leaf(3)
    graph = trace_joint(lambda w, k: (w * 2).sum(), w, constant, no_tangents=True)
    assert torch.equal(graph((w, copy.deepcopy(constant)))[0], (w * 2).sum())
    with pytest.raises(TreeError, match=r"primals\[1\] must be the traced constant"):
        graph((w, other))


@pytest.mark.parametrize("batch", [6, None])
def test_the_stride_of_an_axis_of_one_element(batch):
    def fn(w, x):
        return (w * x.view(x.shape[0], -1).sum(1, keepdim=True)).sum()

    w, x = leaf(3), leaf(6, 1, 4, 4).detach()
    last = x.to(memory_format=torch.channels_last)
    options = {"no_tangents": True, "dynamic": False if batch else (None, 0)}
    for traced in (x, last):
        graph = trace_joint(fn, w, traced, **options)
        for given in (x, last, x[:, :, None, :, :].squeeze(1).expand(6, 1, 4, 4)):
            assert torch.equal(graph((w, given))[0], fn(w, x))


def test_sizes_that_a_size_is_computed_from():
    def fn(w, x):
        y = x * w
        return y.sum(1)[: y.shape[0] // 2].sum()

    graph = trace_joint(fn, leaf(3), leaf(6, 3).detach(), no_tangents=True, dynamic=(None, 0))
    x = leaf(9, 3).detach()
    assert torch.equal(graph((leaf(3), x))[0], fn(leaf(3), x))
    with pytest.raises(ShapeError, match=r"x: \[s\d+, 3\].*under .*//2.*does not hold, got w: \[3\], x: \[2, 3\]"):
        graph((leaf(3), leaf(2, 3).detach()))
