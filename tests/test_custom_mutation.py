"""Custom operators that update arguments: in place where that is possible, in the pure form everywhere."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, jacrev, jvp, vmap

import primitives as pr
from tests.custom_ops import affine, moving_average, operator
from tests.support import assert_close, normal

# It says so once for each operator, in whichever test comes first.
pytestmark = pytest.mark.filterwarnings("ignore:.*vmap runs a loop")


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


def test_the_pure_form_is_differentiable_and_batched():
    x, mean = normal((4, 3), 0), normal((3,), 1)
    assert_close(
        jacrev(lambda m: moving_average.pure({"mean": m}, x)[1]["mean"])(mean), 0.5 * torch.eye(3, dtype=torch.float64)
    )
    _, new = vmap(lambda x: moving_average.pure({"mean": mean}, x))(torch.stack([x, 2 * x]))
    assert_close(new["mean"], torch.stack([mean + x.mean(0), mean + 2 * x.mean(0)]) / 2)


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
    with pytest.raises(pr.MutationError, match="takes no def_vmap"):
        moving_average.def_vmap(lambda *args: None)
    with pytest.raises(pr.MutationError, match="pure is for operators that update"):
        affine.pure(x)
    with pytest.raises(ValueError, match="mutates names 'other'"):
        operator(lambda state: state, mutates=("other",))


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


def test_a_view_of_the_state_may_be_saved():
    op = operator(lambda state, x: (state.add_(1), x * 2)[1], mutates=("state",))
    op.def_save_for_backward(lambda inputs, output: (inputs.state[:], inputs.x))
    op.def_backward(lambda ctx, saved, y_bar: {"state": None, "x": 2 * y_bar + 5 * saved[0]})
    x = torch.ones(3, requires_grad=True)
    op(torch.zeros(3), x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_updates_are_compiled(compiler):
    def step(state, x):
        y = moving_average(state, x)
        return y * 2, state["mean"] + 1

    x = normal((4, 3), 0)
    states = [{"mean": torch.zeros(3, dtype=torch.float64)} for _ in range(2)]
    torch._dynamo.reset()
    actual, expected = torch.compile(step, fullgraph=True, backend=compiler)(states[0], x), step(states[1], x)
    for got, want in zip((*actual, states[0]["mean"]), (*expected, states[1]["mean"]), strict=True):
        assert_close(got, want)
