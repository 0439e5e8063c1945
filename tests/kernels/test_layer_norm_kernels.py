"""The layer norm launchers, run in Triton's interpreter, against formulas in float64."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import pytest
import torch

from tests.kernels.layer_norm_truth import (
    ALL,
    EPS,
    Truth,
    assert_matches,
    check_all,
    check_bwd,
    check_fwd,
    check_jvp,
    random,
)
from triton_kernels import launch
from triton_kernels._runtime import row_view
from triton_kernels.layer_norm import layer_norm_bwd, layer_norm_fwd, layer_norm_jvp

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture
def short_registers(use_limits: Callable[..., None]) -> None:
    """Make rows of more than 16 columns too long for registers, and the tiles of long rows 32 columns wide."""
    use_limits(
        layer_norm_fwd_bytes=32,
        layer_norm_two_row_cols=16,
        layer_norm_accumulated_cols=16,
        layer_norm_sweep_cols=32,
        layer_norm_param_cols=32,
        double_divisor=1,
    )


@pytest.fixture
def one_processor(use_processors: Callable[[int], None]) -> None:
    """Give every program of a persistent grid several blocks of rows."""
    use_processors(1)


# One column, fewer than a vector load, a power of two, one more than a power of two, the last tile of one warp.
@pytest.mark.parametrize("num_cols", [1, 3, 8, 257, 1024])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_columns(dtype: torch.dtype, num_cols: int) -> None:
    x, weight, bias = random(5, num_cols, dtype=dtype), random(num_cols, dtype=dtype), random(num_cols, dtype=dtype)
    check_all(x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_parameters_of_narrow_input(dtype: torch.dtype) -> None:
    check_all(random(5, 33, dtype=dtype), random(33), random(33))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num_cols", [32, 70])
@pytest.mark.usefixtures("short_registers")
def test_long_rows(dtype: torch.dtype, num_cols: int) -> None:
    plan = launch.plan_layer_norm_rows(6, num_cols, dtype.itemsize, False, CPU)
    assert plan.looped
    assert plan.block_cols == 32
    check_all(random(6, num_cols, dtype=dtype), random(num_cols, dtype=dtype), random(num_cols, dtype=dtype))


@pytest.mark.usefixtures("short_registers")
@pytest.mark.parametrize("wanted", [w for w in itertools.product([False, True], repeat=3) if any(w)], ids=str)
def test_long_rows_of_groups(wanted: tuple[bool, bool, bool]) -> None:
    x, y_bar, weight = random(2, 3, 40), random(2, 3, 40, seed=1), random(2, 40)
    check_bwd(y_bar, x, weight, batch_ndim=1, wanted=wanted)
    if wanted == ALL:
        check_fwd(x, weight, random(2, 40, seed=1), batch_ndim=1)
        check_jvp(x, weight, y_bar, random(2, 40, seed=1), random(2, 40, seed=2), batch_ndim=1)


@pytest.mark.usefixtures("short_registers")
@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=3)), ids=str)
def test_long_rows_with_tangents_missing(given: tuple[bool, bool, bool]) -> None:
    tangents = (random(3, 40, seed=1), random(40, seed=2), random(40, seed=3))
    tangents = (tangent if has else None for tangent, has in zip(tangents, given, strict=True))
    check_jvp(random(3, 40), random(40), *tangents)


def test_large_common_offset_costs_no_digits() -> None:
    x = random(4, 300, dtype=torch.float64).float() + 1e4
    y, _, _ = layer_norm_fwd(x, None, None, 1, 0, EPS)
    # The mean itself is rounded to 2**-10 here; a variance from a difference of squares would have no digit right.
    torch.testing.assert_close(y.double(), Truth(x, None).y(None), rtol=0.0, atol=2e-3)


@pytest.mark.usefixtures("short_registers")
def test_large_common_offset_in_long_rows() -> None:
    x = random(2, 70, dtype=torch.float64).float() + 1e4
    y, _, _ = layer_norm_fwd(x, None, None, 1, 0, EPS)
    torch.testing.assert_close(y.double(), Truth(x, None).y(None), rtol=0.0, atol=2e-3)


def test_idle_lanes_of_huge_constant_rows() -> None:
    # mean * rstd overflows, and five columns leave idle lanes, where x_hat must not become infinite.
    x, v = torch.full((2, 5), 2.0**122), random(2, 5)
    mean, rstd = torch.full((2,), 2.0**122), torch.full((2,), EPS**-0.5)
    expected = Truth(torch.zeros(2, 5), None).project(v.double())
    assert_matches(layer_norm_jvp(x, None, mean, rstd, v, None, None, 1, 0), expected, torch.float32)
    assert_matches(layer_norm_bwd(v, x, None, mean, rstd, 1, 0, ALL)[0], expected, torch.float32)


def test_eps_keeps_float64_digits() -> None:
    x = torch.full((2, 4), 3.0, dtype=torch.float64)
    _, _, rstd = layer_norm_fwd(x, None, None, 1, 0, 1e-5)
    torch.testing.assert_close(rstd, torch.full((2,), 1e-5, dtype=torch.float64) ** -0.5, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("has_weight, has_bias", list(itertools.product([False, True], repeat=2)))
def test_parameters_missing(has_weight: bool, has_bias: bool) -> None:
    weight = random(9) if has_weight else None
    check_all(random(6, 9), weight, random(9, seed=1) if has_bias else None)


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=4)), ids=str)
def test_tangents_missing(given: tuple[bool, bool, bool, bool]) -> None:
    values = (random(9), random(4, 9, seed=1), random(9, seed=2), random(9, seed=3))
    check_jvp(random(4, 9), *(value if has else None for value, has in zip(values, given, strict=True)))


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("batch_ndim", [0, 1])
def test_wanted_cotangents(wanted: tuple[bool, bool, bool], batch_ndim: int) -> None:
    weight = random(*(3, 12)[1 - batch_ndim :])
    check_bwd(random(3, 5, 12, seed=1), random(3, 5, 12), weight, batch_ndim=batch_ndim, wanted=wanted)


LAYOUTS = {
    "padded rows": lambda: random(6, 24)[:, 3:20],
    "every second column": lambda: random(6, 24)[:, ::2],
    "transposed": lambda: random(17, 6).T,
    "padded outer dim": lambda: random(3, 5, 10)[:, 1:4],
    "permuted row dims": lambda: random(4, 3, 10).transpose(0, 1),
    "expanded rows": lambda: random(10).expand(3, 4, 10),
    "expanded outer dim": lambda: random(4, 10).expand(3, 4, 10),
    # Whole numbers: the mean of a constant row is exact, and rstd is too large for one that is not.
    "expanded columns": lambda: (8 * random(5, 1)).round().expand(5, 7),
    "one row": lambda: random(1, 24)[:, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_strides_are_read_without_a_copy(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = LAYOUTS[layout]()
    view = row_view([x, torch.empty(x.shape)], 1, None)
    assert view.tensors[0] is x
    check_all(x, random(x.shape[-1]), random(x.shape[-1], seed=1))
    # The cotangent and the tangent have strides of their own.
    dense = random(*x.shape, seed=5)
    check_bwd(x, dense, random(x.shape[-1]))
    check_jvp(dense, random(x.shape[-1]), x, None, None)


def test_strides_that_need_a_copy() -> None:
    x = random(2, 3, 4, 10).permute(2, 0, 1, 3)[:, :, 1:]
    check_all(random(4, 6, 5).transpose(1, 2), random(6), random(6, seed=1))
    check_all(x, random(10), random(10, seed=1))
    check_all(random(5, 4, 6).transpose(1, 2), random(6, 4), random(6, 4, seed=1), norm_ndim=2)


def test_strided_parameters() -> None:
    check_all(random(4, 8), random(16)[::2], random(1).expand(8))


@pytest.mark.parametrize("num_segments", [2, 3])
def test_more_segments_than_a_backward_takes(num_segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LAYER_NORM_MAX_SEGMENTS", num_segments)
    x = random(3, 5, 10)[:, 1:4]
    check_bwd(random(3, 3, 10, seed=1), x, random(10))


@pytest.mark.parametrize(
    "shape, norm_ndim, batch_ndim",
    [((3, 5, 12), 1, 1), ((2, 3, 4, 6), 1, 2), ((2, 3, 4, 6), 2, 1), ((3, 12), 1, 1), ((2, 3, 12), 1, 2), ((6,), 1, 0)],
    ids=str,
)
@pytest.mark.parametrize("expanded", [False, True])
def test_groups(shape: tuple[int, ...], norm_ndim: int, batch_ndim: int, expanded: bool) -> None:
    batch, norm = shape[:batch_ndim], shape[len(shape) - norm_ndim :]
    if expanded:
        weight, bias = random(*norm).expand(*batch, *norm), random(*norm, seed=1).expand(*batch, *norm)
    else:
        weight, bias = random(*batch, *norm), random(*batch, *norm, seed=1)
    check_all(random(*shape), weight, bias, norm_ndim, batch_ndim)


def test_groups_that_share_the_input() -> None:
    x = random(5, 12).expand(3, 5, 12)
    check_all(x, random(3, 12), None, batch_ndim=1)
    check_all(x, random(12).expand(3, 12), random(3, 12, seed=1), batch_ndim=1)


def test_groups_with_a_moved_batch_dim() -> None:
    check_all(random(5, 3, 12).transpose(0, 1), random(12, 3).T, random(3, 12, seed=1), batch_ndim=1)


@pytest.mark.usefixtures("one_processor")
@pytest.mark.parametrize("batch_ndim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_programs_with_many_blocks_of_rows(dtype: torch.dtype, batch_ndim: int) -> None:
    shape = (2, 75, 40)
    num_segments, num_rows = (2, 75) if batch_ndim else (1, 150)
    plan = launch.plan_layer_norm_params(num_segments, num_rows, 40, dtype.itemsize, CPU)
    assert 1 < plan.num_splits < num_rows // plan.block_rows
    x, y_bar = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(*(2, 40)[1 - batch_ndim :], dtype=dtype)
    first = check_bwd(y_bar, x, weight, batch_ndim=batch_ndim)
    again = check_bwd(y_bar, x, weight, batch_ndim=batch_ndim)
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("num_rows", [3, 40])
def test_number_of_rows_compiles_nothing(num_rows: int) -> None:
    from triton_kernels import _layer_norm_kernels, _layer_norm_looped

    for module in (_layer_norm_kernels, _layer_norm_looped):
        for name, kernel in vars(module).items():
            if name.endswith("_kernel"):
                constants = {
                    arg for arg, kind in kernel.function.fn.__annotations__.items() if "constexpr" in str(kind)
                }
                assert not constants & {"num_rows", "segment_rows", "num_splits", "num_parts"}
    check_fwd(random(num_rows, 4), None, None)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5), (0, 3, 5)], ids=str)
def test_no_rows(shape: tuple[int, ...]) -> None:
    x, weight = torch.empty(shape), random(5)
    y, mean, rstd = layer_norm_fwd(x, weight, weight, 1, 0, EPS)
    assert y.shape == shape
    assert mean.shape == rstd.shape == shape[:-1]
    x_bar, weight_bar, bias_bar = layer_norm_bwd(y, x, weight, mean, rstd, 1, 0, ALL)
    assert x_bar.shape == shape
    assert weight_bar.tolist() == bias_bar.tolist() == [0.0] * 5
    assert layer_norm_jvp(x, weight, mean, rstd, y, weight, None, 1, 0).shape == shape


def test_no_columns() -> None:
    x = torch.empty(3, 0)
    y, mean, rstd = layer_norm_fwd(x, None, None, 1, 0, EPS)
    assert y.shape == (3, 0)
    assert mean.shape == rstd.shape == (3,)
    assert mean.tolist() == [0.0] * 3
    assert rstd.isnan().all()


def test_unwanted_outputs_are_separate_tensors() -> None:
    bars = layer_norm_bwd(*(random(2, 3),) * 2, None, random(2), random(2), 1, 0, (False, False, False))
    assert len({id(bar) for bar in bars}) == 3


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("long", [False, True])
def test_nan_and_inf_stay_in_their_row(poison: float, long: bool, request: pytest.FixtureRequest) -> None:
    if long:
        request.getfixturevalue("short_registers")
    x = random(4, 40)
    x[1, 3] = poison
    weight, y_bar = random(40), random(4, 40, seed=1)
    y, mean, rstd = layer_norm_fwd(x, weight, None, 1, 0, EPS)
    rows = torch.tensor([False, True, False, False])
    assert torch.equal(y.isnan(), rows[:, None].expand(4, 40))
    assert torch.equal(mean.isfinite(), ~rows)
    assert torch.equal(rstd.isnan(), rows)
    x_bar, weight_bar, bias_bar = layer_norm_bwd(y_bar, x, weight, mean, rstd, 1, 0, ALL)
    assert torch.equal(x_bar.isnan(), rows[:, None].expand(4, 40))
    assert weight_bar.isnan().all()
    assert bias_bar.isfinite().all()
    y_dot = layer_norm_jvp(x, weight, mean, rstd, y_bar, None, None, 1, 0)
    assert torch.equal(y_dot.isnan(), rows[:, None].expand(4, 40))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nan_and_inf_in_a_cotangent(poison: float) -> None:
    x, y_bar = random(4, 6), random(4, 6, seed=1)
    y_bar[2, 5] = poison
    x_bar, weight_bar, bias_bar = layer_norm_bwd(y_bar, x, None, *Truth(x, None).stats(), 1, 0, ALL)
    assert torch.equal(x_bar.isnan().any(1), torch.tensor([False, False, True, False]))
    assert torch.equal(weight_bar.isfinite(), torch.arange(6) < 5)
    assert torch.equal(bias_bar.isfinite(), torch.arange(6) < 5)


# In each, a product of a number and a stride that both fit in 32 bits does not.
FAR_VIEWS = {
    "rows": ((3, 8), (1 << 30, 1), 0),
    "columns": ((2, 4), (1, 1 << 30), 0),
    "segments": ((3, 2, 8), (1 << 30, 16, 1), 1),
}


@pytest.mark.parametrize("far", FAR_VIEWS, ids=str)
@pytest.mark.parametrize("long", [False, True])
def test_offsets_past_two_to_the_31(far: str, long: bool, request: pytest.FixtureRequest) -> None:
    if long:
        request.getfixturevalue("short_registers")
        limits = {"layer_norm_fwd_bytes": 2, "layer_norm_two_row_cols": 2, "layer_norm_accumulated_cols": 2}
        request.getfixturevalue("use_limits")(**limits)
    shape, strides, batch_ndim = FAR_VIEWS[far]
    # Pages that nothing touches take no memory, as long as the allocation is not filled.
    torch.utils.deterministic.fill_uninitialized_memory = False
    buffer = torch.empty(3 * (1 << 30) + 64, dtype=torch.float16)
    torch.utils.deterministic.fill_uninitialized_memory = True
    x = buffer.as_strided(shape, strides)
    x.copy_(random(*shape))
    weight = random(*shape[:batch_ndim], shape[-1], dtype=torch.float16)
    dense = random(*shape, dtype=torch.float16, seed=1)
    check_fwd(x, weight, None, batch_ndim=batch_ndim)
    check_bwd(x, dense, weight, batch_ndim=batch_ndim)
    check_bwd(dense, x, weight, batch_ndim=batch_ndim)
    check_jvp(x, weight, dense, None, None, batch_ndim=batch_ndim)
    check_jvp(dense, weight, x, None, None, batch_ndim=batch_ndim)
