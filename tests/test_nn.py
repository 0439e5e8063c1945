"""Modules beside those of torch.nn: construction, trees, state; tests/test_torch_suites.py has their steps."""

import copy

import pytest
import torch
from torch.testing import assert_close

import primitives as pr
from tests.custom_ops import NAMESPACE, Affine
from tests.support import TORCH_ERRORS, data, torchs_module
from tests.test_torch_suites import MODULES


def test_a_momentum_of_zero_leaves_the_statistics():
    norm = pr.nn.BatchNorm1d(3, momentum=0.0)
    norm(data(6, 3).float())
    assert (norm.running_mean.tolist(), norm.running_var.tolist()) == ([0.0] * 3, [1.0] * 3)


@pytest.mark.parametrize("name", MODULES)
def test_construction_is_that_of_torch(name):
    info, made = torchs_module(name), []
    given = info.module_inputs_func(info, "cpu", torch.float32, False, training=True)[0].constructor_input
    for space in (pr.nn, torch.nn):
        torch.manual_seed(0)
        made.append(getattr(space, name)(*given.args, **given.kwargs))
    ours, theirs = made
    assert isinstance(ours, type(theirs))
    assert repr(ours) == f"primitives.{theirs!r}"
    assert vars(ours).keys() == vars(theirs).keys()
    assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    if list(theirs.parameters()):
        options = {**given.kwargs, "device": "meta", "dtype": torch.bfloat16}
        weight = next(getattr(pr.nn, name)(*given.args, **options).parameters())
        assert (weight.device.type, weight.dtype) == ("meta", torch.bfloat16)


OVER_TREES = {
    **{"LayerNorm": (3,), "RMSNorm": (3,), "GroupNorm": (1, 3), "Dropout": (0.0,)},
    **{"LogSoftmax": (-1,), "Softmax": (-1,), "Softmin": (-1,)},
}


@pytest.mark.parametrize("name", OVER_TREES)
def test_a_tree_goes_through_the_stateless_modules(name):
    cls, x = getattr(pr.nn, name), data(4, 3)
    module, named = (cls(*OVER_TREES[name], **options).double() for options in ({}, {"namespace": NAMESPACE}))
    assert_close(module({"a": x, "b": [x, None]})["b"], [module(x), None])
    assert_close(copy.deepcopy(named)(Affine(x, x)).bias, module(x))


def test_a_module_that_raises_keeps_its_buffers():
    ours, theirs = (space.BatchNorm2d(4, momentum=None) for space in (pr.nn, torch.nn))
    versions = [buffer._version for buffer in ours.buffers()]
    for x in (torch.ones(3, 4, 1, 1).double(), torch.ones(3, 5, 1, 1), torch.ones(1, 4, 1, 1), torch.ones(4)):
        with pytest.raises(TORCH_ERRORS) as raised:
            theirs(x)
        with pytest.raises(raised.type):
            ours(x)
    assert [buffer._version for buffer in ours.buffers()] == versions


@pytest.mark.parametrize("norm", [pr.nn.LayerNorm, pr.nn.RMSNorm])
def test_a_shape_of_another_type_is_named(norm):
    with pytest.raises(pr.DtypeError, match=f"{norm.__name__}: normalized_shape must be a sequence of ints, got float"):
        norm(8.5)
