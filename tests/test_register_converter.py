"""register_converter: functions of the user in the place of the forward of classes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import primitives as pr
from tests.call_properties import CallRecorder
from tests.support import normal
from tests.test_convert_norms import CastFirst

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
    assert repr(model[1]) == "primitives.Inherits()"
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for module, want, serves in zip(twin, expected, (True, True, False), strict=True):
            with CallRecorder() as recorder:
                assert_close(module(x), want)
            assert ("layer_norm" in recorder.names) == serves
            assert_close(module(x, by=2.0), 2 * want if serves else 2 * want - 1)
        assert list(twin.state_dict()) == keys
    assert [type(module) for module in pr.nn.revert(model)] == [Gain, Inherits, Overrides]


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


class TemperedBatchNorm(nn.BatchNorm2d):
    def __init__(self):
        super().__init__(SIZE)
        self.act, self.factor = nn.ReLU(), 1.0

    def forward(self, x):
        return self.factor * self.act(super().forward(x))


class ClampedBatchNorm(nn.BatchNorm2d):
    def __init__(self):
        super().__init__(SIZE)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(super().forward(x)).clamp(max=50.0)


class Tempered(CastFirst):
    factor: float

    def forward(self, x):
        return self.factor * super().forward(x)


@pytest.mark.parametrize("cls", [Tempered, TemperedBatchNorm, ClampedBatchNorm])
def test_a_norm_whose_results_change_after_the_check_is_what_it_was_written_to_be(cls):
    model = nn.Sequential(cls())
    model[0].factor = 1.0
    theirs, ours = copy.deepcopy(model), pr.nn.convert(model)
    assert pr.nn.converted(ours)
    x = 100 * normal((2, SIZE, 3, SIZE), 6).float()
    for each in (theirs, ours):
        each[0].factor = 2.0
        each[0].weight.data *= 100
    assert_close(ours(x), theirs(x))


def test_weight_norm_is_converted():
    torch.manual_seed(0)
    model = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 3, dtype=torch.float64))
    keys, x = list(model.state_dict()), torch.randn(5, 4, dtype=torch.float64)
    g, v = model.parametrizations.weight.original0, model.parametrizations.weight.original1
    pr.nn.convert(model)
    assert list(model.state_dict()) == keys
    assert "primitives._WeightNorm" in repr(model)

    def loss(g, v):
        names = {"parametrizations.weight.original0": g, "parametrizations.weight.original1": v}
        return torch.func.functional_call(model, names, (x,)).pow(3).sum()

    assert torch.autograd.gradgradcheck(loss, (g, v))
    assert "primitives" not in repr(pr.nn.revert(model))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_weight_norm_by_a_hook_is_named():
    model = torch.nn.Sequential(torch.nn.utils.weight_norm(torch.nn.Linear(4, 3)))
    with pytest.warns(pr.nn.ConversionWarning, match="(?s)Linear.*parametrizations"):
        pr.nn.convert(model)
