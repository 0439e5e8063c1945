"""Nothing happens before an error: running statistics and counters stay as they are, in functions and in modules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import primitives as pr

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
CHANNEL_TENSORS = ("running_mean", "running_var", "weight", "bias")


def ones(*shape, **options):
    return torch.ones(*shape, **options)


def raised_by(call, *args):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the type is compared with that of torch
        call(*args)
    return caught.value


def modules():
    yield pr.nn.BatchNorm1d(4), [ones(3, 5), ones(1, 4), ones(3, 4, dtype=torch.float64), ones(4), X.int()]
    yield pr.nn.BatchNorm2d(4), [ones(3, 4), ones(1, 4, 1, 1), ones(2, 5, 2, 2)]
    yield pr.nn.BatchNorm3d(4, momentum=None), [ones(3, 4, 2, 2), ones(1, 4, 1, 1, 1)]


@pytest.mark.parametrize("module, inputs", [*modules()], ids=lambda v: type(v).__name__)
def test_a_module_that_raises_keeps_its_buffers(module, inputs):
    before = {name: (buffer.clone(), buffer._version) for name, buffer in module.named_buffers()}
    reference = getattr(torch.nn, type(module).__name__)(4, momentum=module.momentum)
    for x in inputs:
        ours, theirs = raised_by(module, x), raised_by(reference, x)
        assert isinstance(ours, type(theirs)), f"{ours} is no {type(theirs).__name__}: {theirs}"
        for name, buffer in module.named_buffers():
            assert torch.equal(buffer, before[name][0])
            assert buffer._version == before[name][1]


@pytest.mark.parametrize("wrong", [*CHANNEL_TENSORS, "momentum", "eps"])
def test_a_call_that_raises_writes_nothing(wrong):
    tensors = {
        "running_mean": torch.zeros(4),
        "running_var": ones(4),
        "weight": ones(4),
        "bias": ones(4),
        "momentum": 0.1,
    }
    kept = {name: value for name, value in tensors.items() if name != wrong}
    tensors[wrong] = "0.1" if wrong in ("momentum", "eps") else ones(3)
    raised_by(lambda: pr.functional.batch_norm(X, **tensors, training=True))
    assert all(value._version == 0 for value in kept.values() if isinstance(value, torch.Tensor))


def test_statistics_that_require_grad_cannot_be_written():
    mean, var = torch.zeros(4), ones(4).requires_grad_()
    theirs = raised_by(lambda: F.batch_norm(X, mean.clone(), var, training=True))
    ours = raised_by(lambda: pr.functional.batch_norm(X, mean, var, training=True))
    assert isinstance(ours, type(theirs))
    assert (mean._version, var._version) == (0, 0)
    assert torch.equal(mean, torch.zeros(4))
