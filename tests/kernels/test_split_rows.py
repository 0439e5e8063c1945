"""Long rows, swept by one program or shared by several: the results are the truth, whatever the number of slices."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.kernels.layer_norm_second_truth import check_bwd_jvp, check_pairing, draw_point
from tests.kernels.layer_norm_truth import check_all, check_fwd, check_jvp, random
from tests.kernels.traffic import measure_traffic
from triton_kernels import launch, layer_norm_second_order
from triton_kernels.layer_norm import layer_norm_fwd, layer_norm_jvp
from triton_kernels.log_softmax import log_softmax_bwd, log_softmax_fwd, log_softmax_jvp
from triton_kernels.log_softmax_second_order import log_softmax_bwd_jvp, log_softmax_pairing

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

TILE = 16
# Two whole tiles and one column.
NUM_COLS = 2 * TILE + 1
# One program per row; two slices, of which the last one is short; slices of one tile, of which the last one is empty.
SPLITS = [1, 2, 4]
COLS = ("layer_norm_two_row_cols", "layer_norm_accumulated_cols", "layer_norm_sweep_cols", "layer_norm_second_cols")
COLS += ("layer_norm_second_summed_cols", "layer_norm_second_sweep_cols", "log_softmax_row_cols")
COLS += ("log_softmax_two_row_cols", "log_softmax_three_row_cols", "log_softmax_sweep_cols")
COLS += ("log_softmax_second_sweep_cols",)


@pytest.fixture
def split_into(use_limits: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Function that makes tiles of all rows tiny, and that many programs share each row."""
    limits = dict.fromkeys(COLS, TILE) | dict.fromkeys(("log_softmax_tile", "log_softmax_two_tile"), 4 * TILE)
    use_limits(**limits, layer_norm_fwd_bytes=TILE, double_divisor=1, max_row_splits=4)
    planners = {name: getattr(launch, name) for name in ("plan_layer_norm_rows", "plan_log_softmax")}
    plan_second = layer_norm_second_order.plan_layer_norm_second

    def split(num_splits: int) -> None:
        def changed(plan: Any) -> Any:
            assert plan.looped
            return dataclasses.replace(plan, col_splits=num_splits)

        def changed_second(*args: Any) -> Any:
            plan = plan_second(*args)
            return dataclasses.replace(plan, rows=changed(plan.rows))

        for name, planner in planners.items():
            monkeypatch.setattr(launch, name, lambda *args, planner=planner: changed(planner(*args)))
        monkeypatch.setattr(layer_norm_second_order, "plan_layer_norm_second", changed_second)

    return split


# Layer norm.


@pytest.mark.parametrize("num_splits", SPLITS)
def test_layer_norm(num_splits: int, split_into: Callable[[int], None]) -> None:
    split_into(num_splits)
    weight, bias = (random(NUM_COLS, seed=seed) for seed in (1, 2))
    check_all(random(1, NUM_COLS) + 8, weight, bias)


@pytest.mark.parametrize("dtype, batch_ndim", [(torch.bfloat16, 1), (torch.float64, 0)], ids=str)
def test_layer_norm_of_other_dtypes(dtype: torch.dtype, batch_ndim: int, split_into: Callable[[int], None]) -> None:
    split_into(2)
    weight, bias = (random(*(2,) * batch_ndim, NUM_COLS, dtype=dtype, seed=seed) for seed in (1, 2))
    check_fwd(random(2, 1, NUM_COLS, dtype=dtype), weight, bias, batch_ndim=batch_ndim)
    tangents = (random(2, 1, NUM_COLS, dtype=dtype, seed=3), weight, bias)
    check_jvp(random(2, 1, NUM_COLS, dtype=dtype), weight, *tangents, batch_ndim=batch_ndim)


def test_layer_norm_of_what_is_given(split_into: Callable[[int], None]) -> None:
    split_into(4)
    x, x_dot, weight = random(1, NUM_COLS), random(1, NUM_COLS, seed=1), random(NUM_COLS, seed=2)
    check_jvp(x, None, x_dot, None, None)
    # Nothing is summed, so that one launch is enough.
    with measure_traffic() as traffic:
        check_jvp(x, weight, None, weight, weight)
    assert traffic.num_launches == 1


@pytest.mark.parametrize("num_splits", SPLITS)
def test_layer_norm_in_second_order(num_splits: int, split_into: Callable[[int], None]) -> None:
    split_into(num_splits)
    check_pairing(draw_point((2, NUM_COLS), batch_ndim=1))
    check_bwd_jvp(draw_point((1, NUM_COLS)))


@pytest.mark.parametrize(
    "absent, wanted", [("", 0), ("", 2), ("x_dot", 0), ("x_dot", 1), ("x_dot", 3), ("weight_dot", 1)]
)
def test_layer_norm_in_second_order_of_what_is_wanted(
    absent: str, wanted: int, split_into: Callable[[int], None]
) -> None:
    # With nothing but the sum of the weight wanted (2), the row kernel only finds means.
    split_into(2)
    check_pairing(draw_point((1, NUM_COLS), absent=(absent,) if absent else ()), [tuple(i == wanted for i in range(6))])


# The interpreter warns of differences of infinities, which make the NaN that this is about.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value, col", [(math.inf, 0), (math.inf, NUM_COLS - 1), (math.nan, TILE)])
def test_layer_norm_of_a_spoilt_row(value: float, col: int, split_into: Callable[[int], None]) -> None:
    split_into(4)
    x = random(2, NUM_COLS)
    x[0, col] = value
    y, mean, rstd = layer_norm_fwd(x, None, None, 1, 0, 1e-5)
    y_dot = layer_norm_jvp(x, None, mean, rstd, x, None, None, 1, 0)
    for rows in (y, y_dot):
        assert rows[0].isnan().all()
        assert rows[1].isfinite().all()
    assert rstd[0].isnan()
    assert mean[0].isnan() or mean[0] == value


def test_layer_norm_keeps_the_digits_of_an_offset(split_into: Callable[[int], None]) -> None:
    x = random(1, NUM_COLS) + 2.0**12
    exact = torch.nn.functional.layer_norm(x.double(), (NUM_COLS,))
    for num_splits in SPLITS:
        split_into(num_splits)
        y, _, _ = layer_norm_fwd(x, None, None, 1, 0, 1e-5)
        torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-3)


# Log-softmax.


def log_softmax_all(x: Tensor, others: list[Tensor], dim: int) -> list[Tensor]:
    """Every result of every launcher."""
    y_bar, x_dot, y_bar_dot = others
    y = torch.log_softmax(x, dim)
    return [
        log_softmax_fwd(x, dim, None),
        log_softmax_bwd(y_bar, y, dim, x.dtype),
        log_softmax_jvp(x_dot, y, dim),
        *log_softmax_pairing(y_bar, y, x_dot, dim, (True, True, True)),
        log_softmax_bwd_jvp(y_bar, y, y_bar_dot, x_dot, dim, x.dtype),
    ]


def log_softmax_truth(x: Tensor, others: list[Tensor], dim: int) -> list[Tensor]:
    """The same as float64 formulas, from the rounded y that the launchers are given."""
    y_bar, x_dot, y_bar_dot = (tensor.double() for tensor in others)
    p = torch.log_softmax(x, dim).double().exp()
    y_bar_sum = y_bar.sum(dim, keepdim=True)
    y_dot, x_bar = x_dot - (p * x_dot).sum(dim, keepdim=True), y_bar - p * y_bar_sum
    output_bar = -p * x_dot * y_bar_sum
    x_bar_dot = output_bar + y_bar_dot - p * y_bar_dot.sum(dim, keepdim=True)
    return [torch.log_softmax(x.double(), dim), x_bar, y_dot, y_dot, output_bar, x_bar, x_bar_dot]


@pytest.mark.parametrize(
    "dtype, num_splits", [(torch.float32, 1), (torch.bfloat16, 2), (torch.float64, 2), (torch.float32, 4)], ids=str
)
@pytest.mark.parametrize("shape, dim", [((1, NUM_COLS), 1), ((NUM_COLS, 3), 0)], ids=["columns", "rows adjacent"])
def test_log_softmax(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype, num_splits: int, split_into: Callable[[int], None]
) -> None:
    split_into(num_splits)
    x, *others = (random(*shape, dtype=dtype, seed=seed) for seed in range(4))
    results, truth = (compute(x, others, dim) for compute in (log_softmax_all, log_softmax_truth))
    for result, expected in zip(results, truth, strict=True):
        assert result.dtype == dtype
        tolerance = 8 * torch.finfo(dtype).eps * max(expected.abs().max().item(), 1.0)
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_log_softmax_of_infinities(split_into: Callable[[int], None]) -> None:
    x = random(5, NUM_COLS)
    # Slices of nothing but -inf at either end, then a row of them; +inf and NaN beside a slice of -inf.
    x[0, :TILE] = x[1, TILE:] = x[2] = x[3, TILE:] = x[4, :TILE] = -math.inf
    x[3, 3], x[4, TILE] = math.inf, math.nan
    split_into(4)
    y = log_softmax_fwd(x, 1, None)
    torch.testing.assert_close(y.double(), torch.log_softmax(x.double(), 1), rtol=0, atol=1e-5, equal_nan=True)
    assert y[2:].isnan().all()
    assert not y[:2].isnan().any()


# Both.

LAUNCHERS = {
    "layer norm": lambda x: layer_norm_fwd(x, None, None, 1, 0, 1e-5)[0],
    "log-softmax": lambda x: log_softmax_fwd(x, 1, None),
}


@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_the_second_sweep_goes_back(
    num_splits: int, launcher: Callable[[Tensor], Tensor], split_into: Callable[[int], None]
) -> None:
    split_into(num_splits)
    x = random(2, 6 * TILE)
    with measure_traffic() as traffic:
        y = launcher(x)
    assert [one.num_programs for one in traffic.launches] == ([2] if num_splits == 1 else [6, 6])
    assert traffic.loaded(x) == (2 * x.nbytes, x.nbytes)
    assert traffic.stored(y) == (y.nbytes, y.nbytes)

    start, stop = x.data_ptr(), x.data_ptr() + x.nbytes
    loads = [load.within(start, stop).addresses for one in traffic.launches for load in one.loads]
    tiles = [int(load[0] - start) // (TILE * x.itemsize) for load in loads if load.size]
    # One program makes both sweeps of its row, several that share rows make the first one of all rows before.
    sweeps = [list(range(6)), list(range(6, 12))] if num_splits == 1 else [list(range(12))]
    assert tiles == [tile for sweep in sweeps for tile in (*sweep, *reversed(sweep))]
