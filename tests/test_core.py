"""The front end, on small operators defined here: rules, missing rules, statistics, masks, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.testing import assert_close

import primitives as pr
from primitives.core import Primitive, registered_primitives
from tests.custom_ops import PRIMITIVES as NAMESPACE
from tests.custom_ops import define

SCHEMA = "(Tensor x, Tensor? weight, float power) -> (Tensor y, Tensor mean, Tensor count)"
OPTIONS = {"residuals": ("x", "weight"), "statistics": ("mean",), "state": ("count",)}


# y = weight * x ** power, with a statistic and a state output, and all rules.


def power_reference(x, weight, power):
    y = x.pow(power) if weight is None else weight * x.pow(power)
    return y, x.mean(), x.new_full((), float(x.numel()))


def power_vjp(residuals, cotangents, wanted):
    x, weight, power, out = residuals.x, residuals.weight, residuals.power, {}
    if wanted.x:
        out["x"] = cotangents.y * power * x.pow(power - 1) * (1 if weight is None else weight)
    if wanted.weight:
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


def double(x):
    return x * 2.0


TRANSFORMS = {
    "grad": lambda f: grad(lambda x: f(x).sum()),
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
    "hessian": hessian,
    "jacfwd(jacfwd)": lambda f: jacfwd(jacfwd(f)),
    "jacrev(jacrev)": lambda f: jacrev(jacrev(f)),
    "jacrev(jacfwd(jacfwd))": lambda f: jacrev(jacfwd(jacfwd(f))),
    "vmap(grad)": lambda f: vmap(grad(f)),
    "vmap(jacfwd(jacrev))": lambda f: vmap(jacfwd(jacrev(f))),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_rules_and_decompositions_nest(transform):
    x, weight = data(3), data(3, seed=1)
    if transform.startswith("vmap"):
        ours, plain = (lambda x: power(x, x)), (lambda x: x.pow(4.0))
    else:
        ours, plain = (lambda x: power(x.sin(), weight).exp()), (lambda x: (weight * x.sin().pow(3.0)).exp())
    assert_close(TRANSFORMS[transform](ours)(x), TRANSFORMS[transform](plain)(x))
    op = define(decomposable=True, rules={"reference": lambda x: x.pow(3.0).sin()})
    assert_close(TRANSFORMS[transform](op)(x), TRANSFORMS[transform](lambda x: x.pow(3.0).sin())(x))


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
    op = define(residuals=("x",), rules={"reference": double, **rules})
    with pytest.raises(pr.MissingRuleError, match=rf"^{op.name}: .*def_{kind}, .*decomposable"):
        call(op, data(3))
    with torch.no_grad():
        assert torch.equal(op(data(3).requires_grad_()), 2 * data(3))
    if rules is REVERSE:
        assert_close(grad(lambda x: op(x).sum())(data(3)), torch.full((3,), 2.0).double())
    if rules is FORWARD:
        assert_close(jvp(op, (data(3),), (data(3),))[1], 2 * data(3))


# Statistics and state.


def first_use(x):
    with fwad.dual_level():
        return mean(fwad.make_dual(x, x)) * 2.0


@pytest.mark.parametrize(
    "call",
    [
        lambda x: mean(x.requires_grad_()).backward(),
        lambda x: vmap(grad(mean))(x.expand(2, 3)),
        first_use,
        lambda x: jvp(lambda x: x - mean(x), (x,), (x,)),
        lambda x: vmap(lambda x: jvp(lambda x: mean(x).exp(), (x,), (x,)))(x.expand(2, 3)),
        hessian(lambda x: x.sum() * mean(x)),
        lambda x: jvp(lambda x: jvp(lambda x: mean(x) * 2.0, (x,), (x,))[1], (x,), (x,)),
    ],
    ids=["backward", "grad", "forward_ad", "mixed", "vmap", "hessian", "jvp jvp"],
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


def test_state_outputs_are_constants():
    y, statistic, count = power_p(data(3).requires_grad_(), None, 3.0)
    assert (y.requires_grad, statistic.requires_grad, count.requires_grad) == (True, True, False)
    assert_close(jvp(lambda x: power_p(x, None, 3.0)[2] * 2.0, (data(3),), (data(3),))[1], torch.zeros(()).double())
    assert_close(grad(lambda x: power(x).sum() * power_p(x, None, 3.0)[2])(data(3)), 9 * data(3).square())


# What rules are told, and what they return.


def test_lists_of_tensors_are_differentiated():
    """By rules, which may leave a list out, and by the decomposition where the value comes from a kernel."""

    def reference(xs, weight):
        return sum(x * weight for x in xs)

    rules = {
        "vjp": lambda r, c, wanted: (
            {"xs": [c.y * r.weight for _ in r.xs]} if any(wanted.xs) else {"weight": c.y * sum(r.xs)}
        ),
        "jvp": lambda r, t: sum(dot * r.weight for dot in t.xs if dot is not None),
        "reference": reference,
    }
    schema, xs, weight = "(Tensor[] xs, Tensor weight) -> Tensor y", [data(3), data(3, seed=1)], data(3, seed=2)
    ruled = define(schema, rules=rules, residuals=("xs", "weight"))
    decomposed = define(schema, rules={"reference": reference}, decomposable=True)
    decomposed.def_kernel("cpu")(reference)
    for op in (ruled, decomposed):
        assert_close(grad(lambda a, op=op: op([a, xs[1]], weight).sum())(xs[0]), weight)
        assert_close(grad(lambda w, op=op: op(xs, w).sum())(weight), xs[0] + xs[1])
        assert_close(jvp(lambda b, op=op: op([xs[0], b], weight), (xs[1],), (xs[0],))[1], xs[0] * weight)


@pytest.mark.parametrize("result, error", [((1,), TypeError), ({"eps": None}, ValueError)], ids=str)
def test_what_a_vjp_rule_returns_is_checked(result, error):
    rules = {"reference": lambda x, eps: x * 1, "vjp": lambda *_: result}
    op = define("(Tensor x, float eps) -> Tensor y", rules=rules)
    with pytest.raises(error, match=rf"^{op.name}: the vjp rule .*(got tuple|'x'.*got.*'eps')"):
        grad(lambda x: op(x, 1.0).sum())(data(3))


@pytest.mark.parametrize("count", [1, 3])
def test_the_number_of_tangents_a_jvp_rule_returns_is_checked(count):
    rules = {"reference": lambda x: (x * 1, x * 2), "jvp": lambda r, t: (t.x,) * count}
    op = define("(Tensor x) -> (Tensor a, Tensor b)", rules=rules)
    with pytest.raises(pr.ShapeError, match=rf"^{op.name}: the jvp rule .* a, b, got {count}"):
        jvp(op, (data(3),), (data(3),))


def test_names_are_checked_when_a_primitive_is_defined():
    for option, names in (("statistics", ("z",)), ("state", ("z",)), ("cached", ("n",))):
        with pytest.raises(ValueError, match=rf"^bad: {option} names '{names[0]}'"):
            define("(Tensor x, int n) -> Tensor y", name="bad", **{option: names})
    for residual in ("z", "n", "n.dtype", "y.dtype"):
        with pytest.raises(ValueError, match=r"^bad: residual .*\(x\) nor an output \(y\)"):
            define("(Tensor x, int n) -> Tensor y", name="bad", residuals=(residual,))
    with pytest.raises(ValueError, match=r"^xs: a list of tensors must not be optional"):
        define("(Tensor x, Tensor[]? xs) -> Tensor y", name="bad")
    assert registered_primitives()[f"{NAMESPACE}::power"] is power_p
    with pytest.raises(RuntimeError, match="power"):
        Primitive("power", SCHEMA, namespace=NAMESPACE)
    with pytest.raises(ValueError, match="must be the only output"):
        define("(Tensor x) -> (Tensor[] ys, Tensor z)", name="bad")
    with pytest.raises(ValueError, match=r'^power: def_kernel takes "cuda" or "cpu", got \'tpu\''):
        power_p.def_kernel("tpu")
