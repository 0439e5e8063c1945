"""grad, grad_and_value, vjp: against torch.func on flat functions and against formulas."""

import functools

import optree
import pytest
import torch
from func_trees import (
    NAMESPACE,
    Affine,
    Batch,
    Pair,
    assert_leaves,
    assert_tree,
    flat_loss,
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


def test_grad_has_the_structure_of_the_argument_and_torchs_values(params, batch):
    expected = torch.func.grad(flat_loss, ALL)(*leaves(params), *batch)
    gradient = func.grad(loss, namespace=NAMESPACE)(params, batch)
    assert structure(gradient) == structure(params)
    assert gradient["affine"].name == "affine"
    assert_leaves(gradient, expected[:5])


@pytest.mark.parametrize("argnums, order", [((0, 1), (0, 1)), ((1, 0), (1, 0)), ((-1,), (1,)), (-1, 1), (1, 1)])
def test_argnums(params, batch, argnums, order):
    expected = torch.func.grad(flat_loss, ALL)(*leaves(params), *batch)
    by_argument = (expected[:5], expected[5:])
    gradient = func.grad(loss, argnums, namespace=NAMESPACE)(params, batch)
    if isinstance(argnums, int):
        assert type(gradient) is Batch
        assert_leaves(gradient, by_argument[order])
    else:
        assert type(gradient) is tuple
        for tree, i in zip(gradient, order, strict=True):
            assert structure(tree) == structure((params, batch)[i])
            assert_leaves(tree, by_argument[i])


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


def test_namespace_is_needed_for_nodes_that_are_registered_in_one(params, batch):
    with pytest.raises(TypeError, match=r"args\[0\]\['affine'\] must be a tensor to be differentiated, got Affine"):
        func.grad(loss)(params, batch)


def test_is_leaf_keeps_a_subtree_opaque():
    class Static(dict):
        pass

    optree.register_pytree_node(
        Static,
        lambda node: (tuple(node.values()), tuple(node)),
        lambda keys, v: Static(zip(keys, v, strict=True)),
        namespace="other",
    )
    config = Static(weight=torch.tensor(2.0))
    options = {"namespace": "other", "is_leaf": lambda node: isinstance(node, Static)}
    seen = []

    def function(x, config):
        seen.append(config)
        return x.sum() * config["weight"]

    assert_tree(func.grad(function, **options)(torch.ones(2), config), torch.full((2,), 2.0))
    assert seen[0] is config
    func.grad(function, namespace="other")(torch.ones(2), config)
    assert seen[1] is not config


def test_an_argument_without_leaves_has_the_gradient_without_leaves():
    assert func.grad(lambda buffers, x: x.sum())({}, torch.ones(2)) == {}
    assert func.grad_and_value(lambda x, y: x.sum(), 1)(torch.ones(2), None) == (None, torch.tensor(2.0))


def test_complex_argument_real_output():
    z = torch.randn(3, dtype=torch.complex128)
    assert_tree(func.grad(lambda tree: tree["z"].abs().square().sum())({"z": z}), {"z": 2 * z})


def test_transformed_functions_keep_their_name_and_no_marks_of_the_compiler():
    @torch.compiler.disable
    def energy(x):
        """Energy of x."""
        return x.sum()

    gradient = func.grad(energy)
    assert (gradient.__name__, gradient.__doc__) == ("energy", "Energy of x.")
    assert not any(name.startswith("_torchdynamo") for name in vars(gradient))
    assert_tree(func.grad(functools.partial(torch.sum, dim=0))(torch.ones(2)), torch.ones(2))


def test_vjp(params, batch):
    def function(params, batch):
        y = predict(params, batch.x)
        return {"prediction": y, "loss": Pair(((y - batch.y) ** 2).sum(), None)}

    output, vjp_fn = func.vjp(function, params, batch, namespace=NAMESPACE)
    assert_tree(output, function(params, batch))
    cotangents = like(output)
    result = vjp_fn(cotangents)
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


def test_dict_order_of_the_cotangents_does_not_matter():
    _, vjp_fn = func.vjp(lambda x: {"a": 2 * x, "b": 3 * x}, torch.tensor(1.0))
    assert_tree(vjp_fn({"b": torch.tensor(1.0), "a": torch.tensor(10.0)}), (torch.tensor(23.0),))


def test_affine_keeps_its_static_field_through_join():
    tree = Affine(torch.ones(2), torch.ones(2), name="other")
    assert func.grad(lambda tree: (tree.w * tree.b).sum(), namespace=NAMESPACE)(tree).name == "other"


def test_attrs_classes():
    attrs = pytest.importorskip("attrs")
    optree_attrs = pytest.importorskip("optree.integrations.attrs")

    @optree_attrs.frozen(namespace=NAMESPACE)
    class Weights:
        w: torch.Tensor
        tag: str = optree_attrs.field(default="t", pytree_node=False)

    assert attrs.has(Weights)
    gradient = func.grad(lambda tree: (tree.w**2).sum(), namespace=NAMESPACE)(Weights(torch.tensor([3.0])))
    assert isinstance(gradient, Weights)
    assert_tree(gradient.w, torch.tensor([6.0]))
    with pytest.raises(ValueError, match=r"args\[0\]\.w must be floating point"):
        func.grad(lambda tree: tree.w.sum(), namespace=NAMESPACE)(Weights(torch.tensor([3])))
