"""Bytes that kernels move, counted in Triton's interpreter, against the passes that they declare.

Here are the meter itself, batch norm and log-softmax; layer norm is in `test_layer_norm_traffic`.
"""

# Compile-time constants are upper case, as in the kernels of the package.
# ruff: noqa: N803

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.layer_norm_truth import ALL, EPS, random
from tests.kernels.traffic import Traffic, check_traffic, measure_traffic
from triton_kernels import batch_norm, launch
from triton_kernels.batch_norm_second_order import batch_norm_bwd_jvp, batch_norm_pairing
from triton_kernels.log_softmax import log_softmax_bwd, log_softmax_fwd, log_softmax_jvp
from triton_kernels.log_softmax_second_order import log_softmax_bwd_jvp, log_softmax_pairing

if TYPE_CHECKING:
    from torch import Tensor

DOUBLE_BACKWARD = (True, True, True, False, False, False)
BACKWARD_OF_JVP = (False, True, True, True, True, True)


# The meter.


@triton.jit
def _touch_kernel(x_ptr, y_ptr, num_cols, BLOCK_COLS: tl.constexpr):
    cols = tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + cols, mask=cols < num_cols, other=0.0)
    x += tl.load(x_ptr)
    tl.store(y_ptr + cols, x, mask=cols < num_cols)


@triton.jit
def _descriptor_kernel(x_ptr, y_ptr, num_cols, BLOCK_COLS: tl.constexpr):
    x_desc = tl.make_tensor_descriptor(x_ptr, [num_cols], [1], [BLOCK_COLS])
    y_desc = tl.make_tensor_descriptor(y_ptr, [num_cols], [1], [BLOCK_COLS])
    y_desc.store([0], x_desc.load([0]))


@triton.jit
def _atomic_kernel(x_ptr, num_cols, BLOCK_COLS: tl.constexpr):
    cols = tl.arange(0, BLOCK_COLS)
    tl.atomic_add(x_ptr + cols, 1.0, mask=cols < num_cols)


def test_meter_counts_active_lanes() -> None:
    x, y = torch.zeros(10), torch.zeros(10)
    with measure_traffic() as traffic:
        _touch_kernel[(1,)](x, y, 10, BLOCK_COLS=16)
        _touch_kernel[(2,)](x, y, 4, BLOCK_COLS=16)
    assert traffic.num_launches == 2
    # The second launch has two programs; each program reads the first element twice.
    assert traffic.loaded(x) == (4 * (11 + 2 * 5), 4 * 10)
    assert traffic.stored(y) == (4 * (10 + 2 * 4), 4 * 10)
    assert traffic.stored(x) == traffic.loaded(y) == (0, 0)
    assert traffic.moved() == traffic.moved(x, y)


def test_meter_counts_descriptors_and_atomics() -> None:
    x, y = torch.ones(8, dtype=torch.float32), torch.zeros(8)
    with measure_traffic() as traffic:
        _descriptor_kernel[(1,)](x, y, 8, BLOCK_COLS=16)
    assert torch.equal(x, y)
    assert traffic.loaded(x).total == traffic.stored(y).total == 32
    with measure_traffic() as traffic:
        _atomic_kernel[(1,)](x, 6, BLOCK_COLS=8)
    assert traffic.loaded(x).total == traffic.stored(x).total == 24


def test_meter_restores_the_interpreter() -> None:
    x = torch.zeros(4)
    with measure_traffic() as traffic:
        pass
    _touch_kernel[(1,)](x, x.clone(), 4, BLOCK_COLS=4)
    assert traffic.num_launches == 0


@triton.jit
def _wasteful_kernel(x_ptr, y_ptr, num_cols, BLOCK_COLS: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK_COLS)
    mask = cols < num_cols
    mean = tl.sum(tl.load(x_ptr + row * num_cols + cols, mask=mask, other=0.0), axis=0) / num_cols
    centered = tl.load(x_ptr + row * num_cols + cols, mask=mask, other=0.0) - mean
    tl.store(y_ptr + row * num_cols + cols, centered, mask=mask)


def test_second_read_of_the_input_is_caught() -> None:
    x = random(6, 1000)
    y = torch.empty_like(x)
    with measure_traffic() as traffic:
        _wasteful_kernel[(6,)](x, y, 1000, BLOCK_COLS=1024)
    assert traffic.loaded(x) == (2 * x.nbytes, x.nbytes)
    check_traffic(traffic, read=[x, x], written=[y], launches=1)
    for declared in ({"read": [x], "launches": 1}, {"read": [x, x], "launches": 2}):
        with pytest.raises(AssertionError):
            check_traffic(traffic, written=[y], **declared)
    with pytest.raises(AssertionError):
        check_traffic(traffic, written=[y], small=[x], launches=1)


# Batch norm.


class Channels(NamedTuple):
    """Full-size operands of batch norm, parameters and statistics, enough of each for every launcher."""

    full: list[Tensor]
    small: list[Tensor]

    def partials(self, traffic: Traffic, num_sums: int) -> int:
        """Bytes of the partial sums of each program of the first launch and channel, written and read once."""
        num_channels = self.small[0].numel()
        channels = 1 if self.full[0].stride(1) != 1 else num_channels
        return 2 * 4 * num_sums * channels * traffic.launches[0].num_programs


CHANNEL_LAYOUTS = {
    "channels first": ((8, 4, 32, 32), torch.contiguous_format),
    "channels last": ((8, 8, 32, 32), torch.channels_last),
    "features": ((8192, 8), torch.contiguous_format),
}


@pytest.fixture(params=CHANNEL_LAYOUTS, ids=str)
def channels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Channels:
    # Fewer programs, so that tensors of this size are to them what those of a GPU are to its programs.
    monkeypatch.setattr(launch, "INTERPRETER_PROCESSORS", 1)
    shape, memory_format = CHANNEL_LAYOUTS[request.param]
    full = [random(*shape, seed=seed).contiguous(memory_format=memory_format) for seed in range(4)]
    return Channels(full, [random(shape[1], seed=seed).abs() for seed in range(6)])


def test_batch_norm_in_training(channels: Channels) -> None:
    (x, y_bar, x_dot, _), (weight, bias, *running, weight_dot, bias_dot) = channels
    with measure_traffic() as traffic:
        y, *stats = batch_norm.batch_norm_train_fwd(x, weight, bias, *running, 0, 0.1, EPS)
    small, extra = [weight, bias, *running, *stats], channels.partials(traffic, 3)
    check_traffic(traffic, read=[x] * 2, written=[y], small=small, extra=extra, launches=3)

    mean, rstd = stats[:2]
    with measure_traffic() as traffic:
        x_bar, *bars = batch_norm.batch_norm_train_bwd(y_bar, x, weight, mean, rstd, 0, ALL)
    small, extra = [weight, mean, rstd, *bars], channels.partials(traffic, 2)
    check_traffic(traffic, read=[y_bar, x] * 2, written=[x_bar], small=small, extra=extra, launches=3)

    with measure_traffic() as traffic:
        y_dot = batch_norm.batch_norm_train_jvp(x, weight, mean, rstd, x_dot, weight_dot, bias_dot, 0)
    small, extra = [weight, mean, rstd, weight_dot, bias_dot], channels.partials(traffic, 2)
    check_traffic(traffic, read=[x, x_dot] * 2, written=[y_dot], small=small, extra=extra, launches=3)


def test_batch_norm_in_evaluation(channels: Channels) -> None:
    (x, y_bar, x_dot, _), (weight, bias, mean, var, weight_dot, bias_dot) = channels
    with measure_traffic() as traffic:
        y = batch_norm.batch_norm_eval_fwd(x, weight, bias, mean, var, 0, EPS)
    check_traffic(traffic, read=[x], written=[y], small=[weight, bias, mean, var], launches=1)

    # The sums take both, x_bar only y_bar.
    with measure_traffic() as traffic:
        x_bar, *bars = batch_norm.batch_norm_eval_bwd(y_bar, x, weight, mean, var, 0, EPS, (True,) * 5)
    small, extra = [weight, mean, var, *bars], channels.partials(traffic, 2)
    check_traffic(traffic, read=[y_bar, x, y_bar], written=[x_bar], small=small, extra=extra, launches=3)

    dots = (x_dot, weight_dot, bias_dot, None, None)
    with measure_traffic() as traffic:
        y_dot = batch_norm.batch_norm_eval_jvp(x, weight, mean, var, *dots, 0, EPS)
    small = [weight, mean, var, weight_dot, bias_dot]
    check_traffic(traffic, read=[x, x_dot], written=[y_dot], small=small, launches=1)


def test_batch_norm_in_second_order(channels: Channels) -> None:
    (x, y_bar, x_dot, y_bar_dot), (weight, mean, rstd, weight_dot, bias_dot, _) = channels
    for wanted in (DOUBLE_BACKWARD, BACKWARD_OF_JVP):
        with measure_traffic() as traffic:
            results = batch_norm_pairing(y_bar, x, weight, mean, rstd, x_dot, weight_dot, bias_dot, 0, wanted)
        written = [result for result in results if result.shape == x.shape]
        small = [weight, mean, rstd, weight_dot, *(result for result in results if result.dim() == 1)]
        extra = channels.partials(traffic, 5)
        check_traffic(traffic, read=[y_bar, x, x_dot] * 2, written=written, small=small, extra=extra, launches=3)
        assert len(written) == 2

    with measure_traffic() as traffic:
        x_bar_dot, *bars = batch_norm_bwd_jvp(y_bar, x, weight, mean, rstd, y_bar_dot, x_dot, weight_dot, 0, ALL)
    read, small = [y_bar, x, y_bar_dot, x_dot] * 2, [weight, mean, rstd, weight_dot, *bars]
    extra = channels.partials(traffic, 7)
    check_traffic(traffic, read=read, written=[x_bar_dot], small=small, extra=extra, launches=3)


# Log-softmax.


@pytest.fixture(params=[False, True], ids=["in registers", "looped"])
def looped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        for name in ("LOG_SOFTMAX_ROW_COLS", "LOG_SOFTMAX_TWO_ROW_COLS", "LOG_SOFTMAX_THREE_ROW_COLS"):
            monkeypatch.setattr(launch, name, 512)
        monkeypatch.setattr(launch, "LOG_SOFTMAX_TILE", 256)
        monkeypatch.setattr(launch, "LOG_SOFTMAX_TWO_TILE", 256)
    return request.param


LOG_SOFTMAX_SHAPES = [((2, 1031), 1), ((1024, 3), 0)]


@pytest.mark.parametrize("shape, dim", LOG_SOFTMAX_SHAPES, ids=str)
def test_log_softmax(shape: tuple[int, int], dim: int, looped: bool) -> None:
    # What a loop sums and then writes from is read twice.
    x, v = random(*shape), random(*shape, seed=1)
    with measure_traffic() as traffic:
        y = log_softmax_fwd(x, dim, None)
    check_traffic(traffic, read=[x, x] if looped else [x], written=[y], launches=1)
    for derivative in (lambda: log_softmax_bwd(v, y, dim, x.dtype), lambda: log_softmax_jvp(v, y, dim)):
        with measure_traffic() as traffic:
            out = derivative()
        check_traffic(traffic, read=[v, y, v] if looped else [v, y], written=[out], launches=1)


@pytest.mark.parametrize("shape, dim", LOG_SOFTMAX_SHAPES, ids=str)
def test_log_softmax_in_second_order(shape: tuple[int, int], dim: int, looped: bool) -> None:
    y_bar, x_dot, y_bar_dot, y_dot = (random(*shape, seed=seed) for seed in range(4))
    y = torch.log_softmax(random(*shape, seed=4), dim)
    for wanted in itertools.product((False, True), repeat=3):
        with measure_traffic() as traffic:
            results = log_softmax_pairing(y_bar, y, x_dot, dim, wanted)
        y_bar_bar, output_bar, x_dot_bar = wanted
        passes = [(y_bar, output_bar or x_dot_bar), (y, any(wanted)), (x_dot, y_bar_bar or output_bar)]
        if looped:
            passes = [
                (y_bar, 2 if x_dot_bar else output_bar),
                (y, y_bar_bar + (output_bar or x_dot_bar)),
                (x_dot, 2 if y_bar_bar else output_bar),
            ]
        read = [tensor for tensor, count in passes for _ in range(count)]
        written = [result for result in results if result.numel()]
        assert len(written) == sum(wanted)
        check_traffic(traffic, read=read, written=written, launches=int(any(wanted)))
    for dots in ((y_bar_dot, y_dot), (y_bar_dot, None), (None, y_dot)):
        with measure_traffic() as traffic:
            x_bar_dot = log_softmax_bwd_jvp(y_bar, y, *dots, dim, y.dtype)
        read = [y, *(tensor for tensor in dots if tensor is not None)]
        read += [y_bar] * (dots[1] is not None) + [y_bar_dot] * (looped and dots[0] is not None)
        check_traffic(traffic, read=read, written=[x_bar_dot], launches=1)
