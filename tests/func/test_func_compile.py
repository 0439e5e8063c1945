"""torch.compile(fullgraph=True) of every transform, over dicts, dataclasses and everything else that is a node."""

import pytest
import torch
from func_trees import NAMESPACE, Affine, Batch, Pair, assert_tree, like, randn

import primitives as pr
from primitives import func

N = {"namespace": NAMESPACE}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(8)


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def check(function, *args):
    expected = function(*args)
    assert_tree(compiled(function)(*args), expected)


def output(tree, x):
    return {"pair": Pair(tree["affine"].w * x.x, tree["affine"].b.sin()), "none": None}


def energy(tree, x):
    return (output(tree, x)["pair"].left ** 3).sum() * output(tree, x)["pair"].right.sum() + tree["rest"][0].sum()


def small():
    return {"affine": Affine(randn(2), randn(1)), "rest": [randn(1), None]}, Batch(randn(2), randn(1))


def norm_loss(tree, x):
    return pr.functional.layer_norm(x, (3,), tree["norm"].w, tree["norm"].b).pow(3).sum()


def pulled(function, *args, **options):
    value, vjp_fn = func.vjp(function, *args, **options)
    return vjp_fn(value)


def slope(tree, batch):
    """A derivative of a function that holds `tree`."""
    return func.linearize(lambda b: energy(tree, b), batch, **N)[1](batch)


CASES = {
    "grad": func.grad(energy, (0, 1), **N),
    "grad_and_value": func.grad_and_value(lambda p, b: (energy(p, b), {"y": b.y, "tag": "t"}), has_aux=True, **N),
    "jacrev": func.jacrev(output, (0, 1), **N),
    "jacrev in chunks": func.jacrev(output, chunk_size=2, **N),
    "jacfwd": func.jacfwd(output, 1, **N),
    "hessian": func.hessian(energy, 1, **N),
    "chunk_vmap": lambda p, b: func.chunk_vmap(lambda x: output(p, Batch(x, x)), chunks=2, **N)(torch.stack([b.x] * 3)),
    "vmap of a prefix": lambda p, b: func.vmap(
        lambda p, t: {"y": output(p, t["b"]), "n": t["n"]},
        (None, {"b": Batch(0, None), "n": None}),
        {"y": {"pair": Pair(-1, 1), "none": None}, "n": None},
        **N,
    )(p, {"b": Batch(torch.stack([b.x] * 3), b.y), "n": 3}),
    "torch's around ours": lambda p, b: torch.func.jacrev(lambda y: func.grad(energy, 1, **N)(p, Batch(b.x * y, y)).x)(
        b.y
    ),
    "grad of a buffer dict": lambda p, b: func.grad(lambda p, buffers, b: energy(p, b), **N)(p, {}, b),
    "jvp": lambda p, b: func.jvp(output, (p, b), (p, b), **N),
    "hvp": lambda p, b: func.hvp(energy, (p, b), (p, b), **N),
    "vjp": lambda p, b: pulled(output, p, b, **N),
    "linearize": lambda p, b: func.linearize(output, p, b, **N)[1](p, b),
    "linearize in grad": lambda p, b: func.grad(lambda p: slope(p, b), **N)(p),
    "linearize in jacfwd": lambda p, b: func.jacfwd(lambda p: slope(p, b), **N)(p),
    "linearize in vmap": lambda p, b: func.vmap(lambda x: slope(p, Batch(x, x)), **N)(torch.stack([b.x] * 3)),
    "linearize, mapped": lambda p, b: func.vmap(func.linearize(torch.sin, b.x)[1])(torch.stack([b.x, b.x.exp()])),
}


@pytest.mark.parametrize("case", CASES)
def test_transform(case):
    check(CASES[case], *small())


def broken(tree):
    y = tree["x"].sin()
    print()  # noqa: T201 - a graph break
    return (y * tree["x"]).sum()


@pytest.mark.parametrize(
    "transform",
    [
        func.grad,
        func.jacrev,
        func.jacfwd,
        func.vmap,
        lambda f: lambda t: func.jvp(f, (t,), (t,)),
        lambda f: lambda t: func.hvp(f, (t,), (t,)),
        lambda f: lambda t: pulled(f, t),
        lambda f: lambda t: func.linearize(f, t)[1](t),
    ],
)
def test_a_graph_break_inside_runs_the_transform_eagerly(transform):
    """Dynamo cannot go on between two levels of a transform, and fails on an assertion when it tries."""
    function, tree = transform(broken), {"x": randn(2)}
    assert_tree(torch.compile(function, backend="eager")(tree), function(tree))


def test_random_numbers():
    """The same in one chunk. For several the state of the generator is needed, which Dynamo cannot read: recorded."""

    def function(x):
        value, jvp_fn = func.linearize(lambda x: torch.nn.functional.dropout(x, 0.5), x)
        return jvp_fn(x) - value

    assert_tree(compiled(function)(torch.ones(64)), torch.zeros(64))
    for transform, numbers in ((func.vmap, 1), (func.jacfwd, 2)):
        result = compiled(transform(lambda x: x * torch.rand(()), randomness="same"))(torch.ones(3))
        assert len(result.unique()) == numbers
    for library in (func, torch.func):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            compiled(library.vmap(lambda x: x * torch.rand(()), randomness="same", chunk_size=1))(torch.ones(3))


def test_layer_norm_in_nested_transforms():
    def function(tree, x, tangent):

        def directional(tree):
            return func.jvp(norm_loss, (tree, x), (tangent, x), **N)[1]

        return func.grad(directional, **N)(tree), func.vmap(func.grad(norm_loss, **N), (None, 0), **N)(tree, x)

    # A dict without leaves: Dynamo cannot represent what optree makes of one.
    tree = {"norm": Affine(randn(3), randn(3)), "buffers": {"none": {}}}
    check(function, tree, randn(4, 3), {"norm": like(tree["norm"]), "buffers": {"none": {}}})


def test_other_batch_sizes_compile_without_a_graph_break():
    function = compiled(func.vmap(func.grad(norm_loss, **N), (None, 0), **N))
    tree = {"norm": Affine(randn(3), randn(3))}
    for size in (4, 6):
        x = randn(size, 3)
        expected = func.vmap(func.grad(norm_loss, **N), (None, 0), **N)(tree, x)
        assert_tree(function(tree, x), expected)
