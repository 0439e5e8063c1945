"""Functions of wrapper subclasses as functions of plain tensors: values, gradients, graphs, sizes and errors."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import relu
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

from primitives._core.errors import LeafError, TreeError
from primitives.tracing import PhiloxState, functionalize_rng, trace_joint, unwrap_subclasses
from tests.support import data


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


def same(x, y):
    return type(x) is type(y) and torch.equal(x.a, y.a) and torch.equal(x.b, y.b)


def assert_plain(graph, *inner_types):
    assert not any(isinstance(node.meta.get("val"), (TwoTensor, *inner_types)) for node in graph.graph.nodes)
    assert "TwoTensor" not in graph.code


def function(tree, w, *, scale=1):
    """Writes to what it has made, too."""
    y = (tree["x"] * w).sin().add_(1) * tree["x"] * scale
    return {"y": relu(y, inplace=True), "twice": w * 2}


def test_values_and_keyword_arguments():
    x, w, scale = two(3, 2), data(2, seed=5), two(3, 2, seed=2)
    unwrapped = unwrap_subclasses(function, ({"x": x}, w), {"scale": scale})
    assert list(unwrapped.args[0]["x"]) == list(unwrapped.kwargs["scale"]) == ["a", "b"]
    graph = make_fx(lambda tree, w, scale: unwrapped.fn(tree, w, scale=scale))(
        *unwrapped.args, unwrapped.kwargs["scale"]
    )
    assert_plain(graph)
    other = two(3, 2, seed=7)
    args, kwargs = unwrapped.unwrap({"x": other}, w), unwrapped.unwrap_kwargs(scale=scale)
    expected = function({"x": other}, w, scale=scale)
    for found in (unwrapped.wrap(graph(*args, kwargs["scale"])), unwrapped({"x": other}, w, scale=scale)):
        assert same(found["y"], expected["y"])
        assert torch.equal(found["twice"], expected["twice"])
    # Nothing is paid where there is nothing to take apart.
    plain = unwrap_subclasses(function, ({"x": data(3)}, data(3)))
    assert plain.fn is function
    assert plain.wrap(x) is x


def test_subclasses_inside_and_beside():
    x, q = TwoTensor(two(2), two(2, seed=3)), quantized(2)
    unwrapped = unwrap_subclasses(lambda x, q: (x.sin(), q, q * 2.0), (x, q))
    graph = make_fx(unwrapped.fn)(*unwrapped.args)
    assert_plain(graph, Quantized)
    y, kept, doubled = unwrapped.wrap(graph(*unwrapped.args))
    assert same(y.b, x.b.sin())
    assert (type(kept), kept.zero_point, kept.dtype) == (Quantized, 3, torch.float64)
    assert torch.equal(doubled, (q.values_.double() - 3) * 0.5 * 2)


def test_a_joint_graph_over_subclasses():
    x, w, y_bar = two(3, 2).requires_grad_(), data(2, seed=5), two(3, 2, seed=7)
    with pytest.raises(LeafError, match="unwrap_subclasses"):
        trace_joint(function, ({"x": x}, w))
    unwrapped = unwrap_subclasses(function, ({"x": x}, w))
    with pytest.raises(RuntimeError, match="wrap_gradients needs a backward pass"):
        unwrapped.wrap_gradients({"x": {"a": w, "b": w}}, None)
    graph = trace_joint(unwrapped.fn, unwrapped.args)
    assert graph.gradient_names == ("tree['x']['a']_bar", "tree['x']['b']_bar")
    assert_plain(graph)
    cotangents = unwrapped.unwrap_cotangents({"y": y_bar, "twice": None})
    plain = unwrapped.unwrap({"x": x}, w)
    outs, grads = graph(plain, cotangents)
    (expected,) = torch.autograd.grad(function({"x": x}, w)["y"], x, y_bar)
    _, saved = graph.forward_graph()(plain)
    for found in (grads, graph.backward_graph()(saved, cotangents)):
        assert same(unwrapped.wrap_gradients(*found)[0]["x"], expected)
    assert torch.equal(unwrapped.wrap(outs)["y"].b, (((x.b * w).sin() + 1) * x.b).relu())
    assert [spec and spec.type for spec in unwrapped.gradient_specs] == [TwoTensor, None]
    with pytest.raises(LeafError, match=r"cotangents\['y'\] must be a TwoTensor .*, got a plain tensor"):
        unwrapped.unwrap_cotangents({"y": data(3, 2), "twice": None})


def test_derivatives_through_a_call_of_every_order():
    """Nothing is cut off where tensors go in and out, and what has no place inside is refused."""
    x, w, y_bar = two(3, 2).requires_grad_(), data(2, seed=5), two(3, 2, seed=7)
    unwrapped = unwrap_subclasses(function, ({"x": x}, w))

    def derivatives(function):
        (x_bar,) = torch.autograd.grad(function({"x": x}, w)["y"], x, y_bar, create_graph=True)
        return x_bar, torch.autograd.grad(x_bar, x, y_bar)[0]

    found, expected = derivatives(unwrapped), derivatives(function)
    assert all(map(same, found, expected))
    assert found[1].a.abs().sum() > 0
    joined = unwrap_subclasses(function, ({"x": two(3, 2)}, w.requires_grad_()))
    with pytest.raises(LeafError, match=re.escape("the gradient of args[1] must be a plain tensor too")):
        trace_joint(joined.fn, joined.args)
    numbers = unwrap_subclasses(lambda q: q * 2.0, (quantized(3).requires_grad_(),))
    with pytest.raises(LeafError, match=re.escape("the gradient of args[0] must be a Quantized")):
        numbers(quantized(3).requires_grad_()).sum().backward()


def test_errors_name_the_leaf():
    x, other = two(2), quantized(2)
    unwrapped = unwrap_subclasses(lambda p, q: (p["x"], q), ({"x": x}, quantized(2)))
    with pytest.raises(RuntimeError, match="there was none"):
        unwrapped.wrap(x)
    other.zero_point = 4
    for args, message in (
        (({"x": data(2)}, other), r"args\[0\]\['x'\] must be a TwoTensor .*, got a plain tensor"),
        (
            ({"x": TwoTensor(two(2), two(2))}, other),
            r"must be a TwoTensor \(a, b\) .*, got a TwoTensor \(a: a TwoTensor",
        ),
        (({"x": x}, other), r"args\[1\] must be a Quantized .*{'zero_point': 3}, got .*{'zero_point': 4}"),
        (([x], other), r"args must have the structure"),
    ):
        with pytest.raises((LeafError, TreeError), match=message):
            unwrapped.unwrap(*args)
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    with pytest.raises(LeafError, match="must have sizes that are numbers, got a nested tensor"):
        unwrap_subclasses(lambda x: x * 2, (nested,))


def test_distributed_tensors(mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    x = DTensor.from_local(data(2, 3), mesh, [Shard(0)])
    unwrapped = unwrap_subclasses(lambda x: x.t() * 2, (x,))
    (name,) = unwrapped.args[0]
    graph = make_fx(unwrapped.fn, tracing_mode="symbolic")(*unwrapped.args)
    for rows in (2, 5):
        given = DTensor.from_local(data(rows, 3), mesh, [Shard(0)])
        y = unwrapped.wrap(graph(*unwrapped.unwrap(given)))
        assert isinstance(y, DTensor)
        assert (tuple(y.shape), tuple(y.stride())) == ((3, 2 * rows), (1, 3))
        assert torch.equal(y.to_local(), data(rows, 3).t() * 2)
    assert not [node for node in graph.graph.nodes if isinstance(node.meta.get("val"), DTensor)]
    with pytest.raises(LeafError, match=r"args\[0\] must be a DTensor .*Shard.*, got a DTensor .*Replicate"):
        unwrapped.unwrap(DTensor.from_local(data(2, 3), mesh, [Replicate()]))
    assert name == "_local_tensor"


def test_metadata_of_a_gradient_is_recorded_where_it_differs(mesh):
    """A gradient of values that are partial in the forward pass comes back replicated."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    w = DTensor.from_local(data(2, 3), mesh, [Shard(0)]).requires_grad_()
    unwrapped = unwrap_subclasses(lambda w: w.redistribute(placements=[Replicate()]).sin(), (w,))
    graph = trace_joint(unwrapped.fn, unwrapped.args)
    _, grads = graph(unwrapped.unwrap(w), {"_local_tensor": data(4, 3, seed=1)})
    (w_bar,) = unwrapped.wrap_gradients(*grads)
    assert w_bar.placements == (Shard(0),)
    assert unwrapped.out_specs[0].context != unwrapped.gradient_specs[0].context
    # Cotangents require no grad, and what they are cotangents of does.
    y_bar = DTensor.from_local(data(4, 3, seed=1), mesh, [Replicate()])
    _, found = graph(unwrapped.unwrap(w), unwrapped.unwrap_cotangents(y_bar))
    assert torch.equal(unwrapped.wrap_gradients(*found)[0].to_local(), w_bar.to_local())
    assert not unwrapped.unwrap(w.detach())[0]["_local_tensor"].requires_grad
    with pytest.raises(LeafError, match=r"cotangents must be a DTensor .*Replicate.*, got a DTensor .*Shard"):
        unwrapped.unwrap_cotangents(DTensor.from_local(data(2, 3), mesh, [Shard(0)]))


RANDOM = {
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5),
    "rand_like": torch.rand_like,
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "in place": lambda x: x.clone().exponential_(),
}


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")
@pytest.mark.parametrize("case", RANDOM)
def test_random_numbers_of_distributed_tensors(mesh, case):
    """They are those of the whole tensor, however it is sharded."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    state, whole, function = PhiloxState.from_seed(5), data(4, 6), RANDOM[case]
    expected, new_state = functionalize_rng(function)(state, whole)
    for placement, of_rank in ((Shard(0), slice(2)), (Shard(1), (slice(None), slice(3))), (Replicate(), slice(None))):
        x = DTensor.from_local(whole[of_rank], mesh, [placement], run_check=False)
        unwrapped = unwrap_subclasses(function, (x,))
        y, after = functionalize_rng(function)(state, x)
        plain, _ = functionalize_rng(unwrapped.fn)(state, *unwrapped.args)
        assert y.placements == (placement,)
        assert torch.equal(y.to_local(), expected[of_rank])
        assert torch.equal(plain["_local_tensor"], expected[of_rank])
        assert after.offset == new_state.offset


def test_random_numbers_of_other_subclasses():
    """The tensors inside draw for themselves, as without an explicit state."""
    x = TwoTensor(torch.ones(32), torch.ones(32))
    y, state = functionalize_rng(RANDOM["dropout"])(PhiloxState.from_seed(5), x)
    first, after = functionalize_rng(RANDOM["dropout"])(PhiloxState.from_seed(5), x.a)
    assert torch.equal(y.a, first)
    assert torch.equal(y.b, functionalize_rng(RANDOM["dropout"])(after, x.b)[0])
    assert not torch.equal(y.a, y.b)
    assert state.offset == 2 * after.offset
