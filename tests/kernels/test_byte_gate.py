"""Every launcher moves the bytes that `triton_kernels.costs` declares, in as many launches."""

from __future__ import annotations

import inspect
import itertools
from typing import TYPE_CHECKING

import pytest
import torch

from tests.kernels.calls import (
    CHANNEL_LAYOUTS,
    LAYER_NORM,
    REDUCED_LAYOUTS,
    ROW_LAYOUTS,
    STRIDED_CHANNELS,
    Call,
    batch_norm_calls,
    dropout_calls,
    layer_norm_backward,
    layer_norm_call,
    layer_norm_pairing,
    log_softmax_calls,
    short_rows,
)
from tests.kernels.traffic import check_cost, measure_traffic
from triton_kernels import costs

if TYPE_CHECKING:
    from collections.abc import Callable

    from triton_kernels.costs import Cost

NUM_ROWS = 6
# No multiple of any vector or tile.
ODD_COLS = 1031
# Rows of several tiles of several rows each, the last of which is partial, in every plan.
SHORT_COLS, SHORT_ROWS = 75, 21


def cost_of(call: Call) -> Cost:
    """What a call declares, by the cost function of the launcher's name."""
    return getattr(costs, call.launcher.__name__)(*call.args)


def check(call: Call) -> None:
    """Hold one call to its cost."""
    with measure_traffic() as traffic:
        results = call.run()
    cost, name = cost_of(call), call.launcher.__name__
    given = inspect.signature(call.launcher).bind(*call.args).arguments
    for operand, declared in cost.loads:
        loaded = traffic.loaded(given[operand]).total
        assert loaded == declared, f"{name} loads {loaded} bytes of {operand}, {declared} declared"
    check_cost(traffic, cost, call.operands(), results)
    # What is swept again is part of what is moved beyond the minimum; all of it was loaded twice.
    swept = sum(sweep.num_bytes for sweep in cost.sweeps)
    assert 0 <= swept <= cost.bytes_moved - cost.minimum_bytes
    twice = [traffic.loaded(tensor) for tensor in call.operands()]
    assert swept <= sum(loaded.total - loaded.unique for loaded in twice)


@pytest.mark.parametrize("num_cols", [1024, ODD_COLS])
@pytest.mark.parametrize("mode", LAYER_NORM)
def test_layer_norm_in_registers(mode: str, num_cols: int) -> None:
    call = layer_norm_call(mode, num_cols, torch.bfloat16, NUM_ROWS)
    check(call)
    # A single pass: beyond its minimum, a call moves the partial rows of its sums and nothing else.
    cost = cost_of(call)
    assert (cost.bytes_moved == cost.minimum_bytes) == (mode in {"forward", "jvp"})


@pytest.mark.parametrize("layout", ROW_LAYOUTS)
def test_layer_norm_of_several_rows_per_program(layout: str) -> None:
    for mode in LAYER_NORM:
        check(layer_norm_call(mode, SHORT_COLS, torch.float32, SHORT_ROWS, layout))


@pytest.mark.parametrize("mode", LAYER_NORM[3:])
def test_layer_norm_sums_that_do_not_fit(mode: str, use_limits: Callable[..., None]) -> None:
    use_limits(layer_norm_second_summed_cols=512)
    call = layer_norm_call(mode, ODD_COLS, torch.bfloat16, 4)
    check(call)
    assert cost_of(call).launches >= 3


@pytest.mark.parametrize("splits", [1, 32], ids=["one program per row", "several programs per row"])
@pytest.mark.parametrize("mode", LAYER_NORM)
def test_layer_norm_of_long_rows(mode: str, splits: int, use_limits: Callable[..., None]) -> None:
    use_limits(**short_rows(512, splits))
    call = layer_norm_call(mode, ODD_COLS, torch.float32, 2)
    check(call)
    if mode == "forward":
        assert cost_of(call).launches == (2 if splits > 1 else 1)


# Each mode meets every layout, and each layout every plan.
@pytest.mark.parametrize("mode", LAYER_NORM)
def test_layer_norm_of_groups_and_strides(mode: str, use_limits: Callable[..., None]) -> None:
    check(layer_norm_call(mode, 512, torch.bfloat16, 3, ROW_LAYOUTS[1 + LAYER_NORM.index(mode) % 3]))
    for number, splits in enumerate((1, 32), LAYER_NORM.index(mode) + 1):
        use_limits(**short_rows(256, splits))
        check(layer_norm_call(mode, 515, torch.float32, 2, ROW_LAYOUTS[1 + number % 3]))


def test_layer_norm_reads_only_what_is_needed() -> None:
    for wanted in itertools.product((False, True), repeat=3):
        check(layer_norm_backward(1024, torch.float32, 2, wanted))
    for number in range(7):
        check(layer_norm_pairing(1024, torch.float32, 2, tuple(number == other for other in range(6))))


@pytest.mark.parametrize("layout", CHANNEL_LAYOUTS)
def test_batch_norm(layout: str, use_processors: Callable[[int], None]) -> None:
    # Few programs, so that tensors of this size are to them what those of a GPU are to its programs.
    use_processors(1)
    for call in batch_norm_calls(layout):
        check(call)


@pytest.mark.parametrize("layout", STRIDED_CHANNELS)
def test_batch_norm_of_groups_and_strides(layout: str, use_processors: Callable[[int], None]) -> None:
    use_processors(1)
    for call in batch_norm_calls(layout)[list(STRIDED_CHANNELS).index(layout) % 2 :: 2]:
        check(call)


SPLITS = pytest.mark.parametrize(
    "splits", [0, 1, 32], ids=["in registers", "one program per row", "several programs per row"]
)


@SPLITS
@pytest.mark.parametrize("shape, dim", [((2, 1031), 1), ((96, 3), 0)], ids=str)
def test_log_softmax(shape: tuple[int, int], dim: int, splits: int, use_limits: Callable[..., None]) -> None:
    if splits:
        use_limits(**short_rows(512, splits))
    calls = log_softmax_calls(shape, dim)
    # What is read, and how often, follows from the wanted results alike whether one program or several sweep a row.
    for call in calls[:: 3 if splits > 1 else 1]:
        check(call)
    if dim == 1:
        assert cost_of(calls[0]).launches == (2 if splits > 1 else 1)


# Rows of several per program, the last of which is partial.
@pytest.mark.parametrize("layout", REDUCED_LAYOUTS)
@pytest.mark.parametrize("shape, dim", [((21, 75), 1), ((2, 37, 3), 1)], ids=str)
def test_log_softmax_of_partial_tiles_and_strides(shape: tuple[int, ...], dim: int, layout: str) -> None:
    for number, call in enumerate(log_softmax_calls(shape, dim, torch.bfloat16, layout)):
        check(call if number % 2 else log_softmax_calls(shape, dim, torch.float32, layout)[number])


# Each call meets both plans of long rows, and both layouts.
@pytest.mark.parametrize("layout", REDUCED_LAYOUTS[1:])
def test_log_softmax_of_long_strided_rows(layout: str, use_limits: Callable[..., None]) -> None:
    for turn, splits in enumerate((1, 32), REDUCED_LAYOUTS.index(layout)):
        use_limits(**short_rows(128, splits))
        for call in log_softmax_calls((2, 137), 1, torch.bfloat16, layout)[turn % 2 :: 2]:
            check(call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout(dtype: torch.dtype) -> None:
    for call in dropout_calls(dtype):
        check(call)
    # With nothing to drop, x is copied without a kernel.
    (x, seed, offset, _, batch_ndim) = dropout_calls(dtype)[0].args
    assert costs.dropout_fwd(x, seed, offset, 0.0, batch_ndim).launches == 0
