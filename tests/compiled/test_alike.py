"""Modules that take the place of others: alike they share programs, in turns too."""

import copy
import itertools

import torch
from torch import nn

from primitives.func._reached import Reached
from tests.compiled.support import data, gradients, mlp, plainly, same

X = data(6, 3)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.gain, self.listed, self.calls = mlp(nn.BatchNorm1d), 1.0, [1.0, {"a": data(1)}], 0

    def forward(self, x):
        self.calls += 1
        return self.net(x) * self.gain * self.listed[0] * self.listed[1]["a"]


def test_a_module_of_the_same_structure_takes_the_programs_of_another():
    net = Gated()
    target, first = copy.deepcopy(net), net

    def loss(x):
        return (net(x) - target(x).detach()).square().mean()

    def check(num_programs):
        for x in (X, X + 1):
            before = copy.deepcopy((net, target)) if net is not target else (copy.deepcopy(net),) * 2
            found = gradients(net, step(x))
            state = copy.deepcopy(net.state_dict())
            net.load_state_dict(before[0].state_dict())
            target.load_state_dict(before[1].state_dict())
            same(found, gradients(net, loss(x)))
            same(state.values(), net.state_dict().values())
        assert len(step.settings.programs) == num_programs

    step = plainly(loss)
    check(2)
    for _ in range(3):
        with torch.no_grad():
            net.net[0].weight.mul_(1.5)
        target = copy.deepcopy(net)
        check(2)
    net = copy.deepcopy(net)
    check(2)
    # The one of before changes: the program of the other stays.
    first.gain, second = 3.0, net
    check(2)
    net = first
    check(4)
    net = second
    check(4)
    net.listed[0] = 5.0
    check(6)
    target = copy.deepcopy(target).eval()
    check(8)
    target.net[2] = nn.Sigmoid()
    check(10)
    net = target
    num_programs = len(step.settings.programs)
    check(num_programs + 2)


class Tied(nn.Module):
    def __init__(self, names):
        super().__init__()
        for k, name in enumerate("abc"):
            setattr(self, name, nn.Parameter(data(3, seed=k)))
        setattr(self, names[0], getattr(self, names[1]))

    def forward(self, x):
        return x * self.a + x * self.b * 2 + x * self.c * 4


def _with(net, **values):
    for name, value in values.items():
        setattr(net, name, value)
    return net


def test_modules_that_differ_in_what_is_seen_take_programs_of_their_own():
    scale, net, number = 1.0, Gated(), 0

    def loss(x):
        return net(x) * scale * getattr(net, f"rate{number}")

    step = plainly(loss)
    for rate, factor in itertools.product((1.0, 2.0), (1.0, 2.0)):
        net, scale = _with(Gated(), rate0=rate), factor
        same(gradients(net, step(X).sum()), gradients(net, loss(X).sum()))
    assert len(step.settings.programs) == 8


def test_modules_that_differ_in_what_is_tied():
    net = Tied("ab")
    step = plainly(lambda x: net(x))
    for names in ("ab", "bc", "ac", "ab", "bc"):
        net = Tied(names)
        same(gradients(net, step(X).sum()), gradients(net, net(X).sum()))
    assert len(step.settings.programs) == 6


def test_two_modules_in_turns_are_looked_at_once(monkeypatch):
    first, second = Gated().eval(), Gated().eval()
    net, found = first, []
    step = plainly(lambda x: net(x))
    look = Reached._walk
    monkeypatch.setattr(Reached, "_walk", lambda self, roots: (found.append(self), look(self, roots)))
    for _ in range(3):
        for net in (first, second):
            same(step(X), net(X))
    assert len(found) == 2
