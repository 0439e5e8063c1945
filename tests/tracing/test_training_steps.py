"""Training steps as pure functions: writes that autograd does not see, optimizers, clips, batch norm."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from primitives.tracing import functionalize_mutations


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_pure(graph):
    names = [node.target._schema.name for node in graph.graph.nodes if hasattr(node.target, "_schema")]
    assert not [name for name in names if name.endswith("_")], graph.code


def scale_hidden(w, x):
    with torch.no_grad():
        w.mul_(3)
    return (w * w * x).sum()


def clip(w, x):
    y = (w * x).sum().square()
    with torch.no_grad():
        w.clamp_(-0.1, 0.1)
    w.data.add_(1)
    w.detach().mul_(2)
    return y + (w * x).exp().sum()


@pytest.mark.parametrize("step", [scale_hidden, clip])
@pytest.mark.parametrize("leaf", [True, False])
def test_writes_hidden_from_autograd(step, leaf):
    """They have no derivative, as in torch: output, gradient and new value are those of the program."""
    x = data(3, seed=1)

    def given():
        w = data(3).requires_grad_()
        return w, w if leaf else w * 1

    w, used = given()
    y = step(used, x)
    expected = [y, *torch.autograd.grad(y, w), used]
    w, used = given()
    y, mutated = functionalize_mutations(step)(used, x)
    assert torch.equal(used, data(3))
    found = [y, *torch.autograd.grad(y, w), mutated["args[0]"]]
    assert all(map(torch.equal, found, expected))
    assert not mutated["args[0]"].requires_grad
    w, used = given()
    y = functionalize_mutations(step).in_place(used, x)
    assert all(map(torch.equal, [y, *torch.autograd.grad(y, w), used], expected))
    graph = make_fx(functionalize_mutations(step), tracing_mode="fake")(used.detach(), x)
    assert_pure(graph)
    value, mutated = graph(data(3), x)
    assert torch.equal(value, expected[0])
    assert torch.equal(mutated["args[0]"], expected[2])


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("traced", [False, True])
def test_a_training_step_with_its_optimizer(name, traced):
    """Forward, backward, two steps and a weight clip: new parameters and batch norm's buffers are those of eager."""

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).double()

    def step(net, params, state, x):
        optimizer = OPTIMIZERS[name](list(params.values()))
        losses = []
        for _ in range(2):
            loss = torch.func.functional_call(net, {**params, **state}, (x,)).square().mean()
            grads = torch.autograd.grad(loss, list(params.values()))
            for p, g in zip(params.values(), grads, strict=True):
                p.grad = g
            optimizer.step()
            losses.append(loss.detach())
        with torch.no_grad():
            params["0.weight"].clamp_(-0.3, 0.3)
        return losses

    eager, x = model(), data(5, 3)
    expected = step(eager, dict(eager.named_parameters()), dict(eager.named_buffers()), x)
    net = model()
    params, state = dict(net.named_parameters()), dict(net.named_buffers())
    pure = functionalize_mutations(lambda params, state, x: step(net, params, state, x))
    if traced:
        pure = make_fx(pure, tracing_mode="fake")(params, state, x)
        assert_pure(pure)
    losses, mutated = pure(params, state, x)
    torch.testing.assert_close(losses, expected)
    assert all(torch.equal(value, model().state_dict()[key]) for key, value in net.state_dict().items())
    for i, named in enumerate((eager.named_parameters(), eager.named_buffers())):
        for key, value in named:
            torch.testing.assert_close(mutated[f"args[{i}][{key!r}]"], value.detach())
