"""vmap and chunk_vmap: against torch.func on flat functions, what torch does not do, compiled, and their memory."""

import pytest
import torch
from func_trees import Batch, N, assert_tree, compiled, flat, leaves, nested_tensors, output, point, randn

from perf.measuring import peak
from primitives import func

pytestmark = pytest.mark.usefixtures("seeded")


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
