"""Calls that pass the dispatcher by, because nothing takes part that it would have to see."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from primitives.core.errors import MutationError
from primitives.core.plain_calls import plain_keys, state_of_new_threads
from primitives.core.write_back import write_back


class Wrapped(torch.Tensor):
    """A subclass, whose calls torch has to see."""


MODES = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "fake tensors": FakeTensorMode,
    "a function mode": lambda: torch.device("cpu"),
    "inference": torch.inference_mode,
    "a profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True),
}


def test_the_dispatcher_is_passed_by_in_plain_code_alone():
    x = torch.zeros(2)
    assert plain_keys([x, torch.nn.Parameter(x)]) is not None
    with torch.no_grad():
        assert plain_keys([x]) is not None
    assert plain_keys([x, x.as_subclass(Wrapped)]) is None
    assert plain_keys([x, x.to("meta")]) is None
    inside = []
    torch.func.grad(lambda y: (inside.append(plain_keys([x])), y.sum())[1])(x)
    assert inside == [None]


@pytest.mark.parametrize("mode", MODES)
def test_modes_see_every_call(mode):
    x = torch.zeros(2)
    outside = state_of_new_threads()
    with MODES[mode]():
        assert plain_keys([x]) is None
        # The package may be imported in here, too.
        assert state_of_new_threads() == outside


def test_a_write_past_the_dispatcher_is_one_that_autograd_knows_of():
    target = torch.zeros(2)
    version = target._version
    write_back([target], [torch.ones(2)])
    assert target.tolist() == [1.0, 1.0]
    assert target._version > version
    with pytest.raises(MutationError):
        write_back([target.requires_grad_()], [torch.ones(2)])
    assert target.tolist() == [1.0, 1.0]
