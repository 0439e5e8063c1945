"""The front end, on small operators defined here: rules, missing rules, statistics, masks."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.testing import assert_close

import primitives as pr
from primitives.core import Primitive, registered_primitives

NAMESPACE = "primitives_test"
SCHEMA = "(Tensor x, Tensor? weight, float power) -> (Tensor y, Tensor mean, Tensor count)"
OPTIONS = {"residuals": ("x", "weight", "mean"), "statistics": ("mean",), "state": ("count",)}
numbers = itertools.count()


def define(schema="(Tensor x) -> Tensor y", *, rules=None, name=None, **options):
    """A fresh operator; `rules` are passed to the `def_*` methods of the same names."""
    op = Primitive(name or f"op{next(numbers)}", schema, namespace=NAMESPACE, **options)
    for kind, rule in (rules or {}).items():
        getattr(op, f"def_{kind}")(rule)
    return op


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


def data(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).abs() + 0.5


def test_the_primitive_is_registered_and_callable():
    assert registered_primitives()[f"{NAMESPACE}::power"] is power_p
    assert repr(power_p) == f"Primitive({NAMESPACE}::power)"
    assert power_p.overload is torch.ops.primitives_test.power.default
    assert power_p.spec.differentiable_outputs == ["y"]
    with pytest.raises(RuntimeError, match="power"):
        Primitive("power", SCHEMA, namespace=NAMESPACE)


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
def test_rules_nest(transform):
    x, weight = data(3), data(3, seed=1)
    if transform.startswith("vmap"):
        ours, plain = (lambda x: power(x, x)), (lambda x: x.pow(4.0))
    else:
        ours, plain = (lambda x: power(x.sin(), weight).exp()), (lambda x: (weight * x.sin().pow(3.0)).exp())
    assert_close(TRANSFORMS[transform](ours)(x), TRANSFORMS[transform](plain)(x))


def test_compiled_with_the_fake_of_the_reference():
    x, weight = data(3).requires_grad_(), data(3, seed=1)
    ours = torch.compile(lambda x: power(x, weight).sin(), fullgraph=True, backend="aot_eager")(x)
    expected = (weight * x.pow(3.0)).sin()
    assert_close(ours, expected)
    assert_close(torch.autograd.grad(ours.sum(), x), torch.autograd.grad(expected.sum(), x))


def test_default_fake_runs_the_reference_without_data():
    calls = []

    def reference(x):
        calls.append(type(x).__name__)
        return x.new_empty(x.shape[1], x.shape[0]), x.sum(0).int()

    op = define("(Tensor x) -> (Tensor a, Tensor b)", rules={"reference": reference})
    with FakeTensorMode() as mode:
        a, b = op(mode.from_tensor(data(2, 5)))
    assert (a.shape, b.shape, b.dtype) == ((5, 2), (5,), torch.int32)
    assert calls == ["FakeTensor"]


def test_own_fake_is_used_instead():
    op = define(rules={"reference": lambda x: x * 2, "fake": lambda x: x.new_empty(7)})
    with FakeTensorMode() as mode:
        assert op(mode.from_tensor(data(2))).shape == (7,)
    assert op(data(2)).shape == (2,)


# Missing rules.

NO_RULE = (
    "{}: {} differentiation was asked for, but there is no {} rule and no decomposition. Register a rule with def_{}, "
)
NO_RULE += "declare the primitive decomposable, or use register_decomposition."


def double(x):
    return x * 2.0


@pytest.mark.parametrize(
    "mode, kind, call",
    [
        ("reverse-mode", "vjp", lambda op, x: op(x.requires_grad_())),
        ("reverse-mode", "vjp", lambda op, x: grad(lambda x: op(x).sum())(x)),
        ("reverse-mode", "vjp", lambda op, x: vmap(grad(op))(x)),
        ("reverse-mode", "vjp", lambda op, x: jacrev(op)(x)),
        ("forward-mode", "jvp", lambda op, x: jvp(op, (x,), (x,))),
        ("forward-mode", "jvp", lambda op, x: jacfwd(op)(x)),
        ("forward-mode", "jvp", lambda op, x: vmap(lambda x: jvp(op, (x,), (x,)))(x)),
    ],
    ids=["requires_grad", "grad", "vmap grad", "jacrev", "jvp", "jacfwd", "vmap jvp"],
)
def test_a_missing_rule_raises_at_the_call(mode, kind, call):
    op = define(rules={"reference": double})
    with pytest.raises(pr.MissingRuleError) as caught:
        call(op, data(3))
    assert str(caught.value) == NO_RULE.format(op.name, mode, kind, kind)
    with pytest.raises(NotImplementedError), fwad.dual_level():
        op(fwad.make_dual(data(3), data(3)) if kind == "jvp" else data(3).requires_grad_())


def test_one_missing_rule_leaves_the_other_mode_working():
    reverse = define(residuals=("x",), rules={"reference": double, "vjp": lambda r, c, w: {"x": 2.0 * c.y}})
    forward = define(residuals=("x",), rules={"reference": double, "jvp": lambda r, t: 2.0 * t.x})
    assert_close(grad(lambda x: reverse(x).sum())(data(3)), torch.full((3,), 2.0).double())
    assert_close(jvp(forward, (data(3),), (data(3),))[1], 2 * data(3))
    with pytest.raises(pr.MissingRuleError, match="forward-mode"):
        jacfwd(reverse)(data(3))
    with pytest.raises(pr.MissingRuleError, match="forward-mode"):
        grad(lambda x: jvp(reverse, (x,), (x,))[1].sum())(data(3))
    with pytest.raises(pr.MissingRuleError, match="reverse-mode"):
        grad(lambda x: jvp(forward, (x,), (x,))[1].sum())(data(3))


def test_without_gradients_no_rule_is_needed():
    op = define(rules={"reference": double})
    with torch.no_grad():
        assert not op(data(3).requires_grad_()).requires_grad
    assert torch.equal(op(data(3)), 2 * data(3))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_decomposable_primitive_is_differentiated_through_its_reference(transform):
    op = define(decomposable=True, rules={"reference": lambda x: x.pow(3.0).sin()})
    assert_close(TRANSFORMS[transform](op)(data(3)), TRANSFORMS[transform](lambda x: x.pow(3.0).sin())(data(3)))


def test_a_primitive_without_reference_says_so():
    op = define()
    with pytest.raises(pr.MissingRuleError, match=rf"^{op.name}: no reference rule is defined\. Register one with"):
        op(data(3))


# Statistics and state.

REFUSED = (
    "power: output 'mean' is a statistic cached for the derivative rules and has no {} of its own. Compute it from the "
    "input with torch operations if its derivative is needed, or detach it if it is not."
)


def mean(x):
    return power_p(x, None, 3.0)[1]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: mean(x.requires_grad_()).backward(),
        lambda x: power_p(x.requires_grad_(), None, 3.0)[0].sum().add(mean(x)).backward(),
        grad(mean),
        jacrev(mean),
        lambda x: vmap(grad(mean))(x.expand(2, 3)),
        lambda x: vjp(mean, x)[1](torch.ones(()).double()),
    ],
    ids=["backward", "sum", "grad", "jacrev", "vmap", "vjp"],
)
def test_the_cotangent_of_a_statistic_is_refused(call):
    with pytest.raises(pr.MissingRuleError, match=f"^{re.escape(REFUSED.format('cotangent'))}$"):
        call(data(3))


def first_use(x):
    with fwad.dual_level():
        return mean(fwad.make_dual(x, x)) * 2.0


@pytest.mark.parametrize(
    "call",
    [
        first_use,
        lambda x: jvp(lambda x: mean(x) * 2.0, (x,), (x,)),
        lambda x: jvp(mean, (x,), (x,))[1] + 1.0,
        lambda x: jvp(lambda x: x - mean(x), (x,), (x,)),
        jacfwd(lambda x: mean(x) * 2.0),
        jacfwd(mean),
        lambda x: vmap(lambda x: jvp(lambda x: mean(x).exp(), (x,), (x,)))(x.expand(2, 3)),
        hessian(lambda x: x.sum() * mean(x)),
        lambda x: jvp(lambda x: jvp(lambda x: mean(x) * 2.0, (x,), (x,))[1], (x,), (x,)),
    ],
    ids=["forward_ad", "jvp", "after", "mixed", "jacfwd", "bare jacfwd", "vmap", "hessian", "jvp jvp"],
)
def test_the_tangent_of_a_statistic_is_refused_at_its_first_use(call):
    with pytest.raises(
        pr.MissingRuleError, match=f"^{re.escape(REFUSED.format('tangent'))}$|{re.escape(REFUSED.format('cotangent'))}"
    ):
        call(data(3))


def test_a_statistic_may_be_used_as_a_constant():
    x = data(3)
    assert_close(grad(lambda x: (power(x) * mean(x).detach()).sum())(x), 3 * x.square() * x.mean())
    assert_close(jvp(lambda x: power(x) * mean(x).detach(), (x,), (x,))[1], 3 * x.pow(3) * x.mean())
    assert_close(vmap(mean)(data(4, 3)), data(4, 3).mean(1))


def test_a_statistic_is_never_a_silent_zero():
    def call():
        op = define(SCHEMA, rules=RULES, **{**OPTIONS, "residuals": ("x", "weight")})
        return jvp(lambda x: op(x, None, 3.0)[1] * 2.0, (data(3),), (data(3),))

    with pytest.raises((pr.MissingRuleError, ValueError), match="mean"):
        call()


def test_state_outputs_are_constants():
    y, statistic, count = power_p(data(3).requires_grad_(), None, 3.0)
    assert (y.requires_grad, statistic.requires_grad, count.requires_grad) == (True, True, False)
    assert_close(jvp(lambda x: power_p(x, None, 3.0)[2] * 2.0, (data(3),), (data(3),))[1], torch.zeros(()).double())
    assert_close(grad(lambda x: power(x).sum() * power_p(x, None, 3.0)[2])(data(3)), 9 * data(3).square())


# What rules are told.


@pytest.mark.parametrize("wants", [(True, True), (True, False), (False, True)])
def test_rules_are_told_what_is_wanted_and_what_is_perturbed(wants):
    seen = []

    def spying_vjp(residuals, cotangents, wanted):
        seen.append((wanted._asdict(), type(residuals).__name__, residuals._fields, cotangents._fields))
        return power_vjp(residuals, cotangents, wanted)

    def spying_jvp(residuals, tangents):
        seen.append({name: tangent is not None for name, tangent in tangents._asdict().items()})
        return power_jvp(residuals, tangents)

    op = define(SCHEMA, rules={**RULES, "vjp": spying_vjp, "jvp": spying_jvp}, **OPTIONS)
    x, weight = (t.requires_grad_(want) for t, want in zip((data(3), data(3, seed=1)), wants, strict=True))
    op(x, weight, 3.0)[0].sum().backward()
    expected = {"x": wants[0], "weight": wants[1]}
    assert seen == [(expected, "Residuals", ("x", "weight", "mean", "power"), ("y",))]
    assert [t.grad is not None for t in (x, weight)] == list(wants)
    seen.clear()
    with fwad.dual_level():
        primals = [
            fwad.make_dual(t.detach(), t.detach()) if want else t.detach()
            for t, want in zip((x, weight), wants, strict=True)
        ]
        op(*primals, 3.0)
    assert seen == [expected]


def test_an_unused_output_has_the_cotangent_none():
    seen = []

    def rule(residuals, cotangents, wanted):
        seen.append(tuple(c is not None for c in cotangents))
        return {"x": sum(c for c in cotangents if c is not None)}

    op = define(
        "(Tensor x) -> (Tensor a, Tensor b)",
        rules={"reference": lambda x: (x * 1, x * 1), "vjp": rule},
        residuals=("x",),
    )
    for used in ([0], [1], [0, 1]):
        x = data(3).requires_grad_()
        outputs = op(x)
        sum(outputs[i].sum() for i in used).backward()
        assert_close(x.grad, torch.full((3,), float(len(used))).double())
    assert seen == [(True, False), (False, True), (True, True)]


@pytest.mark.parametrize(
    "result, error, text",
    [
        ((1,), TypeError, "{}: the vjp rule must return a dict, got tuple."),
        (None, TypeError, "{}: the vjp rule must return a dict, got NoneType."),
        (
            {"z": None},
            ValueError,
            "{}: the vjp rule returned cotangents for ['z'], but the tensor arguments are ['x'].",
        ),
        (
            {"eps": None},
            ValueError,
            "{}: the vjp rule returned cotangents for ['eps'], but the tensor arguments are ['x'].",
        ),
    ],
    ids=str,
)
def test_what_a_vjp_rule_returns_is_checked(result, error, text):
    op = define(
        "(Tensor x, float eps) -> Tensor y", rules={"reference": lambda x, eps: x * 1, "vjp": lambda *_: result}
    )
    with pytest.raises(error, match=f"^{re.escape(text.format(op.name))}$"):
        grad(lambda x: op(x, 1.0).sum())(data(3))


@pytest.mark.parametrize("count", [1, 3])
def test_the_number_of_tangents_a_jvp_rule_returns_is_checked(count):
    rules = {"reference": lambda x: (x * 1, x * 2), "jvp": lambda r, t: (t.x,) * count}
    op = define("(Tensor x) -> (Tensor a, Tensor b)", rules=rules)
    text = f"{op.name}: the jvp rule must return one tangent for each of a, b, got {count}."
    with pytest.raises(pr.ShapeError, match=f"^{re.escape(text)}$"):
        jvp(op, (data(3),), (data(3),))


def test_names_are_checked_when_a_primitive_is_defined():
    for option in ("statistics", "state"):
        with pytest.raises(ValueError, match=rf"^bad: {option} names 'z', which is none of the outputs \(y\)\.$"):
            define(name="bad", **{option: ("z",)})
    text = "bad: residual 'z' is neither a tensor argument (x) nor an output (y)."
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        define("(Tensor x, int n) -> Tensor y", name="bad", residuals=("z",))
    for residual in ("n", "n.dtype"):
        with pytest.raises(ValueError, match=r"^bad: residual"):
            define("(Tensor x, int n) -> Tensor y", name="bad", residuals=(residual,))
    with pytest.raises(ValueError, match=r"^xs: a list of tensors must not be optional; pass an empty list, got "):
        define("(Tensor x, Tensor[]? xs) -> Tensor y", name="bad")
    with pytest.raises(ValueError, match=r'^power: def_kernel takes "cuda" or "cpu", got \'tpu\'\.$'):
        power_p.def_kernel("tpu")


def test_a_tangent_of_another_dtype_is_refused():
    x, x_dot = data(3).float(), data(3)
    # torch computes on: a float64 tangent comes out of a float32 function.
    assert jvp(torch.nn.functional.softplus, (x,), (x_dot,))[1].dtype == torch.float64
    text = "power: the tangent of x must have the dtype of its primal, torch.float32, got torch.float64."
    with pytest.raises(pr.DtypeError, match=f"^{re.escape(text)}$"):
        jvp(power, (x,), (x_dot,))
    with pytest.raises(pr.DtypeError, match="the tangent of weight must have"), fwad.dual_level():
        power(x, fwad.make_dual(x, x_dot))
