"""Custom operators over pytrees: values, every transform, and what torch expects of an operator."""

from __future__ import annotations

import warnings

import optree
import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

import primitives as pr
from tests.custom_ops import Affine, affine, cube, plain_affine
from tests.support import assert_close, like, normal
from tests.test_nestings import nested, nestings


def arguments(dtype=torch.float64):
    return [normal(shape, seed).to(dtype) for seed, shape in enumerate([(3,), (3,), (2, 3)])]


def scalar(function, kind=dict):
    """A scalar function of weight, bias and x through `function`, with a tree of the given kind."""

    def loss(weight, bias, x):
        params = {"weight": weight, "bias": bias} if kind is dict else Affine(weight, bias)
        y, rest = function(params, x)
        return (y.sin() * torch.linspace(0.5, 1, 6, dtype=y.dtype).reshape(2, 3)).sum() + rest["mean"].exp().sum()

    return loss


def trees_close(actual, expected, order=1):
    for got, want in zip(optree.tree_leaves(actual), optree.tree_leaves(expected), strict=True):
        assert_close(got, want, order=order)


def test_it_is_one_operator_whatever_the_trees():
    weight, bias, x = arguments()
    for params in ({"weight": weight, "bias": bias}, {"weight": weight, "bias": None}, Affine(weight, bias)):
        y, rest = affine(params, x, eps=0.5)
        trees_close((y, rest), plain_affine(params, x, 0.5))
    assert str(torch.ops.tests.affine.default._schema) == (
        "tests::affine(Tensor[] leaves, int structure) -> Tensor[] outputs"
    )
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda w, x: affine(Affine(w), x)[0])(weight, x)
    assert torch.ops.tests.affine.default in [node.target for node in graph.graph.nodes]
    with torch.profiler.profile(acc_events=True) as profile:
        affine(Affine(weight), x)
    assert any(event.key == "tests::affine" for event in profile.key_averages())


def test_arguments_are_bound_as_python_binds_them():
    weight, _, x = arguments()
    expected = affine(Affine(weight), x, eps=1e-5)
    trees_close(affine(x=x, params=Affine(weight)), expected)
    trees_close(affine(Affine(weight), x=x), expected)
    assert affine.__doc__.startswith("Every derivative rule")
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        affine(Affine(weight))
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilon'"):
        affine(Affine(weight), x, epsilon=1)


def test_static_values_that_python_calls_equal_are_told_apart():
    """1, 1.0 and True; 0.0 and -0.0: one of them must not answer for the other."""

    @pr.custom_op("tests::scaled")
    def scaled(x, *, by):
        return x.reciprocal() if by is True else (x * by if isinstance(by, int) else x * 0 + 1 / torch.tensor(by))

    x = torch.tensor([2.0])
    assert [scaled(x, by=by).item() for by in (1, True, 0.0, -0.0, 2.0)] == [2.0, 0.5, float("inf"), -float("inf"), 0.5]
    nan = scaled.table.flatten((x,), {"by": float("nan")})[1]
    assert scaled.table.flatten((x,), {"by": float("nan")})[1] is nan


@pytest.mark.parametrize("kind", [dict, Affine], ids=["dict", "dataclass"])
@pytest.mark.parametrize("word", nestings(1, 2, 3, 4))
def test_every_nesting_in_x(word, kind):
    weight, bias, x = arguments()
    actual, expected = (
        nested(lambda x, f=function: scalar(f, kind)(weight, bias, x), letters)(x)
        for function, letters in ((affine, word), (plain_affine, "f" * len(word)))
    )
    assert_close(actual, expected, order=len(word))


@pytest.mark.parametrize("word", nestings(1, 2, 3))
def test_every_nesting_of_the_reference(word):
    x = arguments()[0]
    actual, expected = (nested(f, word)(x) for f in (lambda x: cube(x).sum(), lambda x: (x**3).sum()))
    assert_close(actual, expected, order=len(word))


@pytest.mark.parametrize("modes", [(jacfwd,), (jacrev,), (jacfwd, jacrev), (jacrev, jacfwd), (jacrev, jacrev)])
def test_all_arguments_at_once(modes):
    def derivative(function):
        for mode in modes:
            function = mode(function, argnums=(0, 1, 2))
        return function(*arguments())

    trees_close(derivative(scalar(affine)), derivative(scalar(plain_affine)), order=2)


def test_eager_autograd():
    inputs = [value.requires_grad_() for value in arguments()]
    assert gradcheck(scalar(affine), inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(scalar(affine, Affine), inputs, check_fwd_over_rev=True)


def test_forward_mode_over_a_backward_pass_without_create_graph():
    """What def_save_for_backward computed depends on the dual numbers too."""
    weight, bias, x = arguments()
    x_dot = like(x, seed=5)

    def x_bar(function, x):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.clone().requires_grad_(), x_dot)
            (bar,) = torch.autograd.grad(function(weight, bias, dual), dual)
            return forward_ad.unpack_dual(bar).tangent

    assert_close(x_bar(scalar(affine), x), x_bar(scalar(plain_affine), x), order=2)


def test_batches_of_cotangents():
    inputs = [value.requires_grad_() for value in arguments()]
    bars = torch.eye(2, dtype=torch.float64)
    actual, expected = (
        torch.autograd.grad(
            f({"weight": inputs[0], "bias": inputs[1]}, inputs[2])[1]["mean"], inputs[2], bars, is_grads_batched=True
        )
        for f in (affine, plain_affine)
    )
    trees_close(actual, expected)


@pytest.mark.filterwarnings("ignore:.*vmap runs a loop")
def test_batches_of_cotangents_reach_operators_that_a_rule_calls():
    """Torch's older vmap has no kernel of its own for lists of tensors."""

    @pr.custom_op("tests::inner_of_rule", differentiate="reference")
    def inner(tree, x):
        return {"product": tree["y_bar"] * x.cos()}

    @pr.custom_op("tests::calls_another")
    def outer(x):
        return x.sin()

    outer.def_save_for_backward(lambda inputs, output: inputs.x)
    outer.def_backward(lambda ctx, x, y_bar: {"x": inner({"y_bar": y_bar}, x)["product"]})
    x = normal((3,), 0)
    leaf = x.clone().requires_grad_()
    (x_bar,) = torch.autograd.grad(outer(leaf), leaf, torch.eye(3, dtype=torch.float64), is_grads_batched=True)
    assert_close(x_bar, x.cos().diag())
    assert gradcheck(outer, (leaf,), check_batched_grad=True)
    hessian = torch.autograd.functional.hessian(lambda x: outer(x).sum(), x, vectorize=True)
    assert_close(hessian, -x.sin().diag(), order=2)


@pytest.mark.parametrize(
    "in_dims", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, 0), (None, None, 1), (1, 1, -1)]
)
@pytest.mark.parametrize(
    "function",
    [lambda f: f, lambda f: grad(f, (0, 1, 2)), lambda f: jacfwd(grad(f, 2), 2)],
    ids=["value", "grad", "hessian"],
)
def test_vmap_rule(function, in_dims):
    samples = [arguments(), [value * 1.5 for value in arguments()]]
    stacked = [
        first if dim is None else torch.stack([first, second], dim)
        for first, second, dim in zip(*samples, in_dims, strict=True)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = vmap(function(scalar(affine)), in_dims)(*stacked)
    trees_close(actual, vmap(function(scalar(plain_affine)), in_dims)(*stacked), order=2)


def test_vmap_without_a_rule_is_a_correct_loop_with_one_warning():
    @pr.custom_op("tests::looped", differentiate="reference")
    def looped(pair, x):
        return {"sum": pair[0] * x, "other": (pair[1].sum() + x,)}

    def through(function):
        return lambda a, b, x: function((a, b), x)

    a, b, x = normal((3, 4), 0), normal((4,), 1), normal((4, 3), 2)
    with pytest.warns(UserWarning, match="tests::looped: vmap runs a loop over the batch.*def_vmap") as caught:
        actual = vmap(through(looped), (0, None, 1))(a, b, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twice = vmap(vmap(through(looped), (0, None, 0)), (None, None, 1))(
            a, b, x.reshape(4, 3, 1).expand(4, 3, 2).permute(1, 2, 0)
        )
        empty = vmap(through(looped), (0, None, 1))(a[:0], b, x[:, :0])
    assert len(caught) == 1
    trees_close(actual, vmap(through(looped.__wrapped__), (0, None, 1))(a, b, x))
    assert twice["sum"].shape == (2, 3, 4)
    assert empty["sum"].shape == (0, 4)


def test_vmap_of_random_numbers_is_told_the_mode():
    seen = []

    @pr.custom_op("tests::told")
    def told(x):
        return x + 1

    @told.def_vmap
    def _(info, in_dims, inputs):
        seen.append((info.batch_size, info.randomness, in_dims))
        return told(inputs.x), 0

    vmap(told, randomness="different")(torch.zeros(3, 2))
    assert [(size, mode, tuple(dims)) for size, mode, dims in seen] == [(3, "different", (0,))]


def test_absent_cotangents_and_tangents_are_zeros_or_none():
    seen = {}

    def build(name, **options):
        @pr.custom_op(f"tests::{name}", **options)
        def op(a, b):
            return a * 2, (b * 3, torch.zeros(2, dtype=torch.int64) + a.long()), a + b

        op.def_save_for_backward(lambda inputs, output: ())

        @op.def_backward
        def _(ctx, saved, first, pair, last):
            seen[name] = (first, *pair, last)
            return {"a": None, "b": None}

        @op.def_jvp
        def _(inputs, output, tangents):
            seen[name] = tuple(tangents)
            return None, (None, None), tangents.a

        return op

    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    build("zeros")(a, b)[0].sum().backward()
    first, second, integers, last = seen["zeros"]
    assert (first.tolist(), second.tolist(), integers, last.tolist()) == ([1, 1], [0, 0], None, [0, 0])
    op = build("nones", materialize=False)
    op(a, b)[0].sum().backward()
    assert [x is None for x in seen["nones"]] == [False, True, True, True]
    assert a.grad is None
    _, dots = jvp(lambda a: op(a, b.detach()), (a.detach(),), (a.detach(),))
    assert seen["nones"][1] is None
    assert [x.tolist() for x in optree.tree_leaves(dots)] == [[0, 0], [0, 0], [0, 0], [1, 1]]


def test_output_differentiability():
    @pr.custom_op("tests::marked", differentiate="reference", output_differentiability=[True, False])
    def marked(x):
        return x.sin(), [x.cos(), {"square": x * x}]

    x = torch.ones(2, requires_grad=True)
    y, (cosine, rest) = marked(x)
    assert (y.requires_grad, cosine.requires_grad, rest["square"].requires_grad) == (True, False, False)
    _, (_, dots) = jvp(marked, (x.detach(),), (x.detach(),))
    assert dots[0].tolist() == [0, 0]
    assert grad(lambda x: marked(x)[1][0].sum() + marked(x)[0].sum())(x.detach()).tolist() == x.cos().tolist()


def test_def_autograd_wins():
    @pr.custom_op("tests::taken", differentiate="reference")
    def taken(x):
        return x * x

    taken.def_jvp(lambda inputs, output, tangents: tangents.x * 0)

    @taken.def_autograd
    def _(x):
        # Twice the derivative of the reference, and the same value.
        value = taken.below_autograd(x.detach())
        return value + 2 * (x * x - (x * x).detach())

    x = torch.tensor(3.0)
    assert taken(x) == 9
    assert grad(taken)(x) == 12
    assert jvp(taken, (x,), (x,))[1] == 36
    leaf = x.clone().requires_grad_()
    assert torch.autograd.grad(taken(leaf), leaf)[0] == 12


def test_backends_choose_the_kernel():
    @pr.custom_op("tests::chosen")
    def chosen(x):
        return {"y": x + 1}

    @chosen.def_kernel("cpu")
    def _(x):
        return {"y": x + 2}

    x = torch.zeros(1)
    assert chosen(x)["y"] == 2
    with pr.use_backend("reference"):
        assert chosen(x)["y"] == 1


def test_many_structures_are_warned_of_once():
    @pr.custom_op("tests::counted")
    def counted(x, *, step):
        return x + step

    for step in range(999):
        counted(torch.zeros(1), step=step)
    with pytest.warns(UserWarning, match="1000 different structures"):
        counted(torch.zeros(1), step=999)
    counted(torch.zeros(1), step=1000)


def test_a_pullback_is_used_after_its_level_has_ended():
    """What a decomposition is differentiated with is wrapped for a level that the next transform takes."""
    x, bar, dot = (normal((2, 3), seed) for seed in range(3))

    def pulled(function):
        return lambda x: vjp(function, x)[1](bar)[0]

    def plain(x):
        return x * x * x

    for transform in (
        lambda f: jvp(f, (x,), (dot,))[1],
        lambda f: vjp(f, x)[1](dot)[0],
        lambda f: vmap(f)(torch.stack([x, 2 * x])),
        lambda f: jvp(lambda x: vjp(f, x)[1](dot)[0], (x,), (dot,))[1],
    ):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*vmap runs a loop")
            assert_close(transform(pulled(cube)), transform(pulled(plain)), order=2)
