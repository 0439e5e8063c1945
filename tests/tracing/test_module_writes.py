"""What a module may not write as a pure function, however it does it, and buffers that are written through views."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import primitives as pr
from primitives.core.errors import LeafError
from primitives.tracing import functional_call


class Writer(nn.Module):
    """Does something to itself first."""

    def __init__(self, act):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(3))
        self._act = act

    def forward(self, x):
        with torch.no_grad():
            self._act(self)
        return x * self.weight + self.count


def set_data(module):
    module.weight.data = torch.zeros(3)


def set_grad(module):
    module.weight.grad = torch.zeros(3)


def freeze(module):
    module.weight.requires_grad = False


PARAMETER_WRITES = {
    "itself": lambda m: m.weight.add_(1),
    "data": lambda m: m.weight.data.add_(1),
    "detach": lambda m: m.weight.detach().add_(1),
    "view": lambda m: m.weight.view(-1)[1:].fill_(5),
    "item": lambda m: m.weight[0:1].__setitem__(0, 3.0),
    "operator": lambda m: m.weight.view(3).__imul__(2),
    "out": lambda m: torch.add(torch.ones(3), 1, out=m.weight.view(-1)),
    "list": lambda m: torch._foreach_add_([m.count, m.weight], 1),
    "overload": lambda m: torch.ops.aten.add_.Tensor(m.weight, 1),
    "packet": lambda m: torch.ops.aten.add_(m.weight.detach(), 1),
    "keyword": lambda m: functional.relu(m.weight.detach(), inplace=True),
    "flag": lambda m: functional.dropout(m.weight, 0.5, True, True),
    "init": lambda m: nn.init.zeros_(m.weight),
    "optimizer": lambda m: nn.utils.vector_to_parameters(torch.zeros(3), [m.weight]),
    "set data": set_data,
    "set grad": set_grad,
    "requires_grad": freeze,
}


def under_grad(pure, params, buffers, x):
    return torch.func.grad(lambda params: pure(params, buffers, x)[0].sum())(params)


def under_vmap(pure, params, buffers, x):
    stacked = {name: torch.stack([value, value]) for name, value in params.items()}
    return torch.vmap(pure, in_dims=(0, None, None))(stacked, buffers, x)


def alone(pure, *args):
    return pure(*args)


@pytest.mark.parametrize("name", PARAMETER_WRITES)
def test_parameters_are_not_written(name):
    for run in (alone, under_grad, under_vmap):
        module = Writer(PARAMETER_WRITES[name])
        pure = functional_call(module)
        params, buffers = pure.init()
        given = params["weight"]
        # vmap refuses `.data` by itself.
        by_torch = name == "data" and run is under_vmap
        with pytest.raises(RuntimeError if by_torch else pr.MutationError, match="`data`" if by_torch else "'weight'"):
            run(pure, params, buffers, torch.ones(3))
        assert torch.equal(given, torch.ones(3))
        assert given.grad is None
        assert torch.equal(buffers["count"], torch.zeros(3))
        assert torch.equal(module.weight, torch.ones(3))


@pytest.mark.parametrize("name", ["view", "item", "detach", "keyword", "flag"])
def test_parameters_are_not_written_in_compiled_calls(name):
    torch._dynamo.reset()
    pure = functional_call(Writer(PARAMETER_WRITES[name]))
    params, buffers = pure.init()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="writes its parameter 'weight'"):
        torch.compile(pure, fullgraph=True, backend="eager")(params, buffers, torch.ones(3))
    assert torch.equal(params["weight"], torch.ones(3))


def test_views_may_change_what_they_say_of_themselves():
    def act(module):
        view = module.weight.detach().view(1, 3)
        view.t_().requires_grad_().unsqueeze_(0)
        view.data = torch.zeros(3)

    pure = functional_call(Writer(act))
    params, buffers = pure.init()
    output, _ = pure(params, buffers, torch.ones(3))
    assert torch.equal(output, torch.ones(3))


BUFFER_WRITES = {
    "data": lambda m: m.count.data.add_(1),
    "view": lambda m: m.count.view(-1).add_(1),
    "item": lambda m: m.count[1:].__setitem__(slice(None), 7.0),
    "list": lambda m: torch._foreach_add_([m.count], 1),
    "out": lambda m: torch.add(m.count, 1, out=m.count),
    "overload": lambda m: torch.ops.aten.add_.Tensor(m.count, 1),
    "keyword": lambda m: functional.threshold(m.count.view(3), 1.0, 4.0, inplace=True),
}


@pytest.mark.parametrize("name", BUFFER_WRITES)
def test_buffers_written_through_views_come_out(name):
    module = Writer(BUFFER_WRITES[name])
    pure = functional_call(module)
    params, buffers = pure.init()
    output, new_buffers = pure(params, buffers, torch.ones(3))
    assert torch.equal(buffers["count"], torch.zeros(3))
    assert torch.equal(module.count, torch.zeros(3))
    expected = module(torch.ones(3))
    assert torch.equal(output, expected)
    assert torch.equal(new_buffers["count"], module.count)
    assert module.count.sum() > 0


def test_a_batched_write_through_a_view_names_the_buffer():
    def act(module):
        module.count.view(-1).add_(module.weight)

    pure = functional_call(Writer(act))
    params, buffers = pure.init()
    with pytest.raises(pr.MutationError, match="batched value in place into its buffer 'count'"):
        under_vmap(pure, params, buffers, torch.ones(3))


class Stale(nn.Module):
    """Uses a running mean that it read before the norm gave it a new value."""

    def __init__(self, use, view):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self._use, self._view = use, view

    def forward(self, x):
        mean = self._view(self.norm.running_mean)
        y = self.norm(x)
        return y + self._use(mean)


@pytest.mark.parametrize("view", [lambda m: m, lambda m: m.view(1, 3), lambda m: m.detach()[1:].expand(2)[:1]])
@pytest.mark.parametrize(
    "use", [torch.sin, lambda m: m.add_(1), lambda m: torch.cat([m, m]).sum(), lambda m: torch.add(other=m, input=1.0)]
)
def test_a_buffer_that_a_norm_replaced_is_not_used(use, view):
    """The module would see, and keep, what the pure function cannot."""
    pure = functional_call(Stale(use, view))
    params, buffers = pure.init()
    with pytest.raises(pr.MutationError, match=r"'norm\.running_mean', or a view of it, as it was before"):
        pure(params, buffers, torch.randn(4, 3))
    read_again = functional_call(Stale(lambda m: 0.0, view))
    assert read_again(params, buffers, torch.randn(4, 3))[1]["norm.num_batches_tracked"] == 1


class Holder(nn.Module):
    """Has a parameter and a buffer a second time, where nobody replaces them."""

    def __init__(self, name):
        super().__init__()
        self.linear, self._name = nn.Linear(3, 3), name
        self.register_buffer("count", torch.zeros(3))
        self.held = {"weight": [self.linear.weight], "count": [self.count]}

    def forward(self, x):
        (held,) = self.held[self._name]
        assert held.shape[-1] == 3
        return x + held.sum()


@pytest.mark.parametrize("name", ["weight", "count"])
def test_tensors_of_the_modules_own_are_not_used(name):
    """Their values and gradients would not be those of what was given."""
    pure = functional_call(Holder(name))
    own = "linear.weight" if name == "weight" else "count"
    with pytest.raises(LeafError, match=f"the module uses its own '{own}'"):
        pure(*pure.init(), torch.ones(3))
    model = Holder("weight")
    given = dict(model.named_parameters()), dict(model.named_buffers())
    assert functional_call(model)(*given, torch.ones(3))[0].requires_grad


class Window(nn.Module):
    """A buffer and a part of it."""

    def __init__(self, write):
        super().__init__()
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[:2])
        self._write = write

    def forward(self, x):
        if self._write:
            self.whole.add_(1)
        return x + self.part.sum()


def test_buffers_that_share_memory_are_not_written():
    pure = functional_call(Window(True))
    with pytest.raises(pr.MutationError, match="'whole', which shares memory with its buffer 'part'"):
        pure(*pure.init(), torch.ones(3))
    pure = functional_call(Window(False))
    assert torch.equal(pure(*pure.init(), torch.ones(3))[0], torch.ones(3))


def test_compiled_by_inductor():
    """Batch norm's state out of a call in training, by generated code."""
    torch._dynamo.reset()
    pure = functional_call(nn.BatchNorm1d(3).double())
    params, buffers = pure.init()
    x = torch.linspace(-1.0, 2.0, 12, dtype=torch.float64).reshape(4, 3)
    found = torch.compile(pure, fullgraph=True, backend="inductor")(params, buffers, x)
    torch.testing.assert_close(found, pure(params, buffers, x), rtol=1e-11, atol=1e-11)
    assert found[1]["num_batches_tracked"] == 1
    assert buffers["num_batches_tracked"] == 0
