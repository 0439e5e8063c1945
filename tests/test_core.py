"""The front end, on small operators defined here: rules, missing rules, statistics, masks, and what is refused."""

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.testing import assert_close

import primitives as pr
from primitives._core import registered_primitives
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


def data(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).abs() + 0.5


# Missing rules.

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


# Arguments and results of rules.


def test_lists_of_tensors_are_differentiated():
    """By rules, which may leave a list out, and by the decomposition where the value comes from a kernel."""

    def reference(xs, weight):
        return (xs[0] + 2 * xs[1]) * weight

    rules = {
        "vjp": lambda r, c, mask: (
            {"xs": [c.y * r.weight, 2 * c.y * r.weight]} if any(mask.xs) else {"weight": c.y * reference(r.xs, 1)}
        ),
        "jvp": lambda r, t: sum(i * dot * r.weight for i, dot in enumerate(t.xs, 1) if dot is not None),
        "reference": reference,
    }
    schema, xs, weight = "(Tensor[] xs, Tensor weight) -> Tensor y", [data(3), data(3, seed=1)], data(3, seed=2)
    ruled = define(schema, rules=rules, residuals=("xs", "weight"))
    decomposed = define(schema, rules={"reference": reference}, decomposable=True)
    decomposed.def_kernel("cpu")(reference)
    for op in (ruled, decomposed):
        assert_close(grad(lambda a, op=op: op([a, xs[1]], weight).sum())(xs[0]), weight)
        assert_close(grad(lambda w, op=op: op(xs, w).sum())(weight), xs[0] + 2 * xs[1])
        assert_close(jvp(lambda b, op=op: op([xs[0], b], weight), (xs[1],), (xs[0],))[1], 2 * xs[0] * weight)


@pytest.mark.parametrize("returns", ["(Tensor a, Tensor b)", "Tensor[]"])
def test_none_among_the_tangents_of_several_outputs_is_zero(returns):
    """In a loop over a batch too, of an operator with a list of flags."""
    is_list = returns == "Tensor[]"
    rules = {
        "reference": lambda x, flags: [x.sin(), x.cos()] if is_list else (x.sin(), x.cos()),
        "jvp": lambda r, t: ([None, -r.x.sin() * t.x],) if is_list else (None, -r.x.sin() * t.x),
        "vjp": lambda r, c, output_mask: {"x": X},
    }
    op = define(f"(Tensor x, bool[] flags) -> {returns}", rules=rules, residuals=("x",))
    for call in (lambda x: tuple(op(x, [True, False])), vmap(lambda x: tuple(op(x, [True, False])))):
        a_dot, b_dot = jvp(call, (X,), (X,))[1]
        assert_close(a_dot, torch.zeros_like(X))
        assert_close(b_dot, -X.sin() * X)


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
