"""What the records do not have: noise, dtypes of the stream, and each of the two results alone."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import _C
from torch.testing import assert_close

import primitives as pr
from primitives.ops.add_layer_norm import add_layer_norm_p

HALF = (torch.float16, torch.bfloat16)
FUNCTIONS = {"add_layer_norm": F.layer_norm, "add_rms_norm": F.rms_norm}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def randn(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@every_function
@pytest.mark.usefixtures("backend")
def test_dropout_draws_as_dropout_does(name):
    x, residual = randn(6, 8), randn(6, 8, seed=1)
    run = functools.partial(getattr(pr.functional, name), x, residual, (8,), eps=1e-3)
    for p in (0.4, 1.0):
        torch.manual_seed(3)
        y, s = run(dropout_p=p)
        torch.manual_seed(3)
        assert torch.equal(s, residual + pr.functional.dropout(x, p))
        assert_close(y, FUNCTIONS[name](s, (8,), eps=1e-3))
    assert torch.equal(run(dropout_p=0.4, training=False)[1], residual + x)


@every_function
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_wide_stream_beside_half_precision(name, dtype):
    """The sum stays wide, the normalized one is as narrow as the input; each rounds once."""
    x, residual, weight = randn(4, 16, dtype=dtype), randn(4, 16, dtype=torch.float32, seed=1), randn(16, dtype=dtype)
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
    x, weight = randn(64, 16, dtype=dtype), randn(16, dtype=dtype, seed=2)
    for residual in (randn(64, 16, dtype=dtype, seed=1), randn(64, 16, dtype=torch.float32, seed=1)):
        y, s = pr.functional.add_rms_norm(x, residual, (16,), weight, 1e-3, cast_first=True)
        x_hat = F.rms_norm(s.double(), (16,), eps=1e-3).to(dtype)
        once = pr.functional.add_rms_norm(x, residual, (16,), weight, 1e-3)[0]
        assert (y == weight * x_hat).float().mean() > 0.98 > (once == weight * x_hat).float().mean()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_each_result_alone(p):
    """The cotangent of the other is absent; so is every tangent but that of the cotangent of the sum."""
    values = randn(3, 8), randn(3, 8, seed=1), randn(8, seed=2)
    seed = torch.tensor(5) if p else None
    noise = pr.functional.dropout(torch.ones(3, 8, dtype=torch.float64), 0.0)
    if p:
        noise = torch.ops.primitives.dropout(noise, seed, None, p, 0)

    def ours(x, residual, weight):
        return add_layer_norm_p(x, residual, weight, None, seed, p, x.dtype, 1, 0, 1e-3, True, False)[:2]

    def theirs(x, residual, weight):
        s = residual + x * noise
        return pr.functional.layer_norm(s, (8,), weight, eps=1e-3), s

    bars = randn(3, 8, seed=3), randn(3, 8, seed=4)
    results = []
    for f in (ours, theirs):
        pull = torch.func.vjp(f, *values)[1]
        alone = [torch.func.grad(lambda *v, f=f, i=i: f(*v)[i].sin().sum(), (0, 1, 2))(*values) for i in range(2)]
        moved = torch.func.jvp(lambda bar, pull=pull: pull((bars[0], bar)), (bars[1],), (bars[0],))[1]
        dots = torch.func.jvp(lambda w, f=f: f(*values[:2], w), (values[2],), (values[2],))[1]
        results.append((alone, moved, dots))
    assert_close(*results)


def test_gradients_of_leaves_are_their_own_memory():
    x, residual = randn(3, 8).requires_grad_(), randn(3, 8, seed=1).requires_grad_()
    y, s = pr.functional.add_layer_norm(x, residual, (8,))
    (y.sin() + s).sum().backward()
    assert torch.equal(x.grad, residual.grad)
    assert x.grad.data_ptr() != residual.grad.data_ptr()


def test_randomness_of_vmap():
    x, residual = randn(3, 4, 8), randn(4, 8, seed=1)
    f = functools.partial(pr.functional.add_layer_norm, normalized_shape=(8,), dropout_p=0.5)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(f, (0, None))(x, residual)
    ones = torch.ones_like(x)
    for randomness in ("same", "different"):
        _, s = torch.vmap(f, (0, None), randomness=randomness)(ones, residual)
        dropped = (s - residual).abs() < 1e-6
        assert torch.equal(dropped[0], dropped[1]) == (randomness == "same")


def test_trees_and_autocast():
    x, residual = randn(2, 4), randn(2, 4, seed=1)
    y, s = pr.functional.add_layer_norm({"a": x, "b": [x.float()]}, {"a": residual, "b": [residual.float()]}, (4,))
    assert_close((y["a"], s["a"]), pr.functional.add_layer_norm(x, residual, (4,)))
    assert [y["b"][0].dtype, s["b"][0].dtype] == [torch.float32] * 2
    args = (x.half(), residual.half(), None, None, None, 0.0, torch.float16, 1, 0, 1e-5, True, False)
    key = _C.DispatchKeySet(_C.DispatchKey.AutocastCUDA)
    assert {out.dtype for out in add_layer_norm_p.overload.redispatch(key, *args)} == {torch.float32}


X = torch.ones(3, 4)
WRONG = {
    "shape": ((X, X, (3,)), {}, pr.ShapeError, r"input must have shape \[\*, 3\]"),
    "residual shape": ((X, X[:1], (4,)), {}, pr.ShapeError, r"residual must have shape \[3, 4\].*got \[1, 4\]"),
    "residual None": ((X, None, (4,)), {}, pr.DtypeError, "residual must be a tensor, got None"),
    "residual dtype": ((X, X.half(), (4,)), {}, pr.DtypeError, "residual must have dtype torch.float32"),
    "p": ((X, X, (4,)), {"dropout_p": 1.5}, ValueError, r"dropout_p must be a probability"),
    "eps": ((X, X, (4,)), {"eps": "1"}, pr.DtypeError, "eps must be a number"),
}


@every_function
@pytest.mark.parametrize("case", WRONG)
def test_errors(name, case):
    args, options, error, text = WRONG[case]
    with pytest.raises(error, match=f"^{name}: {text}"):
        getattr(pr.functional, name)(*args, **options)


def blocks(x, residual, weight, bias, mean=None, var=None, training=True):
    """The block by our function, and the same by torch's."""

    def ours(x, residual, weight, bias):
        state = [None if value is None else value.clone() for value in (mean, var)]
        return pr.functional.batch_norm_relu(x, *state, weight, bias, training, 0.1, 1e-3, residual=residual)

    def theirs(x, residual, weight, bias):
        if training:
            x_hat = (x - x.mean((0, 2), keepdim=True)) / (x.var((0, 2), correction=0, keepdim=True) + 1e-3).sqrt()
        else:
            x_hat = (x - mean[:, None]) / (var[:, None] + 1e-3).sqrt()
        y = x_hat * weight[:, None] + bias[:, None]
        return torch.relu(y if residual is None else y + residual)

    return ours, theirs


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_relu_is_the_block_at_every_order(training):
    values = randn(4, 3, 5), randn(4, 3, 5, seed=1), randn(3, seed=2), randn(3, seed=3)
    ours, theirs = blocks(*values, randn(3, seed=4), randn(3, seed=5).exp(), training)
    everything, results = tuple(range(4)), []
    for f in (ours, theirs):

        def gradient(*values, f=f):
            return torch.func.grad(lambda *v: f(*v).square().sum(), everything)(*values)

        def tangent(*values, f=f):
            return torch.func.jvp(f, values, values)[1]

        second = [
            torch.func.jvp(g, values, values[:1] + tuple(map(torch.sin, values[1:])))[1] for g in (gradient, tangent)
        ]
        reverse = torch.func.grad(lambda *v, t=tangent: t(*v).square().sum(), everything)(*values)
        twice = torch.func.grad(lambda *v, g=gradient: g(*v)[0].square().sum(), everything)(*values)
        results.append((f(*values), gradient(*values), *second, reverse, twice))
    assert_close(*results)


def test_batch_norm_relu_keeps_layout_and_writes_state_as_batch_norm_does():
    x, residual = (randn(2, 3, 4, 4, seed=seed).to(memory_format=torch.channels_last) for seed in range(2))
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
