"""How far a compiled function looks: objects of all kinds, many of them, and what it leaves alone."""

import array
import collections
import dataclasses
import functools
import logging
import sys
import types
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Normal
from torch.distributions import kl_divergence as kl

from primitives.func._reached import Reached
from tests.compiled.support import data, gradients, mlp, plainly, same

X, RATE, STEPS, TOOLS = data(6, 3), 1.0, collections.Counter(), types.ModuleType("tools")
TOOLS.factor, TEXT = 1.0, "pde"


class Scaled:
    def __init__(self, value=1.0):
        self.value = value

    def times(self, x):
        return x * self.value


class Doubled(Scaled):
    def times(self, x):
        return super().times(x) * 2


@dataclasses.dataclass(slots=True)
class Weights:
    pde: float = 1.0


class Meta(type):
    @property
    def rate(cls):
        return cls.gain


class Timed:
    def __init__(self, function):
        self.function = function

    def __get__(self, instance, owner):
        return functools.partial(self.function, instance)


class Single(metaclass=Meta):
    only, gain, value = None, 1.0, 1.0

    def __new__(cls):
        cls.only = cls.only or super().__new__(cls)
        return cls.only

    @Timed
    def times(self, x):
        return x * self.value

    def named(self, x, name):
        return getattr(self, "_" + name)(x)

    def _times(self, x):
        return x * self.value


class Outer(nn.Module):
    rate = 1.0

    @staticmethod
    @functools.lru_cache
    def ones(size):
        return torch.ones(size, dtype=X.dtype)

    def forward(self, x):
        return x * self.rate * self.ones(3)


class Inner(Outer):
    def forward(self, x):
        return super().forward(x) + 1


def _calls(num):
    """How many functions run to look at a list of so many objects, linked one by one."""
    first = last = Scaled()
    for _ in range(num):
        last.value = last = Scaled()
    num_calls = 0

    def count(frame, event, arg):
        nonlocal num_calls
        num_calls += 1

    sys.setprofile(count)
    try:
        Reached([lambda: first.value], lambda _: True, deeply=True)
    finally:
        sys.setprofile(None)
    return num_calls


def test_a_linked_list_is_looked_at_once():
    assert _calls(400) < 5 * _calls(100)


def _raising(name, base=object):
    """A class whose attribute, or method, of this name raises."""

    def raises(self, *args):
        raise RuntimeError(name)

    return type(name, (base,), {name: property(raises) if base is object else raises})


def _lying(kind):
    return type("Lying", (), {"__class__": property(lambda self: kind)})()


class Named(float):
    def __repr__(self):
        return "named"


LIARS = {
    **{kind.__name__: _lying(kind) for kind in (nn.Module, list, tuple, torch.Tensor, types.FunctionType)},
    "Mock": mock.Mock(spec=nn.Module),
    "class that raises": _raising("__class__")(),
    "attributes that raise": _raising("__dict__")(),
    "all that raises": _raising("__getattribute__", Scaled)(),
    "text": _raising("__repr__", float)(1.0),
    "copy": _raising("copy", dict)(a=1),
    "items": _raising("items", dict)(a=1),
    "iterator": _raising("__iter__", list)([1]),
    "frozen": _raising("__setitem__", dict)(a=data(1)),
    "proxy": weakref.proxy(mlp()),
    "long": 10**5000,
    "deep": functools.reduce(lambda x, _: (x,), range(1000), 1.0),
    "deep list": functools.reduce(lambda x, _: (x,), range(1000), [1.0]),
}


@pytest.mark.parametrize("name", LIARS)
def test_objects_that_lie_or_raise(name):
    value, net = LIARS[name], mlp()
    held = types.SimpleNamespace(value=value, other=1.0)
    step = plainly(lambda x: [net(x) * held.other, held.value, value, [value][0]][0])
    for other in (1.0, 1.0, 1.0, 2.0):
        held.other = other
        same(step(X), net(X) * other)
    assert len(step.settings.programs) == 2


def test_a_number_that_prints_what_it_is_not():
    held = Scaled(Named(2.0))
    step = plainly(held.times)
    for value in (2.0, 3.0):
        held.value = Named(value)
        for _ in range(2):
            same(step(X), X * value)
    assert len(step.settings.programs) == 2


def scaled(x):
    return x * 2.0


def imports(x):
    import tools

    return x * tools.factor


class Made:
    def scaled(self, x):
        return x * 2.0


class Layer(nn.Module):
    def forward(self, x):
        return x * 2.0


def _changes(monkeypatch):
    """Functions, and what changes what they read to each of two values."""
    small, large, text, number = np.ones(2), np.ones(9)[::2], bytearray(b"\1"), array.array("d", [1.0])
    user, chain, inner, owner = collections.UserDict(a=1.0), collections.ChainMap({"a": 1.0}), {"a": 1.0}, Scaled()
    proxy, reference = types.MappingProxyType(inner), weakref.ref(owner)
    scaled.factor, layer, net, normal = 1.0, Layer(), mlp(), Normal(data(3), 1.0)
    optimizer = torch.optim.SGD(net.parameters())
    schedule, around = torch.optim.lr_scheduler.ConstantLR(optimizer), functools.partial(setattr, normal, "loc")

    def slope(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(net(x).sum(), x)

    def hooked(value):
        net._backward_hooks.clear()
        net.register_full_backward_hook(lambda net, x_bars, y_bars: (x_bars[0] * value,))

    space, weights = types.SimpleNamespace(w_pde=1.0), Weights()
    single, doubled, layers, part = Single(), Doubled(), Inner(), functools.partial(torch.clamp, max=1.0)
    tables = {value: {"a": value} for value in (1.0, 2.0)}
    codes = {1.0: scaled.__code__, 2.0: (lambda x: x * 5.0).__code__}
    methods = {1.0: Made.scaled, 2.0: lambda self, x: x * 7.0}
    monkeypatch.setitem(sys.modules, "tools", TOOLS)
    return {
        "array": (lambda x: x * float(small[0]), lambda value: small.__setitem__(0, value)),
        "view": (lambda x: x * float(large[1]), lambda value: large.__setitem__(1, value)),
        "bytearray": (lambda x: x * text[0], lambda value: text.__setitem__(0, int(value))),
        "array.array": (lambda x: x * number[0], lambda value: number.__setitem__(0, value)),
        "UserDict": (lambda x: x * user["a"], lambda value: user.__setitem__("a", value)),
        "UserDict's": (lambda x: x * user["a"], lambda value: setattr(user, "data", tables[value])),
        "ChainMap": (lambda x: x * chain["a"], lambda value: chain.__setitem__("a", value)),
        "mapping": (lambda x: x * proxy["a"], lambda value: inner.update(a=value)),
        "weak": (lambda x: x * reference().value, lambda value: setattr(owner, "value", value)),
        "attribute": (lambda x: x * scaled.factor, lambda value: setattr(scaled, "factor", value)),
        "code": (lambda x: scaled(x), lambda value: setattr(scaled, "__code__", codes[value])),
        "method": (lambda x: Made().scaled(x), lambda value: monkeypatch.setattr(Made, "scaled", methods[value])),
        "call": (lambda x: layer(x), lambda value: monkeypatch.setattr(Layer, "forward", methods[value])),
        "later": (
            lambda x: x * getattr(Made, "later", 0.0),
            lambda value: monkeypatch.setattr(Made, "later", value, raising=False),
        ),
        "backward hook": (slope, hooked),
        "distribution": (lambda x: normal.log_prob(x), lambda value: around(data(3) + value)),
        "divergence": (lambda x: kl(normal, Normal(x, 1.0)), lambda value: around(data(3) + value)),
        "schedule": (lambda x: x * schedule.get_last_lr()[0], lambda value: setattr(schedule, "_last_lr", [value])),
        "names": (
            lambda x: x * sum(getattr(doubled, name) for name in ("value", "other")),
            lambda value: vars(doubled).update(value=value, other=1.0),
        ),
        "super": (lambda x: doubled.times(x), lambda value: setattr(doubled, "value", value)),
        "super of a module": (lambda x: layers(x), lambda value: setattr(layers, "rate", value)),
        "metaclass": (lambda x: x * Single.rate, lambda value: setattr(Single, "gain", value)),
        "single": (lambda x: x * Single().value, lambda value: setattr(single, "value", value)),
        "descriptor": (lambda x: single.times(x), lambda value: setattr(single, "value", value)),
        "spread": (lambda x: x * sum(vars(space).values()), lambda value: setattr(space, "w_pde", value)),
        "put together": (lambda x: x * getattr(space, f"w_{TEXT}"), lambda value: setattr(space, "w_pde", value)),
        "dataclass": (
            lambda x: x * sum(dataclasses.astuple(weights)),
            lambda value: setattr(weights, "pde", value),
        ),
        "private": (lambda x: single.named(x, "times"), lambda value: setattr(single, "value", value)),
        "partial": (lambda x: part(5 * x), lambda value: part.keywords.update(max=value)),
        "import": (imports, lambda value: monkeypatch.setattr(TOOLS, "factor", value)),
    }


@pytest.mark.parametrize("name", _changes(pytest.MonkeyPatch()))
@pytest.mark.parametrize("num_calls", [1, 3])
def test_changes_of_what_is_not_a_variable(name, num_calls, monkeypatch):
    function, change = _changes(monkeypatch)[name]
    step = plainly(function)
    change(1.0)
    for value in (1.0, 2.0, 1.0):
        change(value)
        for _ in range(num_calls):
            same(step(X), function(X))


def test_a_hook_of_torch_asks_whether_its_module_is_trained():
    net = nn.utils.spectral_norm(nn.Linear(3, 3).double())
    step = plainly(lambda x: net(x))
    for is_training in (True, False):
        net.train(is_training)
        before = net.weight_u.clone()
        step(X)
        assert torch.equal(net.weight_u, before) != is_training
    assert len(step.settings.programs) == 2


def test_counters_and_numbers_of_optimizers_are_no_reason_to_compile_again():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def loss(x):
        STEPS["loss"] += 1
        decayed = [y for group in optimizer.param_groups for y in group["params"]]
        return net(x).square().mean() + 0.1 * sum(y.square().sum() for y in decayed)

    step = plainly(loss)
    for _ in range(3):
        same(step(X), loss(X))
        optimizer.step()
        schedule.step()
    assert len(step.settings.programs) == 1
    optimizer.add_param_group({"params": [nn.Parameter(data(2))]})
    same(step(X), loss(X))


@pytest.mark.parametrize("hold", [lambda: [data(1)], lambda: Scaled(data(1))])
def test_a_backward_pass_reads_tensors_in_objects(hold, caplog):
    held, net = hold(), mlp()

    def loss(x):
        y = net(x)
        y.register_hook(lambda y_bar: y_bar * (held[0] if isinstance(held, list) else held.value))
        return y.square().mean()

    step = plainly(loss)
    with caplog.at_level(logging.WARNING, "primitives.compile"):
        for factor in (1.0, 2.0, 3.0):
            if isinstance(held, list):
                held[0] = data(1) * factor
            else:
                held.value = data(1) * factor
            same(gradients(net, step(X)), gradients(net, loss(X)))
    assert not caplog.messages


def test_statistics_of_a_batch_norm_in_evaluation():
    """Torch has no derivatives of these, in any mode."""

    def loss(mean, var):
        y = (X - mean) / (var + 1e-5).sqrt()
        return y.square().mean()

    def of_torch(mean, var):
        return nn.functional.batch_norm(X, mean, var).square().mean()

    mean, var, step = data(3), data(3, seed=1).abs() + 1, plainly(of_torch)
    for transform in (torch.func.grad, torch.func.hessian):
        for place in (0, 1):
            same(transform(step, place)(mean, var), transform(loss, place)(mean, var))
    mean.requires_grad_()
    same(torch.autograd.grad(step(mean, var), mean), torch.autograd.grad(loss(mean, var), mean))
