"""Memory that inputs and outputs share: writes are not lost, outputs have no history, graphs can be saved."""

from __future__ import annotations

import copy
import pickle
import re
from collections import OrderedDict

import pytest
import torch

import primitives as pr
from primitives.core.errors import MutationError, ShapeError
from primitives.tracing import create_joint, trace_joint
from tests.tracing.test_joint import leaf
from tests.tracing.test_joint_graph import same


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
            trace_joint(fn, w, a, b, no_tangents=True)
    # Views of one memory without an element in common are unrelated, and so is what is only read.
    graph = trace_joint(fn, w, base[2:], base[:2], no_tangents=True)
    trace_joint(lambda w, a, b: (w * a.sum() * b.sum()).sum(), w, base, base, no_tangents=True)((w, base, base))
    for call, b in ((graph, base[1:3]), (graph.forward_graph(), base[:2])):
        with pytest.raises(MutationError, match=r"JointGraph: a, b share memory, and a is written to"):
            call((w, base[:2], b))
    same(graph((w, base[:2], base[2:]))[1][0], torch.zeros(2, dtype=w.dtype))
    # Not even where the tensor that is given has to be laid out anew.
    turned = zeros(3, 3)
    with pytest.raises(MutationError, match="share memory"):
        trace_joint(fn, w, zeros(3, 3), zeros(3, 3), no_tangents=True)((w, turned.t(), turned))


def test_lazy_conjugates():
    def fn(z):
        return (z * z.real).abs().sum()

    z = leaf(3, dtype=torch.complex128)
    graph = trace_joint(fn, z, no_tangents=True)
    same(graph((z.conj(),)), graph((z.conj().resolve_conj(),)))
    same(trace_joint(fn, z.detach().conj().requires_grad_(), no_tangents=True)((z,)), graph((z,)))


@pytest.mark.parametrize("kind", ["joint", "graph", "forward graph"])
def test_outputs_have_no_history(kind):
    def fn(x):
        y = x.sin()
        return x, x.view(-1), y, y[0]

    x, y_bar = leaf(3), leaf(3, seed=1).detach()
    if kind == "joint":
        outs = create_joint(fn)((x,), (None, None, y_bar, None))[0]
    else:
        graph = trace_joint(fn, x)
        outs = graph((x,), (None, None, y_bar, None))[0] if kind == "graph" else graph.forward_graph()((x,))[0]
    assert not any(y.requires_grad for y in outs)
    assert outs[0].data_ptr() == outs[1].data_ptr() == x.data_ptr()
    assert outs[3].data_ptr() == outs[2].data_ptr()


def test_writes_of_create_joint():
    """To metadata of what requires no grad, and to a part of the memory that an input lies in."""
    table = zeros(1, 3)
    joint = create_joint(lambda w, table: w * table.t_().add_(1).sum(), no_tangents=True)
    _, (bar, _) = joint((leaf(1)[0].detach().requires_grad_(), table))
    assert (tuple(table.shape), float(bar)) == ((3, 1), 3.0)
    base = zeros(4)
    create_joint(lambda w, state: (w + state.add_(1)).sum(), no_tangents=True)(
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
    graph = trace_joint(counted, *primals, dynamic=dynamic)
    other = COPIES[name](graph)
    assert str(other) == str(graph)
    assert "test_joint_memory.py" in str(other)
    assert other.code == graph.code
    for size in (5, 7) if dynamic else (5,):
        given = leaf(4), {"x": leaf(size, 4, seed=2)}, zeros()
        tangents = torch.ones(size, dtype=torch.float64), OrderedDict(count=None)
        same(other(given, tangents), graph(given, tangents))
        outs, saved = other.forward_graph()(given)
        same((outs, other.backward_graph()(saved, tangents)), graph(given, tangents))
    assert other.forward_graph().saved == graph.forward_graph().saved
    with pytest.raises(ShapeError):
        other((leaf(4), {"x": leaf(1, 4)}, zeros()), tangents)
