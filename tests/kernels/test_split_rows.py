"""Long rows, swept by one program or shared by several: the results are the truth, whatever the number of slices."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import pytest

from tests.kernels.calls import Call, LayerNorm, LogSoftmax, random, short_rows
from tests.kernels.interpreting import watched
from tests.kernels.truth import EPS, check_values
from triton_kernels import launch, layer_norm_second_order
from triton_kernels.layer_norm import layer_norm_fwd, layer_norm_jvp
from triton_kernels.log_softmax import log_softmax_fwd

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

TILE = 16
# Two whole tiles and one column.
NUM_COLS = 2 * TILE + 1
# Two slices, of which the last one is short; slices of one tile, of which the last one is empty.
SPLITS = [2, 4]


@pytest.fixture
def split_into(use_limits: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Function that makes tiles of all rows tiny, and that many programs share each row, more than its tiles too."""
    use_limits(**short_rows(TILE, 4))
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


@pytest.mark.parametrize("num_splits", SPLITS)
def test_layer_norm(num_splits: int, split_into: Callable[[int], None]) -> None:
    split_into(num_splits)
    rows = LayerNorm.draw((1, NUM_COLS))
    for call in rows.change(x=rows.x + 8).calls():
        check_values(call)


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("shape, dim", [((1, NUM_COLS), 1), ((NUM_COLS, 3), 0)], ids=["columns", "rows adjacent"])
def test_log_softmax(num_splits: int, shape: tuple[int, ...], dim: int, split_into: Callable[[int], None]) -> None:
    split_into(num_splits)
    for call in LogSoftmax.draw(shape, dim).calls():
        check_values(call)


def test_nothing_is_summed_in_one_launch(split_into: Callable[[int], None]) -> None:
    split_into(4)
    call = LayerNorm.draw((1, NUM_COLS)).change(x_dot=None).call("jvp")
    with watched() as launches:
        check_values(call)
    assert len(launches) == 1


# The interpreter warns of differences of infinities, which make the NaN that this is about.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value, col", [(math.inf, 0), (math.inf, NUM_COLS - 1), (math.nan, TILE)])
def test_a_spoilt_row(value: float, col: int, split_into: Callable[[int], None]) -> None:
    split_into(4)
    x = random(2, NUM_COLS)
    x[0, col] = value
    y, mean, rstd = layer_norm_fwd(x, None, None, 1, 0, EPS)
    y_dot = layer_norm_jvp(x, None, mean, rstd, x, None, None, 1, 0)
    for rows in (y, y_dot):
        assert rows[0].isnan().all()
        assert rows[1].isfinite().all()
    assert rstd[0].isnan()
    assert mean[0].isnan() or mean[0] == value


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_log_softmax_of_infinities(split_into: Callable[[int], None]) -> None:
    x = random(5, NUM_COLS)
    # Slices of nothing but -inf at either end, then a row of them; +inf and NaN beside a slice of -inf.
    x[0, :TILE] = x[1, TILE:] = x[2] = x[3, TILE:] = x[4, :TILE] = -math.inf
    x[3, 3], x[4, TILE] = math.inf, math.nan
    split_into(4)
    (y,) = check_values(Call(log_softmax_fwd, (x, 1, None)))
    assert y[2:].isnan().all()
    assert not y[:2].isnan().any()


LAUNCHERS = {
    "layer norm": lambda x: layer_norm_fwd(x, None, None, 1, 0, EPS)[0],
    "log-softmax": lambda x: log_softmax_fwd(x, 1, None),
}


@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=LAUNCHERS)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_the_second_sweep_goes_back(
    num_splits: int, launcher: Callable[[Tensor], Tensor], split_into: Callable[[int], None]
) -> None:
    split_into(num_splits)
    x = random(2, 6 * TILE)
    with watched() as launches:
        launcher(x)
    assert [one.num_programs for one in launches] == ([2] if num_splits == 1 else [6, 6])
    start, stop = x.data_ptr(), x.data_ptr() + x.nbytes
    loads = [load.within(start, stop).addresses for one in launches for load in one.loads]
    tiles = [int(load[0] - start) // (TILE * x.itemsize) for load in loads if load.size]
    # One program makes both sweeps of its row, several that share rows make the first one of all rows before.
    sweeps = [list(range(6)), list(range(6, 12))] if num_splits == 1 else [list(range(12))]
    assert tiles == [tile for sweep in sweeps for tile in (*sweep, *reversed(sweep))]
