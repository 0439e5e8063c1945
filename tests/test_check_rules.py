"""`check_rules`: right operators pass, every planted fault is named, and the reproducer shows it."""

from __future__ import annotations

import dataclasses
import pickle
import re
import unittest
from typing import NamedTuple

import optree
import pytest
import torch

import primitives as pr
from primitives.ops.layer_norm import layer_norm_bwd_p, layer_norm_p
from primitives.ops.log_softmax import log_softmax_p
from primitives.testing import PROPERTIES, RuleError, check_rule, check_rules
from tests import wrong_calls, wrong_ops
from tests.check_rules_support import FAST, failure, run
from tests.wrong_ops import WEIGHT, X

EXPECTED = {**wrong_ops.EXPECTED, **wrong_calls.EXPECTED}


@optree.dataclasses.dataclass(namespace="check_rules")
class Affine:
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    name: str = dataclasses.field(default="affine", metadata={"pytree_node": False})


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@pr.custom_op("check_rules::scaled", differentiate="reference", tree_namespace="check_rules")
def scaled(params, x, *, eps=1e-3):
    y = x * (x.square().mean() + eps).rsqrt() * params["affine"].weight
    return {"y": y, "pair": Pair(y.sum(), x.argmax())}


@pr.custom_op("check_rules::only_value")
def only_value(x):
    return x.exp()


@pr.custom_op("check_rules::half_a_pair")
def half_a_pair(x):
    return x.exp()


@half_a_pair.def_backward
def _half(ctx, saved, y_bar):
    return {"x": saved * y_bar}


@pr.custom_op("check_rules::returns_its_input")
def returns_its_input(x):
    return x


@pr.custom_op("check_rules::counts", mutates=("state",), differentiate="reference")
def counts(state, x):
    state["steps"].add_(1)
    state["mean"].mul_(0.9).add_(x.detach().mean(), alpha=0.1)
    return x.square()


# Right operators.


def test_a_right_op_passes_everything():
    report = check_rules(wrong_ops.right_product, X, WEIGHT)
    assert report.ok
    assert [row.property for row in report.rows] == list(PROPERTIES)
    other = {row.property: row.note for row in report.rows if row.status != "ok"}
    assert other == {"static arguments": "no float, int or bool argument"}


def test_an_op_of_trees_that_differentiates_its_reference_passes():
    params = {"affine": Affine(torch.tensor([0.5, 1.0, 2.0])), "unused": None}
    report = check_rules(scaled, params, X, **FAST)
    assert report["static arguments"].status == "ok"
    assert report["vmap against loop"].note == "no def_vmap: a loop runs"
    assert report["reference against kernel"].status == "not applicable"


def test_primitives_pass():
    weight, bias = torch.tensor([0.5, 1.0, 2.0]), torch.zeros(3)
    assert check_rules(layer_norm_p, X, weight, bias, 1, 0, 1e-3, **FAST)["static arguments"].status == "ok"
    _, mean, rstd = layer_norm_p(X, weight, None, 1, 0, 1e-3)
    check_rules(layer_norm_bwd_p, WEIGHT, X, weight, mean, rstd, 1, 0, 1e-3, [True, False, True], **FAST)
    check_rules(log_softmax_p, X, 1, None, **FAST)


def test_a_plain_function_passes():
    def function(tree, weight, bias):
        return pr.functional.layer_norm(tree, (3,), weight, bias)

    tree = {"a": X.half(), "b": [X, None]}
    report = check_rules(function, tree, torch.ones(3), torch.zeros(3), order=3, **FAST)
    missing = {row.property for row in report.rows if row.status == "not applicable"}
    assert missing == {"reference against kernel", "opcheck", "compile against eager", "static arguments"}


def test_keyword_arguments_of_a_plain_function():
    report = check_rules(lambda x, *, p: x**p, X.abs() + 0.5, p=2.0, **FAST)
    assert report["static arguments"].status == "ok"


def test_an_op_that_updates_an_argument_passes():
    state = {"mean": torch.zeros(()), "steps": torch.zeros((), dtype=torch.int64)}
    report = check_rules(counts, state, X, **FAST, raise_on_failure=False)
    assert report.failed == ()
    assert state["steps"] == 0


@pytest.mark.parametrize("x", [torch.tensor(2.0), torch.ones(1, 3).expand(2, 3), torch.zeros(0, 3)])
def test_scalars_expanded_and_empty_arguments_pass(x):
    assert check_rules(wrong_ops.right_product, x, x.contiguous() + 1, **FAST).ok


def test_what_is_given_stays_as_it_is():
    x, random_state = X.clone(), torch.get_rng_state()
    check_rules(wrong_ops.writes_to_input, x, WEIGHT, **FAST, raise_on_failure=False)
    assert torch.equal(x, X)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not torch.are_deterministic_algorithms_enabled()
    assert pr.current_backend() == "auto"


# Planted faults.


@pytest.mark.parametrize("op", EXPECTED, ids=lambda op: op.__name__)
def test_the_fault_is_named_and_reproduced(op, tmp_path):
    error = failure(op, X, WEIGHT, **FAST)
    assert error.property == EXPECTED[op]
    assert error.op == op.qualified_name
    assert str(error).startswith(f"{op.qualified_name}: {error.property} failed: {error.note}")
    with pytest.raises(RuleError, match=re.escape(error.property)):
        run(error.reproducer, tmp_path)


def test_the_reproducer_of_a_right_op_would_pass(tmp_path):
    error = failure(wrong_ops.wrong_jvp_sign, X, WEIGHT, order=1, tolerances={torch.float32: 1e-5}, **FAST)
    assert "order=1, tolerances={torch.float32: 1e-05}" in error.reproducer
    run(error.reproducer.replace("wrong_jvp_sign", "right_product"), tmp_path)


def test_an_output_that_is_an_input(tmp_path):
    error = failure(wrong_ops.aliased_p, X, **FAST)
    assert error.property == "aliasing and mutation"
    assert error.note == "output shares its memory with x, expected memory of its own."
    with pytest.raises(AssertionError):
        run(error.reproducer, tmp_path)
    # A custom_op refuses it at the call.
    assert failure(returns_its_input, X, **FAST).note.startswith("LeafError: check_rules::returns_its_input: reference")


def test_the_key_path_is_named():
    error = failure(lambda tree: {"y": _Doubled.apply(tree["weights"][0])}, {"weights": (X,)}, **FAST)
    assert error.property == "gradcheck"
    assert "the cotangent of tree['weights'][0]" in error.note


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, y_bar):
        return 3 * y_bar


# Missing rules and mistakes.


def test_an_op_without_rules_is_not_differentiated():
    report = check_rules(only_value, X, **FAST)
    assert report["gradcheck"].note == "no def_backward"
    assert report["jvp against differences"].note == "no def_jvp"
    assert report["nestings"].status == "not applicable"
    assert report["vmap against loop"].status == "ok"


def test_half_of_a_pair_of_rules_fails():
    error = failure(half_a_pair, X, **FAST)
    assert error.property == "gradcheck"
    assert "MissingRuleError" in error.note
    assert "def_save_for_backward" in error.note


def test_orders():
    assert check_rules(only_value, X, order=1, **FAST)["gradgradcheck"].note == "order=1"
    report = check_rules(wrong_ops.detached_jvp, X, WEIGHT, order=1, **FAST)
    assert report["nestings"].status == "ok"
    with pytest.raises(ValueError, match="order must be at least 1"):
        check_rules(only_value, X, order=0)


def test_errors_of_the_call():
    with pytest.raises(TypeError, match="must hold a tensor"):
        check_rules(only_value, None)
    with pytest.raises(TypeError, match="op must be"):
        check_rules(3, X)
    with pytest.raises(TypeError, match="positional"):
        check_rules(log_softmax_p, X, dim=1)
    with pytest.raises(ValueError, match="must be one of reference against kernel"):
        check_rule(only_value, "gradchek", X)


def test_tolerances():
    assert check_rules(wrong_ops.wrong_kernel, X, WEIGHT, tolerances={torch.float32: 1e-2}, **FAST).ok


# As tests of their own, and the texts.


@pytest.mark.parametrize("rule", PROPERTIES)
def test_every_property_is_a_test(rule):
    check_rule(wrong_ops.right_product, rule, X, WEIGHT)


def test_what_does_not_apply_is_skipped():
    with pytest.raises(unittest.SkipTest, match="no def_jvp"):
        check_rule(only_value, "jvp against differences", X)


def test_the_report_is_a_table():
    report = check_rules(only_value, X, **FAST)
    lines = str(report).splitlines()
    assert lines[0] == "check_rules::only_value:"
    assert lines[1].split() == ["property", "status", "error", "allowed", "note"]
    assert [line.strip().split("  ")[0] for line in lines[2:]] == list(PROPERTIES)
    with pytest.raises(KeyError):
        report["gradchek"]


def test_errors_go_between_processes():
    error = failure(wrong_ops.wrong_kernel, X, WEIGHT, **FAST)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.reproducer == error.reproducer


def test_trees_in_reproducers_are_code(tmp_path):
    params = {"affine": Affine(torch.linspace(0, 1, 30).reshape(10, 3)), "unused": None}
    error = failure(broken_on_trees, params, torch.tensor([True, False]), (1, float("inf")), **FAST)
    assert f"{__name__}.Affine(weight=torch.rand" in error.reproducer
    assert "float('inf')" in error.reproducer
    with pytest.raises(RuleError, match="broken"):
        run(error.reproducer, tmp_path)


def broken_on_trees(params, mask, numbers):
    raise ValueError(f"broken {numbers}")
