"""Modules against those of torch.nn: steps, state, construction."""

import copy

import pytest
import torch
from torch.testing import assert_close

import primitives as pr
from tests.custom_ops import NAMESPACE, Affine
from tests.support import TORCH_ERRORS, data, torchs_module

# Not among torch's samples of modules, or of arguments of another kind.
NOT_MADE = ("Dropout", "SyncBatchNorm")
MODULES = [name for name in pr.nn.__all__ if hasattr(torch.nn, name) and name not in NOT_MADE]
BATCH_NORMS = {"BatchNorm1d": (6, 3), "BatchNorm2d": (4, 3, 2, 5), "BatchNorm3d": (2, 3, 2, 3, 2)}
# Beyond the samples of tests/test_torch_suites.py, which take no second step.
CASES = [
    *[("BatchNorm2d", (3,), options) for options in (
        {}, {"momentum": None}, {"momentum": 0.0}, {"affine": False}, {"track_running_stats": False, "momentum": None},
    )],
    ("BatchNorm1d", (3,), {"momentum": 0.3, "eps": 1e-2}),
    ("BatchNorm3d", (3,), {"momentum": None}),
]  # fmt: skip


def pair(name, args=(3,), options=None):
    """One module of each kind with the same random parameters and buffers."""
    ours, theirs = (getattr(space, name)(*args, **options or {}).double() for space in (pr.nn, torch.nn))
    with torch.no_grad():
        for i, value in enumerate(theirs.state_dict().values()):
            if value.is_floating_point():
                value.copy_(data(*value.shape, seed=i).abs() + 0.5)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def assert_same_step(ours, theirs, x):
    """Results, gradients and state of one step are the same."""
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    results = [module(value) for module, value in zip((ours, theirs), inputs, strict=True)]
    assert_close(*results)
    for result in results:
        result.sin().sum().backward()
    assert_close(inputs[0].grad, inputs[1].grad)
    assert_close([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert_close(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("name, args, options", CASES, ids=str)
def test_steps_are_those_of_torch(name, args, options):
    ours, theirs = pair(name, args, options)
    for step, training in enumerate([True, True, False, True, False]):
        ours.train(training), theirs.train(training)
        assert_same_step(ours, theirs, data(*BATCH_NORMS.get(name, (4, 3, 2, 5)), seed=step))
    fresh = getattr(torch.nn, name)(*args, **options).double()
    assert str(fresh.load_state_dict(ours.state_dict())) == "<All keys matched successfully>"


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
