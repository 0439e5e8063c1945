"""Functions of wrapper subclasses as functions of plain tensors: values, gradients, graphs, sizes and errors."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

from primitives.core.errors import LeafError, TreeError
from primitives.tracing import create_joint, functionalize_mutations, unwrap_subclasses


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def two(*shape, seed=0):
    return TwoTensor(data(*shape, seed=seed), data(*shape, seed=seed + 1))


class Quantized(torch.Tensor):
    """Integers with a scale and a zero point; every operation is one on float64 tensors."""

    @staticmethod
    def __new__(cls, values, scale, zero_point, size=None, stride=None):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape if size is None else size, strides=stride or values.stride(), dtype=torch.float64
        )

    def __init__(self, values, scale, zero_point, size=None, stride=None):
        self.values_, self.scale, self.zero_point = values, scale, zero_point

    def __tensor_flatten__(self):
        return ["values_", "scale"], {"zero_point": self.zero_point}

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Quantized(inner["values_"], inner["scale"], context["zero_point"], size, stride)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            x = args[0]
            return cls(x.values_.detach(), x.scale.detach(), x.zero_point, x.shape, x.stride())
        args, kwargs = pytree.tree_map_only(
            cls, lambda x: (x.values_.to(torch.float64) - x.zero_point) * x.scale, (args, kwargs or {})
        )
        return func(*args, **kwargs)


def quantized(*shape):
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.int8).reshape(shape)
    return Quantized(values, torch.tensor(0.5, dtype=torch.float64), 3)


@pytest.fixture
def mesh():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.device_mesh.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def assert_plain(graph, *inner_types):
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        assert not isinstance(value, (TwoTensor, *inner_types))
    assert "TwoTensor" not in graph.code


def test_two_tensors():
    x, w = two(3, 2), data(2, seed=5)
    unwrapped = unwrap_subclasses(lambda tree, w: {"y": tree["x"] * w, "w": w + 1}, {"x": x}, w)
    assert list(unwrapped.args[0]["x"]) == ["a", "b"]
    plain = unwrapped.fn(*unwrapped.args)
    assert torch.equal(plain["y"]["b"], x.b * w)
    result = unwrapped.wrap(plain)
    assert type(result["y"]) is TwoTensor
    assert torch.equal(unwrapped({"x": x}, w)["y"].a, x.a * w)
    graph = make_fx(unwrapped.fn)(*unwrapped.args)
    assert_plain(graph)
    assert torch.equal(graph(*unwrapped.args)["y"]["b"], x.b * w)


def test_nested_subclasses():
    x = TwoTensor(two(2), two(2, seed=3))
    unwrapped = unwrap_subclasses(lambda x: x.sin(), x)
    plain = unwrapped.fn(*unwrapped.args)
    assert torch.equal(plain["b"]["a"], x.b.a.sin())
    assert torch.equal(unwrapped.wrap(plain).b.b, x.b.b.sin())
    assert_plain(make_fx(unwrapped.fn)(*unwrapped.args))


def test_quantized_tensors():
    x = quantized(3, 2)
    unwrapped = unwrap_subclasses(lambda q, w: (q, (q * w).sum(1)), x, data(2))
    graph = make_fx(unwrapped.fn)(*unwrapped.args)
    assert_plain(graph, Quantized)
    same, y = unwrapped.wrap(graph(*unwrapped.args))
    torch.testing.assert_close(y, ((x.values_.double() - 3) * 0.5) @ data(2))
    assert type(same) is Quantized
    assert (same.zero_point, same.dtype) == (3, torch.float64)


def test_gradients_are_subclasses_with_metadata_of_their_own():
    x, w = two(3, 2).requires_grad_(), data(2, seed=5).requires_grad_()
    joint = create_joint(lambda x, w: (x * w).sin())
    y_bar = two(3, 2, seed=7)
    _, (x_bar, w_bar) = joint((x, w), y_bar)
    unwrapped = unwrap_subclasses(lambda x, w, y_bar: joint((x, w), y_bar), x, w, y_bar)
    graph = make_fx(unwrapped.fn, tracing_mode="fake")(*unwrapped.args)
    assert_plain(graph)
    # The gradient of the plain `w` is a two-tensor, as its cotangents were.
    assert [spec and spec.type for spec in unwrapped.out_specs] == [TwoTensor] * 3
    assert unwrapped.in_specs[1] is None
    for outs, (x_found, w_found) in (unwrapped.wrap(graph(*unwrapped.args)), unwrapped(x, w, y_bar)):
        torch.testing.assert_close(outs.a, (x.a * w).sin())
        for found, wanted in ((x_found, x_bar), (w_found, w_bar)):
            torch.testing.assert_close(found.a, wanted.a)
            torch.testing.assert_close(found.b, wanted.b)


def test_dynamic_sizes():
    unwrapped = unwrap_subclasses(lambda x: (x.t() * 2, x.shape[0] * x.sum()), two(4, 3))
    graph = make_fx(unwrapped.fn, tracing_mode="symbolic")(*unwrapped.args)
    for rows in (4, 7):
        x = two(rows, 3)
        y, total = unwrapped.wrap(graph(*unwrapped.unwrap(x)))
        assert (tuple(y.shape), tuple(y.stride())) == ((3, rows), (1, 3))
        torch.testing.assert_close(y.b, x.b.t() * 2)
        torch.testing.assert_close(total.a, rows * x.a.sum())


def test_distributed_tensors(mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    x = DTensor.from_local(data(2, 3), mesh, [Shard(0)])
    unwrapped = unwrap_subclasses(lambda x: x * 2, x)
    (name,) = unwrapped.args[0]
    graph = make_fx(unwrapped.fn, tracing_mode="symbolic")(*unwrapped.args)
    for rows in (2, 5):
        given = DTensor.from_local(data(rows, 3), mesh, [Shard(0)])
        y = unwrapped.wrap(graph(*unwrapped.unwrap(given)))
        assert isinstance(y, DTensor)
        assert tuple(y.shape) == (2 * rows, 3)
        assert torch.equal(y.to_local(), data(rows, 3) * 2)
    assert not [node for node in graph.graph.nodes if isinstance(node.meta.get("val"), DTensor)]
    with pytest.raises(LeafError, match=r"args\[0\] must have the metadata"):
        unwrapped.unwrap(DTensor.from_local(data(2, 3), mesh, [Replicate()]))
    w = DTensor.from_local(data(2, 3), mesh, [Shard(0)]).requires_grad_()
    joint = create_joint(lambda w: w * w)
    y_bar = DTensor.from_local(data(2, 3, seed=1), mesh, [Shard(0)])
    (w_bar,) = unwrap_subclasses(lambda w, y_bar: joint((w,), y_bar)[1], w, y_bar)(w, y_bar)
    torch.testing.assert_close(w_bar.to_local(), 2 * data(2, 3) * data(2, 3, seed=1))
    assert name == "_local_tensor"


def test_without_subclasses_it_is_the_function():
    def function(x):
        return x

    unwrapped = unwrap_subclasses(function, data(2))
    assert unwrapped.fn is function
    x = data(2)
    assert unwrapped.unwrap(x)[0] is x
    assert unwrapped.wrap(x) is x


def test_with_mutations():
    def program(x):
        x.mul_(2)
        return x[0]

    x = two(3)
    inside = unwrap_subclasses(functionalize_mutations(program), x)
    outside = unwrap_subclasses(program, x)
    pure = functionalize_mutations(outside.fn)
    _, mutated = pure(*outside.args)
    assert list(mutated) == ["args[0]['a']", "args[0]['b']"]
    for function, unwrapped in ((inside.fn, inside), (pure, outside)):
        graph = make_fx(function)(*unwrapped.args)
        names = [node.target._schema.name for node in graph.graph.nodes if hasattr(node.target, "_schema")]
        assert not [name for name in names if name.endswith("_")]
    graph = make_fx(inside.fn)(*inside.args)
    row, mutated = inside.wrap(graph(*inside.args))
    assert torch.equal(mutated["args[0]"].b, 2 * x.b)
    assert torch.equal(row.a, 2 * x.a[0])


def test_errors_name_the_leaf():
    x = two(2)
    unwrapped = unwrap_subclasses(lambda p, q: (p["x"], q), {"x": x}, quantized(2))
    with pytest.raises(RuntimeError, match="there was none"):
        unwrapped.wrap(x)
    with pytest.raises(LeafError, match=re.escape("args[0]['x'] must be a TwoTensor, got a plain tensor")):
        unwrapped.unwrap({"x": data(2)}, quantized(2))
    with pytest.raises(LeafError, match=re.escape("args[0]['x'].a must be a plain tensor, got a TwoTensor")):
        unwrapped.unwrap({"x": TwoTensor(two(2), two(2))}, quantized(2))
    other = quantized(2)
    other.zero_point = 4
    with pytest.raises(LeafError, match=r"args\[1\] must have the metadata {'zero_point': 3}, got {'zero_point': 4}"):
        unwrapped.unwrap({"x": x}, other)
    with pytest.raises(TreeError, match=r"args must have the structure"):
        unwrapped.unwrap([x], other)
    with pytest.raises(LeafError, match=re.escape("args[0]['x'] must be a dict with keys ['a', 'b'], got Tensor")):
        unwrapped.fn({"x": data(2)}, {})
    plain = {"x": {"a": data(2).requires_grad_(), "b": data(2)}}
    with pytest.raises(LeafError, match=re.escape("args[0]['x']['a'] must not require grad")):
        unwrapped.fn(plain, {})
