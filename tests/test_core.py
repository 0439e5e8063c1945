"""The front end, on small operators defined here: rules, missing rules, statistics, masks, and what is refused."""

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.testing import assert_close

import primitives as pr
from primitives._core import registered_primitives
from tests import support
from tests.custom_ops import define

X = torch.ones(3)
SCHEMA = "(Tensor x, Tensor? weight, float power) -> (Tensor y, Tensor mean, Tensor count)"
OPTIONS = {"residuals": ("x", "weight"), "statistics": ("mean",), "state": ("count",)}


# y = weight * x ** power, with a statistic and a state output, and all rules.


def power_reference(x, weight, power):
    y = x.pow(power) if weight is None else weight * x.pow(power)
    return y, x.mean(), x.new_full((), float(x.numel()))


def power_vjp(residuals, cotangents, output_mask):
    x, weight, power, out = residuals.x, residuals.weight, residuals.power, {}
    if output_mask.x:
        out["x"] = cotangents.y * power * x.pow(power - 1) * (1 if weight is None else weight)
    if output_mask.weight:
        out["weight"] = cotangents.y * x.pow(power)
    return out


def power_jvp(residuals, tangents):
    x, weight, power, terms = residuals.x, residuals.weight, residuals.power, []
    if tangents.x is not None:
        terms.append(tangents.x * power * x.pow(power - 1) * (1 if weight is None else weight))
    if tangents.weight is not None:
        terms.append(tangents.weight * x.pow(power))
    return sum(terms)


RULES = {"reference": power_reference, "vjp": power_vjp, "jvp": power_jvp}
power_p = define(SCHEMA, rules=RULES, name="power", **OPTIONS)


def power(x, weight=None, exponent=3.0):
    return power_p(x, weight, exponent)[0]


def mean(x):
    return power_p(x, None, 3.0)[1]


def data(*shape):
    return support.data(*shape).abs() + 0.5


REVERSE = {"vjp": lambda r, c, w: {"x": 2.0 * c.y}}
FORWARD = {"jvp": lambda r, t: 2.0 * t.x}


@pytest.mark.parametrize(
    "rules, kind, call",
    [
        ({}, "vjp", lambda op, x: op(x.requires_grad_())),
        ({}, "vjp", lambda op, x: vmap(grad(op))(x)),
        ({}, "jvp", lambda op, x: jvp(op, (x,), (x,))),
        ({}, "jvp", lambda op, x: vmap(lambda x: jvp(op, (x,), (x,)))(x)),
        (REVERSE, "jvp", lambda op, x: jacfwd(op)(x)),
        (REVERSE, "jvp", lambda op, x: grad(lambda x: jvp(op, (x,), (x,))[1].sum())(x)),
        (FORWARD, "vjp", lambda op, x: grad(lambda x: jvp(op, (x,), (x,))[1].sum())(x)),
    ],
    ids=["requires_grad", "vmap grad", "jvp", "vmap jvp", "jacfwd", "grad jvp", "grad of jvp"],
)
def test_a_missing_rule_raises_at_the_call(rules, kind, call):
    op = define(residuals=("x",), rules={"reference": lambda x: x * 2.0, **rules})
    with pytest.raises(pr.MissingRuleError, match=rf"^{op.name}: .*def_{kind}, .*decomposable"):
        call(op, data(3))
    with torch.no_grad():
        assert torch.equal(op(data(3).requires_grad_()), 2 * data(3))
    if rules is REVERSE:
        assert_close(grad(lambda x: op(x).sum())(data(3)), torch.full((3,), 2.0).double())
    if rules is FORWARD:
        assert_close(jvp(op, (data(3),), (data(3),))[1], 2 * data(3))


def first_use(x):
    with fwad.dual_level():
        return mean(fwad.make_dual(x, x)) * 2.0


@pytest.mark.parametrize(
    "call",
    [
        lambda x: mean(x.requires_grad_()).backward(),
        lambda x: vmap(grad(mean))(x.expand(2, 3)),
        first_use,
        lambda x: vmap(lambda x: jvp(lambda x: mean(x).exp(), (x,), (x,)))(x.expand(2, 3)),
        hessian(lambda x: x.sum() * mean(x)),
        lambda x: jvp(lambda x: jvp(lambda x: mean(x) * 2.0, (x,), (x,))[1], (x,), (x,)),
    ],
    ids=["backward", "grad", "forward_ad", "vmap", "hessian", "jvp jvp"],
)
def test_the_derivative_of_a_statistic_is_refused(call):
    """Its tangent at the first use of it, its cotangent in the backward pass."""
    with pytest.raises(pr.MissingRuleError, match=r"^power: output 'mean' is a statistic"):
        call(data(3))


def test_a_statistic_may_be_used_as_a_constant():
    x = data(3)
    assert_close(grad(lambda x: (power(x) * mean(x).detach()).sum())(x), 3 * x.square() * x.mean())
    assert_close(jvp(lambda x: power(x) * mean(x).detach(), (x,), (x,))[1], 3 * x.pow(3) * x.mean())
    assert_close(vmap(mean)(data(4, 3)), data(4, 3).mean(1))


def test_cached_arguments_are_constants():
    op = define("(Tensor x, Tensor s) -> Tensor y", rules={"reference": torch.mul}, decomposable=True, cached=("s",))
    assert_close(grad(lambda x: op(x, x).sum())(X), X)


def test_state_outputs_are_constants():
    y, statistic, count = power_p(data(3).requires_grad_(), None, 3.0)
    assert (y.requires_grad, statistic.requires_grad, count.requires_grad) == (True, True, False)
    assert_close(jvp(lambda x: power_p(x, None, 3.0)[2] * 2.0, (data(3),), (data(3),))[1], torch.zeros(()).double())
    assert_close(grad(lambda x: power(x).sum() * power_p(x, None, 3.0)[2])(data(3)), 9 * data(3).square())


@pytest.mark.parametrize(
    "kind, result, error, words",
    [
        ("vjp", (1,), TypeError, "got tuple"),
        ("vjp", {"z": None}, ValueError, "'x'.*got.*'z'"),
        ("jvp", (X,), pr.ShapeError, "a, b, got 1"),
        ("jvp", (X, X, X), pr.ShapeError, "a, b, got 3"),
    ],
)
def test_what_a_rule_returns_is_checked(kind, result, error, words):
    rules = {"reference": lambda x: (x * 1, x * 2), kind: lambda *_: result}
    op = define("(Tensor x) -> (Tensor a, Tensor b)", rules=rules)
    with pytest.raises(error, match=rf"^{op.name}: the {kind} rule .*{words}"):
        (jacrev if kind == "vjp" else jacfwd)(op)(X)


SIMPLE = "(Tensor x, int n) -> Tensor y"
WRONG = [
    *[(SIMPLE, {name: ("z",)}, ValueError, f"^bad: {name} names 'z'") for name in ("statistics", "state", "cached")],
    *[(SIMPLE, {"residuals": (name,)}, ValueError, "^bad: residual .*nor an output") for name in ("z", "n", "y.dtype")],
    ("(Tensor x, Tensor[]? xs) -> Tensor y", {}, ValueError, "^xs: a list of tensors must not be optional"),
    ("(Tensor x) -> (Tensor[] ys, Tensor z)", {}, ValueError, "must be the only output"),
    (SCHEMA, {"name": "power"}, RuntimeError, "power"),
]


@pytest.mark.parametrize("schema, options, error, words", WRONG)
def test_definitions_are_checked(schema, options, error, words):
    with pytest.raises(error, match=words):
        define(schema, **{"name": "bad", **options})
    assert registered_primitives()["primitives_test::power"] is power_p
    assert repr(power_p) == "Primitive(primitives_test::power)"
