"""grad, grad_and_value, vjp, jvp, hvp: against torch.func on flat functions and against formulas."""

import optree
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

ALL = tuple(range(7))


@pytest.fixture(name="params")
def _params():
    torch.manual_seed(0)
    return make_params()


@pytest.fixture(name="batch")
def _batch():
    torch.manual_seed(1)
    return Batch(randn(2), randn(3))


@pytest.mark.parametrize("argnums, order", [((0, 1), (0, 1)), ((1, 0), (1, 0)), ((-1,), (1,)), (-1, 1), (0, 0)])
def test_grad_has_the_structure_of_its_arguments_and_torchs_values(params, batch, argnums, order):
    expected = torch.func.grad(flat_loss, ALL)(*leaves(params), *batch)
    gradient = func.grad(loss, argnums, namespace=NAMESPACE)(params, batch)
    single = isinstance(argnums, int)
    assert type(gradient) is type((params, batch)[order] if single else ())
    trees, positions = ([gradient], [order]) if single else (gradient, order)
    for tree, i in zip(trees, positions, strict=True):
        assert structure(tree) == structure((params, batch)[i])
        assert_leaves(tree, (expected[:5], expected[5:])[i])
        assert i or tree["affine"].name == params["affine"].name


def test_grad_and_value_and_aux(params, batch):
    def with_aux(params, batch):
        value = loss(params, batch)
        return value, {"prediction": Pair(predict(params, batch.x), None), "label": "run", "n": 3}

    gradient, (value, aux) = func.grad_and_value(with_aux, has_aux=True, namespace=NAMESPACE)(params, batch)
    assert_tree(gradient, func.grad(loss, namespace=NAMESPACE)(params, batch))
    assert_tree(value, loss(params, batch))
    assert_tree(aux, with_aux(params, batch)[1])
    assert_tree(func.grad(with_aux, has_aux=True, namespace=NAMESPACE)(params, batch), (gradient, aux))
    assert_tree(func.grad_and_value(loss, namespace=NAMESPACE)(params, batch), (gradient, value))


def test_keyword_arguments_and_what_is_no_tensor_pass_through():
    seen = []

    def function(x, config, *, scale, mode):
        seen.append((config, mode))
        return (x["a"] ** config["power"]).sum() * scale["by"]

    x = {"a": randn(3), "nothing": None}
    gradient = func.grad(function)(x, {"power": 3, "name": "cube"}, scale={"by": torch.tensor(2.0)}, mode="train")
    assert_tree(gradient, {"a": 6 * x["a"] ** 2, "nothing": None})
    assert seen == [({"power": 3, "name": "cube"}, "train")]


def test_is_leaf_keeps_a_subtree_opaque():
    class Static(dict):
        pass

    config, seen = Static(weight=torch.tensor(2.0)), []
    optree.register_pytree_node(Static, lambda node: (node.values(), None), lambda *_: Static(), namespace="other")

    def function(x, config):
        seen.append(config)
        return x.sum()

    for is_leaf in (None, lambda node: isinstance(node, Static)):
        assert_tree(func.grad(function, namespace="other", is_leaf=is_leaf)(torch.ones(2), config), torch.ones(2))
        assert (seen[-1] is config) == (is_leaf is not None)


def test_attrs_classes():
    attrs = pytest.importorskip("optree.integrations.attrs")

    @attrs.frozen(namespace=NAMESPACE)
    class Weights:
        w: torch.Tensor
        tag: str = attrs.field(default="t", pytree_node=False)

    square = func.grad(lambda tree: (tree.w**2).sum(), namespace=NAMESPACE)
    assert_tree(square(Weights(torch.tensor([3.0]))), Weights(torch.tensor([6.0])))
    with pytest.raises(ValueError, match=r"args\[0\]\.w must be floating point"):
        square(Weights(torch.tensor([3])))


def test_an_argument_without_leaves_has_the_gradient_without_leaves():
    assert func.grad(lambda buffers, x: x.sum())({}, torch.ones(2)) == {}
    assert func.grad_and_value(lambda x, y: x.sum(), 1)(torch.ones(2), None) == (None, torch.tensor(2.0))


def test_transformed_functions_keep_their_name_and_no_marks_of_the_compiler():
    @torch.compiler.disable
    def energy(x):
        """Energy of x."""
        return x.sum()

    gradient = func.grad(energy)
    assert (gradient.__name__, gradient.__doc__) == ("energy", "Energy of x.")
    assert not any(name.startswith("_torchdynamo") for name in vars(gradient))


def test_vjp(params, batch):
    def function(params, batch):
        y = predict(params, batch.x)
        return {"prediction": y, "loss": Pair(((y - batch.y) ** 2).sum(), None)}

    output, vjp_fn = func.vjp(function, params, batch, namespace=NAMESPACE)
    assert_tree(output, function(params, batch))
    cotangents = like(output)
    # In any order of a dict's keys.
    result = vjp_fn(dict(reversed(cotangents.items())))
    assert structure(result) == structure((params, batch))

    def flat(*tensors):
        y = predict(optree.tree_unflatten(structure(params), tensors[:5]), tensors[5])
        return ((y - tensors[6]) ** 2).sum(), y

    _, flat_vjp_fn = torch.func.vjp(flat, *leaves(params), *batch)
    assert_leaves(result, flat_vjp_fn(tuple(leaves(cotangents))))


def test_vjp_aux_and_graph_options():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    output, vjp_fn, aux = func.vjp(lambda t: (t["x"] ** 3, ("aux", t["x"])), {"x": x}, has_aux=True)
    assert_tree(output, x**3)
    assert_tree(aux, ("aux", x))
    (result,) = vjp_fn(torch.ones(2), create_graph=False)
    assert not result["x"].requires_grad
    (result,) = vjp_fn(torch.ones(2), retain_graph=False)
    assert_tree(result, {"x": 3 * x**2})
    with pytest.raises(RuntimeError, match="second time"):
        vjp_fn(torch.ones(2))


def test_complex_tensors():
    z, z_dot = torch.randn(2, 3, dtype=torch.complex128)
    assert_tree(func.grad(lambda tree: tree["z"].abs().square().sum())({"z": z}), {"z": 2 * z})
    assert_tree(func.jvp(lambda t: t["z"] ** 2, ({"z": z},), ({"z": z_dot},)), (z**2, 2 * z * z_dot))


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
