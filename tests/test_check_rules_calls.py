"""`check_rules` over dtypes, complex numbers, integers, static arguments and sizes, and its reproducers of them."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import primitives as pr
from primitives.testing import RuleError, check_rule, check_rules
from tests import wrong_calls, wrong_ops
from tests.check_rules_support import FAST, failure, run
from tests.wrong_ops import WEIGHT, X

Z = torch.complex(X, WEIGHT - 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_right_derivatives_pass_at_every_dtype(dtype):
    op = "derivatives by dtype"
    check_rule(wrong_ops.right_product, op, X.to(dtype), WEIGHT.to(dtype))
    check_rule(torch.nn.functional.layer_norm, op, X.to(dtype), (3,))


def test_a_kernel_that_is_wrong_in_low_precision_is_found():
    error = failure(wrong_calls.wrong_low_precision, X.bfloat16(), WEIGHT.bfloat16(), **FAST)
    assert error.property == "derivatives by dtype"
    assert "the cotangent of x in torch.bfloat16" in error.note


def test_kernels_that_rules_call_run_in_the_interpreter(monkeypatch):
    @pr.custom_op("wrong::interpreted_backward")
    def backward(x, y_bar):
        return 2 * x * y_bar

    @backward.def_kernel("cuda")
    def kernel(x, y_bar):
        return (2.0 if x.dtype is torch.float64 else 2.2) * x * y_bar

    @pr.custom_op("wrong::no_kernel_of_its_own")
    def square(x):
        return x.square()

    square.def_save_for_backward(lambda inputs, output: inputs.x)
    square.def_backward(lambda ctx, saved, y_bar: {"x": backward(saved, y_bar)})
    for module in ("primitives.core.backend", "primitives.testing._check"):
        monkeypatch.setattr(f"{module}.require_interpreter", lambda op_name: None)
    error = failure(square, X, order=1, **FAST)
    assert error.property == "derivatives by dtype"
    assert error.note.endswith("(cpu, triton backend)")


# Complex numbers.


@pytest.mark.parametrize("weight", [WEIGHT, Z + 1], ids=["real", "complex"])
def test_complex_arguments_pass(weight):
    report = check_rules(wrong_calls.right_complex, Z, weight)
    assert {row.property for row in report.rows if row.status != "ok"} == {
        "reference against kernel",
        "static arguments",
    }


@pytest.mark.parametrize("weight", [WEIGHT, Z + 1], ids=["real", "complex"])
def test_a_forgotten_conjugation_is_found(weight, tmp_path):
    error = failure(wrong_calls.unconjugated, Z, weight, **FAST)
    assert error.property == "gradcheck"
    with pytest.raises(AssertionError):
        run(error.reproducer, tmp_path)


def test_functions_between_real_and_complex_numbers_pass():
    assert check_rules(lambda x: torch.complex(x.sin(), x.square()), X, **FAST).ok
    assert check_rules(lambda z: z.abs().square() + z.real, Z, **FAST).ok


# Batches of integers.


def test_mixed_indices_are_found(tmp_path):
    error = failure(wrong_calls.gathered, X, torch.tensor([1, 0, 1]), **FAST)
    assert error.property == "vmap against loop"
    with pytest.raises(AssertionError):
        run(error.reproducer, tmp_path)


def test_integers_that_cannot_differ_are_noted():
    row = check_rule(lambda x, i: x[i], "vmap against loop", X, torch.tensor([1, 1]))
    assert row.note == "i is the same in every sample: it has one value only"

    def segments(x, bounds):
        return torch.stack([x[a:b].sum() for a, b in itertools.pairwise(bounds)])

    with pytest.raises(RuleError):
        # Data-dependent slices do not go under vmap; what matters is that the samples are not moved.
        check_rule(segments, "vmap against loop", X, torch.tensor([0, 2]))


# Static arguments.


@pytest.mark.parametrize("name", ["power", "scales", "negate"])
def test_constants_in_the_place_of_static_arguments_are_found(name):
    constant = {"power": 2, "scales": (1.0, 0.5), "negate": False}[name]
    rule = functools.partial(wrong_calls.power_backward, **{name: constant})
    op = pr.custom_op(f"wrong::constant_{name}")(wrong_calls.fixed_power.__wrapped__)
    op.def_save_for_backward(lambda inputs, output: (inputs.x, inputs.weight))
    op.def_backward(rule)
    x = X.abs() + 0.5
    with pytest.raises(RuleError, match=f"The derivative does not follow {name}"):
        check_rule(op, "static arguments", x, WEIGHT)
    op.def_backward(wrong_calls.power_backward)
    check_rule(op, "static arguments", x, WEIGHT)


def test_a_size_that_only_the_reference_supports_is_noted():
    @pr.custom_op("wrong::even_powers", differentiate="reference")
    def even_powers(x, *, power=2):
        return x**power

    @even_powers.def_kernel("cpu")
    def kernel(x, *, power=2):
        if power % 2:
            raise ValueError("power must be even")
        return x**power

    row = check_rule(even_powers, "static arguments", X)
    assert row.note == "the operator refuses power=3, which the reference accepts"


# Steps and devices.


@pytest.mark.parametrize("value", [1e-4, 1e-3, 1.0, 1e4])
def test_functions_that_are_smooth_in_a_small_neighborhood_pass(value):
    assert check_rules(torch.sqrt, torch.tensor([value, 2 * value]), **FAST).ok


def test_devices_may_be_one():
    for devices in ("cpu", ("cpu",), torch.device("cpu")):
        check_rule(wrong_ops.right_product, "gradcheck", X, WEIGHT, devices=devices)


# Reproducers.


def test_static_arguments_in_reproducers_are_code(tmp_path):
    options = {"mode": wrong_calls.Mode.SQUARE, "dtype": torch.float16, "other": (torch.device("cpu"), len)}
    error = failure(wrong_calls.with_mode, X, WEIGHT, **options, **FAST)
    assert "mode=tests.wrong_calls.Mode.SQUARE, dtype=torch.float16" in error.reproducer
    assert "other=(torch.device(type='cpu'), builtins.len)" in error.reproducer
    with pytest.raises(AssertionError):
        run(error.reproducer, tmp_path)


def test_what_is_no_code_is_a_comment(tmp_path):
    error = failure(wrong_calls.with_mode, X, WEIGHT, mode=lambda: 1, **FAST)
    assert "# None stands for <function" in error.reproducer
    assert "mode=None" in error.reproducer
    with pytest.raises(AssertionError):
        run(error.reproducer, tmp_path)
