"""Beside the records of norms: adaptive layer norm, eps, dtypes of the stream, zeros, NaN, layouts and state."""

import pytest
import torch
import torch.nn.functional as F
from torch import _C
from torch.testing import assert_close

import primitives as pr
from primitives.ops.norms.add_layer_norm import add_layer_norm_p
from primitives.ops.norms.layer_norm import NormOptions
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


FUNCTIONS = {"add_layer_norm": F.layer_norm, "add_rms_norm": F.rms_norm}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


@every_function
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_wide_stream_beside_half_precision(name, dtype):
    """The sum stays wide, the normalized one is as narrow as the input; each rounds once."""
    x, residual, weight = data(4, 16, dtype=dtype), data(4, 16, dtype=torch.float32, seed=1), data(16, dtype=dtype)
    values = [value.requires_grad_() for value in (x, residual, weight)]
    y, s = getattr(pr.functional, name)(x, residual, (16,), weight, eps=1e-3)
    wide = residual + x.float()
    assert (y.dtype, s.dtype) == (dtype, torch.float32)
    assert torch.equal(s, wide)
    exact = FUNCTIONS[name](wide.double(), (16,), weight.double(), eps=1e-3)
    assert (y == exact.to(dtype)).float().mean() > 0.95
    bars = torch.autograd.grad(y.float().sum() + s.sum(), values)
    assert [bar.dtype for bar in bars] == [dtype, torch.float32, dtype]
    assert torch.equal(bars[0], bars[1].to(dtype))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rounding_before_the_weight_is_that_of_models(dtype):
    x, weight = data(64, 16, dtype=dtype), data(16, dtype=dtype, seed=2)
    for residual in (data(64, 16, dtype=dtype, seed=1), data(64, 16, dtype=torch.float32, seed=1)):
        y, s = pr.functional.add_rms_norm(x, residual, (16,), weight, 1e-3, cast_first=True)
        x_hat = F.rms_norm(s.double(), (16,), eps=1e-3).to(dtype)
        once = pr.functional.add_rms_norm(x, residual, (16,), weight, 1e-3)[0]
        assert (y == weight * x_hat).float().mean() > 0.98 > (once == weight * x_hat).float().mean()


def test_gradients_of_leaves_are_their_own_memory():
    x, residual = data(3, 8).requires_grad_(), data(3, 8, seed=1).requires_grad_()
    y, s = pr.functional.add_layer_norm(x, residual, (8,))
    (y.sin() + s).sum().backward()
    assert torch.equal(x.grad, residual.grad)
    assert x.grad.data_ptr() != residual.grad.data_ptr()


def test_trees_and_autocast():
    x, residual = data(2, 4), data(2, 4, seed=1)
    y, s = pr.functional.add_layer_norm({"a": x, "b": [x.float()]}, {"a": residual, "b": [residual.float()]}, (4,))
    assert_close((y["a"], s["a"]), pr.functional.add_layer_norm(x, residual, (4,)))
    assert [y["b"][0].dtype, s["b"][0].dtype] == [torch.float32] * 2
    args = (x.half(), residual.half(), None, None, None, 0.0, torch.float16, *NormOptions(1, 1e-5))
    key = _C.DispatchKeySet(_C.DispatchKey.AutocastCUDA)
    assert {out.dtype for out in add_layer_norm_p.overload.redispatch(key, *args)} == {torch.float32}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_derivatives_of_batch_norm_relu_at_zero_and_at_nan_are_those_of_torch(dtype):
    """And with a cotangent and a residual that stand for several numbers each."""
    x = torch.tensor([[1.0], [2.0], [torch.nan], [-3.0]], dtype=dtype)
    state, residual, y_bar = (torch.zeros(1), torch.ones(1)), torch.tensor(-1.0), torch.tensor(2.0, dtype=dtype)

    def ours(x, residual):
        given = (state[0].to(dtype), state[1].to(dtype))
        return pr.functional.batch_norm_relu(x, *given, eps=0.0, residual=residual.to(dtype).expand(4, 1))

    def theirs(x, residual):
        return torch.relu(x + residual.to(dtype))

    results = []
    for function in (ours, theirs):
        y, vjp = torch.func.vjp(function, x, residual)
        tangent = torch.func.jvp(function, (x, residual), (torch.ones_like(x), residual))[1]
        results.append((y, *vjp(y_bar.expand(4, 1)), tangent))
    assert_close(*results, equal_nan=True)
    assert results[0][1].flatten().tolist() == [0.0, 2.0, 2.0, 0.0]


def test_batch_norm_relu_keeps_layout_and_writes_state_as_batch_norm_does():
    x, residual = (data(2, 3, 4, 4, seed=seed).to(memory_format=torch.channels_last) for seed in range(2))
    states = [[torch.zeros(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype)] for _ in range(3)]
    y = pr.functional.batch_norm_relu(x, *states[0], training=True, residual=residual)
    assert_close(y, torch.relu(F.batch_norm(x, *states[1], training=True) + residual))
    assert_close(states[0], states[1])
    assert y.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(pr.ShapeError, match=r"^batch_norm_relu: residual must have shape"):
        pr.functional.batch_norm_relu(x, *states[2], training=True, residual=residual[:1])
    assert torch.equal(states[2][0], torch.zeros(3, dtype=x.dtype)), "written before the error"
    half = pr.functional.batch_norm_relu(x.half(), None, None, training=True, residual=residual.float())
    assert half.dtype == torch.float16
    tree = pr.functional.batch_norm_relu({"a": x, "b": x}, None, None, training=True, residual={"a": x, "b": residual})
    assert_close(tree["b"], pr.functional.batch_norm_relu(x, None, None, training=True, residual=residual))
    assert_close(
        pr.functional.batch_norm_relu(x, None, None, training=True),
        torch.relu(F.batch_norm(x, None, None, None, None, True)),
    )
