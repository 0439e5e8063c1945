"""Custom operators that update arguments: in place where that is possible, in the pure form everywhere."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch.func import grad, jacrev, jvp, vmap

import primitives as pr
from tests.custom_ops import affine, moving_average
from tests.support import assert_close, normal


@contextlib.contextmanager
def looping():
    """Where vmap loops: it says so once for each operator, in whichever test comes first."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*vmap runs a loop")
        yield


def test_state_is_updated_in_place_and_the_pure_form_returns_it():
    x = normal((4, 3), 0)
    state = {"mean": torch.zeros(3, dtype=torch.float64), "name": "n"}
    view, version = state["mean"].view(1, 3), state["mean"]._version
    y, (_, new) = moving_average.pure(state, x)[0], moving_average.pure(state, x)
    assert torch.equal(state["mean"], torch.zeros(3))
    assert new["name"] == "n"
    assert_close(moving_average(state, x), y)
    assert_close(state["mean"], x.mean(0) / 2)
    assert_close(view[0], new["mean"])
    assert state["mean"]._version == version + 1
    leaf = x.clone().requires_grad_()
    moving_average(state, leaf).square().sum().backward()
    expected = leaf.grad.clone()
    assert not state["mean"].requires_grad
    state["mean"] = new["mean"]
    assert_close(grad(lambda x: moving_average(state, x).square().sum())(x), expected)


def test_the_pure_form_is_differentiable_and_batched():
    x, mean = normal((4, 3), 0), normal((3,), 1)
    assert_close(
        jacrev(lambda m: moving_average.pure({"mean": m}, x)[1]["mean"])(mean), 0.5 * torch.eye(3, dtype=torch.float64)
    )
    with looping():
        _, new = vmap(lambda x: moving_average.pure({"mean": mean}, x))(torch.stack([x, 2 * x]))
    assert_close(new["mean"], torch.stack([mean + x.mean(0), mean + 2 * x.mean(0)]) / 2)


def test_updates_that_are_impossible_raise_and_name_the_pure_form():
    x, mean = normal((4, 3), 0), normal((3,), 1)
    before = mean.clone()
    with pytest.raises(pr.MutationError, match=r"state\['mean'\] is updated in place and must not require grad.*pure"):
        grad(lambda m: moving_average({"mean": m}, x).sum())(mean)
    with pytest.raises(pr.MutationError, match=r"derivative would be lost.*pure form"):
        jvp(lambda m: moving_average({"mean": m}, x), (mean,), (mean,))
    with looping(), pytest.raises(pr.MutationError, match=r"no batch axis.*pure form"):
        vmap(lambda x: moving_average({"mean": mean}, x))(torch.stack([x, x]))
    assert torch.equal(mean, before)
    with pytest.raises(pr.MutationError, match="takes no def_vmap"):
        moving_average.def_vmap(lambda *args: None)
    with pytest.raises(pr.MutationError, match="pure is for operators that update"):
        affine.pure(x)
    with pytest.raises(ValueError, match="mutates names 'other'"):
        pr.custom_op("tests::wrong_name", mutates=("other",))(lambda state: state)


def test_derivatives_of_new_values_are_refused_where_rules_have_no_place_for_them():
    @pr.custom_op("tests::counted_calls", mutates=("count",))
    def counted_calls(count, x):
        count.add_(x.sum())
        return x * 2

    counted_calls.def_save_for_backward(lambda inputs, output: inputs.count)
    counted_calls.def_backward(lambda ctx, saved, y_bar: {"count": None, "x": 2 * y_bar})
    counted_calls.def_jvp(lambda inputs, output, tangents: 2 * tangents.x)
    x, count = torch.ones(2), torch.zeros(())
    leaf = x.clone().requires_grad_()
    counted_calls(count, leaf).sum().backward()
    assert (leaf.grad.tolist(), count.item()) == ([2, 2], 2)
    assert jvp(lambda x: counted_calls.pure(count, x)[0], (x,), (x,))[1].tolist() == [2, 2]
    with pytest.raises(pr.MissingRuleError, match="new count"):
        grad(lambda x: counted_calls.pure(count, x)[1])(x)
    with pytest.raises(pr.MissingRuleError, match="new count"):
        jvp(lambda x: counted_calls.pure(count, x)[1] * 2, (x,), (x,))


def test_the_same_tensor_is_not_updated_twice():
    @pr.custom_op("tests::two_states", mutates=("first", "second"))
    def two_states(first, second, x):
        first.add_(x)
        second.sub_(x)
        return x.clone()

    state, x = torch.zeros(2), torch.ones(2)
    with pytest.raises(pr.MutationError, match="first is updated in place and shares memory with second"):
        two_states(state, state, x)
    assert state.tolist() == [0, 0]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_updates_are_compiled(backend):
    def step(state, x):
        y = moving_average(state, x)
        return y * 2, state["mean"] + 1

    x = normal((4, 3), 0)
    states = [{"mean": torch.zeros(3, dtype=torch.float64)} for _ in range(2)]
    torch._dynamo.reset()
    actual, expected = torch.compile(step, fullgraph=True, backend=backend)(states[0], x), step(states[1], x)
    for got, want in zip((*actual, states[0]["mean"]), (*expected, states[1]["mean"]), strict=True):
        assert_close(got, want)
