"""linearize: against jvp, inside and around every transform, and differentiated from outside."""

import pytest
import torch
import torch.nn.functional as TF
from func_trees import N, assert_tree, like, randn

import primitives as pr
from primitives import func
from primitives._core.errors import MissingRuleError

pytestmark = pytest.mark.usefixtures("seeded")


def derivative(transform, function, primals, tangents):
    """Output and tangent along `tangents`, by either transform."""
    if transform == "jvp":
        return func.jvp(function, primals, tangents, **N)
    value, jvp_fn = func.linearize(function, *primals, **N)
    return value, jvp_fn(*tangents)


def assert_same(function, primals, tangents=None):
    tangents = like(primals) if tangents is None else tangents
    assert_tree(*[derivative(transform, function, primals, tangents) for transform in ("linearize", "jvp")])


KINDS = {
    "a constant": lambda x: torch.ones(2, dtype=x.dtype),
    "an integer beside": lambda x: (x.argmax(), x**2, x > 0),
    "an integer alone": lambda x: {"index": x.argmax()},
    "not holomorphic": lambda x: (torch.polar(x.exp(), x * 2), (x * (1 + 2j)).abs() * (x * 1j).conj()),
    "another dtype": lambda x: x.float() ** 2,
    "views": lambda x: (x.expand(2, 3), x[1:], x.t()),
    "in place": lambda x: x.clone().mul_(x).add_(1),
    "values decide": lambda x: x**2 if x.sum() > 0 else x**3,
    "detached": lambda x: x.detach() * x,
    "empty": lambda x: (x[:0] * 2, x),
    "sorted": lambda x: x.sort(),
    "layer norm": lambda x: pr.functional.layer_norm(x, (3,), x.exp(), x.sum().expand(3)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind(kind):
    assert_same(KINDS[kind], (randn(3),))


def test_what_is_computed_without_gradient_is_constant():
    """As in vjp; around linearize the modes change nothing."""

    def function(x):
        with torch.no_grad():
            shift = x.sin()
        return x + shift

    x = torch.ones(3)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            assert_tree(func.linearize(function, x)[1](x), x)
    with torch.inference_mode():
        if torch.__version__ >= "2.13":
            assert_tree(func.linearize(function, x)[1](x), x)
        else:  # Torch's own derivatives are zeros there.
            with pytest.raises(MissingRuleError, match="no_grad"):
                func.linearize(function, x)


# Nestings. Each takes a function of x that holds a derivative, and returns something computed from it.

X = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def cubic(x):
    return (x**3).cumsum(0) * x.sin()


OUTER = {
    "grad": lambda f, m: m.grad(lambda x: f(x).pow(2).sum())(X),
    "vjp": lambda f, m: m.vjp(f, X)[1](X.exp()),
    "jvp": lambda f, m: m.jvp(f, (X,), (X.exp(),)),
    "linearize": lambda f, m: func.linearize(f, X)[1](X.exp()),
    "hvp": lambda f, m: func.hvp(lambda x: f(x).sum(), (X,), (X.exp(),)),
    "jacrev by one": lambda f, m: m.jacrev(f, chunk_size=1)(X),
    "hessian": lambda f, m: m.hessian(f)(X),
    "vmap": lambda f, m: m.vmap(f)(torch.stack([X, X.exp()])),
    "vmap of grad": lambda f, m: m.vmap(m.grad(lambda x: f(x).sum()))(torch.stack([X, X.exp()])),
    "jvp of vmap": lambda f, m: m.jvp(m.vmap(f), (torch.stack([X, X.exp()]),), (torch.ones(2, 3, dtype=X.dtype),)),
}


@pytest.mark.parametrize("module", [func, torch.func])
@pytest.mark.parametrize("outer", OUTER)
def test_inside(outer, module):
    def inner(transform):
        # The tangent depends on the point too.
        return lambda x: derivative(transform, cubic, (x,), (x.cos(),))[1]

    assert_tree(*[OUTER[outer](inner(transform), module) for transform in ("linearize", "jvp")])


def test_the_function_runs_once_with_the_random_numbers_of_the_output():
    ones, calls = torch.ones(64), []

    def both(x):
        value, jvp_fn = func.linearize(lambda x: calls.append(1) or TF.dropout(x, 0.5), x)
        return value, jvp_fn(ones), jvp_fn(2 * ones)

    value, tangent, double = func.vmap(both, randomness="different")(torch.ones(2, 64))
    assert_tree([tangent, double], [value, 2 * value])
    assert not torch.equal(value[0], value[1])
    assert len(calls) == 1


def changed_in_place(function, held, x):
    _, jvp_fn = func.linearize(function, x)
    before = jvp_fn(X)
    with torch.no_grad():
        held.mul_(2)
    return jvp_fn, before


def test_a_change_of_what_is_needed_raises():
    weight, leaf, x = randn(3), randn(3).requires_grad_(), X.clone()
    for function, held in [
        (lambda x: pr.functional.layer_norm(x, (3,), leaf), leaf),
        (lambda x: pr.functional.layer_norm(x, (3,), weight), weight),
        (lambda x: TF.layer_norm(x, (3,), weight), x),
        (lambda x: func.vmap(lambda w: w * x)(weight[None])[0], weight),
    ]:
        with pytest.raises(RuntimeError, match="changed in place"):
            changed_in_place(function, held, x)[0](X)

    def under(x, weight):
        return changed_in_place(lambda x: weight * x.sin(), weight, x)[0](X).sum()

    for transform in (func.grad, func.jacfwd, func.vmap):
        with pytest.raises(RuntimeError, match="changed in place"):
            transform(under)(X.expand(2, 3) if transform is func.vmap else X, randn(2, 3))


def test_a_change_of_anything_else_is_harmless():
    bias = randn(3)
    jvp_fn, before = changed_in_place(lambda x: x.sin() + bias, bias, X)
    torch.testing.assert_close(jvp_fn(X), before)
    value, jvp_fn = func.linearize(lambda x: x + 1, X)
    value.zero_()
    torch.testing.assert_close(jvp_fn(X), X)
