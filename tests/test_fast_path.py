"""Calls that pass the dispatcher by, because nothing takes part that it would have to see."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import primitives.functional as F
from primitives.core import primitive as primitive_module
from primitives.core.errors import MutationError
from primitives.core.fast_path import are_unwatched, fast_path_keys, state_of_new_threads
from primitives.core.write_back import count_up, write_back
from primitives.ops.layer_norm import layer_norm_p


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
    assert fast_path_keys([x, torch.nn.Parameter(x)]) is not None
    with torch.no_grad():
        assert fast_path_keys([x]) is not None
    assert fast_path_keys([x, x.as_subclass(Wrapped)]) is None
    assert fast_path_keys([x, x.to("meta")]) is None
    inside = []
    torch.func.grad(lambda y: (inside.append(fast_path_keys([x])), y.sum())[1])(x)
    assert inside == [None]


@pytest.mark.parametrize("mode", MODES)
def test_modes_see_every_call(mode):
    x = torch.zeros(2)
    outside = state_of_new_threads()
    with MODES[mode]():
        assert fast_path_keys([x]) is None
        # The package may be imported in here, too.
        assert state_of_new_threads() == outside


def test_what_the_dispatcher_converts_it_still_converts():
    """Numbers of another kind, and too few arguments, are no plain calls; the results are those of plain ones."""
    x, weight = torch.arange(6.0).view(2, 3).requires_grad_(), torch.ones(3, requires_grad=True)
    expected = layer_norm_p(x, weight, None, 1, 0, 1.0)[0]
    for eps in (1, torch.tensor(1.0), True):
        y = layer_norm_p(x, weight, None, 1, 0, eps)[0]
        assert torch.equal(y, expected)
        assert type(y.grad_fn) is type(expected.grad_fn)
    for wrong in ((x, weight, None, 1, 0), (x, weight, None, 1.5, 0, 1.0), (x, "weight", None, 1, 0, 1.0)):
        with pytest.raises(RuntimeError):
            layer_norm_p(*wrong)


def test_a_subclass_is_shown_the_operator():
    seen = []

    class Watching(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.arange(6.0).view(2, 3)
    layer_norm_p(x.as_subclass(Watching), None, None, 1, 0, 1.0)
    assert layer_norm_p.overload in seen
    assert not are_unwatched([x, x.as_subclass(Watching)])


def test_nothing_is_recorded_below_autograd():
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    with torch._C._AutoDispatchBelowAutograd():
        assert not layer_norm_p(x, None, None, 1, 0, 1.0)[0].requires_grad
    assert layer_norm_p(x, None, None, 1, 0, 1.0)[0].requires_grad


def test_what_is_written_is_a_constant():
    """The graph of the value does not come with it."""
    target, value = torch.zeros(2), torch.ones(2, requires_grad=True)
    write_back([target], [value * 2])
    assert target.tolist() == [2.0, 2.0]
    assert not target.requires_grad


def test_counting_is_seen_by_modes():
    counter = torch.tensor(3)
    version = counter._version
    count_up(counter)
    assert (counter.item(), counter._version > version) == (4, True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert not are_unwatched([counter])
    torch.func.grad(lambda x: (count_up(counter), x.sum())[1])(torch.ones(2))
    assert counter.item() == 5


def test_a_write_past_the_dispatcher_is_one_that_autograd_knows_of():
    target = torch.zeros(2)
    version = target._version
    write_back([target], [torch.ones(2)])
    assert target.tolist() == [1.0, 1.0]
    assert target._version > version
    with pytest.raises(MutationError):
        write_back([target.requires_grad_()], [torch.ones(2)])
    assert target.tolist() == [1.0, 1.0]


STATISTICS = (torch.zeros(6), torch.ones(6))


@pytest.mark.parametrize(
    "call, num_params",
    [
        (lambda x, w, b: F.layer_norm(x, (6,), w, b), 2),
        (lambda x, w, b: F.batch_norm(x, *STATISTICS, w, b, training=True), 2),
        (lambda x, w, b: F.batch_norm(x, *STATISTICS, w, b, training=False), 2),
        (lambda x: F.log_softmax(x, 1), 0),
        (lambda x: F.dropout(x, 0.5), 0),
    ],
    ids=["layer_norm", "batch_norm", "batch_norm_eval", "log_softmax", "dropout"],
)
def test_rules_call_as_plain_calls_do(call, num_params, monkeypatch):
    """What a rule passes needs no conversion, so that its calls pass the dispatcher by, in second order too."""
    found = []
    original = primitive_module.fast_path_keys
    monkeypatch.setattr(
        primitive_module, "fast_path_keys", lambda tensors: found.append(original(tensors)) or found[-1]
    )
    inputs = [torch.randn(shape, requires_grad=True) for shape in [(8, 6), *[(6,)] * num_params]]
    gradients = torch.autograd.grad(call(*inputs).sin().sum(), inputs, create_graph=True)
    torch.autograd.grad(torch.stack([g.square().sum() for g in gradients]).sum(), inputs, allow_unused=True)
    assert len(found) > 2
    assert all(keys is not None for keys in found)
