"""Every transform over trees: against torch's Jacobian and Hessian of flat tensors, nested, mapped and compiled."""

import pytest
import torch
from func_trees import N, Pair, assert_tree, compiled, flat, leaves, like, loss, output, point, randn, rebuilt
from torch.fx.experimental.proxy_tensor import make_fx

import primitives as pr
from perf.measuring import peak
from primitives import func

pytestmark = pytest.mark.usefixtures("seeded")

TF = torch.nn.functional
BOTH = (0, 1)


def pulled(function, cotangents, *args):
    value, vjp_fn = func.vjp(function, *args, **N)
    return value, vjp_fn(cotangents)


def linearized(function, args, tangents):
    value, jvp_fn = func.linearize(function, *args, **N)
    return value, jvp_fn(*tangents)


# Of the arguments, tangents for them, and cotangents for the output.
TRANSFORMS = {
    "grad": lambda a, v, c: func.grad(loss, BOTH, **N)(*a),
    "grad_and_value": lambda a, v, c: func.grad_and_value(loss, BOTH, **N)(*a),
    "vjp": lambda a, v, c: pulled(output, c, *a),
    "jvp": lambda a, v, c: func.jvp(output, a, v, **N),
    "linearize": lambda a, v, c: linearized(output, a, v),
    "hvp": lambda a, v, c: func.hvp(loss, a, v, **N),
    "jacrev": lambda a, v, c: func.jacrev(output, BOTH, **N)(*a),
    "jacrev one by one": lambda a, v, c: func.jacrev(output, BOTH, chunk_size=1, **N)(*a),
    "jacrev in chunks": lambda a, v, c: func.jacrev(output, BOTH, chunk_size=2, **N)(*a),
    "jacfwd": lambda a, v, c: func.jacfwd(output, BOTH, **N)(*a),
    "jacfwd in chunks": lambda a, v, c: func.jacfwd(output, BOTH, chunk_size=2, **N)(*a),
    "hessian": lambda a, v, c: func.hessian(loss, BOTH, **N)(*a),
    "hessian in chunks": lambda a, v, c: func.hessian(loss, BOTH, chunk_size=3, **N)(*a),
    "jacrev of jacfwd": lambda a, v, c: func.jacrev(func.jacfwd(loss, BOTH, **N), BOTH, **N)(*a),
    "jacfwd of jacfwd": lambda a, v, c: func.jacfwd(func.jacfwd(loss, BOTH, **N), BOTH, **N)(*a),
}


def expected(name, args, tangents, cotangents):
    """The same from whole matrices of torch, as a tree."""
    tensors, directions = leaves(args), leaves(tangents)
    numbers = tuple(range(len(tensors)))

    def times(row):
        return sum(torch.tensordot(block, v, v.dim()) for block, v in zip(row, directions, strict=True))

    value, first = output(*args), name.split()[0]
    if first == "hvp" or first == "hessian" or " of " in name:
        (rows,) = torch.func.jacfwd(torch.func.jacrev(flat(loss, args), numbers), numbers)(*tensors)
        return rebuilt(args, [times(row) if first == "hvp" else rebuilt(args, row) for row in rows])
    rows = torch.func.jacrev(flat(output, args), numbers)(*tensors)
    if first in ("jacrev", "jacfwd"):
        return rebuilt(value, [rebuilt(args, row) for row in rows])
    if first in ("jvp", "linearize"):
        return value, rebuilt(value, map(times, rows))
    if first == "vjp":
        columns = zip(*rows, strict=True)
        pairs = [zip(leaves(cotangents), column, strict=True) for column in columns]
        return value, rebuilt(args, [sum(torch.tensordot(c, x, c.dim()) for c, x in pair) for pair in pairs])
    # Of the leaves of the output, the loss is the first.
    gradient = rebuilt(args, rows[0])
    return gradient if first == "grad" else (gradient, loss(*args))


# Seconds each. By day one that has both modes, beside vmap in test_func_vmap.py; by night those that they are made of.
IN_ONE_GRAPH = {"hvp": ()} | dict.fromkeys(("vjp", "linearize", "jacfwd", "jacrev in chunks"), pytest.mark.nightly)


@pytest.mark.parametrize(
    "name", [*TRANSFORMS, *[pytest.param(f"{name}, compiled", marks=marks) for name, marks in IN_ONE_GRAPH.items()]]
)
def test_transform(name):
    name, *is_compiled = name.split(", ")
    args = point()
    given = args, like(args), like(output(*args))
    found = (compiled(TRANSFORMS[name]) if is_compiled else TRANSFORMS[name])(*given)
    assert_tree(found, expected(name, *given))
    if name == "grad":
        assert found[0]["affine"].name == "own"


@pytest.mark.parametrize("name", ["grad", "grad_and_value", "jacrev", "jacfwd", "hvp", "jvp"])
def test_aux_is_handed_on(name):
    def with_aux(x):
        return (x**3).sum(), {"raw": [x, None], "note": "aux", "index": torch.arange(2)}

    transform, x = getattr(func, name), randn(3)
    (value, aux), slope = with_aux(x), 3 * x**2
    wanted = {"grad_and_value": (slope, (value, aux)), "hvp": ((6 * x**2,), aux), "jvp": (value, 3 * value, aux)}
    given = ((x,), (x,)) if name in ("hvp", "jvp") else ()
    found = transform(with_aux, *given, has_aux=True)
    assert_tree(found if given else found(x), wanted.get(name, (slope, aux)))


def test_is_leaf_keeps_a_subtree_opaque():
    config, seen = {"weight": torch.tensor(2.0)}, []
    for is_leaf in (None, lambda node: node is config):
        gradient = func.grad(lambda x, config: (seen.append(config), x.sum())[1], is_leaf=is_leaf)
        assert_tree(gradient(torch.ones(2), config), torch.ones(2))
        assert (seen[-1] is config) == (is_leaf is not None)


def test_an_argument_without_leaves_has_the_gradient_without_leaves():
    assert func.grad(lambda buffers, x: x.sum())({}, torch.ones(2)) == {}
    assert func.grad_and_value(lambda x, y: x.sum(), 1)(torch.ones(2), None) == (None, torch.tensor(2.0))


def test_transformed_functions_keep_their_name_and_no_marks_of_the_compiler():
    gradient = func.grad(torch.compiler.disable(loss))
    assert gradient.__name__ == "loss"
    assert not any(name.startswith("_torchdynamo") for name in vars(gradient))


def test_graph_options_of_vjp():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    _, vjp_fn, aux = func.vjp(lambda t: (t["x"] ** 3, ("aux", t["x"])), {"x": x}, has_aux=True)
    assert_tree(aux, ("aux", x))
    assert not vjp_fn(torch.ones(2), create_graph=False)[0]["x"].requires_grad
    assert_tree(vjp_fn(torch.ones(2), retain_graph=False), ({"x": 3 * x**2},))
    with pytest.raises(RuntimeError, match="second time"):
        vjp_fn(torch.ones(2))


@pytest.mark.parametrize("transform", [func.jacrev, func.jacfwd])
@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_empty_inputs_and_outputs(transform, chunk_size):
    assert transform(lambda x: x[:0], chunk_size=chunk_size)(randn(4)).shape == (0, 4)
    assert transform(lambda x: x * 2, chunk_size=chunk_size)(randn(0, 2)).shape == (0, 2, 0, 2)
    constant = transform(lambda x: (x.sum() + torch.ones(3), {"x": x, "n": 1}), has_aux=True, chunk_size=chunk_size)
    assert_tree(constant(torch.ones(0)), (torch.ones(3, 0), {"x": torch.ones(0), "n": 1}))
    x = {"full": randn(2), "empty": randn(0)}
    jacobian = transform(lambda t: {"y": t["full"] * 2, "none": t["empty"] * 1}, chunk_size=chunk_size)(x)
    assert_tree(jacobian["y"], {"full": 2 * torch.eye(2, dtype=torch.float64), "empty": randn(2, 0)})
    assert jacobian["none"]["full"].shape == (0, 2)


def test_hvp_of_a_mean_squared_error():
    """torch has no jvp of its backward where the target is a constant: "ZeroTensors are immutable"."""
    x, target, v = randn(3, 4)
    (product,) = func.hvp(lambda x: TF.mse_loss(x.exp(), target), (x,), (v,))
    assert_tree(product, (2 * x.exp() - target) * x.exp() * v / 2)


def test_hvp_makes_no_hessian():
    def bytes_of(size):
        return peak(lambda: func.hvp(lambda x: x.exp().sum(), (torch.ones(size),), (torch.ones(size),)))

    assert bytes_of(4096) < 2.5 * bytes_of(2048)


def test_functional_call_by_flat_nested_and_several_trees():
    model, x, weight, bias = torch.nn.Sequential(torch.nn.Linear(2, 3)), *map(torch.randn, (2, (3, 2), 3))
    trees = {"0.weight": weight, "0.bias": bias}, ({"0": {"weight": weight}}, {"0.bias": bias, "unused": None})
    for tree in trees:
        for args, kwargs in ((x, None), ((x,), None), ((), {"input": x})):
            torch.testing.assert_close(func.functional_call(model, tree, args, kwargs), TF.linear(x, weight, bias))
    with pytest.raises(RuntimeError, match="Missing key"):
        func.functional_call(model, {"0": {"weight": weight}}, x, strict=True)


def test_the_state_of_a_tree_of_models_is_stacked():
    models = Pair(torch.nn.BatchNorm1d(2).double(), torch.nn.BatchNorm1d(2).double())
    models.right.weight.data.mul_(3)
    params, buffers = func.stack_module_state(models, **N)
    wanted = torch.func.stack_module_state([models.left, models.right])
    assert_tree((params, buffers), wanted)
    assert_tree(func.stack_module_state(torch.nn.ModuleList([models.left, models.right])), wanted)
    x = randn(4, 2)

    def call(params, buffers):
        return func.functional_call(models.left, (params, buffers), x)

    torch.testing.assert_close(func.vmap(call)(params, buffers), torch.stack([models.left(x), models.right(x)]))
    for error, words, given in ((pr.TreeError, "got none", []), (pr.LeafError, "got float", [models.left, 1.0])):
        with pytest.raises(error, match=f"stack_module_state: models must hold .*{words}"):
            func.stack_module_state(given)


def test_functionalized_functions_write_to_arguments_at_the_end_and_not_inside():
    def update(node, *, by):
        node.left.add_(by["x"])
        return Pair(node.left.t(), {"rest": "name", "y": node.right.clone().mul_(2)})

    node, by = Pair(torch.zeros(2, 3), torch.ones(2)), {"x": torch.ones(2, 3)}
    for remove in ("mutations", "mutations_and_views"):
        given = Pair(node.left.clone(), node.right)
        out = func.functionalize(update, remove=remove, **N)(given, by=by)
        assert_tree(
            (given.left, out.left, out.right["y"], out.right["rest"]), (by["x"], by["x"].t(), 2 * node.right, "name")
        )
    pure = func.functionalize(lambda node: update(node, by=by).right["y"], **N)
    graph = make_fx(lambda a, b: pure(Pair(a, b)))(node.left.clone(), node.right).graph
    assert "mul_" not in str(graph)
    assert "mul.Tensor" in str(graph)


@pytest.mark.parametrize("number", [None, 2])
@pytest.mark.parametrize("transform", [func.jacfwd, func.vmap, func.chunk_vmap])
def test_randomness(transform, number):
    options = {} if number is None else {"chunks" if transform is func.chunk_vmap else "chunk_size": number}

    def factors(randomness):
        torch.manual_seed(0)
        result = transform(lambda x: x * torch.rand(()), randomness=randomness, **options)(torch.ones(6))
        return (result.diagonal() if result.dim() == 2 else result).unique(), torch.rand(())

    with pytest.raises(RuntimeError, match="randomness error mode"):
        factors("error")
    assert len(factors("different")[0]) == 6
    (same,), after = factors("same")
    torch.manual_seed(0)
    assert same == torch.rand(())
    assert after == torch.rand(()), "the generator moves on once"


# torch has no zero tangents of dynamic sizes.
def test_a_gradient_of_a_jvp_compiles():
    def energy(p, x):
        return pr.functional.layer_norm(x, (4,), p["w"], p["b"]).pow(3).sum()

    def function(p, x):
        return func.grad(lambda p: func.jvp(energy, (p, x), (p, x.exp()))[1])(p)

    # A dict without leaves: Dynamo cannot represent what optree makes of one.
    params, x = {"w": randn(4), "b": randn(4), "buffers": {"none": {}}}, randn(4, 4)
    assert_tree(compiled(function)(params, x), function(params, x))


def broken(tree):
    y = tree["x"].sin()
    print()  # noqa: T201 - a graph break
    return (y * tree["x"]).sum()


@pytest.mark.parametrize(
    "transform", [func.grad, func.jacrev, func.vmap, lambda f: lambda t: linearized(f, (t,), (t,))]
)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo of torch 2.11 reads
def test_a_graph_break_inside_runs_the_transform_eagerly(transform):
    """Dynamo cannot go on between two levels of a transform, and fails on an assertion when it tries."""
    function, tree = transform(broken), {"x": randn(2)}
    assert_tree(torch.compile(function, backend="eager")(tree), function(tree))
