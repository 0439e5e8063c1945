"""register_converter: functions of the user in the place of the forward of classes."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import primitives as pr
from tests.call_properties import CallRecorder
from tests.support import normal

SIZE = 6


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(SIZE))

    def forward(self, x, by=1.0):
        return nn.functional.normalize(x, dim=-1) * self.gain * by


class Inherits(Gain):
    pass


class Overrides(Gain):
    def forward(self, x, by=1.0):
        return super().forward(x, by) + 1


def by_rms_norm(module, x, by=1.0):
    if by != 1.0:
        return NotImplemented
    return pr.functional.rms_norm(x, (SIZE,), module.gain, 0.0) * SIZE**-0.5


@pytest.fixture
def registered():
    pr.nn.register_converter(Gain, by_rms_norm)
    yield
    pr.nn.register_converter(Gain, None)


@pytest.mark.usefixtures("registered")
def test_a_function_of_the_user_computes():
    model = nn.ModuleList([Gain(), Inherits(), Overrides()]).double()
    keys, x = list(model.state_dict()), normal((3, SIZE), 1)
    expected = [module(x) for module in model]
    pr.nn.convert(model)
    assert list(pr.nn.converted(model)) == ["0", "1"]
    assert [type(module) for module in model] == [Gain, Inherits, Overrides]
    assert f"{__name__}.by_rms_norm" in repr(pr.nn.converted(model))
    assert inspect.signature(model[1].forward) == inspect.signature(Inherits().forward)
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for module, want, serves in zip(twin, expected, (True, True, False), strict=True):
            with CallRecorder() as recorder:
                assert_close(module(x), want)
            assert ("layer_norm" in recorder.names) == serves
            assert_close(module(x, by=2.0), 2 * want if serves else 2 * want - 1)
        assert list(twin.state_dict()) == keys
    attributes = [vars(module).keys() for module in pr.nn.revert(model)]
    assert attributes == [vars(Gain()).keys()] * 3


@pytest.mark.usefixtures("registered")
def test_a_copy_computes_with_its_own_parameters():
    """Deep copies, replicas of DataParallel, other states by functional_call, compiled."""
    model, x = pr.nn.convert(Gain()), normal((3, SIZE), 1).float()
    y, doubled = model(x), {"gain": torch.full((SIZE,), 2.0)}
    twin, replica = copy.deepcopy(model), model._replicate_for_data_parallel()
    for other in (twin, replica):
        vars(other)["_parameters"] = {"gain": nn.Parameter(doubled["gain"])}
        assert_close(other(x), 2 * y)
        assert_close(model(x), y)
    assert_close(torch.func.functional_call(model, doubled, (x,)), 2 * y)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(*[torch.autograd.grad(f(x).sin().sum(), model.gain) for f in (compiled, model)])
    hooked, calls = model.register_forward_hook(lambda *args: calls.append(args)), []
    assert_close(model(x), y)
    assert len(calls) == 1
    hooked.remove()


def test_a_class_of_torch_may_be_registered_and_the_nearest_class_is_asked():
    class Rectified(nn.ReLU):
        pass

    try:
        pr.nn.register_converter(nn.ReLU, lambda module, x: x.clamp(min=0))
        pr.nn.register_converter(Rectified, lambda module, x: x.abs())
        model, x = pr.nn.convert(nn.Sequential(nn.ReLU(), Rectified())), torch.tensor([-1.0, 2.0])
        assert model[0](x).tolist() == [0.0, 2.0]
        assert model[1](x).tolist() == [1.0, 2.0]
    finally:
        pr.nn.register_converter(nn.ReLU, None)
        pr.nn.register_converter(Rectified, None)
    assert not pr.nn.converted(pr.nn.convert(nn.Sequential(nn.ReLU())))


@pytest.mark.parametrize(
    "cls, function, named",
    [(3, by_rms_norm, "3"), (int, by_rms_norm, "int"), (Gain, "x", "str"), (pr.nn.LayerNorm, by_rms_norm, "LayerNorm")],
)
def test_what_cannot_be_registered(cls, function, named):
    with pytest.raises(TypeError, match=named):
        pr.nn.register_converter(cls, function)
