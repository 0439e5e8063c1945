"""Custom operators in compilers and tracers: the operator itself is in the graph, whatever its trees are."""

import collections
from typing import NamedTuple

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from perf.ops.samples import normal
from primitives.testing import check_rule
from tests.custom_ops import Affine, affine, arguments, cube, operator, plain_affine
from tests.support import assert_close

OVERLOAD = torch.ops.tests.affine.default
W, B, X = arguments()


def compiled(function, *args):
    """The result, and the operators that the graphs hold."""
    targets = set()

    def note(graph, inputs):
        targets.update(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    return torch.compile(function, fullgraph=True, backend=backend)(*args), targets


@pytest.mark.parametrize("tree", [{"weight": W, "bias": B}, Affine(W, B), Affine(W)], ids=["dict", "node", "None"])
def test_values_and_derivatives_come_from_graphs_with_the_operator(tree):
    (y, _), targets = compiled(lambda x: affine(tree, x), X)
    assert_close(y, plain_affine(tree, X)[0])
    assert OVERLOAD in targets


def test_the_compiled_operator_keeps_its_rules():
    check_rule(affine, "compile against eager", (Affine(W), X))


def test_static_arguments_and_trees_are_told_apart():
    """Each makes a graph of its own, and none of them answers for another."""

    def function(params, x, eps):
        return affine(params, x, eps=eps)[0]

    torch._dynamo.reset()
    fast = torch.compile(function, fullgraph=True, backend="eager")
    first, *others = {"weight": W, "bias": B}, {"weight": W, "bias": None}, Affine(W, B)
    for params, eps in ((first, 0.0), (first, 1.0), *((params, 1.0) for params in others)):
        assert_close(fast(params, X, eps), plain_affine(params, X, eps)[0])
    shaped = operator(lambda x, *, shape: x.reshape(shape) * 1, differentiate="reference")
    fast = torch.compile(lambda x: shaped(x, shape=x.shape), fullgraph=True, backend="eager")
    for rows in (2, 4):
        assert fast(torch.ones(rows, 3)).shape == (rows, 3)
    scaled = operator(lambda d: d["x"] * d["n"], differentiate="reference")
    fast = torch.compile(lambda x, n: scaled({"x": x, "n": n}), fullgraph=True, backend="eager")
    for number in (2, 3, 0.5):
        assert_close(fast(X, number), X * number)


class Result(NamedTuple):
    y: torch.Tensor
    z: torch.Tensor | None


def test_namedtuples_and_none_in_containers_are_compiled():
    op = operator(
        lambda pair: Result(pair[0] * 2, None if pair[1] is None else pair[1].sum()), differentiate="reference"
    )
    assert_close(compiled(lambda x: (x if op(Result(x, None)).z is None else 0) * op((x, x)).z, X)[0], X * X.sum())
    op = operator(lambda tree: tree["a"] * (1 if tree["b"] is None else tree["b"]), differentiate="reference")
    assert_close(compiled(lambda x: op(collections.OrderedDict(a=x, b=None)), X)[0], X)
    assert_close(compiled(lambda x: op(collections.defaultdict(int, a=x, b=None)), X)[0], X)


def test_dynamic_batch_sizes_share_a_graph():
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(lambda x: affine(Affine(W, B), x)[0], fullgraph=True, backend=graphs, dynamic=True)
    for size in (4, 5, 7):
        x = normal((size, 3), size)
        assert_close(fast(x), plain_affine(Affine(W, B), x)[0])
    assert graphs.frame_count == 1


class Net(torch.nn.Module):
    def forward(self, x):
        return cube(affine({"weight": x[0], "bias": None}, x)[0])


# Torch 2.11's words for the programs that it reads back itself.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_export(tmp_path):
    """Without strict=True, which fails inside torch for every function that Dynamo may not trace (2.11 to 2.15)."""
    net = Net()
    size = torch.export.Dim("size", min=2, max=64)
    program = torch.export.export(net, (X,), dynamic_shapes=({0: size},), strict=False)
    assert OVERLOAD in {node.target for node in program.graph.nodes}
    torch.export.save(program, tmp_path / "net.pt2")
    longer = torch.cat([X, X + 1])
    assert_close(torch.export.load(tmp_path / "net.pt2").module()(longer), net(longer))
