"""Long sums of the kernels for CPU tensors, held to float64 with the numbers that running sums add up worst.

Numbers that are alike are all rounded to the same side, so n of them lose up to n * 2**-26 of their sum; numbers of
both signs, of which other tests are made, lose next to nothing. Each limit is tested at itself, where the error is the
one that its comment states, and one beyond.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import primitives as pr
from primitives.ops import _cpu_batch_norm, _cpu_channels, _cpu_layer_norm, _cpu_log_softmax
from tests.op_cases import BATCH_NORM, BATCH_NORM_EVAL, LAYER_NORM, LOG_SOFTMAX
from tests.support import arranged

EPS = 1e-5
# Of 512 numbers: all that a sum beyond a limit may lose.
SHORT = 8e-6
# Vectors of other processors have half the lanes of AVX2, so sums along a line are twice as long there.
OF_LANES = 1 if torch.backends.cpu.get_cpu_capability().startswith("AVX") else 2
ROWS, IMAGE = _cpu_channels.LONGEST_BACKWARD, _cpu_channels.LONGEST_IMAGE
CHANNELS = 8
# Sums of some numbers are rounded worse than those of others.
CONSTANTS = 1 + torch.rand(CHANNELS, generator=torch.Generator().manual_seed(1))


class Channelwise(NamedTuple):
    """x [N, C, *spatial] of two values with its statistics, and a cotangent or tangent v whose sums are long."""

    x: torch.Tensor
    v: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor


def alternating(*shape):
    """0.7 and -0.7 in turns, in every axis."""
    signs = torch.ones(shape)
    for axis, size in enumerate(shape):
        line = torch.ones(size)
        line[1::2] = -1
        signs = signs * line.view(-1, *[1] * (len(shape) - axis - 1))
    return 0.7 * signs


def channelwise(shape, layout, kind):
    """In float32; statistics are those of float64."""
    x = arranged(alternating(*shape), layout)
    axes, spread = [0, *range(2, len(shape))], (-1, *[1] * (len(shape) - 2))
    mean, variance = x.double().mean(axes), x.double().var(axes, correction=0)
    rstd = (variance + EPS).rsqrt()
    x_hat = (x.double() - mean.view(spread)) * rstd.view(spread)
    v = CONSTANTS.view(spread).expand(shape) if kind == "one sign" else (x_hat * CONSTANTS.view(spread)).float()
    return Channelwise(x, v if kind == "one sign" else arranged(v, layout), mean.float(), rstd.float())


def in_float64(call, *args):
    with pr.use_backend("reference"):
        return call(*(a.double() if isinstance(a, torch.Tensor) else a for a in args))


def assert_lost(got, want, sizes, bound):
    """Errors are at most `bound` of `sizes`, the size of a sum's summands all together or of a value's terms."""
    for i, (a, b, size) in enumerate(zip(got, want, sizes, strict=True)):
        error = ((a.double() - b).abs().max() / size).item()
        assert error <= bound, f"output {i}: lost {error:.1e} of the sum, {bound:.1e} allowed"


def check_channels(operation, shape, layout, kind, bound):
    """A backward or jvp of batch norm in training: cotangents of parameters, and how exact sums are in the rest."""
    sample = channelwise(shape, layout, kind)
    x, v, mean, rstd = sample
    weight, count = torch.ones(CHANNELS), x.numel() // CHANNELS
    # Of an output with the shape of x, both terms that are sums; and what a parameter's cotangent adds up.
    value, total = 2 * v.abs().max() * rstd.max(), v.abs().max() * count
    if operation == "bwd":
        args = (v, x, weight, mean, rstd, 0, EPS, (True, True, True))
        primitive, sizes = BATCH_NORM.bwd, (value, total, total)
    elif operation == "jvp":
        args, primitive, sizes = (x, weight, mean, rstd, v, None, None, 0, EPS), BATCH_NORM.jvp, (value,)
    else:
        tensors = (torch.zeros_like(x), x, weight, mean, rstd, v, None, None)
        args = (*tensors, 0, EPS, (True, True, True))
        primitive, sizes = _second_order(BATCH_NORM, "bwd_jvp"), (value, total, total)
    assert primitive.rules.kernels["cpu"](*args) is not None
    got, want = primitive(*args), in_float64(primitive, *args)
    got, want = ([out] if isinstance(out, torch.Tensor) else out for out in (got, want))
    assert_lost(got, want, sizes, bound)


def _second_order(case, name):
    return next(primitive for primitive in case.second_order if primitive.name.endswith(name))


# What the backwards of batch norm lose at their limits, and past them.
at_the_limits = pytest.mark.parametrize(
    "shape, layout, bound",
    [
        ((ROWS, CHANNELS), "contiguous", 5e-4),
        ((ROWS + 1, CHANNELS), "contiguous", SHORT),
        ((2, CHANNELS, 1, ROWS // 2), "channels_last", 5e-4),
        ((11, CHANNELS, 56, 57), "channels_last", SHORT),
        ((1, CHANNELS, IMAGE // 128, 128), "contiguous", 3.1e-5 * OF_LANES),
        ((1, CHANNELS, IMAGE // 128 + 1, 128), "contiguous", SHORT * OF_LANES),
        # The length is a prime number.
        ((1, CHANNELS, 16411), "contiguous", SHORT * OF_LANES),
    ],
    ids=["rows", "longer rows", "channels_last", "longer channels_last", "image", "larger image", "larger line"],
)


@pytest.mark.parametrize("kind", ["one sign", "x_hat"])
@at_the_limits
def test_backward_of_batch_norm(shape, layout, kind, bound):
    check_channels("bwd", shape, layout, kind, bound)


@pytest.mark.parametrize("kind", ["one sign", "x_hat"])
@pytest.mark.parametrize("operation", ["jvp", "bwd_jvp"])
@pytest.mark.parametrize(
    "shape, layout, bound",
    [
        ((4096, CHANNELS), "contiguous", SHORT),
        ((1001, CHANNELS, 3, 3), "channels_last", SHORT),
        ((1, CHANNELS, 181, 181), "contiguous", SHORT * OF_LANES),
    ],
    ids=["rows", "channels_last", "image"],
)
def test_tangents_of_batch_norm(operation, shape, layout, kind, bound):
    check_channels(operation, shape, layout, kind, bound)


@pytest.mark.parametrize("is_expanded", [False, True], ids=["dense", "expanded"])
@pytest.mark.parametrize("kind", ["one sign", "x_hat"])
@at_the_limits
def test_backward_of_batch_norm_in_evaluation(shape, layout, kind, is_expanded, bound):
    x, v, mean, rstd = channelwise(shape, layout, kind)
    # Centered elsewhere, x - mean has one sign, and so have the summands that an expanded cotangent leaves.
    mean = mean - 2 if is_expanded else mean
    v = v[:1].expand(shape) if is_expanded else v
    weight, variance = torch.ones(CHANNELS), rstd.double().pow(-2).sub(EPS).float()
    args = (v, x, weight, mean, variance, 0, EPS, (True,) * 5)
    assert BATCH_NORM_EVAL.bwd.rules.kernels["cpu"](*args) is not None
    got, want = BATCH_NORM_EVAL.bwd(*args), in_float64(BATCH_NORM_EVAL.bwd, *args)
    value = v.abs().max() * rstd.max()
    total, x_hat = v.abs().max() * (x.numel() // CHANNELS), ((x.abs().max() + mean.abs().max()) * rstd.max()).item()
    sizes = (value, total * x_hat, total, total * rstd.max(), 0.5 * total * x_hat * rstd.max() ** 2)
    assert_lost(got, want, sizes, bound)


@pytest.mark.parametrize(
    "count, bound", [(_cpu_batch_norm.LONGEST_AT_ONCE, 5e-4), (_cpu_batch_norm.LONGEST_AT_ONCE + 1, SHORT)]
)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_statistics_of_few_values(layout, count, bound):
    """Of values that are alike means lose what sums of one sign do, and deviations as much of the mean."""
    shape = (count, CHANNELS) if layout == "contiguous" else (1, CHANNELS, 1, count)
    spread = (1, -1, *[1] * (len(shape) - 2))
    x = arranged((alternating(*shape) + 1) * CONSTANTS.view(spread), layout)
    out = BATCH_NORM.forward(x, None, None, None, None, 0, 0.1, EPS)
    true = in_float64(BATCH_NORM.forward, x, None, None, None, None, 0, 0.1, EPS)
    assert_lost(out[1:3], true[1:3], (true[1].max(), true[1].max() * true[2].max() ** 2), bound)


class Rowwise(NamedTuple):
    """x [rows, cols] of two values, and what layer norm makes of it."""

    x: torch.Tensor
    mean: torch.Tensor
    rstd: torch.Tensor


def rowwise(rows, cols):
    x = alternating(rows, cols)
    mean, variance = x.double().mean(1), x.double().var(1, correction=0)
    return Rowwise(x, mean.float(), (variance + EPS).rsqrt().float())


def numbers_alike(sample, kind):
    """In one tensor: numbers of one sign, or proportional to x_hat, row by row and column by column."""
    x, mean, rstd = sample
    scale = CONSTANTS if x.shape[1] == CHANNELS else CONSTANTS[: x.shape[0], None]
    return (scale * (torch.ones_like(x) if kind == "one sign" else (x - mean[:, None]) * rstd[:, None])).contiguous()


@pytest.mark.parametrize("kind", ["one sign", "x_hat"])
@pytest.mark.parametrize(
    "rows, bound",
    [(_cpu_layer_norm.LONGEST_SUM, 3.1e-5), (_cpu_layer_norm.LONGEST_SUM + 1, SHORT), (100_000, SHORT)],
)
def test_parameter_cotangents_of_layer_norm(rows, bound, kind):
    sample = rowwise(rows, CHANNELS)
    y_bar, total = numbers_alike(sample, kind), CONSTANTS.max() * rows
    for weight in (torch.ones(CHANNELS), None):
        args = (y_bar, sample.x, weight, sample.mean, sample.rstd, 1, 0, EPS, (False, True, True))
        assert LAYER_NORM.bwd.rules.kernels["cpu"](*args) is not None
        got, want = LAYER_NORM.bwd(*args), in_float64(LAYER_NORM.bwd, *args)
        assert_lost(got[1:], want[1:], (total, total), bound)


def test_many_blocks_of_layer_norm(monkeypatch):
    """Their sums are added more exactly than ATen adds rows."""
    monkeypatch.setattr(_cpu_layer_norm, "LONGEST_BLOCK", 2)
    test_parameter_cotangents_of_layer_norm(8192, SHORT, "one sign")


def test_many_pieces_of_batch_norm(monkeypatch):
    """As many pieces as a wide tensor has: their sums are added more exactly than ATen adds rows."""
    monkeypatch.setattr(_cpu_channels, "WIDEST_FOLD", CHANNELS)
    monkeypatch.setattr(_cpu_channels, "LONGEST_SUM", 4)
    check_channels("jvp", (8192, CHANNELS), "contiguous", "one sign", SHORT)


@pytest.mark.parametrize("kind", ["one sign", "x_hat"])
def test_second_order_sums_of_layer_norm(kind):
    sample = rowwise(20_000, CHANNELS)
    x, mean, rstd = sample
    v, primitive = numbers_alike(sample, kind), _second_order(LAYER_NORM, "bwd_jvp")
    args = (torch.zeros_like(x), x, None, mean, rstd, v, None, None, 1, 0, EPS, (False, True, True))
    assert primitive.rules.kernels["cpu"](*args) is not None
    got, want = primitive(*args), in_float64(primitive, *args)
    assert_lost(got[1:], want[1:], [CONSTANTS.max() * len(x)] * 2, SHORT)


@pytest.mark.parametrize("kind", ["one sign", "x_hat"])
@pytest.mark.parametrize(
    "cols, bound", [(_cpu_layer_norm.LONGEST_ROW, 3.1e-5 * OF_LANES), (_cpu_layer_norm.LONGEST_ROW + 1, 1e-6)]
)
def test_rows_of_layer_norm(cols, bound, kind):
    """Sums along a row, in the cotangent and in the tangent."""
    sample = rowwise(4, cols)
    x, mean, rstd = sample
    v = numbers_alike(sample, kind)
    size = v.abs().max() * rstd.max()
    args = (v, x, None, mean, rstd, 1, 0, EPS, (True, False, False))
    assert LAYER_NORM.bwd.rules.kernels["cpu"](*args) is not None
    assert_lost(LAYER_NORM.bwd(*args)[:1], in_float64(LAYER_NORM.bwd, *args)[:1], (size,), bound)
    args = (x, None, mean, rstd, v, None, None, 1, 0, EPS)
    assert_lost([LAYER_NORM.jvp(*args)], [in_float64(LAYER_NORM.jvp, *args)], (size,), bound)


@pytest.mark.parametrize(
    "length, dim, bound",
    [
        (_cpu_log_softmax.LONGEST_ROW, 1, 1.25e-4 * OF_LANES),
        (_cpu_log_softmax.LONGEST_ROW + 1, 1, 1e-6),
        (_cpu_log_softmax.LONGEST_SUM, 0, 3.1e-5),
        (_cpu_log_softmax.LONGEST_SUM + 1, 0, 1e-6),
    ],
)
def test_log_softmax(length, dim, bound):
    """A cotangent of one sign where one element has all the weight, and a forward of one sign, all alike but one."""
    alike = CONSTANTS[:4, None].repeat(1, length)
    y = torch.full((4, length), -40.0)
    y[:, 0] = 0.0
    alike, y = (t if dim else t.t().contiguous() for t in (alike, y))
    assert LOG_SOFTMAX.bwd.rules.kernels["cpu"](alike, y, dim, torch.float32) is not None
    got, want = LOG_SOFTMAX.bwd(alike, y, dim, torch.float32), in_float64(LOG_SOFTMAX.bwd, alike, y, dim, torch.float64)
    assert_lost([got], [want], (alike.max() * length,), bound)
    x = -alike / 2
    x.select(dim, 0).zero_()
    got, want = LOG_SOFTMAX.forward(x, dim, None), in_float64(LOG_SOFTMAX.forward, x, dim, None)
    assert_lost([got], [want], (1.0,), bound + torch.finfo(torch.float32).eps * want.abs().max().item())
