"""Traces without functionalization, and with it where a function writes to memory that others see."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from tests.compiled.support import data, plainly, same

X = data(6, 3)


def own(x):
    y = torch.zeros_like(x)
    y.add_(x.sin()).mul_(x)
    return y, y + 1


def alias(x):
    y = x * 1
    z = y.detach()
    y.mul_(x)
    return y, z


def statistics(x):
    mean, var = torch.zeros(3).double(), torch.ones(3).double()
    y = nn.functional.batch_norm(x, mean, var, training=True)
    return y, mean * x, var


def view_before(x):
    y = x * 1
    z = y[0]
    y.mul_(x)
    return y, z


def view(x):
    y = x * 2
    y[0].mul_(x[1])
    return y


def windows(x):
    y = x * 2
    y[:5].unfold(0, 2, 2)[1].mul_(x[1, :, None])
    y.unfold(0, 2, 4).sub_(1)
    return y


def transposed(x):
    y = x[:3] * 1
    y.t_()
    return y @ x[3:]


def memory_of_another(x):
    y, z = torch.empty_like(x), (x * 2).detach()
    y.detach_().set_(z)
    z.mul_(3)
    return x * y


def literal(x):
    y = torch.tensor(2.0).clone().mul_(3)
    return x * y.item()


@pytest.mark.parametrize(
    "function, num_runs",
    [
        (own, 1),
        (alias, 1),
        (statistics, 1),
        (view_before, 2),
        (view, 2),
        (windows, 2),
        (transposed, 2),
        (memory_of_another, 2),
        (literal, 2),
    ],
)
def test_writes_to_memory_of_its_own(function, num_runs):
    """Where others see the memory, Python runs twice."""
    count = itertools.count()

    def counted(x):
        next(count)
        return function(x)

    step, x = plainly(counted), X.clone().requires_grad_()
    same(step(X), function(X))
    assert next(count) == num_runs

    def penalty(f):
        y = sum(y.square().sum() for y in tree_leaves(f(x)))
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return gradient, *torch.autograd.grad(gradient.square().sum(), x)

    same(penalty(step), penalty(function))


def test_zero_gradients_of_numbers():
    x = torch.tensor(0.7, requires_grad=True)

    def penalty(f):
        (gradient,) = torch.autograd.grad(f(x).square(), x, create_graph=True)
        return torch.autograd.grad(gradient.square(), x)

    def loss(x):
        return nn.functional.l1_loss(1.0 * x, torch.tensor(0.3))

    same(penalty(plainly(loss)), penalty(loss), 1e-6)
