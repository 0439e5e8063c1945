"""What code of a compiled function reads, and what it only writes to."""

import collections
import logging
import types

import pytest
import torch
from torch import nn

from tests.compiled.support import data, mlp, plainly, same

X, LOG = data(6, 3), logging.getLogger(__name__)
CALLS, LOSSES, RATE = 0, [], 1.0


@torch.fx.wrap
def shifted(x):
    return x + 1


class Traced(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        Traced.calls += 1
        return x * 2

    @staticmethod
    def backward(ctx, y_bar):
        return y_bar * 2


class Recorder:
    def __init__(self):
        self.num, self.outputs, self.sizes, self.last = 0, [], {}, None

    def __call__(self, module, args, y):
        self.num += 1
        self.outputs.append(y.detach())
        self.sizes["y"] = y.shape
        self.last = y


class Recording(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.calls, self.attention, self.history, self.step = mlp(), 0, None, [], 0
        self.recorder = Recorder()
        self.net[0].register_forward_hook(self.recorder)

    def forward(self, x):
        global CALLS
        CALLS += 1
        LOSSES.append(x)
        LOG.debug("called")
        self.calls += 1
        self.attention = y = self.net(Traced.apply(x))
        self.history.append(y.detach())
        return y.square().mean()

    def train_step(self, number):
        self.step = number


def test_counters_and_histories_are_no_reason_to_compile_again():
    module, num, seen = Recording(), 0, {}

    def loss(x):
        nonlocal num
        num += 1
        seen["x"] = x
        return module(x) * 2

    def state():
        return CALLS, LOSSES, Traced.calls, vars(module), num, seen, vars(module.recorder)

    step = plainly(loss)
    for number in range(4):
        # Each other time, so that a call comes after none.
        for _ in range(number % 2):
            loss(X)
            logging.getLogger(f"{__name__}{number}")
        module.train_step(number)
        before = str(state())
        same(step(X), step(X))
        assert str(state()) == before
        assert len(step.settings.programs) == 1


class Counting:
    def __init__(self):
        self.num, self.seen, self.total = 0.0, [], {"all": 0.0}

    def __call__(self, x):
        self.num += 1
        self.seen.append(self.num)
        self.total["all"] += 1
        return x * self.num * len(self.seen) * self.total["all"]


def test_what_is_written_and_read_is_seen():
    function, truth = Counting(), Counting()
    step = plainly(function)
    for _ in range(3):
        expected = truth(X)
        for _ in range(3):
            same(step(X), expected)
        function(X)


def _object(name, function):
    found = type("Object", (), {name: function, "__module__": __name__})()
    found.value = 1.0
    return found


OPERATORS = {
    "__getitem__": (lambda self, i: self.value * RATE, lambda y: y[0]),
    "__len__": (lambda self: int(self.value * RATE), len),
    "__iter__": (lambda self: iter([self.value * RATE]), sum),
    "__contains__": (lambda self, x: x == self.value * RATE, lambda y: 1.0 in y),
    "__rmul__": (lambda self, x: x * self.value * RATE, lambda y: 1.0 * y),
    "__float__": (lambda self: self.value * RATE, float),
    "__bool__": (lambda self: self.value * RATE > 1, bool),
    "__enter__": (lambda self: self.value * RATE, lambda y: type(y).__enter__(y)),
    "__getattr__": (lambda self, name: vars(self)["value"] * RATE, lambda y: y.other),
    "__call__": (lambda self: self.value * RATE, lambda y: y()),
}


# A module has a __getattr__ of its own.
@pytest.mark.parametrize(
    "name, is_module", [(name, case) for name in OPERATORS for case in (False, True) if not case or "attr" not in name]
)
def test_operators_of_objects(name, is_module, monkeypatch):
    function, use = OPERATORS[name]
    if is_module:
        obj = type("Module", (nn.Module,), {name: function, "__module__": __name__})()
        obj.value = 1.0
    else:
        obj = _object(name, function)
    step = plainly(lambda x: x * use(obj))
    for value, rate in ((1.0, 1.0), (3.0, 1.0), (3.0, 2.0), (1.0, 1.0)):
        obj.value = value
        monkeypatch.setattr(f"{__name__}.RATE", rate)
        for _ in range(2):
            same(step(X), X * use(obj))
    assert len(step.settings.programs) == 3


def test_a_tuple_of_another_class_in_a_place():
    class Pair(tuple):
        def __new__(cls, a, b):
            return super().__new__(cls, (a, b))

    held = types.SimpleNamespace(pair=Pair(2.0, data(3)), found=collections.deque([torch.return_types.max([X, X])]))
    step = plainly(lambda x: x * held.pair[0] * held.pair[1] * held.found[0].values)
    for pair in (held.pair, Pair(2.0, data(3, seed=1)), Pair(3.0, data(3))):
        held.pair = pair
        same(step(X), step.__wrapped__(X))


class Samples(torch.utils.data.Dataset):
    def __init__(self):
        self.images = [data(3, seed=number) for number in range(5)]

    def __getitem__(self, i):
        return self.images[i]

    def __len__(self):
        return len(self.images)


class Stepped(nn.Sequential):
    step = 0

    def forward(self, x):
        return super().forward(x) * getattr(self, "scale", 1.0)


def test_samples_and_numbers_of_steps_are_no_part_of_a_loss():
    samples, net = Samples(), Stepped(nn.Linear(3, 1), nn.BatchNorm1d(1)).double()
    state = types.SimpleNamespace(step=0, rate=1.0)
    step = plainly(lambda x: net(x).sum() / len(samples) * getattr(state, "rate", len(f"{x.dim()} axes")))
    for number in range(3):
        net.step = state.step = number
        same(step(X), step.__wrapped__(X))
    assert not any("captured" in name for name in step.graphs["value"].primal_names)
    assert len(step.settings.programs) == 1
    net[1].eps, net.scale = 0.5, 2.0
    same(step(X), step.__wrapped__(X))


def test_numbers_of_a_module_by_names_that_code_puts_together():
    class Rated(nn.Module):
        def __init__(self):
            super().__init__()
            self.rate0, self.rate1 = 1.0, 2.0

        def forward(self, x):
            return sum(x * getattr(self, f"rate{i}") for i in range(2))

    net = Rated()
    step = plainly(lambda x: net(x))
    for rate in (2.0, 3.0, 5.0):
        net.rate1 = rate
        for _ in range(2):
            same(step(X), net(X))


def test_functions_marked_for_fx_stay_as_they_are():
    """While it traces, torch has others in their places, as in those of timm's masks."""
    net, marked = mlp(), shifted
    step = plainly(lambda x: shifted(net(x)))
    for k in range(3):
        net.my_step = k
        same(step(X), marked(net(X)))
    assert shifted is marked
    assert len(step.settings.programs) == 1
