"""`check_rules`: right operators pass, every planted fault is named, and the reproducer shows it."""

import contextlib
import enum
import pickle
import re
import runpy
import unittest
from typing import NamedTuple

import pytest
import torch

import primitives as pr
from primitives.ops.softmax.log_softmax import log_softmax_p
from primitives.testing import PROPERTIES, RuleError, check_rule, check_rules
from tests import wrong_ops
from tests.custom_ops import NAMESPACE, Affine, affine
from tests.wrong_ops import ALONE, OTHERS, WEIGHT, X, right_product

# The compiler takes most of the time; it is checked where it matters.
FAST = {"compile": False}
Z = torch.complex(X, WEIGHT - 1)


def failure(op, args, kwargs=None, **options):
    with pytest.raises(RuleError) as caught:
        check_rules(op, args, kwargs, **options)
    return caught.value


def run(program, tmp_path):
    path = tmp_path / "reproducer.py"
    path.write_text(program)
    return runpy.run_path(str(path))


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Mode(enum.Enum):
    SQUARE = 1


@pr.custom_op("check_rules::scaled", differentiate="reference", namespace=NAMESPACE)
def scaled(params, x, *, eps=1e-3):
    y = x * (x.square().mean() + eps).rsqrt() * params["affine"].weight
    return {"y": y, "pair": Pair(y.sum(), x.argmax())}


only_value = pr.custom_op("check_rules::only_value")(lambda x: x.exp())
half_a_pair = pr.custom_op("check_rules::half_a_pair")(lambda x: x.exp())
half_a_pair.def_backward(lambda ctx, saved, y_bar: {"x": saved * y_bar})


@pr.custom_op("check_rules::counts", mutates=("state",), differentiate="reference")
def counts(state, x):
    state["steps"].add_(1)
    state["mean"].mul_(0.9).add_(x.detach().mean(), alpha=0.1)
    return x.square()


PARAMS, THREE = {"affine": Affine(torch.tensor([0.5, 1.0, 2.0])), "unused": None}, torch.tensor([0.5, 1.0, 2.0])
STATE = {"mean": torch.zeros(()), "steps": torch.zeros((), dtype=torch.int64)}
NO_KERNEL, NO_NUMBER, NO_OP = "reference against kernel", "static arguments", "opcheck"
OF_DERIVATIVES = {name for name in PROPERTIES if re.search("grad|jvp|transpose|nest|deriv|cotangent", name)}
# Not for the compiler, which is off.
RIGHT = {
    "trees": (scaled, (PARAMS, X), {}, {NO_KERNEL}),
    **{f"rules on a {type(tree).__name__}": (affine, (tree, X), {}, {NO_KERNEL})
       for tree in ({"weight": THREE, "bias": THREE + 1}, Affine(THREE))},
    "plain": (lambda tree, *parameters: pr.functional.layer_norm(tree, (3,), *parameters),
              ({"a": X.half(), "b": [X, None]}, torch.ones(3), torch.zeros(3)), {},
              {NO_KERNEL, NO_OP, NO_NUMBER}),
    "keyword": (lambda x, *, order: x**order, (X.abs() + 0.5,), {"order": 2.0}, {NO_KERNEL, NO_OP}),
    "updates": (counts, (STATE, X), {}, {NO_KERNEL, NO_NUMBER}),
    **{f"product of {name}": (right_product, (x, x.contiguous() + 1), {}, {NO_NUMBER}) for name, x in {
        "numbers": torch.tensor(2.0), "expanded": torch.ones(1, 3).expand(2, 3), "complex": Z,
    }.items()},
    "product of nothing": (right_product, (X[:0], X[:0]), {}, {NO_NUMBER, *OF_DERIVATIVES}),
    "real and complex": (right_product, (Z, WEIGHT), {}, {NO_NUMBER}),
    "real to complex": (lambda x: torch.complex(x.sin(), x.square()), (X,), {}, {NO_KERNEL, NO_OP, NO_NUMBER}),
    "complex to real": (lambda z: z.abs().square() + z.real, (Z,), {}, {NO_KERNEL, NO_OP, NO_NUMBER}),
    **{f"sqrt at {value}": (torch.sqrt, (torch.tensor([value, 2 * value]),), {}, {NO_KERNEL, NO_OP, NO_NUMBER})
       for value in (1e-4, 1e4)},
}  # fmt: skip


@pytest.mark.parametrize("op, args, kwargs, others", RIGHT.values(), ids=RIGHT)
def test_right_operators_pass(op, args, kwargs, others):
    report = check_rules(op, args, kwargs, order=3 if kwargs else 2, **FAST)
    assert {row.property for row in report.rows if row.status != "ok"} == {"compile against eager", *others}
    assert STATE["steps"] == 0


def test_a_right_op_passes_under_the_compiler_and_the_report_is_a_table():
    random_state = torch.get_rng_state()
    report = check_rules(right_product, (X, WEIGHT))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert {row.property: row.note for row in report.rows if row.status != "ok"} == {
        "static arguments": "no float, int or bool argument"
    }
    lines = str(report).splitlines()
    assert [line.strip().split("  ")[0] for line in lines[2:]] == list(PROPERTIES)
    # Each property finds what no other finds.
    assert set(ALONE.values()) == set(PROPERTIES)
    with pytest.raises(KeyError):
        report["gradchek"]


@pytest.mark.parametrize("op", {**ALONE, **OTHERS}, ids=lambda op: op.qualified_name)
def test_the_fault_is_named_and_reproduced(op, tmp_path):
    name = {**ALONE, **OTHERS}[op]
    args = (X,) if op is wrong_ops.aliased_p else (X, WEIGHT)
    error = failure(op, args, compile=name in ("compile against eager", "opcheck"))
    assert (error.property, error.op) == (name, op.qualified_name)
    assert op in OTHERS or error.report.failed == (name,)
    assert str(error).startswith(f"{error.op}: {name} failed: {error.note}")
    with pytest.raises(RuleError, match=re.escape(name)):
        run(error.reproducer, tmp_path)
    # The arguments, the process and its settings are as they were.
    assert all(x._version == 0 for x in args)
    assert not torch.are_deterministic_algorithms_enabled()
    assert pr.current_backend() == "auto"


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, y_bar):
        return 3 * y_bar


BF16 = torch.bfloat16
BFLOAT16 = next(op for op in ALONE if op.qualified_name == "wrong::bfloat16")
OF_CALLS = {
    "key path": (lambda tree: {"y": Tripled.apply(tree["a"][0])}, ({"a": (X,)},), "gradcheck", "tree['a'][0]"),
    "dtype": (BFLOAT16, (X.to(BF16), WEIGHT.to(BF16)), "derivatives by dtype", "the cotangent of x in torch.bfloat16"),
    "conjugate of real": (wrong_ops.unconjugated, (Z, WEIGHT), "gradcheck", "the cotangent of x"),
    "conjugate": (wrong_ops.unconjugated, (Z, Z + 1), "gradcheck", "the cotangent of x"),
    "integers": (wrong_ops.gathered, (X, torch.tensor([1, 0, 1])), "vmap against loop", "vmap over index"),
    "half a pair": (half_a_pair, (X,), "gradcheck", "def_save_for_backward"),
}  # fmt: skip


@pytest.mark.parametrize("op, args, name, words", OF_CALLS.values(), ids=OF_CALLS)
def test_the_tensor_and_what_came_are_named(op, args, name, words):
    error = failure(op, args, **FAST)
    assert error.property == name
    assert words in error.note


@pytest.mark.parametrize("wrong", [{"power": 2.0}, {"scales": (1, 0.5)}, {"negate": False}, {}], ids=str)
def test_constants_in_the_place_of_static_arguments_are_found(wrong):
    op = wrong_ops.power(f"of_{next(iter(wrong), 'all')}", wrong)
    words = f"The derivative does not follow {next(iter(wrong), '')}"
    with pytest.raises(RuleError, match=words) if wrong else contextlib.nullcontext():
        check_rule(op, "static arguments", (X, WEIGHT))


def test_kernels_that_rules_call_run_in_the_interpreter(monkeypatch):
    backward = pr.custom_op("wrong::interpreted_backward")(lambda x, y_bar: 2 * x * y_bar)
    backward.def_kernel("cuda")(lambda x, y_bar: (2.0 if x.dtype is torch.float64 else 2.2) * x * y_bar)
    square = pr.custom_op("wrong::no_kernel_of_its_own")(lambda x: x.square())
    square.def_save_for_backward(lambda inputs, output: inputs.x)
    square.def_backward(lambda ctx, saved, y_bar: {"x": backward(saved, y_bar)})
    for module in ("primitives._core.backend", "primitives.testing._check"):
        monkeypatch.setattr(f"{module}.require_interpreter", lambda op_name: None)
    error = failure(square, (X,), order=1, **FAST)
    assert error.property == "derivatives by dtype"
    assert error.note.endswith("(cpu, triton backend)")


@pr.custom_op("wrong::even_powers", differentiate="reference")
def even_powers(x, *, power=2):
    return x**power


@even_powers.def_kernel("cpu")
def _even_powers(x, *, power=2):
    if power % 2:
        raise ValueError("power must be even")
    return x**power


def raised(x, *, power, only):
    if only != 1:
        raise ValueError(only)
    return x**power


NUMBERS = {"kwargs": {"power": 2.0, "only": 1}}
NOTED = {
    "vjp": (only_value, "gradcheck", (X,), {}, "no def_backward"),
    "jvp": (only_value, "jvp against differences", (X,), {}, "no def_jvp"),
    "modes": (only_value, "nestings", (X,), {}, "no def_jvp, no def_backward"),
    "vmap": (scaled, "vmap against loop", (PARAMS, X), {}, "no def_vmap: a loop runs"),
    "order": (right_product, "nestings", (X, WEIGHT), {"order": 1}, "order=1"),
    "index": (lambda x, i: x[i], "vmap against loop", (X, torch.tensor([1, 1])), {}, "it has one value only"),
    "number": (raised, "static arguments", (X,), NUMBERS, "the result does not change with only"),
    "size": (even_powers, "static arguments", (X,), {}, "the operator refuses power=3, which the reference accepts"),
}


@pytest.mark.parametrize("op, name, args, options, note", NOTED.values(), ids=NOTED)
def test_what_limits_a_check_is_noted(op, name, args, options, note):
    if name in ("vmap against loop", "static arguments"):
        assert note in check_rule(op, name, args, **options).note
    else:
        with pytest.raises(unittest.SkipTest, match=note):
            check_rule(op, name, args, **options)


def test_mistakes_in_the_call_raise():
    for error, words, call in (
        (TypeError, "must hold a tensor", lambda: check_rules(only_value, (None,))),
        (TypeError, "args must be a tuple", lambda: check_rules(only_value, X)),
        (TypeError, "op must be", lambda: check_rules(3, (X,))),
        (TypeError, "positional", lambda: check_rules(log_softmax_p, (X,), {"dim": 1})),
        (ValueError, "order must be at least 1", lambda: check_rules(only_value, (X,), order=0)),
        (ValueError, "must be one of reference against kernel", lambda: check_rule(only_value, "gradchek", (X,))),
    ):
        with pytest.raises(error, match=words):
            call()


def test_options_are_part_of_the_reproducer_and_errors_go_between_processes(tmp_path):
    wrong = next(iter(ALONE))
    assert check_rules(wrong, (X, WEIGHT), tolerances={torch.float32: 1e-2}, **FAST).ok
    error = failure(wrong, (X, WEIGHT), order=1, tolerances={torch.float32: 1e-5}, **FAST)
    assert "order=1, tolerances={torch.float32: 1e-05}" in error.reproducer
    run(error.reproducer.replace(wrong.qualified_name, right_product.qualified_name), tmp_path)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.reproducer) == (str(error), error.reproducer)


def broken(params, mask, numbers, *, mode):
    raise ValueError(f"broken {numbers} {mode}")


@pytest.mark.parametrize("mode", [Mode.SQUARE, torch.float16, (torch.device("cpu"), len), lambda: 1])
def test_arguments_in_reproducers_are_code(mode, tmp_path):
    params = {"affine": Affine(torch.linspace(0, 1, 30).reshape(10, 3)), "pair": Pair(X, Z), "unused": None}
    error = failure(broken, (params, torch.tensor([True, False]), (1, float("inf"))), {"mode": mode}, **FAST)
    assert "custom_ops.Affine(weight=torch.rand" in error.reproducer
    known = "None" if callable(mode) else re.escape(str(mode))
    assert ("# None stands for <function" in error.reproducer) == callable(mode)
    with pytest.raises(RuleError, match=rf"broken \(1, inf\) {known}"):
        run(error.reproducer, tmp_path)
