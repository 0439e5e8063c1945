"""Custom operators under transforms, compilers and tracers, beside what `check_rules` holds them to."""

import collections
import warnings
from typing import NamedTuple

import optree
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap

from perf.ops.samples import normal
from primitives.testing import check_rule
from tests.custom_ops import Affine, affine, arguments, cube, operator, plain_affine, trees_close
from tests.support import assert_close, noting

OVERLOAD = torch.ops.tests.affine.default
W, B, X = arguments()


def test_what_a_rule_has_computed_is_a_function_of_the_inputs():
    """Autograd has not seen how: recorded, and in forward mode over a plain backward pass."""
    op = operator(lambda x: x.sin())
    op.def_save_for_backward(lambda inputs, output: inputs.x.cos())
    op.def_backward(lambda ctx, cosine, y_bar: {"x": y_bar * cosine})
    op.def_jvp(lambda inputs, output, tangents: inputs.x.cos() * tangents.x)
    x = X.clone().requires_grad_()
    (x_bar,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    with forward_ad.dual_level():
        (moving,) = torch.autograd.grad(op(forward_ad.make_dual(x, torch.ones_like(x))).sum(), x)
        second = forward_ad.unpack_dual(moving).tangent
    for found in (*torch.autograd.grad(x_bar.sum(), x), second):
        assert_close(found, -X.sin(), order=2)


def test_a_state_is_updated_in_compiled_code_and_its_pure_form_under_transforms():
    op = operator(lambda state, x: (state.mul_(0.5).add_(x), x * 2)[1], mutates=("state",), differentiate="reference")
    compiled = torch.compile(lambda x: (op(state := x + 1, x), state), fullgraph=True, backend="aot_eager")
    assert_close(torch.stack(compiled(X)), torch.stack([2 * X, 1.5 * X + 0.5]))

    def pure(x):
        state = x * 0
        return *op.pure(state, x), state

    trees_close(torch.compile(pure, fullgraph=True, backend="aot_eager")(X), (2 * X, X, 0 * X))
    assert_close(jvp(lambda x: pure(x)[0], (X,), (B.expand(2, 3),))[1], 2 * B.expand(2, 3))
    with pytest.warns(UserWarning, match="loop"):
        trees_close(vmap(pure)(X), (2 * X, X, 0 * X))


@pytest.mark.filterwarnings("ignore:.*vmap runs a loop")
def test_batches_of_cotangents_reach_operators_that_a_rule_calls():
    """Torch's older vmap has no kernel of its own for lists of tensors."""
    inner = operator(lambda tree, x: {"product": tree["y_bar"] * x.cos()}, differentiate="reference")
    outer = operator(lambda x: x.sin())
    outer.def_save_for_backward(lambda inputs, output: inputs.x)
    outer.def_backward(lambda ctx, x, y_bar: {"x": inner({"y_bar": y_bar}, x)["product"]})
    x, eye = normal((3,), 0), torch.eye(3, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    (x_bar,) = torch.autograd.grad(outer(leaf), leaf, eye, is_grads_batched=True)
    assert_close(x_bar, x.cos().diag())
    hessian = torch.autograd.functional.hessian(lambda x: outer(x).sum(), x, vectorize=True)
    assert_close(hessian, -x.sin().diag(), order=2)


def test_a_pullback_is_used_after_its_level_has_ended():
    """The tensors of a differentiated decomposition are wrapped for a level that the next transform takes."""
    x, y_bar, dot = (normal((2, 3), seed) for seed in range(3))

    def pulled(function):
        return lambda x: vjp(function, x)[1](y_bar)[0]

    cubed = operator(lambda x: x * x * x, differentiate="reference")
    cubed.def_kernel("cpu")(lambda x: x * x * x)
    for transform in (
        lambda f: jvp(f, (x,), (dot,))[1],
        lambda f: vjp(f, x)[1](dot)[0],
        lambda f: jvp(lambda x: vjp(f, x)[1](dot)[0], (x,), (dot,))[1],
    ):
        assert_close(transform(pulled(cubed)), transform(pulled(lambda x: x**3)), order=2)


def test_absent_cotangents_and_tangents_are_zeros_or_none():
    """But those of an output that has no derivative are always `None`."""
    seen = {}

    def build(name, **options):
        def function(a, b):
            return a * 2, (b * 3, torch.zeros(2, dtype=torch.int64) + a.long()), a + b, a * b

        def note(*values):
            seen[name] = optree.tree_leaves(values, none_is_leaf=True)

        op = operator(function, output_differentiability=[True, True, True, False], **options)
        op.def_save_for_backward(lambda inputs, output: ())
        op.def_backward(lambda ctx, saved, *bars: note(*bars) or {"a": None, "b": None})
        op.def_jvp(lambda inputs, output, dots: note(*dots) or (None, (None, None), dots.a, None))
        return op

    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    build("zeros")(a, b)[0].sum().backward()
    assert [x if x is None else x.tolist() for x in seen["zeros"]] == [[1, 1], [0, 0], None, [0, 0], None]
    seen["zeros"][1][0] = 1
    assert [seen["zeros"][i].tolist() for i in (1, 3)] == [[1, 0], [0, 0]], "zeros share no memory"
    op = build("nones", materialize=False)
    op(a, b)[0].sum().backward()
    assert [x is None for x in seen["nones"]] == [False, True, True, True, True]
    assert a.grad is None
    _, dots = jvp(lambda a: op(a, b.detach()), (a.detach(),), (a.detach(),))
    assert seen["nones"][1] is None
    assert [x.tolist() for x in optree.tree_leaves(dots)] == [[0, 0], [0, 0], [0, 0], [1, 1], [0, 0]]


def test_def_autograd_wins():
    taken = operator(lambda x: x * x, differentiate="reference")
    taken.def_jvp(lambda inputs, output, tangents: tangents.x * 0)
    # Twice the derivative of the reference, and the same value.
    taken.def_autograd(lambda x: taken.below_autograd(x.detach()) + 2 * (x * x - (x * x).detach()))
    x = torch.tensor(3.0)
    assert (taken(x), grad(taken)(x), jvp(taken, (x,), (x,))[1]) == (9, 12, 36)


@pytest.mark.parametrize("differentiate", ["eager", "grad", "compiled"])
def test_a_random_reference_is_differentiated_with_the_numbers_that_it_drew(differentiate):
    drop = operator(lambda x: x * (torch.rand_like(x) < 0.5), differentiate="reference")
    torch._dynamo.reset()
    called = torch.compile(drop, fullgraph=True, backend="aot_eager") if differentiate == "compiled" else drop
    x = torch.ones(64, requires_grad=True)
    if differentiate == "grad":
        x_bar, y = grad(lambda x: ((y := drop(x)).sum(), y), has_aux=True)(x.detach())
    else:
        (x_bar,) = torch.autograd.grad((y := called(x)).sum(), x)
    assert torch.equal(x_bar, y.detach())


def test_vmap_without_a_rule_is_a_correct_loop_with_one_warning():
    def plain(a, b, x):
        return {"sum": a * x, "other": (b.sum() + x,)}

    op = operator(lambda pair, x: plain(*pair, x), differentiate="reference")
    a, b, x, axes = normal((3, 4), 0), normal((4,), 1), normal((4, 3), 2), (0, None, 1)
    looped = vmap(lambda a, b, x: op((a, b), x), axes)
    with pytest.warns(UserWarning, match="vmap runs a loop over the batch.*def_vmap") as caught:
        actual = looped(a, b, x)
    assert len(caught) == 1
    trees_close(actual, vmap(plain, axes)(a, b, x))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*vmap runs a loop")
        several = vmap(looped, (None, None, 0))(a, b, x.expand(2, 4, 3))
        assert looped(a[:0], b, x[:, :0])["sum"].shape == (0, 4)
    trees_close(several, vmap(vmap(plain, axes), (None, None, 0))(a, b, x.expand(2, 4, 3)))


@pytest.mark.filterwarnings("ignore:.*vmap runs a loop")
def test_the_loop_of_vmap_respects_randomness():
    noise = operator(lambda x: x + torch.rand_like(x))
    with pytest.raises(RuntimeError, match="randomness error mode"):
        vmap(noise)(X)
    for randomness in ("same", "different"):
        first, second = vmap(noise, randomness=randomness)(X * 0)
        assert torch.equal(first, second) == (randomness == "same")


# In compilers and tracers the operator itself is in the graph, whatever its trees are.


def compiled(function, *args):
    """The result, and the operators that the graphs hold."""
    targets = set()

    torch._dynamo.reset()
    backend = noting(lambda graph: targets.update(node.target for node in graph.graph.nodes))
    return torch.compile(function, fullgraph=True, backend=backend)(*args), targets


@pytest.mark.parametrize("tree", [{"weight": W, "bias": B}, Affine(W, B), Affine(W)], ids=["dict", "node", "None"])
def test_values_and_derivatives_come_from_graphs_with_the_operator(tree):
    (y, _), targets = compiled(lambda x: affine(tree, x), X)
    assert_close(y, plain_affine(tree, X)[0])
    assert OVERLOAD in targets


def test_the_compiled_operator_keeps_its_rules():
    check_rule(affine, "compile against eager", (Affine(W), X))


def test_static_arguments_and_trees_are_told_apart():
    """Each makes a graph of its own, and none of them answers for another."""

    def function(params, x, eps):
        return affine(params, x, eps=eps)[0]

    torch._dynamo.reset()
    fast = torch.compile(function, fullgraph=True, backend="eager")
    first, *others = {"weight": W, "bias": B}, {"weight": W, "bias": None}, Affine(W, B)
    for params, eps in ((first, 0.0), (first, 1.0), *((params, 1.0) for params in others)):
        assert_close(fast(params, X, eps), plain_affine(params, X, eps)[0])
    shaped = operator(lambda x, *, shape: x.reshape(shape) * 1, differentiate="reference")
    fast = torch.compile(lambda x: shaped(x, shape=x.shape), fullgraph=True, backend="eager")
    for rows in (2, 4):
        assert fast(torch.ones(rows, 3)).shape == (rows, 3)
    scaled = operator(lambda d: d["x"] * d["n"], differentiate="reference")
    fast = torch.compile(lambda x, n: scaled({"x": x, "n": n}), fullgraph=True, backend="eager")
    for number in (2, 3, 0.5):
        assert_close(fast(X, number), X * number)


class Result(NamedTuple):
    y: torch.Tensor
    z: torch.Tensor | None


def test_namedtuples_and_none_in_containers_are_compiled():
    op = operator(
        lambda pair: Result(pair[0] * 2, None if pair[1] is None else pair[1].sum()), differentiate="reference"
    )
    assert_close(compiled(lambda x: (x if op(Result(x, None)).z is None else 0) * op((x, x)).z, X)[0], X * X.sum())
    op = operator(lambda tree: tree["a"] * (1 if tree["b"] is None else tree["b"]), differentiate="reference")
    assert_close(compiled(lambda x: op(collections.OrderedDict(a=x, b=None)), X)[0], X)
    assert_close(compiled(lambda x: op(collections.defaultdict(int, a=x, b=None)), X)[0], X)


def test_dynamic_batch_sizes_share_a_graph():
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(lambda x: affine(Affine(W, B), x)[0], fullgraph=True, backend=graphs, dynamic=True)
    for size in (4, 5, 7):
        x = normal((size, 3), size)
        assert_close(fast(x), plain_affine(Affine(W, B), x)[0])
    assert graphs.frame_count == 1


class Net(torch.nn.Module):
    def forward(self, x):
        return cube(affine({"weight": x[0], "bias": None}, x)[0])


# Torch 2.11's words for the programs that it reads back itself.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_export(tmp_path):
    """Without strict=True, which fails inside torch for every function that Dynamo may not trace (2.11 to 2.15)."""
    net = Net()
    size = torch.export.Dim("size", min=2, max=64)
    program = torch.export.export(net, (X,), dynamic_shapes=({0: size},), strict=False)
    assert OVERLOAD in {node.target for node in program.graph.nodes}
    torch.export.save(program, tmp_path / "net.pt2")
    longer = torch.cat([X, X + 1])
    assert_close(torch.export.load(tmp_path / "net.pt2").module()(longer), net(longer))
