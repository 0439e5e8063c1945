"""Checkpointed regions in pure calls of modules and of random functions: recomputed in the state of their beginning."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from primitives.tracing import PhiloxState, functionalize_rng, pure_module, trace_joint
from tests.support import data
from tests.tracing.test_pure_module import assert_untouched, snapshot


class Block(nn.Module):
    """Buffers of every kind, read and written in a region that may be checkpointed."""

    def __init__(self, again):
        super().__init__()
        self.again, self.linear, self.norm, self.dropout = (again, nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
        for name in ("in_place", "assigned"):
            self.register_buffer(name, torch.zeros(4))

    def body(self, x):
        self.in_place.add_(1)
        self.assigned = self.assigned + 1
        return self.dropout(self.norm(self.linear(x)).tanh()) * self.in_place.clone() * self.assigned

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)


class Blocks(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.again, self.first, self.second = again, Block(again), Block(again)

    def forward(self, x):
        def twice(x):
            return self.first(self.second(x))

        x = self.second(self.first(x))
        return checkpoint(twice, x, use_reentrant=False) if self.again else twice(x)


def eager(pure, params, buffers, x):
    torch.manual_seed(3)
    output, buffers = pure(params, buffers, x)
    # The second time as the first.
    torch.autograd.grad(output.sum(), list(params.values()), retain_graph=True)
    return output, buffers, torch.autograd.grad(output.sum(), list(params.values()))


def stated(pure, params, buffers, x):
    (output, buffers), _ = functionalize_rng(pure)(PhiloxState.from_seed(3), params, buffers, x)
    return output, buffers, torch.autograd.grad(output.sum(), list(params.values()))


def joint(pure, params, buffers, x):
    def loss(params, buffers, x):
        output, buffers = pure(params, buffers, x)
        return output.sum(), (output.detach(), buffers)

    graph = trace_joint(loss, (params, buffers, x), no_cotangents=True, functionalize_rng=True)
    rng = PhiloxState.from_seed(3), PhiloxState.from_seed(4)
    (_, (output, buffers)), grads, _ = graph((params, buffers, x), rng=rng)
    return output, buffers, list(grads[0].values())


@pytest.mark.parametrize("run", [eager, stated, joint])
def test_checkpoints_inside_give_the_same_bits(run):
    results = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model = Blocks(is_checkpointed).double()
        pure, before = pure_module(model), snapshot(model)
        params, buffers = pure.init()
        params = {name: (p + 1).requires_grad_() for name, p in params.items()}
        results.append(run(pure, params, buffers, data(5, 4)))
        assert_untouched(model, before)
    (output, buffers, grads), (*actual, actual_grads) = results
    assert torch.equal(actual[0], output)
    assert actual[1].keys() == buffers.keys()
    assert all(torch.equal(actual[1][name], value) for name, value in buffers.items())
    assert all(torch.equal(a, e) for a, e in zip(actual_grads, grads, strict=True))


def test_a_region_sees_attributes_and_buffers_of_its_beginning():
    class Scaled(nn.Module):
        def __init__(self, write):
            super().__init__()
            self.weight, self.factor, self._write = nn.Parameter(torch.ones(3).double()), 1.0, write
            self.register_buffer("mask", torch.ones(3, dtype=torch.float64))

        def forward(self, x):
            self.factor = 3.0
            y = checkpoint(lambda x: (x * self.mask * self.factor * self.weight).sin(), x, use_reentrant=False)
            self.factor = 5.0
            self._write(self)
            return y

    x, weight = data(3).requires_grad_(), {"weight": data(3, seed=1)}
    for write in (
        lambda m: m.mask.zero_(),
        lambda m: m.__setattr__("mask", torch.zeros(3)),
        lambda m: m.mask[:2].zero_(),
    ):
        model = Scaled(write)
        pure, before = pure_module(model), snapshot(model)
        (x_bar,) = torch.autograd.grad(pure(weight, pure.init()[1], x)[0].sum(), x)
        torch.testing.assert_close(x_bar, (3 * x * weight["weight"]).cos() * 3 * weight["weight"])
        assert_untouched(model, before)
