"""Custom operators over pytrees: calls, static arguments, updates of arguments, and torch's other features."""

import concurrent.futures
import copy
import dataclasses
import pickle
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch
from torch.func import grad, jvp, vmap

import primitives as pr
from perf.ops.samples import normal
from tests.custom_ops import NAMESPACE, Affine, affine, arguments, moving_average, operator, plain_affine, trees_close
from tests.support import assert_close

# It says so once for each operator, in whichever test comes first.
pytestmark = pytest.mark.filterwarnings("ignore:.*vmap runs a loop")
X = torch.linspace(-1.5, 2, 6).reshape(2, 3)


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
    value: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
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


@pytest.mark.parametrize("options", [{"unsafe_hash": True}, {"eq": False}])
def test_a_static_value_that_changes_answers_for_no_other_one(options):
    kind = dataclasses.make_dataclass("Settings", ["value"], **options)
    op, one, x = operator(lambda x, *, by: x * by.value), kind(2.0), torch.ones(1)
    assert op(x, by=one) == 2
    one.value = 3.0
    assert [op(x, by=by).item() for by in (one, kind(2.0), one)] == [3, 2, 3]
    # A compiler does not take it: the graph breaks there.
    assert torch.compile(lambda x: op(x + 1, by=one) + 1, backend="aot_eager")(x) == 7


def test_numbers_in_sets_and_scalars_of_numpy_are_told_apart():
    divided = operator(lambda x, *, by: x // next(iter(by)) if {*map(type, by)} == {int} else x / next(iter(by)))
    x = torch.tensor([5.0])
    assert [divided(x, by=frozenset({n})).item() for n in (2, 2.0, 2)] == [2.0, 2.5, 2.0]
    signed = operator(lambda x, *, by: torch.copysign(x, torch.tensor(float(by))))
    assert [signed(x, by=kind(by)).item() for kind in (np.float32, np.float16) for by in (0.0, -0.0)] == [5, -5] * 2
    assert len({signed.table.flatten((x,), {"by": np.float32("nan")})[1].number for _ in range(3)}) == 1


def test_the_order_and_the_values_of_dicts_are_the_callers():
    def total(d, x):
        # Sums in which each place counts by itself.
        leaves = [leaf for leaf in optree.tree_leaves(list(d.values())) if isinstance(leaf, torch.Tensor)]
        return x + sum(i * leaf for i, leaf in enumerate(leaves, 1))

    op, one, two = operator(total), torch.tensor(1.0), torch.tensor(2.0)
    trees = [{"b": one, "a": two}, {"a": two, "b": one}, {"a": one, "b": 3}, {"a": [one, two], "b": one}, {"a": None}]
    for tree in trees * 2:
        assert op(tree, one) == total(tree, one)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("outer", [lambda d: [d], lambda d: {"in": (d, None)}, Affine])
def test_the_order_of_dicts_inside_is_the_callers_too(outer, is_compiled):
    def difference(tree):
        inside = optree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, dict) and "a" in x, namespace=NAMESPACE)
        first, second = inside[0].values()
        return first - second

    op, one, two = operator(difference, namespace=NAMESPACE), torch.tensor(1.0), torch.tensor(2.0)
    called = torch.compile(lambda tree: op(tree), fullgraph=True, backend="aot_eager") if is_compiled else op
    assert [called(outer(d)).item() for d in ({"b": one, "a": two}, {"a": two, "b": one}) * 2] == [-1, 1] * 2


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


def test_state_is_updated_in_place_and_the_pure_form_returns_it():
    x = normal((4, 3), 0)
    state = {"mean": torch.zeros(3, dtype=torch.float64), "name": "n"}
    view, version = state["mean"].view(1, 3), state["mean"]._version
    y, new = moving_average.pure(state, x)
    assert torch.equal(state["mean"], torch.zeros(3))
    assert new["name"] == "n"
    assert_close(moving_average(state, x), y)
    assert_close(state["mean"], x.mean(0) / 2)
    assert_close(view[0], new["mean"])
    assert state["mean"]._version == version + 1
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(moving_average(state, leaf).square().sum(), leaf)
    assert not state["mean"].requires_grad
    state["mean"] = new["mean"]
    assert_close(grad(lambda x: moving_average(state, x).square().sum())(x), expected)


def test_updates_that_are_impossible_raise_and_name_the_pure_form():
    x, mean = normal((4, 3), 0), normal((3,), 1)
    before = mean.clone()
    with pytest.raises(pr.MutationError, match=r"state\['mean'\] .*must not require grad.*pure"):
        grad(lambda m: moving_average({"mean": m}, x).sum())(mean)
    with pytest.raises(pr.MutationError, match=r"derivative would be lost.*pure form"):
        jvp(lambda m: moving_average({"mean": m}, x), (mean,), (mean,))
    with pytest.raises(pr.MutationError, match=r"no batch axis.*pure form"):
        vmap(lambda x: moving_average({"mean": mean}, x))(torch.stack([x, x]))
    assert torch.equal(mean, before)


def test_derivatives_of_new_values_are_refused_where_rules_have_no_place_for_them():
    op = operator(lambda count, x: (count.add_(x.sum()), x * 2)[1], mutates=("count",))
    op.def_save_for_backward(lambda inputs, output: inputs.count)
    op.def_backward(lambda ctx, saved, y_bar: {"count": None, "x": 2 * y_bar})
    op.def_jvp(lambda inputs, output, tangents: 2 * tangents.x)
    x, count = torch.ones(2), torch.zeros(())
    leaf = x.clone().requires_grad_()
    op(count, leaf).sum().backward()
    assert (leaf.grad.tolist(), count.item()) == ([2, 2], 2)
    assert jvp(lambda x: op.pure(count, x)[0], (x,), (x,))[1].tolist() == [2, 2]
    with pytest.raises(pr.MissingRuleError, match="new count"):
        grad(lambda x: op.pure(count, x)[1])(x)
    with pytest.raises(pr.MissingRuleError, match="new count"):
        jvp(lambda x: op.pure(count, x)[1] * 2, (x,), (x,))


def test_updates_of_memory_that_is_shared_are_refused():
    two = operator(lambda a, b, x: (a.add_(x), b.add_(x), x * 1)[2], mutates=("a", "b"))
    buffer = torch.zeros(3)
    for first, second in ((buffer, buffer), (buffer, buffer.view(3)), (buffer[:2], buffer[1:])):
        with pytest.raises(pr.MutationError, match="a is updated in place and shares memory with b"):
            two(first, second, torch.ones(()))
    two(buffer[:1], buffer[2:], torch.ones(()))
    assert buffer.tolist() == [1, 0, 1]
    one = operator(lambda state, x: (state.add_(1), x * 2)[1], mutates=("state",))
    with pytest.raises(pr.MutationError, match="state is updated in place and shares memory with x"):
        one(buffer, buffer)


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
