"""Custom operators over pytrees: calls, static arguments, and torch's other features."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import pickle
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch.func import grad, jvp
from torch.utils.checkpoint import checkpoint

import primitives as pr
from tests.custom_ops import Affine, affine, arguments, operator, plain_affine, scalar, trees_close
from tests.support import assert_close

X = torch.linspace(-1.5, 2, 6).reshape(2, 3)


# Calls.


def test_it_is_one_operator_whatever_the_trees():
    weight, bias, x = arguments()
    for params in ({"weight": weight, "bias": bias}, {"weight": weight, "bias": None}, Affine(weight, bias)):
        trees_close(affine(params, x, eps=0.5), plain_affine(params, x, 0.5))
        trees_close(affine(x=x, params=params), plain_affine(params, x))
    with torch.profiler.profile(acc_events=True) as profile:
        affine(Affine(weight), x)
    assert any(event.key == "tests::affine" for event in profile.key_averages())
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        affine(Affine(weight))
    with pytest.raises(TypeError, match=r"tests::affine.* unexpected keyword argument 'epsilon'"):
        affine(Affine(weight), x, epsilon=1)


class Config(NamedTuple):
    """A static argument."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A static argument."""

    value: Any


@pytest.mark.parametrize("kind", [Config, Frozen, lambda value: Frozen((Config(value), "more"))])
def test_static_values_that_python_calls_equal_are_told_apart(kind):
    """1, 1.0 and True; 0.0 and -0.0: one of them must not answer for the other. NaN is always the same."""

    def scaled(x, *, by):
        by = by.value[0].value if isinstance(by.value, tuple) else by.value
        return x.reciprocal() if by is True else (x * by if isinstance(by, int) else x * 0 + 1 / torch.tensor(by))

    op, x = operator(scaled), torch.tensor([2.0])
    values = [op(x, by=kind(by)).item() for by in (1, True, 0.0, -0.0, 2.0, 1)]
    assert values == [2.0, 0.5, float("inf"), -float("inf"), 0.5, 2.0]
    assert len({op.table.flatten((x,), {"by": kind(float("nan"))})[1].number for _ in range(3)}) == 1


def test_the_order_and_the_values_of_dicts_are_the_callers():
    op, one, two = operator(lambda d: torch.stack(list(d.values()))), torch.tensor(1.0), torch.tensor(2.0)
    for _ in range(2):
        assert op({"b": one, "a": two}).tolist() == [1, 2]
        assert op({"a": two, "b": one}).tolist() == [2, 1]

    def total(d, x):
        return x + sum(leaf if isinstance(leaf, torch.Tensor) else 0 for leaf in optree.tree_leaves(d))

    op = operator(total)
    for tree in ({"a": one, "b": one}, {"a": one, "b": 3}, {"a": [one, one], "b": one}, {"a": None, "b": one}) * 2:
        assert op(tree, one) == total(tree, one)


def test_many_structures_are_warned_of_once():
    counted = operator(lambda x, *, step: x + step)
    for step in range(999):
        counted(torch.zeros(1), step=step)
    with pytest.warns(UserWarning, match="1000 different structures"):
        counted(torch.zeros(1), step=999)
    counted(torch.zeros(1), step=1000)


def test_defining_the_same_function_again_replaces_the_operator():
    def define(factor, **options):
        @pr.custom_op("tests::cell", **options)
        def cell(x):
            return x * factor

        return cell

    first = define(2, differentiate="reference")
    first.def_autocast("cpu")(lambda inputs: inputs._replace(x=inputs.x.bfloat16()))
    first.def_jvp(lambda inputs, output, tangents: tangents.x * 100)
    second = define(3)
    assert_close(second(X), X * 3)
    with torch.autocast("cpu"):
        assert second(X).dtype == torch.float32
    for differentiate in (lambda: second(X.clone().requires_grad_()), lambda: jvp(second, (X,), (X,))):
        with pytest.raises(pr.MissingRuleError):
            differentiate()
    with pytest.raises(ValueError, match="tests::cell exists already"):
        pr.custom_op("tests::cell")(lambda x: x)


# Torch's other features.


def test_autocast():
    def function(params, x, *, k=1):
        return {"y": params["w"] * x * k}

    op, w = operator(function), torch.ones(3)
    op.def_autocast("cpu")(lambda inputs: inputs._replace(params={"w": inputs.params["w"].bfloat16()}, k=2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # The rule may change static arguments, in the first call too.
        y = op({"w": w}, w.bfloat16())["y"]
    assert (y.dtype, y.tolist()) == (torch.bfloat16, [2, 2, 2])
    assert op({"w": w}, w)["y"].dtype == torch.float32
    update = operator(lambda state, x: (state.add_(x.sum()), x * 2)[1], mutates=("state",))
    update.def_autocast("cpu")(lambda inputs: inputs._replace(x=inputs.x.bfloat16()))
    state = torch.zeros(())
    with torch.autocast("cpu"):
        y = update(state, torch.ones(2))
    assert (y.dtype, y.tolist(), state.item()) == (torch.bfloat16, [2, 2], 2)


def test_saved_tensors_are_in_the_care_of_autograd():
    weight, bias, x = [value.requires_grad_() for value in arguments()]
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        loss = scalar(affine)(weight, bias, x)
    assert any(t is x for t in packed)
    expected = torch.autograd.grad(scalar(plain_affine)(weight, bias, x), (weight, bias, x))
    trees_close(torch.autograd.grad(loss, (weight, bias, x)), expected)
    again = checkpoint(scalar(affine), weight, bias, x, use_reentrant=False)
    trees_close(torch.autograd.grad(again, (weight, bias, x)), expected)
    y = affine(Affine(weight), x)[0]
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_several_threads_at_once():
    def work(offset):
        weight, bias, x = arguments()
        params = {"weight": weight, "bias": bias}
        return [grad(lambda x, i=i: affine(params, x, eps=float(i % 7) + offset)[0].sum())(x) for i in range(40)]

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        results = [value for values in pool.map(work, [0, 1] * 3) for value in values]
    assert all(torch.equal(value, results[0]) for value in results)


def test_modules_with_an_operator_are_pickled_and_copied():
    module = torch.nn.Identity()
    module.op = affine
    assert all(other.op is affine for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)))
