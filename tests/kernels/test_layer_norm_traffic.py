"""Bytes that the layer norm kernels move, counted in Triton's interpreter, against the passes that they declare."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.kernels.layer_norm_truth import ALL, EPS, random
from tests.kernels.traffic import Traffic, check_traffic, measure_traffic
from triton_kernels import launch, launch_second_order
from triton_kernels._runtime import accumulation_dtype
from triton_kernels.layer_norm import layer_norm_bwd, layer_norm_fwd, layer_norm_jvp
from triton_kernels.layer_norm_second_order import layer_norm_bwd_jvp, layer_norm_pairing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

NUM_ROWS = 6
DOUBLE_BACKWARD = (True, True, True, False, False, False)
BACKWARD_OF_JVP = (False, True, True, True, True, True)


class Rows:
    """Operands of layer norm over rows of `num_cols` columns."""

    def __init__(self, num_cols: int, dtype: torch.dtype) -> None:
        """Draw them."""
        self.num_cols = num_cols
        self.x, self.y_bar, self.x_dot, self.y_bar_dot = (
            random(NUM_ROWS, num_cols, dtype=dtype, seed=seed) for seed in range(4)
        )
        self.weight, self.weight_dot, self.bias_dot = (random(num_cols, seed=seed) for seed in range(3))
        stat_dtype = accumulation_dtype(dtype)
        mean = self.x.to(stat_dtype).mean(1)
        self.stats = mean, (self.x.to(stat_dtype).var(1, correction=0) + EPS) ** -0.5

    def params(self, traffic: Traffic, params: Sequence[Tensor], sums: int = 0, parts_launch: int = 0) -> int:
        """Bytes of parameters, which each program of the first launch reads once, and of partial rows.

        Of each of the `sums` over rows every program of the launch number `parts_launch` writes its part of a partial
        row in float32, which is read once.
        """
        first = traffic.launches[0].num_programs
        num_parts = 0
        if sums:
            num_parts = traffic.launches[parts_launch].num_programs
            if parts_launch:
                num_parts //= launch.cdiv(self.num_cols, launch.LAYER_NORM_PARAM_COLS)
            assert 1 < num_parts <= NUM_ROWS
        return first * sum(param.nbytes for param in params) + 2 * 4 * num_parts * sums * self.num_cols


ROWS = [(1024, torch.bfloat16), (4096, torch.bfloat16), (1024, torch.float32)]


@pytest.fixture(params=ROWS, ids=str)
def rows(request: pytest.FixtureRequest) -> Rows:
    return Rows(*request.param)


def check_forward(rows: Rows, passes: int) -> None:
    params = (rows.weight, rows.bias_dot)
    with measure_traffic() as traffic:
        y, mean, rstd = layer_norm_fwd(rows.x, *params, 1, 0, EPS)
    extra = rows.params(traffic, params)
    check_traffic(traffic, read=[rows.x] * passes, written=[y], small=[mean, rstd], extra=extra, launches=1)


def check_jvp(rows: Rows, passes: int) -> None:
    params = (rows.weight, rows.weight_dot, rows.bias_dot)
    with measure_traffic() as traffic:
        y_dot = layer_norm_jvp(rows.x, params[0], *rows.stats, rows.x_dot, *params[1:], 1, 0)
    extra = rows.params(traffic, params)
    read = [rows.x, rows.x_dot] * passes
    check_traffic(traffic, read=read, written=[y_dot], small=rows.stats, extra=extra, launches=1)


def check_backward(rows: Rows, passes: int, param_passes: int = 1) -> None:
    with measure_traffic() as traffic:
        x_bar, *bars = layer_norm_bwd(rows.y_bar, rows.x, rows.weight, *rows.stats, 1, 0, ALL)
    fused = passes == 1
    extra = rows.params(traffic, [rows.weight] * param_passes, sums=2, parts_launch=0 if fused else 1)
    check_traffic(
        traffic,
        read=[rows.y_bar, rows.x] * passes,
        written=[x_bar],
        small=[*rows.stats, *bars],
        extra=extra,
        launches=2 if fused else 3,
    )


def check_double_backward(rows: Rows, passes: int, param_passes: int = 1) -> None:
    params = (rows.weight, rows.weight_dot, rows.bias_dot)
    with measure_traffic() as traffic:
        y_bar_bar, x_bar, weight_bar, *_ = layer_norm_pairing(
            rows.y_bar, rows.x, params[0], *rows.stats, rows.x_dot, *params[1:], 1, 0, DOUBLE_BACKWARD
        )
    fused = passes == 1
    read_params = [*params[:2] * param_passes, params[2]]
    check_traffic(
        traffic,
        read=[rows.y_bar, rows.x, rows.x_dot] * passes,
        written=[y_bar_bar, x_bar],
        small=[*rows.stats, weight_bar],
        extra=rows.params(traffic, read_params, sums=1, parts_launch=0 if fused else 1),
        launches=2 if fused else 3,
    )


def check_backward_of_jvp(rows: Rows, passes: int, param_passes: int = 1) -> None:
    params = (rows.weight, rows.weight_dot)
    with measure_traffic() as traffic:
        _, x_bar, weight_bar, x_dot_bar, *bars = layer_norm_pairing(
            rows.y_bar, rows.x, params[0], *rows.stats, rows.x_dot, params[1], rows.bias_dot, 1, 0, BACKWARD_OF_JVP
        )
    assert traffic.moved(rows.bias_dot) == 0
    fused = passes == 1
    check_traffic(
        traffic,
        read=[rows.y_bar, rows.x, rows.x_dot] * passes,
        written=[x_bar, x_dot_bar],
        small=[*rows.stats, weight_bar, *bars],
        extra=rows.params(traffic, params * param_passes, sums=3, parts_launch=0 if fused else 1),
        # Three sums over rows are added up by two launches.
        launches=3 if fused else 4,
    )


def check_jvp_of_backward(rows: Rows, passes: int, param_passes: int = 1) -> None:
    params = (rows.weight, rows.weight_dot)
    with measure_traffic() as traffic:
        x_bar_dot, *bars = layer_norm_bwd_jvp(
            rows.y_bar, rows.x, params[0], *rows.stats, rows.y_bar_dot, rows.x_dot, params[1], 1, 0, ALL
        )
    fused = passes == 1
    check_traffic(
        traffic,
        read=[rows.y_bar, rows.x, rows.y_bar_dot, rows.x_dot] * passes,
        written=[x_bar_dot],
        small=[*rows.stats, *bars],
        extra=rows.params(traffic, params * param_passes, sums=2, parts_launch=0 if fused else 1),
        launches=2 if fused else 3,
    )


SUMMING = [
    check_backward,
    check_double_backward,
    check_backward_of_jvp,
    check_jvp_of_backward,
]
EVERY = [check_forward, check_jvp, *SUMMING]


@pytest.mark.parametrize("check", EVERY)
def test_each_operand_is_read_once(check, rows: Rows) -> None:
    check(rows, passes=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("check", SUMMING[1:])
def test_second_order_sums_that_do_not_fit_take_one_more_pass(check, dtype: torch.dtype) -> None:
    check(Rows(4608, dtype), passes=2)


def test_second_order_rows_without_sums_take_one_pass() -> None:
    rows = Rows(4608, torch.bfloat16)
    with measure_traffic() as traffic:
        y_bar_bar, x_bar, *_ = layer_norm_pairing(
            rows.y_bar, rows.x, None, *rows.stats, rows.x_dot, None, None, 1, 0, (True, True, *[False] * 4)
        )
    read = [rows.y_bar, rows.x, rows.x_dot]
    check_traffic(traffic, read=read, written=[y_bar_bar, x_bar], small=rows.stats, launches=1)


def test_first_order_sums_that_do_not_fit_take_one_more_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LAYER_NORM_ACCUMULATED_COLS", 512)
    check_backward(Rows(1024, torch.float32), passes=2)


@pytest.mark.parametrize("check", EVERY)
def test_long_rows_take_two_passes_and_one_for_sums(check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LAYER_NORM_FWD_BYTES", 512 * 4)
    for name in ("LAYER_NORM_TWO_ROW_COLS", "LAYER_NORM_ACCUMULATED_COLS", "LAYER_NORM_SWEEP_COLS"):
        monkeypatch.setattr(launch, name, 512)
    for name in ("LAYER_NORM_SECOND_COLS", "LAYER_NORM_SECOND_SUMMED_COLS", "LAYER_NORM_SECOND_SWEEP_COLS"):
        monkeypatch.setattr(launch_second_order, name, 512)
    rows = Rows(1024, torch.float32)
    if check in SUMMING:
        check(rows, passes=3, param_passes=2)
    else:
        check(rows, passes=2)


def test_unneeded_operands_are_not_read() -> None:
    rows = Rows(1024, torch.float32)
    operands = (rows.y_bar, rows.x, rows.weight, *rows.stats, rows.x_dot, rows.weight_dot, rows.bias_dot)
    read_for = {
        (True, False, False, False, False, False): (rows.x, rows.x_dot),
        (False, False, True, False, False, False): (rows.y_bar, rows.x, rows.x_dot),
        (False, False, False, True, False, False): (rows.y_bar, rows.x),
        (False, False, False, False, True, False): (rows.y_bar, rows.x),
        (False, False, False, False, False, True): (rows.y_bar,),
        (False, False, False, False, False, False): (),
    }
    for wanted, read in read_for.items():
        with measure_traffic() as traffic:
            layer_norm_pairing(*operands, 1, 0, wanted)
        for operand in (rows.y_bar, rows.x, rows.x_dot):
            assert traffic.loaded(operand).total == (operand.nbytes if any(operand is t for t in read) else 0), wanted
