"""The functional API over pytrees: structures, None leaves, prefix trees, errors with key paths, atomic writes."""

import optree
import pytest
import torch
from torch.testing import assert_close

import primitives as pr
from tests.func.func_trees import assert_tree
from tests.support import data


def assert_same(ours, theirs):
    assert_tree(ours, theirs, rtol=0, atol=0)


def test_prefix_trees_of_parameters():
    x = {"a": data(5, 3, seed=0), "b": [data(5, 3, seed=1), data(5, 3, seed=2)], "c": (data(5, 3, seed=3), None)}
    shared = data(5, 3, seed=4)[0].requires_grad_()
    weight = {"a": torch.full((3,), 2.0).double(), "b": shared, "c": None}
    bias = {"a": None, "b": [data(5, 3, seed=5)[0], None], "c": (data(5, 3, seed=6)[0], data(5, 3, seed=7)[0])}
    ours = pr.functional.layer_norm(x, (3,), weight, bias)

    def single(leaf, w, b):
        return pr.functional.layer_norm(leaf, (3,), w, b)

    of_shared = [single(x["b"][0], shared, bias["b"][0]), single(x["b"][1], shared, None)]
    expected = {
        "a": single(x["a"], weight["a"], None), "b": of_shared, "c": (single(x["c"][0], None, bias["c"][0]), None),
    }  # fmt: skip
    assert_same(ours, expected)
    assert_close(*[torch.autograd.grad(sum(y.square().sum() for y in ys), shared) for ys in (ours["b"], of_shared)])


@pytest.mark.parametrize(
    "weight, path",
    [
        (lambda w: {"a": w}, "weight tree root"),
        (lambda w: {"a": w, "b": {"c": w, "d": [w]}}, "weight['b']['d']"),
        (lambda w: {"a": {"x": w}, "b": w}, "weight['a']"),
    ],
    ids=["missing", "children", "leaf"],
)
def test_a_wrong_prefix_is_named_with_its_key_path(weight, path):
    x = {"a": data(5, 3, seed=0), "b": {"c": data(5, 3, seed=1), "d": [data(5, 3, seed=2), data(5, 3, seed=3)]}}
    weight = weight(data(5, 3, seed=4)[0])
    with pytest.raises(
        pr.TreeError, match=r"^layer_norm: weight must be one value or a tree prefix of input"
    ) as caught:
        pr.functional.layer_norm(x, (3,), weight)
    # Where, and both structures.
    for part in (path, *[str(optree.tree_structure(tree, none_is_leaf=True)) for tree in (weight, x)]):
        assert part in str(caught.value)


def batch_norm_state():
    return torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)


@pytest.mark.parametrize("bad", [data(5, 4, seed=1), data(5, 3, seed=1).int(), data(1, 3, seed=1), 1.0])
def test_one_bad_leaf_leaves_the_running_statistics_unwritten(bad):
    state = batch_norm_state()
    with pytest.raises((pr.ShapeError, pr.DtypeError)):
        pr.functional.batch_norm([data(5, 3, seed=0), bad], *state, training=True)
    assert [value._version for value in state] == [0, 0]
