"""jvp, linearize, hvp: against torch.func on flat functions and against formulas."""

import pytest
import torch
from func_trees import (
    NAMESPACE,
    Batch,
    Pair,
    assert_leaves,
    assert_tree,
    flat_loss,
    flat_predict,
    leaves,
    like,
    loss,
    predict,
    randn,
    structure,
)
from func_trees import params as make_params

from primitives import func


@pytest.fixture(name="params")
def _params():
    torch.manual_seed(2)
    return make_params()


@pytest.fixture(name="batch")
def _batch():
    torch.manual_seed(3)
    return Batch(randn(2), randn(3))


def test_jvp(params, batch):
    def function(params, x):
        y = predict(params, x)
        return Pair(y, {"square": y**2, "none": None})

    tangents = like((params, batch.x))
    output, tangent = func.jvp(function, (params, batch.x), tangents, namespace=NAMESPACE)
    primals = (*leaves(params), batch.x)
    expected = torch.func.jvp(lambda *t: (flat_predict(*t), flat_predict(*t) ** 2), primals, tuple(leaves(tangents)))
    assert structure(output) == structure(tangent) == structure(function(params, batch.x))
    assert_leaves(output, expected[0])
    assert_leaves(tangent, expected[1])


def test_jvp_aux_and_strict():
    x, x_dot = torch.tensor(2.0), torch.tensor(1.0)
    result = func.jvp(lambda t: (t["x"] ** 2, {"note": "aux", "x": t["x"]}), ({"x": x},), ({"x": x_dot},), has_aux=True)
    assert_tree(result, (torch.tensor(4.0), torch.tensor(4.0), {"note": "aux", "x": x}))
    constant = torch.tensor(7.0)
    assert_tree(func.jvp(lambda t: constant, ({"x": x},), ({"x": x_dot},)), (constant, torch.tensor(0.0)))
    with pytest.raises(RuntimeError, match="independent"):
        func.jvp(lambda t: constant, ({"x": x},), ({"x": x_dot},), strict=True)


def test_jvp_of_complex_tensors():
    z, z_dot = torch.randn(2, 3, dtype=torch.complex128)
    assert_tree(func.jvp(lambda t: t["z"] ** 2, ({"z": z},), ({"z": z_dot},)), (z**2, 2 * z * z_dot))


def test_hvp_against_the_hessian_of_torch(params, batch):
    tangents = like((params, batch))
    product = func.hvp(loss, (params, batch), tangents, namespace=NAMESPACE)
    assert structure(product) == structure((params, batch))
    flat, flat_tangents = (*leaves(params), *batch), leaves(tangents)
    argnums = tuple(range(len(flat)))
    rows = torch.func.hessian(flat_loss, argnums)(*flat)
    expected = [
        sum(torch.tensordot(block, v, v.dim()) for block, v in zip(row, flat_tangents, strict=True)) for row in rows
    ]
    assert_leaves(product, expected)


def test_hvp_of_a_mean_squared_error():
    """torch has no jvp of its backward where the target is a constant: "ZeroTensors are immutable"."""
    x, target, v = randn(4), randn(4), randn(4)

    def function(tree):
        return 3 * torch.nn.functional.mse_loss(tree["x"].exp(), target), {"name": "aux", **tree}

    product, aux = func.hvp(function, ({"x": x},), ({"x": v},), has_aux=True)
    assert_tree(product, ({"x": 3 * (2 * x.exp() - target) * x.exp() * v / 2},))
    assert_tree(aux, {"name": "aux", "x": x})


def test_hvp_is_one_forward_and_one_backward_pass():
    calls = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(x):
            calls.append("forward")
            return x.exp()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output)
            ctx.save_for_forward(output)

        @staticmethod
        def backward(ctx, y_bar):
            calls.append("backward")
            return y_bar * ctx.saved_tensors[0]

        @staticmethod
        def jvp(ctx, x_dot):
            calls.append("jvp")
            return x_dot * ctx.saved_tensors[0]

    x, v = randn(5), randn(5)
    (product,) = func.hvp(lambda x: Counted.apply(x).sum(), (x,), (v,))
    torch.testing.assert_close(product, x.exp() * v)
    assert sorted(calls) == ["backward", "forward", "jvp"]


def test_hvp_holds_constant_what_has_no_tangent():
    x, other = {"a": randn(3), "b": randn(3), "n": torch.tensor(2), "s": "text"}, {"c": randn(3), "d": (3,)}
    v = {"a": randn(3), "b": None, "n": None, "s": None}

    def function(t, other):
        return ((t["a"] * t["b"]) ** t["n"] * other["c"] * other["d"][0]).sum() * len(t["s"])

    product = func.hvp(function, (x, other), (v, None))
    (expected,) = func.hvp(lambda a: function({**x, "a": a}, other), (x["a"],), (v["a"],))
    assert_tree(product, ({"a": expected, "b": None, "n": None, "s": "text"}, None))


def test_hvp_maps_over_directions():
    x = {"a": randn(3), "b": randn(())}
    directions = {"a": torch.eye(4, dtype=torch.float64)[:, :3], "b": torch.eye(4, dtype=torch.float64)[:, 3]}

    def function(t):
        return (t["a"] ** 3).sum() * t["b"].exp()

    (columns,) = func.vmap(lambda v: func.hvp(function, (x,), (v,)), chunk_size=3)(directions)
    expected = func.hessian(function)(x)
    torch.testing.assert_close(columns["a"][:3], expected["a"]["a"])
    torch.testing.assert_close(columns["b"][:3], expected["b"]["a"])
    torch.testing.assert_close(columns["b"][3], expected["b"]["b"])
