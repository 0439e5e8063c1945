"""vmap and chunk_vmap: against torch.func on flat functions, and what torch does not do."""

import pytest
import torch
from func_trees import NAMESPACE, Affine, Batch, Pair, assert_tree, flat_predict, leaves, nested_tensors, predict, randn
from func_trees import params as make_params

from primitives import func


@pytest.fixture(name="params")
def _params():
    torch.manual_seed(5)
    return make_params()


@pytest.mark.parametrize("transform", [func.vmap, func.chunk_vmap])
@pytest.mark.parametrize("number", [None, 1, 2, 3, 7])
def test_against_torch(params, transform, number):
    """Mapped and unmapped outputs, in chunks of any size, and in more chunks than there are calls."""
    options = {"namespace": NAMESPACE}
    if number is not None:
        options["chunk_size" if transform is func.vmap else "chunks"] = number
    constant = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
    for xs, in_dim, out_dim in ((randn(2, 5), 1, 1), (randn(5, 2), 0, -1), (randn(0, 2), 0, 0)):
        expected = torch.func.vmap(flat_predict, (None,) * 5 + (in_dim,), out_dim)(*leaves(params), xs)
        mapped = transform(lambda *args: (predict(*args), constant), (None, in_dim), (out_dim, None), **options)
        assert_tree(mapped(params, xs), (expected, constant))


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}])
def test_prefix_trees_of_axes(options):
    tree = {"affine": Affine(randn(2, 4), randn(4)), "pair": Pair(randn(4, 3), [randn(3), 2.0, None]), "note": "n"}
    in_dims = ({"affine": Affine(-1, 0), "pair": Pair(0, None), "note": None},)

    def function(tree):
        left = tree["pair"].left * tree["pair"].right[1]
        return {
            "batch": Batch(tree["affine"].w * tree["affine"].b, left + tree["pair"].right[0]),
            "whole": (tree["pair"].right[0].exp(), tree["note"], None),
        }

    out_dims = {"batch": Batch(1, -1), "whole": None}
    result = func.vmap(function, in_dims, out_dims, namespace=NAMESPACE, **options)(tree)
    affine, pair = tree["affine"], tree["pair"]
    expected = {
        "batch": Batch(affine.w * affine.b, (2 * pair.left + pair.right[0]).T),
        "whole": (pair.right[0].exp(), "n", None),
    }
    assert_tree(result, expected)


def test_one_axis_for_a_whole_argument_or_output():
    tree = {"a": randn(3, 2), "b": [randn(3), None]}
    expected = {"sum": tree["a"].sum(1) + tree["b"][0], "none": None}
    for in_dims in (0, (0,), ({"a": 0, "b": 0},), ({"a": -2, "b": [-1, None]},)):
        result = func.vmap(lambda t: {"sum": t["a"].sum() + t["b"][0], "none": None}, in_dims)(tree)
        assert_tree(result, expected)
    single = func.vmap(lambda t: t["a"], out_dims=(1,))(tree)
    assert_tree(single, tree["a"].T)


def test_keyword_arguments_are_not_mapped():
    x, scale = randn(3), {"by": randn(3)}
    result = func.vmap(lambda x, *, scale: x * scale["by"])(x, scale=scale)
    assert_tree(result, x[:, None] * scale["by"])


@pytest.mark.parametrize("transform", [func.vmap, func.chunk_vmap])
@pytest.mark.parametrize("number", [None, 3])
def test_randomness(transform, number):
    options = {"chunk_size" if transform is func.vmap else "chunks": number} if number else {}

    def noisy(x):
        return x + torch.rand(2)

    x = torch.zeros(8, 2)
    with pytest.raises(RuntimeError, match="randomness error mode"):
        transform(noisy, **options)(x)
    assert len(transform(noisy, randomness="different", **options)(x).unique()) == 16
    torch.manual_seed(0)
    same, after = transform(noisy, randomness="same", **options)(x), torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(same, torch.rand(2).expand(8, 2))
    assert after == torch.rand(1), "the generator moves on once"


def test_nested_vmap_with_an_output_that_only_the_outer_one_maps():
    """torch refuses it: it looks whether any vmap maps the output."""
    x, y = torch.arange(3.0), torch.ones(2)
    nested = func.vmap(lambda x: func.vmap(lambda y: (x * y, x * 2), out_dims=(0, None))(y))
    assert_tree(nested(x), (x[:, None] * y, x * 2))


@pytest.mark.parametrize("dim", [0, 1])
def test_arguments_and_outputs_are_those_of_torch_and_no_views(dim):
    leaf = torch.zeros(2, 3, requires_grad=True)
    same = func.vmap(lambda t: {"x": t["x"]}, dim, dim)({"x": leaf})["x"]
    assert same is leaf
    assert same.is_leaf
    for options in ({}, {"chunk_size": 1}):
        x = leaf * 1
        func.vmap(lambda x: x.add_(1), dim, dim, **options)(x)
        assert x.sum() == 6, "written to in place, also where it is differentiated"
        x.sum().backward()
    assert func.vmap(lambda x: x * 2)(leaf)._base is None


# torch maps the multiplication in a loop.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_nested_tensors_are_mapped():
    short, long = randn(2, 3), randn(4, 3)
    for x in nested_tensors(short, long):
        result = func.vmap(lambda t, scale: {"y": t["x"] * scale}, (0, None))({"x": x}, 3.0)["y"]
        assert result.is_nested
        for row, wanted in zip(result.unbind(), (short, long), strict=True):
            torch.testing.assert_close(row, 3 * wanted)


def test_chunks_are_called_in_order_and_hold_what_they_should():
    sizes = []

    class Record(torch.autograd.Function):
        generate_vmap_rule = False

        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def vmap(info, in_dims, x):
            sizes.append(info.batch_size)
            return x.clone(), in_dims[0]

    x = torch.arange(6.0)
    assert_tree(func.vmap(Record.apply, chunk_size=4)(x), x)
    assert_tree(func.chunk_vmap(Record.apply, chunks=2)(x), x)
    assert_tree(func.chunk_vmap(Record.apply, chunks=4)(x), x)
    assert_tree(func.vmap(Record.apply)(x), x)
    assert sizes == [4, 2, 3, 3, 2, 2, 2, 6]
