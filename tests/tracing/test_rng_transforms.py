"""An explicit random state under transforms, checkpoints, and on both sides of a gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import primitives as pr
from primitives.tracing import PhiloxState, functionalize_rng, rng_mode

X = torch.linspace(-2.0, 2.0, 24, dtype=torch.float64).reshape(4, 6)
STATE = PhiloxState.from_seed(3)


@pytest.fixture(autouse=True)
def untouched_generator():
    """Torch's own generator is neither read nor changed."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


def noisy(x):
    h = pr.functional.dropout(torch.tanh(x), 0.3) + torch.rand_like(x)
    return (F.dropout(h, 0.5) * torch.randn(6, dtype=x.dtype)).square().sum()


def test_derivatives_inside_and_outside():
    pure = functionalize_rng(noisy)
    inside = functionalize_rng(torch.func.grad(noisy))(STATE, X)[0]
    assert torch.equal(torch.func.grad(lambda x: pure(STATE, x)[0])(X), inside)
    assert torch.equal(torch.func.grad(lambda s, x: pure(s, x)[0], argnums=1)(STATE, X), inside)
    leaf = X.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(pure(STATE, leaf)[0], leaf)[0], inside)
    value, tangent = torch.func.jvp(lambda x: pure(STATE, x)[0], (X,), (torch.ones_like(X),))
    assert torch.equal(value, pure(STATE, X)[0])
    torch.testing.assert_close(tangent, inside.sum())
    hvp = torch.func.jvp(torch.func.grad(lambda x: pure(STATE, x)[0]), (X,), (torch.ones_like(X),))[1]
    assert hvp.isfinite().all()


def test_vmap_inside():
    def fn(xs, randomness):
        return torch.vmap(lambda x: F.dropout(x + torch.rand(6), 0.5), randomness=randomness)(xs)

    ones = torch.ones(4, 6)
    different = functionalize_rng(fn)(STATE, ones, "different")[0]
    same = functionalize_rng(fn)(STATE, ones, "same")[0]
    assert torch.equal(different, functionalize_rng(fn)(STATE, ones, "different")[0])
    assert not torch.equal(different[0], different[1])
    assert torch.equal(same, same[:1].expand(4, 6))
    with pytest.raises(RuntimeError, match="randomness"):
        functionalize_rng(fn)(STATE, ones, "error")


def sample(state, x):
    """Draws of an element, of a batch inside, and of the package's own dropout."""

    def fn(x):
        inner = torch.vmap(lambda row: F.dropout(row, 0.5), randomness="different")(x.view(2, 3)).flatten()
        return pr.functional.dropout(x, 0.4) + torch.rand(6).exp() + inner + torch.empty_like(x).normal_()

    return functionalize_rng(fn)(state, x)


@pytest.mark.parametrize("batched", [(True, True), (True, False), (False, True)])
def test_vmap_over_states_equals_the_loop(batched):
    seeds, offsets = torch.tensor([3, -4, 2**50, 9]), torch.tensor([0, 5, 2**34, 1])
    states = PhiloxState(seeds if batched[0] else seeds[0], offsets if batched[1] else offsets[0])
    axes = PhiloxState(*[0 if b else None for b in batched])
    outs, new_states = torch.vmap(sample, in_dims=(axes, 0), randomness="different")(states, X)
    for i, (out, x) in enumerate(zip(outs, X, strict=True)):
        state = PhiloxState(*[value[i] if b else value for value, b in zip(states, batched, strict=True)])
        expected, new_state = sample(state, x)
        assert torch.equal(out, expected)
        assert new_states.offset[i] == new_state.offset


def test_vmap_over_states_in_vmap_over_states():
    states = PhiloxState(torch.arange(6).reshape(3, 2), torch.arange(6, 12).reshape(3, 2))
    xs = torch.stack([X[:3], X[1:]], 1)
    inner = torch.vmap(lambda state, x: sample(state, x)[0], randomness="different")
    outs = torch.vmap(inner, in_dims=1, randomness="different")(states, xs)
    for i in range(2):
        for j in range(3):
            assert torch.equal(outs[i, j], sample(PhiloxState(*[v[j, i] for v in states]), xs[j, i])[0])


def test_vmap_over_states_and_gradients():
    seeds = PhiloxState(torch.arange(4), torch.zeros(4, dtype=torch.int64))
    per_sample = torch.func.grad(lambda s, x: sample(s, x)[0].square().sum(), argnums=1)
    outs = torch.vmap(per_sample, randomness="different")(seeds, X)
    for i in range(4):
        assert torch.equal(outs[i], per_sample(PhiloxState(*[v[i] for v in seeds]), X[i]))


def test_one_state_for_all_samples():
    """With randomness="same", vmap does what a loop does: every sample has the numbers of the state."""
    outs, new_state = torch.vmap(sample_alone, in_dims=(None, 0), out_dims=(0, None), randomness="same")(STATE, X)
    for i in range(4):
        expected, after = sample_alone(STATE, X[i])
        assert torch.equal(outs[i], expected)
        assert new_state.offset == after.offset
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(sample_alone, in_dims=(None, 0))(STATE, X)


def sample_alone(state, x):
    return functionalize_rng(lambda x: F.dropout(x, 0.4) + torch.rand(6))(state, x)


@pytest.mark.parametrize("name", ["jacfwd", "jacrev", "hessian"])
def test_matrices_of_derivatives_of_what_a_state_draws(name):
    def loss(x):
        return functionalize_rng(lambda x: (pr.functional.dropout(x.sin(), 0.4) * F.dropout(x, 0.4)).sum())(STATE, x)[0]

    expected = getattr(torch.autograd.functional, "hessian" if name == "hessian" else "jacobian")(loss, X[0])
    assert expected.abs().sum() > 0
    torch.testing.assert_close(getattr(pr.func, name)(loss, randomness="same")(X[0]), expected, rtol=1e-12, atol=1e-12)


def test_vmap_over_states_must_draw_differently():
    states = PhiloxState(torch.arange(4), torch.arange(4))
    for randomness in ("same", "error"):
        with pytest.raises(RuntimeError, match='must have randomness="different"'):
            torch.vmap(sample, randomness=randomness)(states, X)
    with pytest.raises(pr.MissingRuleError, match="randperm"):
        torch.vmap(functionalize_rng(lambda: torch.randperm(3)), randomness="different")(states)


# Recomputation.


WEIGHT = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(6, 6).requires_grad_()


def block(x):
    h = pr.functional.dropout(x @ WEIGHT, 0.4)
    return torch.tanh(F.dropout(h, 0.3) + torch.rand_like(h))


def checkpointed_loss(x, mode):
    """Draws before, between, in and after three regions, one of which holds another."""

    def region(f, *args):
        return f(*args) if mode is None else checkpoint(f, *args, use_reentrant=mode)

    x = x + torch.rand_like(x)
    x = region(block, x)
    x = x * torch.randn_like(x)
    x = region(block, x)
    # Reentrant checkpoints hold no others.
    x = block(block(x)) if mode else region(lambda y: block(region(block, y)), x)
    return (x * torch.rand_like(x)).sum()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backward", ["inside", "outside"])
def test_checkpointing_recomputes_the_same_numbers(backward, reentrant):
    """Gradients are those without checkpoints, bitwise, wherever the backward pass runs."""

    def gradients(mode):
        x = X.clone().requires_grad_()
        WEIGHT.grad = None

        def loss_of(x):
            loss = checkpointed_loss(x, mode)
            if backward == "inside":
                # Reentrant checkpoints take `backward` alone.
                loss.backward()
            return loss

        out, new_state = functionalize_rng(loss_of)(STATE, x)
        if backward == "outside":
            out.backward()
        return (out, x.grad, WEIGHT.grad), new_state

    expected, expected_state = gradients(None)
    actual, state = gradients(reentrant)
    assert all(map(torch.equal, actual, expected))
    assert state.offset == expected_state.offset


def test_forward_and_backward_draw_from_states_of_their_own():
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + torch.rand_like(x)

        @staticmethod
        def backward(ctx, y_bar):
            return y_bar * torch.rand_like(y_bar)

    forward, backward = PhiloxState.from_seed(1), PhiloxState.from_seed(2)
    x = X.clone().requires_grad_()
    with rng_mode(forward) as mode:
        y = Noisy.apply(x)
    with rng_mode(backward) as other:
        (x_bar,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y - x, functionalize_rng(torch.rand_like)(forward, X)[0] + X - X)
    assert torch.equal(x_bar, functionalize_rng(torch.rand_like)(backward, X)[0])
    assert mode.state.offset == other.state.offset == X.numel() // 2
