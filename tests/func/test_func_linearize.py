"""linearize: against jvp, inside and around every transform, and differentiated from outside."""

import pytest
import torch
import torch.nn.functional as TF
from func_trees import NAMESPACE, Affine, Pair, assert_leaves, assert_tree, like, randn

import primitives as pr
from primitives import func

N = {"namespace": NAMESPACE}
MODULES = {"primitives": func, "torch": torch.func}


def output(tree, x):
    hidden = torch.tanh(tree["affine"].w @ x + tree["affine"].b)
    normal = pr.functional.layer_norm(hidden, (3,), tree["affine"].b, x.sum().expand(3))
    return {"pair": Pair(normal, [hidden.prod(), None]), "x": x, "constant": torch.ones(2)}


def point():
    return {"affine": Affine(randn(3, 2), randn(3)), "none": None}, randn(2)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(9)


def derivative(transform, function, primals, tangents):
    """Output and tangent along `tangents`, by either transform."""
    if transform == "jvp":
        return func.jvp(function, primals, tangents, **N)
    value, jvp_fn = func.linearize(function, *primals, **N)
    return value, jvp_fn(*tangents)


def assert_same(function, primals, tangents=None, **options):
    tangents = like(primals) if tangents is None else tangents
    expected = derivative("jvp", function, primals, tangents)
    assert_tree(derivative("linearize", function, primals, tangents), expected, **options)


# Functions of every kind.


def test_a_tree():
    assert_same(output, point())


KINDS = {
    "several outputs": lambda x: (x.sin(), x.sum(), x * 2),
    "the argument": lambda x: x,
    "a constant": lambda x: torch.ones(2, dtype=x.dtype),
    "an integer beside": lambda x: (x.argmax(), x**2, x > 0),
    "an integer alone": lambda x: {"index": x.argmax()},
    "complex": lambda x: torch.polar(x.exp(), x * 2),
    "not holomorphic": lambda x: (x * (1 + 2j)).abs() * (x * 1j).conj(),
    "another dtype": lambda x: x.float() ** 2,
    "views": lambda x: (x.expand(2, 3), x[1:], x.t()),
    "in place": lambda x: x.clone().mul_(x).add_(1),
    "values decide": lambda x: x**2 if x.sum() > 0 else x**3,
    "detached": lambda x: x.detach() * x,
    "empty": lambda x: (x[:0] * 2, x),
    "sorted": lambda x: x.sort(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind(kind):
    assert_same(KINDS[kind], (randn(3),))


def test_complex_and_empty_arguments():
    z, z_dot = torch.randn(2, 3, dtype=torch.complex128)
    assert_same(lambda z, x: (z.conj() * z.exp(), z.abs() * x), (z, randn(3)), (z_dot, randn(3)))
    assert_same(lambda tree: tree["x"] * 2, ({"x": randn(0, 2)},))
    assert_same(lambda x, y: (x.sum() + y, x), (randn(0), randn(2)))


def test_what_is_computed_without_gradient_is_constant():
    """As in vjp. Forward mode does not heed no_grad: recorded, so that a torch that does is noticed."""

    def function(x):
        with torch.no_grad():
            shift = x.sin()
        return x + shift

    x = randn(3)
    ones = torch.ones_like(x)
    assert_tree(func.linearize(function, x)[1](ones), func.vjp(function, x)[1](ones)[0])
    assert_tree(func.linearize(function, x)[1](ones), ones)
    assert_tree(func.jvp(function, (x,), (ones,))[1], 1 + x.cos())


def test_inside_no_grad_and_inference_mode():
    x = torch.ones(3)
    with torch.no_grad():
        value, jvp_fn = func.linearize(torch.exp, x)
    with torch.inference_mode():
        assert_same(torch.exp, (x,))
    assert_tree(jvp_fn(x), value)


# Nestings. Each takes a function of x that holds a derivative, and returns something computed from it.

X = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


def cubic(x):
    return (x**3).cumsum(0) * x.sin()


OUTER = {
    "grad": lambda f, m: m.grad(lambda x: f(x).pow(2).sum())(X),
    "grad_and_value": lambda f, m: func.grad_and_value(lambda x: f(x).pow(2).sum())(X),
    "vjp": lambda f, m: m.vjp(f, X)[1](X.exp()),
    "jvp": lambda f, m: m.jvp(f, (X,), (X.exp(),)),
    "linearize": lambda f, m: func.linearize(f, X)[1](X.exp()),
    "hvp": lambda f, m: func.hvp(lambda x: f(x).sum(), (X,), (X.exp(),)),
    "jacrev": lambda f, m: m.jacrev(f)(X),
    "jacrev by one": lambda f, m: m.jacrev(f, chunk_size=1)(X),
    "jacfwd": lambda f, m: m.jacfwd(f)(X),
    "hessian": lambda f, m: m.hessian(f)(X),
    "vmap": lambda f, m: m.vmap(f)(torch.stack([X, X.exp()])),
    "vmap in chunks": lambda f, m: m.vmap(f, chunk_size=1)(torch.stack([X, X.exp()])),
    "vmap of grad": lambda f, m: m.vmap(m.grad(lambda x: f(x).sum()))(torch.stack([X, X.exp()])),
    "jvp of vmap": lambda f, m: m.jvp(m.vmap(f), (torch.stack([X, X.exp()]),), (torch.ones(2, 3, dtype=X.dtype),)),
}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("outer", OUTER)
def test_inside(outer, module):
    def inner(transform):
        # The tangent depends on the point too.
        return lambda x: derivative(transform, cubic, (x,), (x.cos(),))[1]

    results = [OUTER[outer](inner(transform), MODULES[module]) for transform in ("linearize", "jvp")]
    assert_tree(*results)


@pytest.mark.parametrize("outer", [name for name in OUTER if "vmap" not in name])
def test_the_derivative_is_transformed(outer):
    """As a function of the tangent alone; the point stays."""
    _, jvp_fn = func.linearize(cubic, X + 1)
    assert_tree(
        OUTER[outer](lambda v: jvp_fn(v.sin()), func),
        OUTER[outer](lambda v: func.jvp(cubic, (X + 1,), (v.sin(),))[1], func),
    )


def test_the_derivative_is_mapped():
    _, jvp_fn = func.linearize(cubic, X)
    torch.testing.assert_close(func.vmap(jvp_fn, out_dims=1)(torch.eye(3, dtype=X.dtype)), func.jacrev(cubic)(X))


def test_parameters_from_outside():
    """Gradients with respect to what the function holds, by grad, by vmap and by autograd."""
    x, v = randn(4, 3), randn(4, 3)

    def held(transform, weight):
        def function(x):
            return pr.functional.layer_norm(x * weight, (3,), weight)

        return derivative(transform, function, (x,), (v,))[1]

    weight = randn(3).requires_grad_()
    weights = randn(2, 3)
    expected = func.jacrev(lambda w: held("jvp", w))(weight.detach())
    torch.testing.assert_close(func.jacrev(lambda w: held("linearize", w))(weight.detach()), expected)
    torch.testing.assert_close(func.jacfwd(lambda w: held("linearize", w))(weight.detach()), expected)
    torch.testing.assert_close(
        func.vmap(lambda w: held("linearize", w))(weights), torch.stack([held("jvp", w) for w in weights])
    )
    held("linearize", weight).sin().sum().backward()
    gradient = weight.grad.clone()
    weight.grad = None
    held("jvp", weight).sin().sum().backward()
    torch.testing.assert_close(gradient, weight.grad)


def test_parameters_of_a_functional_call():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    params = {name: p.detach() for name, p in model.named_parameters()}
    x, v = torch.randn(5, 2), torch.randn(5, 2)

    def slope(transform):
        return lambda p: derivative(transform, lambda x: func.functional_call(model, p, x), (x,), (v,))[1].pow(2).sum()

    assert_tree(func.grad(slope("linearize"))(params), func.grad(slope("jvp"))(params))


def test_autograd_and_forward_ad_from_outside():
    leaf = X.clone().requires_grad_()
    _, jvp_fn = func.linearize(cubic, leaf)
    (gradient,) = torch.autograd.grad(jvp_fn(X.cos()).sum(), leaf, create_graph=True)
    expected = func.grad(lambda x: func.jvp(cubic, (x,), (X.cos(),))[1].sum())
    torch.testing.assert_close(gradient, expected(X))
    (second,) = torch.autograd.grad(gradient.sum(), leaf)
    torch.testing.assert_close(second, func.grad(lambda x: expected(x).sum())(X))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, X.exp())
        tangent = torch.autograd.forward_ad.unpack_dual(func.linearize(cubic, dual)[1](X.cos())).tangent
    torch.testing.assert_close(tangent, func.jvp(lambda x: func.jvp(cubic, (x,), (X.cos(),))[1], (X,), (X.exp(),))[1])


# One evaluation.


def test_random_numbers_are_those_of_the_output():
    ones = torch.ones(64)
    value, jvp_fn = func.linearize(lambda x: TF.dropout(x, 0.5), ones)
    assert_tree([jvp_fn(ones), jvp_fn(2 * ones)], [value, 2 * value])
    rows = torch.ones(2, 64)

    def both(x):
        value, jvp_fn = func.linearize(TF.dropout, x)
        return value, jvp_fn(ones)

    value, tangent = func.vmap(both, randomness="different")(rows)
    assert_tree(tangent, value)
    assert not torch.equal(value[0], value[1])


def test_the_function_runs_once():
    calls = []

    def function(x):
        calls.append(1)
        return x**3

    _, jvp_fn = func.linearize(function, X)
    assert_leaves([jvp_fn(X), jvp_fn(X)], [3 * X**3] * 2)
    assert len(calls) == 1


# Changes in place.


def changed_in_place(function, held, x):
    _, jvp_fn = func.linearize(function, x)
    before = jvp_fn(X)
    with torch.no_grad():
        held.mul_(2)
    return jvp_fn, before


@pytest.mark.parametrize("layer_norm", [pr.functional.layer_norm, TF.layer_norm])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_change_of_what_is_needed_raises(requires_grad, layer_norm):
    weight, x = randn(3).requires_grad_(requires_grad), X.clone()
    for function, held in [
        (lambda x: weight * x, weight),
        (lambda x: layer_norm(x, (3,), weight), weight),
        (lambda x: layer_norm(x, (3,)), x),
        (lambda x: func.vmap(lambda w: w * x)(weight[None])[0], weight),
    ]:
        jvp_fn, _ = changed_in_place(function, held, x)
        with pytest.raises(RuntimeError, match=r"linearize: no tensor .* shape .* and dtype torch.float64 was. Call"):
            jvp_fn(X)


def test_a_change_under_a_transform_raises():
    def function(x, weight):
        return changed_in_place(lambda x: weight * x.sin(), weight, x)[0](X).sum()

    for transform in (func.grad, func.jacfwd, func.vmap):
        with pytest.raises(RuntimeError, match="changed in place"):
            transform(function)(X.expand(2, 3) if transform is func.vmap else X, randn(2, 3))


def test_a_change_of_anything_else_is_harmless():
    bias, buffer = randn(3), randn(3)
    jvp_fn, before = changed_in_place(lambda x: x.sin() + bias + buffer.sin(), bias, X)
    buffer.add_(1)
    torch.testing.assert_close(jvp_fn(X), before)
    value, jvp_fn = func.linearize(lambda x: x + 1, X)
    value.zero_()
    torch.testing.assert_close(jvp_fn(X), X)
