"""Traces without functionalization, and with it where a function writes to memory that others see."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import primitives as pr
from primitives.tracing._joint import replayed
from tests.compiled.support import data, mlp, plainly, same

X = data(6, 3)
NET = mlp()


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


def reshaped(x):
    y = x * 1
    z = y.view(3, 6)
    z.mul_(x.view(3, 6))
    same = y.expand(6, 3).add_(x)
    return y, z, same, nn.functional.linear(x.view(3, 2, 3).transpose(0, 1), x[:3], x[0])


def turned(x):
    y = x[:3] * 1
    z = y.t()
    z.mul_(x[3:])
    return y, z


@torch.library.custom_op("compiled_tests::halves", mutates_args=())
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sin(), x.cos()


@halves.register_fake
def _(x):
    return x.new_empty(2, *x.shape).unbind()


def half(x):
    y, z = halves(x.detach())
    y.mul_(2)
    return y * x, z * x


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
    return y.mul_(x[3:]).unsqueeze_(1).add_(1) * x[3:]


def transposed_apart(x):
    y = x[:3] * 1
    z = y.detach()
    y.t_()
    return y * x[3:], z * x[3:]


def transposed_and_written(x):
    y = x[:3] * 1
    z = y.detach()
    y.t_().mul_(x[3:])
    return y, z * x[3:]


def other_strides(x):
    y = x.t() / 2
    return y.masked_fill_(x.t() > 0, 3.0), torch.linalg.vector_norm(x.t(), dim=1)


def memory_of_another(x):
    y, z = torch.empty_like(x), (x * 2).detach()
    y.detach_().set_(z)
    z.mul_(3)
    return x * y


def literal(x):
    y = torch.tensor(2.0).clone().mul_(3)
    return x * y.item()


def averages(x):
    pixels = x.view(1, 6, 3, 1).expand(2, -1, -1, 4).to(memory_format=torch.channels_last)
    return nn.functional.adaptive_avg_pool2d(pixels, 1), nn.functional.adaptive_avg_pool2d(pixels, (1, 2))


@pytest.mark.parametrize(
    "function, num_runs",
    [
        (own, 1),
        (alias, 1),
        (statistics, 1),
        (reshaped, 1),
        (turned, 2),
        (half, 2),
        (view_before, 2),
        (view, 2),
        (windows, 2),
        (transposed, 1),
        (transposed_apart, 1),
        (transposed_and_written, 2),
        (other_strides, 1),
        (memory_of_another, 2),
        (literal, 2),
        (averages, 1),
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


def test_writes_to_windows_with_gaps_are_refused():
    def windows(x):
        y = x.flatten() * 1
        y.unfold(0, 2, 5)[0].mul_(2)
        return y

    with pytest.raises(pr.MutationError, match=r"test_writes.py:\d+: y.unfold.*Take the windows of a clone"):
        plainly(windows)(X)
    read = plainly(lambda x: (x.flatten() * 1).add_(1).unfold(0, 2, 5).square())
    same(read(X), (X.flatten() + 1).unfold(0, 2, 5).square())


def writes_row(x):
    y = x * 1
    z = y.detach()
    z[1] = x[0]
    return (y * z).sum()


def scatters(x):
    return torch.as_strided_scatter(x * 1, x[0].sin(), (3,), (2,)).square().sum()


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.parametrize("function", [writes_row, scatters])
def test_batches_of_writes(function):
    """Torch itself has no rule for batches of a scatter."""
    batch = data(2, 6, 3)
    truth = torch.stack([torch.func.grad(function)(x) for x in batch])
    same(torch.func.vmap(torch.func.grad(plainly(function)))(batch), truth)


def test_zero_gradients_of_numbers():
    x = torch.tensor(0.7, requires_grad=True)

    def penalty(f):
        (gradient,) = torch.autograd.grad(f(x).square(), x, create_graph=True)
        return torch.autograd.grad(gradient.square(), x)

    def loss(x):
        return nn.functional.l1_loss(1.0 * x, torch.tensor(0.3))

    same(penalty(plainly(loss)), penalty(loss), 1e-6)


def likes(x):
    """Calls that differ in one thing from one before: a tensor that is given twice, a sign, a type, memory."""
    y, z, numbers = x + 1, x + 2, torch.arange(6)
    products = [y * y, y * z, z * z, y * 0.0, y * -0.0, numbers * 2, numbers * 2.0, numbers * True]
    rows = [torch.cat([y, z])[k : k + 2] for k in (0, 1, 1)]
    sums = [each.sum(*axes) for each in (y, z, rows[2]) for axes in ((), (0,), (1,))]
    layouts = [each.t().reshape(-1).square() for each in (y, z.t().contiguous().t(), *rows)]
    written = (y * z).mul_(z), y.clone().add_(1), y.clone().add_(z)
    results = *products, *rows, *sums, *layouts, *written
    return sum(each.double().cos().sum() for each in results)


def nodes_of(function, x):
    """Each node of a joint graph with places of its inputs, what its value is like, and those with the same memory."""
    step = plainly(function)
    torch.func.jvp(torch.func.grad(step), (x,), (x,))
    step(x.clone().requires_grad_()).backward()
    assert not step.settings.writes
    found = []
    for graph in step.graphs.values():
        place = {node: k for k, node in enumerate(graph.graph.nodes)}
        values = [node.meta.get("val") for node in place]
        memory = [y.untyped_storage()._cdata if isinstance(y, torch.Tensor) else None for y in values]
        for (node, k), y, number in zip(place.items(), values, memory, strict=True):
            kind = replayed._kind(y) if isinstance(y, torch.Tensor) else None
            args = torch.fx.map_arg((node.args, node.kwargs), place.__getitem__)
            found.append((k, node.target, repr(args), kind, memory.index(number), node.stack_trace))
    return found


@pytest.mark.parametrize("function", [likes, lambda x: (NET(x) * NET(x.flip(0)).exp()).sum()])
def test_calls_like_one_before_are_recorded_as_torch_would(function, monkeypatch):
    asked, found = [], []
    for describe in (replayed._described, lambda *args: {}[asked.append(args)]):
        monkeypatch.setattr(replayed, "_described", describe)
        # In one line, which is in the stacks.
        found.append(nodes_of(function, X))
    assert found[0] == found[1]
    assert len(asked) > 100
