"""Changes of modules and defaults that come after calls, when C++ looks at dictionaries of modules."""

import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

from tests.compiled.support import data, gradients, mlp, plainly, same

X = data(6, 3)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.hidden = nn.Linear(3, 1).double(), [nn.Linear(3, 1).double()]
        self.weights, self.history = {"pde": 1.0, "all": [{"in": 2.0}]}, []
        self.listed, self.pair = [1.0, data(1)], (2.0, data(1, seed=1))

    def forward(self, x):
        x = self.hidden[0](x) * x
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
    "module": (lambda m: m.hidden.__setitem__(0, nn.Linear(3, 1).double()), 1),
    "what forward does not read": (Weighted.train_step, 0),
}


@pytest.mark.parametrize("change, num_programs", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("is_submodule", [False, True])
def test_containers_of_modules(change, num_programs, is_submodule):
    module = Weighted()
    step = plainly(nn.Sequential(module) if is_submodule else module)
    same(step(X), module(X))
    change(module)
    for _ in range(2):
        same(step(X), module(X))
    assert len(step.compiled.settings.programs) == 1 + num_programs


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
    def by_place(x, net=mlp(), scale=2.0):  # noqa: B008 - the test changes defaults that are modules
        return (net(x) * scale).square().sum()

    def by_keyword(x, *, net=mlp(), scale=2.0):  # noqa: B008 - as above
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
