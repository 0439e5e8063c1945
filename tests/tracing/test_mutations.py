"""Writes to inputs as outputs: values, metadata, aliases, derivatives, graphs and errors."""

from __future__ import annotations

import re

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import primitives as pr
from primitives.core.errors import MissingRuleError, MutationError
from primitives.tracing import functionalize_mutations


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ops(graph):
    return [node.target._schema.name for node in graph.graph.nodes if hasattr(node.target, "_schema")]


def assert_pure(graph):
    assert not [name for name in ops(graph) if name.endswith("_") or name == "primitives::write_back"], graph.code


def functional_with_out(x, y):
    torch.add(y, 1, out=x)


# What writes to two matrices, and the labels of what is written to.
PROGRAMS = {
    "data": (lambda x, y: x.add_(y), "x"),
    "view": (lambda x, y: x[1:].t()[0].mul_(2), "x"),
    "both": (lambda x, y: (y.mul_(x), x.zero_()), "xy"),
    "same values": (lambda x, y: x.copy_(x.clone()), "x"),
    "out": (functional_with_out, "x"),
    "foreach": (lambda x, y: torch._foreach_add_([x, y], 1.0), "xy"),
    "index": (lambda x, y: x.__setitem__((0, slice(1)), 5.0), "x"),
    "masked": (lambda x, y: x.__setitem__(x > 0, 0.0), "x"),
    "metadata": (lambda x, y: y.t_(), "y"),
    "unsqueeze": (lambda x, y: x.unsqueeze_(0), "x"),
    "back again": (lambda x, y: x.t_().t_(), ""),
    "metadata and data": (lambda x, y: x.t_().add_(1), "x"),
    "native norm": (lambda x, y: torch.native_batch_norm(x, None, None, y[0], y[1], True, 0.1, 1e-5), "y"),
    "nothing": (lambda x, y: x + y, ""),
    "detached": (lambda x, y: x.detach().add_(1), "x"),
    "write_back": (lambda x, y: torch.ops.primitives.write_back([x], [y]), "x"),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("tracing_mode", [None, "fake", "symbolic"])
def test_new_values(name, tracing_mode):
    program, labels = PROGRAMS[name]
    x, y = data(2, 2), data(2, 2, seed=1)
    expected = x.clone(), y.clone()
    program(*expected)
    before = x.clone(), y.clone(), x._version, y._version
    pure = functionalize_mutations(lambda x, y: [program(x, y)][1:])
    if tracing_mode:
        pure = make_fx(pure, tracing_mode=tracing_mode)(x, y)
        assert_pure(pure)
    else:
        given = x.clone(), y.clone()
        pure.in_place(*given)
        assert all(a.stride() == b.stride() and torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    _, mutated = pure(x, y)
    keys = {"x": "args[0]", "y": "args[1]"}
    assert list(mutated) == [keys[label] for label in labels]
    for key, value in mutated.items():
        wanted = expected[int(key[5])]
        assert (value.shape, value.stride(), value.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        assert torch.equal(value, wanted)
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    assert (x._version, y._version) == before[2:]
    assert x.shape == y.shape == (2, 2)


def test_inputs_that_overlap_are_read_and_not_written():
    base = data(6)
    pure = functionalize_mutations(lambda a, b: (a.mul_(2), b.sum())[1])
    within = functionalize_mutations(lambda a, b: pure(a, b)[0])
    for function in (pure, within, make_fx(pure, tracing_mode="fake"), make_fx(within, tracing_mode="fake")):
        with pytest.raises(MutationError, match=re.escape("args[0], args[1] share memory, and args[0] is written to")):
            function(base[:4], base[2:])
    x = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(MutationError, match="share memory"):
        functionalize_mutations(lambda x, y: x.zero_())(x, torch.view_as_real(x))
    assert torch.equal(base, data(6))
    assert functionalize_mutations(lambda a, b: a * b[:4])(base[:4], base[2:])[1] == {}
    # Inputs that share a storage and no element, and one tensor in two places, are nothing special.
    assert list(pure(base[:2], base[2:])[1]) == ["args[0]"]
    assert torch.equal(pure(base, base)[0], 2 * base.sum())


def test_outputs_that_are_views_of_inputs_stay_so():
    x = data(3, 3).t()[1:]
    pure = functionalize_mutations(lambda x: (x, x[1], x.detach()[1]))
    for call in (pure, make_fx(pure, tracing_mode="fake")(x)):
        for y, wanted in zip(call(x)[0], (x, x[1], x[1]), strict=True):
            assert (y.data_ptr(), y.stride()) == (wanted.data_ptr(), wanted.stride())


def test_what_is_made_inside_is_written_to():
    def program(x):
        y, z = torch.zeros(2, dtype=x.dtype), torch.tensor(3.0)
        y.add_(torch.tensor([1.0, 2.0]))
        y[0] = z.mul_(2)
        return y + x

    pure = functionalize_mutations(program)
    graph = make_fx(pure)(data(2))
    assert_pure(graph)
    for call in (pure, graph):
        value, mutated = call(data(2))
        assert torch.equal(value, program(data(2)))
        assert mutated == {}


def program(x, w):
    x.mul_(w)
    x[0].add_(x[1])
    with torch.no_grad():
        (x * 1).add_(1)
    return (x * x * x).sum()


def by_hand(x, w):
    x = x * w
    x = torch.cat([(x[0] + x[1])[None], x[1:]])
    return (x * x * x).sum()


TRANSFORMS = {
    "grad": lambda f, x, w: grad(f, (0, 1))(x, w),
    "per sample": lambda f, x, w: vmap(grad(f), (0, None))(torch.stack([x, x + 1]), w),
    "jvp": lambda f, x, w: jvp(f, (x, w), (w, x)),
    "hessian": lambda f, x, w: hessian(f)(x, w),
    "vmap": lambda f, x, w: vmap(f)(torch.stack([x, x + 1]), torch.stack([w, w + 1])),
    "backward": lambda f, x, w: torch.autograd.grad(
        f(x.requires_grad_(), w.requires_grad_()), (x, w), create_graph=True
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives(name):
    results = [
        TRANSFORMS[name](f, data(3), data(3, seed=1))
        for f in (lambda x, w: functionalize_mutations(program)(x, w)[0], by_hand)
    ]
    torch.testing.assert_close(*results)
    # The pure form of a derivative has a graph without writes, and so has the pure form inside it, given that.
    transform, inner = TRANSFORMS[name], functionalize_mutations(program)
    outer = functionalize_mutations(lambda x, w: transform(lambda x, w: inner(x, w)[0], x.clone(), w.clone()))
    graph = make_fx(outer, tracing_mode="fake")(data(3), data(3, seed=1))
    assert_pure(graph)
    torch.testing.assert_close(graph(data(3), data(3, seed=1))[0], results[1])


def test_graphs_are_differentiable_where_they_are_traced():
    """A backward pass that is traced outside of the pure function finds its inputs, and no write is recorded."""
    pure = functionalize_mutations(program)
    x, w = data(3).requires_grad_(), data(3, seed=1).requires_grad_()

    def gradients(x, w):
        y, mutated = pure(x, w)
        return torch.autograd.grad(y + mutated["args[0]"].sum(), (x, w))

    graph = make_fx(gradients, tracing_mode="fake")(x, w)
    assert_pure(graph)
    y = by_hand(x, w)
    after = torch.cat([(x[0] * w[0] + x[1] * w[1])[None], (x * w)[1:]])
    torch.testing.assert_close(graph(x, w), torch.autograd.grad(y + after.sum(), (x, w)))


def test_writes_to_what_is_no_input():
    outside = data(2)
    for pure in (
        functionalize_mutations(outside.add_),
        functionalize_mutations(lambda x: outside[0].zero_()),
    ):
        for call in (pure, make_fx(pure)):
            with pytest.raises(MutationError, match=r"not an input.*test_mutations.py:\d+: "):
                call(data(2))
    assert torch.equal(outside, data(2))


def test_what_cannot_be_pure():
    for program in (lambda x: x.resize_(1, 2), lambda x: x.resize_(5).zero_(), lambda x: x.set_(x.sin())):
        for call in (functionalize_mutations(program), make_fx(functionalize_mutations(program))):
            with pytest.raises(MutationError, match=r"args\[0\] is given other memory"):
                call(data(2, 2))
    with pytest.raises(MissingRuleError, match="pre_dispatch"):
        make_fx(functionalize_mutations(torch.sin), pre_dispatch=True)(data(2))


def test_a_graph_that_copies_back():
    def program(x, y):
        x.add_(1)
        y.t_()
        return x[0]

    graph = make_fx(functionalize_mutations(program).in_place, tracing_mode="fake")(data(2, 2), data(2, 2))
    assert [name for name in ops(graph) if name.endswith("_")] == ["aten::copy_", "aten::as_strided_"]
    x = data(2, 2)
    row = graph(x, data(2, 2))
    assert torch.equal(x, data(2, 2) + 1)
    assert row.data_ptr() == x.data_ptr()


# Training steps: writes that autograd does not see, optimizers, clips, batch norm.


def step(w, x):
    y = (w * x).sum().square()
    with torch.no_grad():
        w.clamp_(-0.1, 0.1)
    w.data.add_(1)
    w.detach().mul_(2)
    return y + (w * x).exp().sum()


@pytest.mark.parametrize("leaf", [True, False])
def test_writes_hidden_from_autograd(leaf):
    """They have no derivative, as in torch: output, gradient and new value are those of the program."""
    x, pure = data(3, seed=1), functionalize_mutations(step)

    def run(call):
        w = data(3).requires_grad_()
        used = w if leaf else w * 1
        y, new = call(used)
        return y, torch.autograd.grad(y, w)[0], new

    expected = run(lambda w: (step(w, x), w))
    for call in (lambda w: (pure.in_place(w, x), w), lambda w: ((result := pure(w, x))[0], result[1]["args[0]"])):
        assert all(map(torch.equal, run(call), expected))
    assert not pure(data(3).requires_grad_(), x)[1]["args[0]"].requires_grad
    graph = make_fx(pure, tracing_mode="fake")(data(3), x)
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
        norm = (pr.nn if name == "AdamW" else torch.nn).BatchNorm1d(4)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), norm, torch.nn.Linear(4, 1)).double()

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
