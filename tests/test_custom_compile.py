"""Custom operators in compilers and tracers: the operator itself is in the graph, whatever its trees are."""

from __future__ import annotations

import collections
from typing import NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.func import grad, jvp, vmap

from perf.ops.samples import normal
from tests.custom_ops import Affine, affine, arguments, cube, operator, plain_affine
from tests.support import assert_close

OVERLOAD = torch.ops.tests.affine.default


def with_dict(function, weight, bias, x):
    y, rest = function({"weight": weight, "bias": bias}, x)
    return y * rest["mean"].unsqueeze(-1)


def with_dataclass(function, weight, bias, x):
    y, rest = function(Affine(weight, bias), x)
    return y * rest["mean"].unsqueeze(-1)


def without_bias(function, weight, bias, x):
    return function(Affine(weight), x)[0] * bias


FUNCTIONS = [with_dict, with_dataclass, without_bias]


def compiled(function, *args):
    """The result, and the operators that the graphs hold."""
    targets = set()

    def note(graph, inputs):
        targets.update(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    return torch.compile(function, fullgraph=True, backend=backend)(*args), targets


TRANSFORMS = {
    "grad": lambda f: lambda w, b, x: grad(lambda x: f(w, b, x).sum())(x),
    "jvp": lambda f: lambda w, b, x: jvp(lambda x: f(w, b, x), (x,), (x * 2,))[1],
    "vmap": lambda f: lambda w, b, x: vmap(lambda x: f(w, b, x))(torch.stack([x, x + 1])),
    "hvp": lambda f: lambda w, b, x: jvp(grad(lambda x: f(w, b, x).sin().sum()), (x,), (x,))[1],
}
CASES = [(lambda f: f, function) for function in FUNCTIONS] + [(t, with_dataclass) for t in TRANSFORMS.values()]


@pytest.mark.parametrize("transform, function", CASES, ids=[*(f.__name__ for f in FUNCTIONS), *TRANSFORMS])
def test_forward_and_backward_of_transforms(transform, function):
    leaves = [value.requires_grad_() for value in arguments()]
    actual, targets = compiled(transform(lambda *args: function(affine, *args)), *leaves)
    expected = transform(lambda *args: function(plain_affine, *args))(*leaves)
    assert transform in TRANSFORMS.values() or OVERLOAD in targets
    assert_close(actual, expected, order=2)
    for got, want in zip(
        torch.autograd.grad(actual.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True
    ):
        assert_close(got, want, order=3)


def test_static_arguments_and_trees_are_told_apart():
    """Each makes a graph of its own, and none of them answers for another."""
    weight, bias, x = arguments()

    def function(params, x, eps):
        return affine(params, x, eps=eps)[0]

    torch._dynamo.reset()
    fast = torch.compile(function, fullgraph=True, backend="eager")
    first, *others = {"weight": weight, "bias": bias}, {"weight": weight, "bias": None}, Affine(weight, bias)
    for params, eps in ((first, 0.0), (first, 1.0), *((params, 1.0) for params in others)):
        assert_close(fast(params, x, eps), plain_affine(params, x, eps)[0])
    shaped = operator(lambda x, *, shape: x.reshape(shape) * 1, differentiate="reference")
    fast = torch.compile(lambda x: shaped(x, shape=x.shape), fullgraph=True, backend="eager")
    for rows in (2, 4):
        assert fast(torch.ones(rows, 3)).shape == (rows, 3)
    scaled = operator(lambda d: d["x"] * d["n"], differentiate="reference")
    fast = torch.compile(lambda x, n: scaled({"x": x, "n": n}), fullgraph=True, backend="eager")
    for number in (2, 3, 0.5):
        assert_close(fast(x, number), x * number)


class Result(NamedTuple):
    """A result."""

    y: torch.Tensor
    z: torch.Tensor | None


def test_namedtuples_and_none_in_containers_are_compiled():
    op, x = operator(lambda pair: Result(pair[0] * 2, pair[0].sum()), differentiate="reference"), arguments()[2]
    assert_close(compiled(lambda x: op(Result(x, None)).y * op((x, x)).z, x)[0], x * 2 * x.sum())
    op = operator(lambda tree: tree["a"] * (1 if tree["b"] is None else tree["b"]), differentiate="reference")
    assert_close(compiled(lambda x: op(collections.OrderedDict(a=x, b=None)), x)[0], x)
    assert_close(compiled(lambda x: op(collections.defaultdict(int, a=x, b=None)), x)[0], x)


def test_dynamic_batch_sizes_share_a_graph():
    weight, bias, _ = arguments()
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fast = torch.compile(lambda x: with_dict(affine, weight, bias, x), fullgraph=True, backend=graphs, dynamic=True)
    for size in (4, 5, 7):
        x = normal((size, 3), size)
        assert_close(fast(x), with_dict(plain_affine, weight, bias, x))
    assert graphs.frame_count == 1


class Net(torch.nn.Module):
    """A module that calls operators with trees."""

    def forward(self, x):
        return cube(affine({"weight": x[0], "bias": None}, x)[0])


# Torch 2.11's words for the programs that it reads back itself.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_export(tmp_path):
    """Without strict=True, which fails inside torch for every function that Dynamo may not trace (2.11 to 2.15)."""
    net, x = Net(), arguments()[2]
    size = torch.export.Dim("size", min=2, max=64)
    program = torch.export.export(net, (x,), dynamic_shapes=({0: size},), strict=False)
    assert OVERLOAD in {node.target for node in program.graph.nodes}
    torch.export.save(program, tmp_path / "net.pt2")
    longer = torch.cat([x, x + 1])
    assert_close(torch.export.load(tmp_path / "net.pt2").module()(longer), net(longer))
