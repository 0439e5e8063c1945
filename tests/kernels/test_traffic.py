"""Bytes that the layer norm kernels move, counted in Triton's interpreter, against the least that they could."""

# Compile-time constants are upper case, as in the kernels of the package.
# ruff: noqa: N803

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.layer_norm_truth import ALL, EPS, random
from tests.kernels.traffic import Traffic, measure_traffic
from triton_kernels import launch, launch_second_order
from triton_kernels._runtime import accumulation_dtype
from triton_kernels.layer_norm import layer_norm_bwd, layer_norm_fwd, layer_norm_jvp
from triton_kernels.layer_norm_second_order import layer_norm_bwd_jvp, layer_norm_pairing

if TYPE_CHECKING:
    from torch import Tensor

NUM_ROWS = 6


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


# The kernels.


@dataclasses.dataclass(frozen=True)
class Measured:
    """A launcher's traffic, and which of its tensors are of which kind."""

    traffic: Traffic
    full_size: tuple[Tensor, ...]
    row_stats: tuple[Tensor, ...] = ()
    params: tuple[Tensor, ...] = ()

    def check_full_size(self, num_passes: int, launches: int) -> None:
        """Every full-size tensor moves once."""
        minimum = sum(tensor.nbytes for tensor in self.full_size)
        assert minimum == num_passes * self.full_size[0].nbytes
        assert minimum <= self.traffic.moved(*self.full_size) <= 1.02 * minimum
        assert self.traffic.moved(*self.row_stats) <= sum(stat.nbytes for stat in self.row_stats)
        assert self.traffic.num_launches == launches

    @property
    def scratch(self) -> int:
        """Bytes moved to and from partial rows."""
        return self.traffic.moved() - self.traffic.moved(*self.full_size, *self.row_stats, *self.params)


class Case:
    """Operands of layer norm over rows of `num_cols` columns."""

    def __init__(self, num_cols: int, dtype: torch.dtype) -> None:
        """Draw them."""
        self.x, self.y_bar, self.x_dot, self.y_bar_dot = (
            random(NUM_ROWS, num_cols, dtype=dtype, seed=seed) for seed in range(4)
        )
        self.weight, self.weight_dot, self.bias_dot = (random(num_cols, seed=seed) for seed in range(3))
        stat_dtype = accumulation_dtype(dtype)
        self.mean = self.x.to(stat_dtype).mean(1)
        self.rstd = (self.x.to(stat_dtype).var(1, correction=0) + EPS) ** -0.5

    @property
    def stats(self) -> tuple[Tensor, Tensor]:
        return self.mean, self.rstd


@pytest.fixture(params=[(1024, torch.bfloat16), (4096, torch.bfloat16), (1024, torch.float32), (4096, torch.float32)])
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


def test_forward(case: Case) -> None:
    params = (case.weight, case.bias_dot)
    with measure_traffic() as traffic:
        y, mean, rstd = layer_norm_fwd(case.x, *params, 1, 0, EPS)
    measured = Measured(traffic, (case.x, y), (mean, rstd), params)
    measured.check_full_size(num_passes=2, launches=1)
    assert measured.scratch == 0


def test_jvp(case: Case) -> None:
    params = (case.weight, case.weight_dot, case.bias_dot)
    with measure_traffic() as traffic:
        y_dot = layer_norm_jvp(case.x, params[0], *case.stats, case.x_dot, *params[1:], 1, 0)
    measured = Measured(traffic, (case.x, case.x_dot, y_dot), case.stats, params)
    measured.check_full_size(num_passes=3, launches=1)
    assert measured.scratch == 0


def test_backward(case: Case) -> None:
    with measure_traffic() as traffic:
        x_bar, *bars = layer_norm_bwd(case.y_bar, case.x, case.weight, *case.stats, 1, 0, ALL)
    measured = Measured(traffic, (case.y_bar, case.x, x_bar), case.stats, (case.weight, *bars))
    measured.check_full_size(num_passes=3, launches=2)
    check_param_traffic(measured, bars, [case.weight])


def test_double_backward(case: Case) -> None:
    params = (case.weight, case.weight_dot, case.bias_dot)
    wanted = (True, True, True, False, False, False)
    with measure_traffic() as traffic:
        y_bar_bar, x_bar, weight_bar, *_ = layer_norm_pairing(
            case.y_bar, case.x, params[0], *case.stats, case.x_dot, *params[1:], 1, 0, wanted
        )
    full_size = (case.y_bar, case.x, case.x_dot, y_bar_bar, x_bar)
    measured = Measured(traffic, full_size, case.stats, (*params, weight_bar))
    measured.check_full_size(num_passes=5, launches=2)
    check_param_traffic(measured, [weight_bar], params)


def test_backward_of_jvp(case: Case) -> None:
    params = (case.weight, case.weight_dot)
    wanted = (False, True, True, True, True, True)
    with measure_traffic() as traffic:
        _, x_bar, weight_bar, x_dot_bar, *bars = layer_norm_pairing(
            case.y_bar, case.x, params[0], *case.stats, case.x_dot, params[1], case.bias_dot, 1, 0, wanted
        )
    full_size = (case.y_bar, case.x, case.x_dot, x_bar, x_dot_bar)
    measured = Measured(traffic, full_size, case.stats, (*params, case.bias_dot, weight_bar, *bars))
    # Three sums over rows are added up by two launches.
    measured.check_full_size(num_passes=5, launches=3)
    assert traffic.moved(case.bias_dot) == 0
    check_param_traffic(measured, [weight_bar, *bars], params)


def test_jvp_of_backward(case: Case) -> None:
    params = (case.weight, case.weight_dot)
    with measure_traffic() as traffic:
        x_bar_dot, *bars = layer_norm_bwd_jvp(
            case.y_bar, case.x, params[0], *case.stats, case.y_bar_dot, case.x_dot, params[1], 1, 0, ALL
        )
    full_size = (case.y_bar, case.x, case.y_bar_dot, case.x_dot, x_bar_dot)
    measured = Measured(traffic, full_size, case.stats, (*params, *bars))
    measured.check_full_size(num_passes=5, launches=2)
    check_param_traffic(measured, bars, params)


def check_param_traffic(measured: Measured, sums: list[Tensor], params: tuple[Tensor, ...] | list[Tensor]) -> None:
    """Each program reads every parameter once and writes one partial row per sum, which is then read once."""
    partial_row = sums[0].nbytes
    num_parts, remainder = divmod(measured.scratch, 2 * len(sums) * partial_row)
    assert remainder == 0
    assert 1 < num_parts <= NUM_ROWS
    assert measured.traffic.moved(*params) == num_parts * sum(param.nbytes for param in params)
    assert measured.traffic.moved(*sums) == sum(tensor.nbytes for tensor in sums)


# What longer rows cost: the numbers of times that each operand is read.


def test_sums_that_do_not_fit_cost_one_more_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_second_order, "LAYER_NORM_SECOND_SUMMED_COLS", 512)
    check_double_backward_reads(1024, reads=2)


def test_looped_rows_are_read_twice_and_once_for_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_second_order, "LAYER_NORM_SECOND_COLS", 512)
    monkeypatch.setattr(launch_second_order, "LAYER_NORM_SECOND_SWEEP_COLS", 512)
    check_double_backward_reads(1024, reads=3)


def check_double_backward_reads(num_cols: int, reads: int) -> None:
    """How often the double backward reads each of its full-size operands; it writes each result once."""
    case = Case(num_cols, torch.float32)
    with measure_traffic() as traffic:
        outputs = layer_norm_pairing(
            case.y_bar, case.x, case.weight, *case.stats, case.x_dot, None, None, 1, 0, (True,) * 3 + (False,) * 3
        )
    for operand in (case.y_bar, case.x, case.x_dot):
        assert traffic.loaded(operand).total == reads * operand.nbytes
        assert traffic.loaded(operand).unique == operand.nbytes
    for result in outputs[:2]:
        assert traffic.stored(result).total == result.nbytes


def test_unneeded_operands_are_not_read() -> None:
    case = Case(1024, torch.float32)
    operands = (case.y_bar, case.x, case.weight, *case.stats, case.x_dot, case.weight_dot, case.bias_dot)
    read_for = {
        (True, False, False, False, False, False): (case.x, case.x_dot),
        (False, False, True, False, False, False): (case.y_bar, case.x, case.x_dot),
        (False, False, False, True, False, False): (case.y_bar, case.x),
        (False, False, False, False, True, False): (case.y_bar, case.x),
        (False, False, False, False, False, True): (case.y_bar,),
        (False, False, False, False, False, False): (),
    }
    for wanted, read in read_for.items():
        with measure_traffic() as traffic:
            layer_norm_pairing(*operands, 1, 0, wanted)
        for operand in (case.y_bar, case.x, case.x_dot):
            assert traffic.loaded(operand).total == (operand.nbytes if any(operand is t for t in read) else 0), wanted


# A kernel that fails.


@triton.jit
def _wasteful_kernel(x_ptr, y_ptr, num_cols, BLOCK_COLS: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK_COLS)
    mask = cols < num_cols
    mean = tl.sum(tl.load(x_ptr + row * num_cols + cols, mask=mask, other=0.0), axis=0) / num_cols
    centered = tl.load(x_ptr + row * num_cols + cols, mask=mask, other=0.0) - mean
    tl.store(y_ptr + row * num_cols + cols, centered, mask=mask)


def test_second_read_of_the_input_is_caught() -> None:
    x = random(NUM_ROWS, 1000)
    y = torch.empty_like(x)
    with measure_traffic() as traffic:
        _wasteful_kernel[(NUM_ROWS,)](x, y, 1000, BLOCK_COLS=1024)
    assert traffic.loaded(x) == (2 * x.nbytes, x.nbytes)
    with pytest.raises(AssertionError):
        Measured(traffic, (x, y)).check_full_size(num_passes=2, launches=1)


def test_plans_of_the_measured_rows_are_fused() -> None:
    for num_cols in (1024, 4096):
        plan = launch_second_order.plan_layer_norm_second(1, NUM_ROWS, num_cols, 4, True, torch.device("cpu"))
        assert plan.fused
        assert plan.num_splits <= launch.INTERPRETER_PROCESSORS
