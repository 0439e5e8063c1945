"""The front end, on small operators defined here: rules, missing rules, statistics, masks, and what is refused.

Then what is around a call: implementations, memory, threads, the fast path, written tensors.
"""

import gc
import weakref

import pytest
import torch
import torch.autograd.forward_ad as fwad
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.testing import assert_close

import primitives as pr
from primitives._core import registered_primitives
from primitives._core.fast_path import fast_path_keys, state_of_new_threads
from primitives._core.write_back import count_up, write_back
from primitives.ops.norms.layer_norm import NormOptions, layer_norm_p
from tests import support
from tests.custom_ops import define, operator

X, PAIR = torch.ones(3), torch.tensor([1.0, 2.0])
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


def data(*shape, **options):
    return support.data(*shape, **options).abs() + 0.5


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


# Around a call.


def cube_rules():
    return {
        "reference": lambda x: x.pow(3.0),
        "vjp": lambda r, c, output_mask: {"x": 3.0 * r.x.square() * c.y},
        "jvp": lambda r, t: 3.0 * r.x.square() * t.x,
    }


@pytest.mark.parametrize(
    "wanted, outputs, wrongs",
    [
        ("a tensor", "Tensor y", [None, 3, (PAIR,), [PAIR], (PAIR, PAIR)]),
        ("a tuple of 2 tensors", "(Tensor y, Tensor z)", [None, PAIR, (PAIR,), (PAIR, 1.0), [PAIR] * 3]),
        ("a list of tensors", "Tensor[] ys", [None, PAIR, [None], [PAIR, 1.0]]),
        ("a tuple of 0 tensors", "()", [PAIR, 3]),
    ],
    ids=["tensor", "tuple", "list", "nothing"],
)
def test_outputs_that_are_not_the_schemas_raise(wanted, outputs, wrongs):
    for wrong in wrongs:
        op = define(f"(Tensor x) -> {outputs}", rules={"reference": lambda x, wrong=wrong: wrong})
        for call in (op, op.overload):
            with pytest.raises(TypeError, match=f"an implementation must return {wanted}, got "):
                call(PAIR)


def test_outputs_come_as_the_schema_says():
    """A list for a tuple and a tuple for a list are converted, and nothing is detached by that."""
    rules = {"reference": lambda x: [x * 2, x * 3], "vjp": lambda r, c, output_mask: {"x": 2 * c.y + 3 * c.z}}
    op = define("(Tensor x) -> (Tensor y, Tensor z)", rules=rules)
    assert type(op(PAIR)) is tuple
    assert grad(lambda x: sum(op(x)).sum())(PAIR).tolist() == [5.0, 5.0]
    for kept in ([PAIR * 2], (PAIR * 2,)):
        ys = define("(Tensor x) -> Tensor[] ys", rules={"reference": lambda x, kept=kept: kept})(PAIR)
        assert type(ys) is list
        assert ys is not kept
    assert define("(Tensor x) -> ()", rules={"reference": lambda x: None})(PAIR) is None
    # The list of the caller is not the implementation's to change.
    xs = [PAIR, PAIR]
    define("(Tensor[] xs, float s) -> Tensor y", rules={"reference": lambda xs, s: xs.pop() * s})(xs, 2.0)
    assert len(xs) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda op: op(op(data(64).requires_grad_())).sum().backward(),
        lambda op: torch.autograd.grad(op(x := data(64).requires_grad_()).sum(), x, create_graph=True),
        lambda op: jacfwd(jacrev(op))(data(4)),
        lambda op: vmap(grad(op))(data(64)),
    ],
    ids=["backward", "double", "jacfwd jacrev", "vmap"],
)
@pytest.mark.parametrize("way", ["x", "y", "custom"])
def test_a_call_frees_its_tensors(call, way):
    references, rules = [], cube_rules()

    def reference(x):
        y = x.pow(3.0)
        references.extend([weakref.ref(x), weakref.ref(y)])
        return y

    if way == "custom":
        op = operator(reference, differentiate="reference")
        op.def_vmap(lambda info, in_dims, inputs: (op(inputs.x), in_dims.x))
    else:
        op = define(rules={**rules, "reference": reference}, residuals=("x", way)[way == "x" :], decomposable=True)
    # The first call of a transform imports modules of torch, which leaves cycles behind.
    call(op)
    references.clear()
    gc.disable()
    try:
        call(op)
        assert references
        assert [reference() for reference in references if reference() is not None] == []
    finally:
        gc.enable()


class Watching(torch.Tensor):
    """A subclass, which torch shows every call."""

    seen: tuple = ()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Watching.seen += (func,)
        return super().__torch_function__(func, types, args, kwargs or {})


MODES = [
    lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    FakeTensorMode,
    lambda: torch.device("cpu"),
    torch.inference_mode,
    lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True),
]


def test_plain_eager_calls_alone_take_the_fast_path():
    x, outside = torch.zeros(2), state_of_new_threads()
    assert fast_path_keys([x, torch.nn.Parameter(x)]) is not None
    with torch.no_grad():
        assert fast_path_keys([x]) is not None
    assert fast_path_keys([x, x.as_subclass(Watching)]) is None
    assert fast_path_keys([x, x.to("meta")]) is None
    inside = []
    grad(lambda y: (inside.append(fast_path_keys([x])), y.sum())[1])(x)
    assert inside == [None]
    for mode in MODES:
        with mode():
            assert fast_path_keys([x]) is None, mode
            # The package may be imported in here, too.
            assert state_of_new_threads() == outside


def test_what_the_dispatcher_converts_and_shows_it_still_does():
    x, weight = torch.arange(6.0).view(2, 3).requires_grad_(), torch.ones(3, requires_grad=True)
    expected = layer_norm_p(x, weight, None, *NormOptions(1, 1.0))[0]
    for eps in (1, torch.tensor(1.0), True):
        y = layer_norm_p(x, weight, None, *NormOptions(1, eps))[0]
        assert torch.equal(y, expected)
        assert type(y.grad_fn) is type(expected.grad_fn)
    keyword = define("(Tensor x, *, float s) -> Tensor y", rules={"reference": lambda x, s: x * s})
    wrong = [
        (x, weight, None, 1, 0),
        (x, weight, None, *NormOptions(1.5, 1.0)),
        (x, "weight", None, *NormOptions(1, 1.0)),
    ]
    for op, args in (*[(layer_norm_p, args) for args in wrong], (keyword, (PAIR, 2.0))):
        with pytest.raises(RuntimeError):
            op(*args)
    layer_norm_p(x.detach().as_subclass(Watching), None, None, *NormOptions(1, 1.0))
    assert layer_norm_p.overload in Watching.seen
    with torch._C._AutoDispatchBelowAutograd():
        assert not layer_norm_p(x, None, None, *NormOptions(1, 1.0))[0].requires_grad


def test_write_back_writes_in_place_and_counts_a_version():
    targets, values, counter = [data(3), data(2, 2)], [data(3, seed=1), data(2, 2, seed=1)], torch.tensor(3)
    pointers = [t.data_ptr() for t in targets]
    write_back(targets, [value.requires_grad_() * 1 for value in values])
    assert_close(targets, [value.detach() for value in values], rtol=0, atol=0)
    assert [(t._version, t.requires_grad, t.data_ptr()) for t in targets] == [(1, False, p) for p in pointers]
    with pytest.raises(pr.MutationError):
        write_back([values[0]], [targets[0]])
    grad(lambda x: (count_up(counter), x.sum())[1])(torch.ones(2))
    assert (counter.item(), counter._version) == (4, 1)
