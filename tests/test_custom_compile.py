"""Custom operators in compilers and tracers: the operator itself is in the graph, whatever its trees are."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.func import grad, jvp, vmap

from tests.custom_ops import Affine, affine, cube, plain_affine
from tests.support import assert_close, normal

OVERLOAD = torch.ops.tests.affine.default


def arguments():
    return [normal(shape, seed) for seed, shape in enumerate([(3,), (3,), (2, 3)])]


def with_dict(function, weight, bias, x):
    y, rest = function({"weight": weight, "bias": bias}, x)
    return y * rest["mean"].unsqueeze(-1)


def with_dataclass(function, weight, bias, x):
    y, rest = function(Affine(weight, bias), x)
    return y * rest["mean"].unsqueeze(-1)


def without_bias(function, weight, bias, x):
    return function(Affine(weight), x)[0] * bias


FUNCTIONS = [with_dict, with_dataclass, without_bias]
every_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)


class Recorder:
    """A backend that notes the operators which the graphs that reach it hold."""

    def __init__(self):
        self.targets = set()

    def __call__(self, graph, inputs):
        def note(graph, inputs):
            self.targets.update(node.target for node in graph.graph.nodes)
            return make_boxed_func(graph)

        return aot_autograd(fw_compiler=note, bw_compiler=note)(graph, inputs)


def compiled(function, *args):
    torch._dynamo.reset()
    recorder = Recorder()
    result = torch.compile(function, fullgraph=True, backend=recorder)(*args)
    return result, recorder.targets


@every_function
def test_forward_and_backward(function):
    leaves = [value.requires_grad_() for value in arguments()]
    actual, targets = compiled(lambda *args: function(affine, *args), *leaves)
    expected = function(plain_affine, *leaves)
    assert OVERLOAD in targets
    assert_close(actual, expected)
    for got, want in zip(
        torch.autograd.grad(actual.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True
    ):
        assert_close(got, want)


TRANSFORMS = {
    "grad": lambda f: lambda w, b, x: grad(lambda x: f(w, b, x).sum())(x),
    "jvp": lambda f: lambda w, b, x: jvp(lambda x: f(w, b, x), (x,), (x * 2,))[1],
    "vmap": lambda f: lambda w, b, x: vmap(lambda x: f(w, b, x))(torch.stack([x, x + 1])),
    "hvp": lambda f: lambda w, b, x: jvp(grad(lambda x: f(w, b, x).sin().sum()), (x,), (x,))[1],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_inside_a_compiled_function(transform):
    args = arguments()
    actual, _ = compiled(TRANSFORMS[transform](lambda *a: with_dataclass(affine, *a)), *args)
    assert_close(actual, TRANSFORMS[transform](lambda *a: with_dataclass(plain_affine, *a))(*args), order=2)


def test_static_arguments_and_trees_are_told_apart():
    """Each makes a graph of its own, and none of them answers for another."""
    weight, bias, x = arguments()

    def function(params, x, eps):
        return affine(params, x, eps=eps)[0]

    torch._dynamo.reset()
    fast = torch.compile(function, fullgraph=True, backend="aot_eager")
    for params in ({"weight": weight, "bias": bias}, {"weight": weight, "bias": None}, Affine(weight, bias)):
        for eps in (0.0, 1.0):
            assert_close(fast(params, x, eps), plain_affine(params, x, eps)[0])


def test_dynamic_batch_sizes_share_a_graph():
    weight, bias, _ = arguments()
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    fast = torch.compile(lambda x: with_dict(affine, weight, bias, x), fullgraph=True, backend=graphs, dynamic=True)
    for size in (4, 5, 7):
        x = normal((size, 3), size)
        assert_close(fast(x), with_dict(plain_affine, weight, bias, x))
    assert graphs.frame_count == 1


def test_inductor():
    leaves = [value.float().requires_grad_() for value in arguments()]
    torch._dynamo.reset()
    actual = torch.compile(lambda *args: with_dict(affine, *args), fullgraph=True)(*leaves)
    expected = with_dict(plain_affine, *leaves)
    assert_close(actual, expected)
    got, want = (torch.autograd.grad(y.sum(), leaves[2])[0] for y in (actual, expected))
    assert_close(got, want)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode):
    weight, bias, x = arguments()
    make_fx = torch.fx.experimental.proxy_tensor.make_fx
    graph = make_fx(lambda *args: with_dataclass(affine, *args), tracing_mode=mode)(weight, bias, x)
    assert OVERLOAD in {node.target for node in graph.graph.nodes}
    assert_close(graph(weight, bias, x * 2), with_dataclass(plain_affine, weight, bias, x * 2))


class Net(torch.nn.Module):
    """A module that calls operators with trees of its parameters."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(normal((3,), 3))

    def forward(self, x):
        return cube(affine({"weight": self.weight, "bias": None}, x)[0])


# What torch 2.11 says of the programs that it reads back itself.
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


@pytest.mark.gpu
def test_cuda_graphs():
    """Forward and backward are captured once and replayed for other data."""
    weight, bias, x = [value.cuda().requires_grad_() for value in arguments()]

    def step():
        return torch.autograd.grad(with_dict(affine, weight, bias, x).sum(), (weight, x))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        x.add_(1)
    graph.replay()
    for got, want in zip(results, step(), strict=True):
        assert_close(got, want)
