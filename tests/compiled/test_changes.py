"""Changes of modules and defaults that come after calls, when C++ looks at dictionaries of modules."""

import copy
import dataclasses
import enum
import functools
import gc
import types
import weakref
from collections import OrderedDict, deque

import numpy as np
import pytest
import torch
from torch import nn

from tests.compiled.support import data, gradients, mlp, plainly, same

X = data(6, 3)
SCALE, TABLE, RATE, SETTINGS = 2.0, {"a": 1.0}, 1.0, types.ModuleType("settings")
SETTINGS.speed = 1.0
Mode = enum.Enum("Mode", ["SIN", "COS"])


class Slope:
    kind, rate = "up", 1.0

    def times(self, x):
        return getattr(self, f"times_{self.kind}")(x)

    def times_up(self, x):
        return x * self.rate


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.slope, self.kind = 1.0, Slope(), "up"

    def steep(self, x):
        return getattr(self, self.kind + "_steep")(x)

    def up_steep(self, x):
        return self.slope.times(x)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()
        self.net, self.hidden = nn.Linear(3, 1).double(), [nn.Linear(3, 1).double()]
        self.weights, self.history = {"pde": 1.0, "all": [{"in": 2.0}]}, []
        self.listed, self.pair = [1.0, data(1)], (2.0, data(1, seed=1))

    def forward(self, x):
        x = self.hidden[0](x) * self.part.steep(x) * self.part.gain
        return self.factor() * (self.net(x).square().mean() if len([*self.listed, *self.pair]) == 4 else x.sum())

    def factor(self):
        inner = self.weights["all"][0]["in"]
        return self.weights["pde"] * inner * self.listed[0] * self.listed[1] * self.pair[0] * self.pair[1]

    def train_step(self):
        self.history.append(0.0)


CHANGES = {
    "entry": (lambda m: m.weights.update(pde=100.0), 1),
    "entry inside": (lambda m: m.weights["all"][0].update({"in": 5.0}), 1),
    "dictionary": (lambda m: setattr(m, "weights", {"pde": 7.0, "all": m.weights["all"]}), 1),
    "number in a list": (lambda m: m.listed.__setitem__(0, 3.0), 1),
    "tensor in a list": (lambda m: m.listed.__setitem__(1, m.listed[1] * 2), 0),
    "list that grows": (lambda m: m.listed.append(0.0), 1),
    "tuple": (lambda m: setattr(m, "pair", (3.0, m.pair[1])), 1),
    "tuple that grows": (lambda m: setattr(m, "pair", (*m.pair, 1.0)), 1),
    "tensor in a tuple": (lambda m: setattr(m, "pair", (2.0, m.pair[1] * 2)), 0),
    "module": (lambda m: m.hidden.__setitem__(0, nn.Linear(3, 1).double()), 0),
    "attribute of a submodule": (lambda m: setattr(m.part, "gain", 3.0), 1),
    "what another's method reads": (lambda m: setattr(m.part.slope, "rate", 3.0), 1),
    "what forward does not read": (Weighted.train_step, 0),
}


@pytest.mark.parametrize("change, num_programs", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("wrapped", [lambda m: m, nn.Sequential, lambda m: lambda x: m(x)])
def test_containers_of_modules(change, num_programs, wrapped):
    module = Weighted()
    step = plainly(wrapped(module))
    same(step(X), module(X))
    change(module)
    for _ in range(2):
        same(step(X), module(X))
    assert len(getattr(step, "compiled", step).settings.programs) == 1 + num_programs


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Tanh()]).double()
        self.second = nn.ModuleList([nn.Linear(3, 3)]).double()
        self.register_buffer("shift", None)
        self.register_module("last", None)
        self.power, self.sign, self.a, self.b = 2, 0.0, 1, 2
        self.ordered = OrderedDict(sin=torch.sin, exp=torch.exp)

    def forward(self, x):
        for function in self.ordered.values():
            x = function(x)
        for layer in self.first:
            x = layer(x)
        x = x.sin() if self.shift is None else x.sin() + self.shift
        for layer in self.second:
            x = layer(x)
        x = x if self.last is None else self.last(x)
        number = torch.tensor(3) * self.power
        return x * self.a, number, torch.full((1,), self.sign).atan2(torch.tensor(-1.0))


def _swap_names(m):
    del m.power, m.sign, m.a, m.b
    m.power, m.sign, m.b, m.a = 2, 0.0, 1, 2


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.first[0], "bias", nn.Parameter(data(3, seed=1))),
        lambda m: m.first[0]._parameters.update(bias=nn.Parameter(data(3, seed=1))),
        lambda m: setattr(m, "shift", data(3, seed=2)),
        lambda m: setattr(m, "last", nn.Linear(3, 2).double()),
        lambda m: m.second.append(m.first.pop(1)),
        lambda m: m.second.insert(0, m.first.pop(1)),
        lambda m: setattr(m, "power", 2.0),
        lambda m: setattr(m, "power", True),
        lambda m: setattr(m, "sign", -0.0),
        _swap_names,
        lambda m: m.ordered.move_to_end("sin"),
    ],
)
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_attributes_of_modules(change, is_dynamic):
    module = Changing()
    step = plainly(module, dynamic=is_dynamic)
    for each in (lambda m: None, change):
        each(module)
        for _ in range(3):
            found, truth = step(X), module(X)
            same(found, truth)
            same(gradients(module, found[0].square().sum()), gradients(module, truth[0].square().sum()))


@pytest.mark.parametrize("name", ["__defaults__", "__kwdefaults__"])
def test_defaults(name):
    first = mlp()

    def by_place(x, net=first, scale=2.0):
        return (net(x) * scale).square().sum()

    def by_keyword(x, *, net=first, scale=2.0):
        return (net(x) * scale).square().sum()

    function = by_place if name == "__defaults__" else by_keyword
    step = plainly(function)
    for net, scale in ((mlp(), 2.0), (mlp(width=4), 2.0), (mlp(), 3.0)):
        values = (net, scale) if name == "__defaults__" else {"net": net, "scale": scale}
        setattr(function, name, values)
        for _ in range(3):
            same(gradients(net, step(X)), gradients(net, function(X)))
        if isinstance(values, dict):
            values["scale"] = 5.0
            same(step(X), function(X))


class Rated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, y_bar):
        return y_bar * LENT.rate * LENT.net[0].weight.detach().sum() * SCALE


@functools.lru_cache
def window(size):
    return torch.linspace(0, 1, size, dtype=torch.float64)


LENT = nn.Module()


@pytest.mark.parametrize("is_hook", [True, False])
def test_a_backward_pass_reads_what_the_call_reads(is_hook, monkeypatch):
    """Rules of torch.autograd.Function and hooks of tensors run after the function."""
    LENT.net = mlp()
    LENT.register_buffer("rate", data(1))

    def loss(x):
        y = LENT.net(x * window(3))
        if is_hook:
            y.register_hook(lambda y_bar: y_bar * LENT.rate * LENT.net[0].weight.detach().sum() * RATE)
        return (y if is_hook else Rated.apply(y)).square().mean()

    step = plainly(loss)
    for _ in range(2):
        for _ in range(3):
            same(gradients(LENT.net, step(X)), gradients(LENT.net, loss(X)))
        LENT.rate, LENT.net[0].weight.data = LENT.rate * 2, LENT.net[0].weight.data * 3
        monkeypatch.setattr(f"{__name__}.{'RATE' if is_hook else 'SCALE'}", 5.0)
    same(window(3) + 1, torch.linspace(1, 2, 3).double())


NUMBERS = [(2.0, 3.0), (np.float64(2), np.float64(3)), (2, 2.0), (True, False), (Mode.SIN, Mode.COS), (0.0, -0.0)]
NUMBERS += [
    (range(1), range(2)),
    (torch.sin, torch.cos),
    (nn.Tanh, nn.ReLU),
    (b"", b"a"),
    (frozenset([1]), frozenset()),
]


@pytest.mark.parametrize("values", NUMBERS, ids=[type(pair[1]).__name__ for pair in NUMBERS])
def test_a_value_in_each_place(values, monkeypatch):
    """After two calls, when C++ begins to look."""

    def used(value):
        text = str(type(value)) + repr(value)
        return torch.full((), float(sum(map(ord, text))))

    class Place:
        pass

    place, entries, net = Place(), [None], nn.Module()
    net.forward = lambda: used(net.value)
    cell = None

    def put(value):
        nonlocal cell
        cell = place.value = entries[0] = net.value = value
        monkeypatch.setattr(f"{__name__}.RATE", value)

    put(values[0])
    calls = lambda: used(cell), lambda: used(place.value), lambda: used(entries[0]), lambda: used(RATE), lambda: net()
    steps = [plainly(call) for call in calls]
    for value in (*values, values[0]):
        put(value)
        for _ in range(2):
            same([step() for step in steps], [used(value)] * len(steps))


def test_zeros_of_both_signs():
    step = plainly(lambda x: (1 / (x * 0.0), 1 / (x * -0.0)))
    same(step(X + 2), step.__wrapped__(X + 2))


def test_parameters_that_were_replaced_are_freed():
    net = mlp()
    step, whole = plainly(lambda x: net(x).square().sum()), plainly(net)
    for _ in range(3):
        step(X).backward()
        whole(X).sum().backward()
    old = [weakref.ref(x) for x in net.parameters()]
    net.load_state_dict({name: x.clone() for name, x in net.state_dict().items()}, assign=True)
    for _ in range(2):
        step(X)
        whole(X)
    gc.collect()
    assert not any(each() is not None for each in old)


def scaled(x):
    return x * SCALE * TABLE["a"]


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    inner: object = dataclasses.field(default_factory=lambda: types.SimpleNamespace(gain=1.0, listed=[1.0]))
    act: object = torch.sin
    shift: object = dataclasses.field(default_factory=lambda: data(3))


@dataclasses.dataclass(slots=True)
class Slotted:
    k: float = 1.0


class Doubled:
    factor = 2.0

    def __call__(self, *args):
        return args[-1] * self.factor


class Layer(nn.Module):
    rate = 1.0

    def __init__(self, config):
        super().__init__()
        self.config, self.net, self._p, self.calls = config, nn.Linear(3, 3).double(), 2.0, 0

    @property
    def power(self):
        return self._p * self.config.inner.gain

    def forward(self, x):
        self.calls += 1
        return scaled(self.net(x)) * self.power * getattr(self.config, "late", 1.0) * self.rate


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.config, self.slotted, self.doubled = Config(), Slotted(), Doubled()
        self.mode, self.kind, self.dtype, self.imaginary = Mode.SIN, nn.Linear, torch.float64, 1j
        self.act, self.function = torch.sin, functools.partial(torch.mul, other=2.0)
        self.chosen, self.queue = {1, 2}, deque([1.0])
        self.layer, self.last = Layer(self.config), Layer(self.config)
        self.last.register_forward_hook(self.doubled)
        self.removed = self.layer.register_forward_pre_hook(lambda layer, args: (args[0] + 1,))
        vars(self)["hidden"] = nn.Linear(3, 3).double()

    def forward(self, x):
        x = self.config.act(self.act(x) * self.config.scale * self.config.inner.listed[0] + self.config.shift)
        x = self.last(self.layer(self.function(x))) * self.slotted.k * self.queue[0] * abs(self.imaginary)
        x = x + self.hidden(x) * (3 if self.mode is Mode.COS else 1) * (5 if 3 in self.chosen else 1)
        return x.to(self.dtype) * (7 if self.kind is not nn.Linear else 1)


class Job:
    scale, other = 1.0, 1.0

    def __init__(self, net):
        self.net, self.weight, self.step, self.losses = net, 1.0, 0, []

    def loss(self, x):
        return self.net(x).square().mean() * self.weight * self.scale * Job.other * SETTINGS.speed


def assigned(path, value):
    *path, last = path.split(".")
    return lambda job, monkeypatch: setattr(functools.reduce(getattr, path, job.net), last, value)


NAMED = [
    assigned("config.scale", 3.0),
    assigned("config.inner.gain", 3.0),
    assigned("config.inner", types.SimpleNamespace(gain=5.0, listed=[2.0])),
    assigned("config", Config(scale=5.0)),
    assigned("config.act", torch.cos),
    assigned("config.shift", data(3, seed=1)),
    assigned("act", torch.cos),
    assigned("function", functools.partial(torch.mul, other=3.0)),
    assigned("slotted.k", 3.0),
    assigned("doubled.factor", 3.0),
    assigned("mode", Mode.COS),
    assigned("kind", nn.Bilinear),
    assigned("dtype", torch.float32),
    assigned("imaginary", 2j),
    lambda job, _: job.net.chosen.add(3),
    assigned("chosen", {1}),
    assigned("last._p", 5.0),
    assigned("last.config.late", 3.0),
    assigned("last.rate", 3.0),
    lambda job, _: vars(job.net).update(hidden=nn.Linear(3, 3).double()),
    lambda job, _: job.net.config.inner.listed.__setitem__(0, 3.0),
    lambda job, _: job.net.queue.__setitem__(0, 3.0),
    lambda job, _: job.net.removed.remove(),
    lambda job, _: job.net.layer.register_forward_hook(lambda layer, args, y: y * 3),
    assigned("last.__class__", type("Other", (Layer,), {"forward": lambda self, x: x * 4})),
    assigned("last.__class__", type("Third", (Layer,), {"forward": lambda self, x: x * 5})),
    lambda job, _: nn.utils.parametrizations.orthogonal(job.net.layer.net),
    assigned("last.forward", torch.sin),
    lambda job, _: setattr(job, "weight", 3.0),
    lambda job, monkeypatch: monkeypatch.setattr(f"{__name__}.SCALE", 3.0),
    lambda job, monkeypatch: monkeypatch.setattr(SETTINGS, "speed", 3.0),
    lambda job, monkeypatch: monkeypatch.setattr(Job, "scale", 3.0),
    lambda job, monkeypatch: monkeypatch.setattr(Job, "other", 3.0),
    lambda job, monkeypatch: monkeypatch.setitem(TABLE, "a", 3.0),
    lambda job, monkeypatch: monkeypatch.setattr(f"{__name__}.scaled", torch.sin),
]


def test_whatever_code_names(monkeypatch):
    """By submodules, properties, hooks and functions, too. A counter does not make it compile again."""
    torch.manual_seed(0)
    job = Job(Holding())
    step = plainly(lambda x: job.loss(x))
    for number, change in enumerate([lambda *_: None, *NAMED], start=1):
        before = job.losses[-1:]
        change(job, monkeypatch)
        # What is called once, twice, and again is looked at in three ways.
        for _ in range(1 + number % 3):
            job.losses.append(step(X).detach())
            same(job.losses[-1], copy.deepcopy(job).loss(X).detach())
            if number < 20:
                job.step += 1
        assert not any(torch.equal(job.losses[-1], loss) for loss in before)
        assert len(step.settings.programs) <= number
