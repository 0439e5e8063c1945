"""Beside the records of norms: adaptive layer norm, eps, layouts of results, state."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import primitives as pr
from primitives.testing import check_rules
from tests.support import data

HALF = (torch.float16, torch.bfloat16)
EPS = 1e-3


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64], ids=str)
def test_eps_none_is_that_of_torch(dtype):
    x = torch.full((2, 4), 1e-4, dtype=dtype)
    tree = pr.functional.rms_norm({"a": x, "b": [x.double()]}, (4,))
    assert_close([tree["a"], tree["b"][0]], [F.rms_norm(x, (4,)), F.rms_norm(x.double(), (4,))])


@pytest.mark.usefixtures("backend")
def test_ada_layer_norm_at_higher_orders_and_in_batches():
    check_rules(pr.functional.ada_layer_norm, (data(2, 3, 4), data(2, 4, seed=1), data(2, 4, seed=2)), compile=False)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_ada_layer_norm_of_half_precision_rounds_once(dtype):
    x, scale, shift = data(2, 3, 8, dtype=dtype), data(2, 8, dtype=dtype, seed=1), data(2, 8, dtype=dtype, seed=2)
    exact = F.layer_norm(x.double(), (8,)) * (1 + scale.double()[:, None]) + shift.double()[:, None]
    for params in ((scale, shift), (scale.float(), shift.float())):
        y = pr.functional.ada_layer_norm(x, *params)
        assert y.dtype == dtype
        assert (y == exact.to(dtype)).float().mean() > 0.95
        bars = torch.func.grad(lambda *p: pr.functional.ada_layer_norm(x, *p).float().sum(), (0, 1))(*params)
        assert [bar.dtype for bar in bars] == [param.dtype for param in params]


def test_rms_norm_is_contiguous_where_torchs_keeps_channels_last():
    x = data(2, 3, 4, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    y, theirs = (f(x, (5,)) for f in (pr.functional.rms_norm, F.rms_norm))
    assert_close(y, theirs)
    assert y.is_contiguous()
    assert torch.autograd.grad(y.sin().sum(), x)[0].is_contiguous()


def test_samples_that_are_none_move_no_statistics():
    statistics = torch.zeros(4), torch.ones(4)
    pr.functional.instance_norm(torch.ones(0, 4, 3, 2), *statistics)
    assert_close(statistics, (torch.zeros(4), torch.ones(4)), rtol=0, atol=0)
