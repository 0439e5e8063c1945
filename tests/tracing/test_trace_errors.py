"""What make_fx cannot trace through the functions of this package is named with the user's line."""

import re

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

from primitives.tracing import PhiloxState, TraceError, functional_call, functionalize_rng, unwrap_subclasses


def branching(x):
    return x if x.sum() > 0 else -x


def reading(x):
    return x * x.sum().item()


class Module(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def of_module(function, mode):
    return make_fx(functional_call(Module(function)), tracing_mode=mode)({}, {}, torch.ones(3))


def of_random(function, mode):
    return make_fx(functionalize_rng(function), tracing_mode=mode)(PhiloxState.from_seed(0), torch.ones(3))


def of_subclass(function, mode):
    unwrapped = unwrap_subclasses(lambda x: function(x.a), TwoTensor(torch.ones(3), torch.ones(3)))
    return make_fx(unwrapped.fn, tracing_mode=mode)(*unwrapped.args)


TRACES = {"functional_call": of_module, "functionalize_rng": of_random, "unwrap_subclasses": of_subclass}


@pytest.mark.parametrize(
    "function, mode, line",
    [
        (branching, "fake", "return x if x.sum() > 0 else -x"),
        (branching, "real", "return x if x.sum() > 0 else -x"),
        (reading, "real", "return x * x.sum().item()"),
    ],
)
@pytest.mark.parametrize("name", TRACES)
def test_the_error_names_the_line(name, function, mode, line):
    with pytest.raises(TraceError, match=re.escape(line)) as info:
        TRACES[name](function, mode)
    assert str(info.value).startswith(f"{name}: ")
    assert __file__ in str(info.value)


def test_errors_outside_of_a_trace_are_torchs():
    def failing(x):
        raise RuntimeError("get value out of a tracing tensor")

    for pure, args in (
        (functional_call(Module(failing)), ({}, {}, torch.ones(3))),
        (functionalize_rng(failing), (PhiloxState.from_seed(0), torch.ones(3))),
    ):
        with pytest.raises(RuntimeError, match="get value") as info:
            pure(*args)
        assert not isinstance(info.value, TraceError)
