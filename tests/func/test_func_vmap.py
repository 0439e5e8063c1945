"""vmap and chunk_vmap: against torch.func on flat functions, what torch does not do, compiled, and their memory."""

import pytest
import torch
from func_trees import Affine, Batch, N, Pair, assert_tree, compiled, flat, leaves, nested_tensors, output, point, randn

from perf.memory import peak
from primitives import func


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)
    torch._dynamo.reset()


@pytest.mark.parametrize("transform", [func.vmap, func.chunk_vmap])
@pytest.mark.parametrize("number", [None, 1, 2, 3, 7])
def test_against_torch(transform, number):
    """Mapped and unmapped outputs, in chunks of any size, and in more chunks than there are calls."""
    options = dict(N) if number is None else {**N, "chunk_size" if transform is func.vmap else "chunks": number}
    constant, (params, batch) = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)], point()

    def function(params, x):
        return output(params, Batch(x, batch.y))["y"]

    for xs, in_dim, out_dim in ((randn(2, 5), 1, 1), (randn(5, 2), 0, -1), (randn(0, 2), 0, 0)):
        axes = [None] * len(leaves(params))
        (expected,) = torch.func.vmap(flat(function, (params, xs)), (*axes, in_dim), out_dim)(*leaves((params, xs)))
        mapped = transform(lambda *args: (function(*args), constant), (None, in_dim), (out_dim, None), **options)
        assert_tree(mapped(params, xs), (expected, constant))


@pytest.mark.parametrize("chunks, calls", [(1, 1), (2, 2), (3, 3), (4, 3), (7, 6)])
def test_the_function_is_called_once_for_each_chunk(chunks, calls):
    seen = []
    func.chunk_vmap(lambda x: seen.append(x) or x, chunks=chunks)(torch.ones(6))
    assert len(seen) == calls


@pytest.mark.parametrize("run", [{}, {"chunk_size": 2}, compiled], ids=["whole", "in chunks", "compiled"])
def test_prefix_trees_of_axes(run):
    tree = {"affine": Affine(randn(2, 4), randn(4)), "pair": Pair(randn(4, 3), [randn(3), 2.0, None]), "note": "n"}
    in_dims = ({"affine": Affine(-1, 0), "pair": Pair(0, None), "note": None},)

    def function(tree):
        left = tree["pair"].left * tree["pair"].right[1]
        return {
            "batch": Batch(tree["affine"].w * tree["affine"].b, left + tree["pair"].right[0]),
            "whole": (tree["pair"].right[0].exp(), tree["note"], None),
        }

    out_dims = {"batch": Batch(1, -1), "whole": None}
    mapped = func.vmap(function, in_dims, out_dims, **N, **({} if run is compiled else run))
    affine, pair = tree["affine"], tree["pair"]
    expected = {
        "batch": Batch(affine.w * affine.b, (2 * pair.left + pair.right[0]).T),
        "whole": (pair.right[0].exp(), "n", None),
    }
    assert_tree((compiled(mapped) if run is compiled else mapped)(tree), expected)


def test_one_axis_for_a_whole_argument_or_output():
    tree = {"a": randn(3, 2), "b": [randn(3), None]}
    expected = {"sum": tree["a"].sum(1) + tree["b"][0], "none": None}
    for in_dims in (0, (0,), ({"a": 0, "b": 0},), ({"a": -2, "b": [-1, None]},)):
        result = func.vmap(lambda t: {"sum": t["a"].sum() + t["b"][0], "none": None}, in_dims)(tree)
        assert_tree(result, expected)
    assert_tree(func.vmap(lambda t: t["a"], out_dims=(1,))(tree), tree["a"].T)
    scaled = func.vmap(lambda x, *, scale: x * scale["by"])(tree["b"][0], scale={"by": tree["a"]})
    assert_tree(scaled, tree["b"][0][:, None, None] * tree["a"])


def test_nested_vmap_with_an_output_that_only_the_outer_one_maps():
    """torch refuses it: it looks whether any vmap maps the output."""
    x, y = torch.arange(3.0), torch.ones(2)
    nested = func.vmap(lambda x: func.vmap(lambda y: (x * y, x * 2), out_dims=(0, None))(y))
    assert_tree(nested(x), (x[:, None] * y, x * 2))


@pytest.mark.parametrize("dim", [0, 1])
def test_arguments_and_outputs_are_those_of_torch_and_no_views(dim):
    leaf = torch.zeros(2, 3, requires_grad=True)
    assert func.vmap(lambda t: {"x": t["x"]}, dim, dim)({"x": leaf})["x"] is leaf
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
        assert_tree(list(result.unbind()), [3 * short, 3 * long])


def test_random_numbers_compiled():
    """In one chunk. For several the state of the generator is needed, which Dynamo cannot read."""
    assert len(compiled(func.vmap(lambda x: x * torch.rand(()), randomness="same"))(torch.ones(3)).unique()) == 1


# Bytes that torch allocates, from its profiler, the same in every run.

ENTRIES, WIDTH = 64, 512
# The peak of a chunk of 1/n may be this many times 1/n of the peak of all at once: operands, result and whole rows of
# bookkeeping do not shrink with it.
SLACK = 1.5
WEIGHT, OUT_WEIGHT, DIRECTION = torch.ones(WIDTH, 4), torch.ones(ENTRIES, WIDTH), torch.ones(WIDTH)


def scalar(tree):
    return (WEIGHT @ tree["x"]).tanh().square().sum()


def vector(tree):
    return OUT_WEIGHT @ (WEIGHT @ tree["x"]).tanh()


def energy(tree):
    return (DIRECTION * tree["x"].square().sum()).tanh().sum()


@pytest.mark.parametrize(
    "function, shape",
    [
        (lambda size: func.vmap(scalar, chunk_size=size), (ENTRIES, 4)),
        (lambda size: func.chunk_vmap(scalar, chunks=ENTRIES // (size or ENTRIES)), (ENTRIES, 4)),
        (lambda size: func.vmap(func.grad(scalar), chunk_size=size), (ENTRIES, 4)),
        (lambda size: func.jacrev(vector, chunk_size=size), (4,)),
        (lambda size: func.hessian(energy, chunk_size=size), (ENTRIES,)),
    ],
    ids=["vmap", "chunk_vmap", "vmap of grad", "jacrev", "hessian"],
)
def test_the_peak_falls_with_the_chunk(function, shape):
    tree = {"x": torch.randn(shape)}
    whole, *peaks = (peak(lambda size=size: function(size)(tree)) for size in (None, 32, 16, 8))
    # All values of all entries, at least: the meter sees the work.
    assert whole >= ENTRIES * WIDTH * 4
    for size, found in zip((32, 16, 8), peaks, strict=True):
        assert found <= SLACK * size / ENTRIES * whole
