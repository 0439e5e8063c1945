"""The second-order layer norm launchers, run in Triton's interpreter, against torch's autograd in float64."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import pytest
import torch

from tests.kernels.layer_norm_second_truth import (
    ALL_SIX,
    check_both,
    check_bwd_jvp,
    check_pairing,
    check_results,
    draw_point,
)
from tests.kernels.layer_norm_truth import check_all, random
from triton_kernels import launch

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
CPU = torch.device("cpu")


def use_plan(use_limits: Callable[..., None], plan: str) -> None:
    """Serve rows of more than 16 columns as if they were too long: for sums, or for registers altogether."""
    if plan == "fused":
        return
    use_limits(double_divisor=1, layer_norm_param_cols=32, layer_norm_second_summed_cols=16)
    if plan == "looped":
        use_limits(layer_norm_second_cols=16, layer_norm_second_sweep_cols=32)


@pytest.fixture(params=["fused", "sums apart", "looped"])
def plan(request: pytest.FixtureRequest, use_limits: Callable[..., None]) -> str:
    use_plan(use_limits, request.param)
    return request.param


# One column, fewer than a vector load, one more than a power of two, several tiles of a warp.
@pytest.mark.parametrize("num_cols", [1, 3, 257, 1024])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_columns(dtype: torch.dtype, num_cols: int) -> None:
    check_both(draw_point((5, num_cols), dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float32_parameters_of_narrow_input(dtype: torch.dtype) -> None:
    check_both(draw_point((5, 33), dtype, torch.float32))


@pytest.mark.parametrize("shape, batch_ndim", [((5, 33), 0), ((2, 3, 33), 1), ((3, 33), 1)], ids=str)
def test_bfloat16_parameters_of_float64_input(shape: tuple[int, ...], batch_ndim: int, plan: str) -> None:
    check_both(draw_point(shape, torch.float64, torch.bfloat16, batch_ndim=batch_ndim))


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("shape, batch_ndim", [((5, 33), 0), ((2, 3, 33), 1), ((3, 33), 1)], ids=str)
def test_bfloat16_parameters_of_float64_input_in_first_order(
    shape: tuple[int, ...], batch_ndim: int, looped: bool, use_limits: Callable[..., None]
) -> None:
    if looped:
        cols = dict.fromkeys(("two_row_cols", "accumulated_cols", "sweep_cols"), 16)
        use_limits(double_divisor=1, layer_norm_fwd_bytes=16 * 8, **{f"layer_norm_{k}": v for k, v in cols.items()})
    weight, bias = (random(*shape[:batch_ndim], shape[-1], dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    check_all(random(*shape, dtype=torch.float64), weight, bias, batch_ndim=batch_ndim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num_cols", [32, 70])
@pytest.mark.parametrize("batch_ndim", [0, 1])
def test_plans(dtype: torch.dtype, num_cols: int, batch_ndim: int, plan: str) -> None:
    chosen = launch.plan_layer_norm_second(1, 6, num_cols, dtype.itemsize, True, CPU)
    assert (chosen.fused, chosen.rows.looped) == (plan == "fused", plan == "looped")
    check_both(draw_point((2, 3, num_cols), dtype, batch_ndim=batch_ndim))


def test_default_plans() -> None:
    def plans(num_cols: int, itemsize: int) -> tuple[bool, bool]:
        chosen = launch.plan_layer_norm_second(1, 64, num_cols, itemsize, True, CPU)
        return chosen.fused, chosen.rows.looped

    assert [plans(num_cols, 2) for num_cols in (4096, 4097, 8192, 8193)] == [
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]
    assert plans(1024, 8) == (True, False)
    assert plans(2049, 8) == (False, True)


def masks_pairwise(num_results: int) -> list[tuple[bool, ...]]:
    """Every result alone, every pair, all, and none."""
    chosen = [set(range(num_results)), set()]
    chosen += [set(pair) for pair in itertools.combinations_with_replacement(range(num_results), 2)]
    return [tuple(i in some for i in range(num_results)) for some in chosen]


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=4)), ids=str)
def test_pairing_of_what_is_given_and_wanted(given: tuple[bool, ...], plan: str) -> None:
    names = ("weight", "x_dot", "weight_dot", "bias_dot")
    absent = [name for name, has in zip(names, given, strict=True) if not has]
    check_pairing(draw_point((3, 20), absent=absent), masks_pairwise(6))


@pytest.mark.parametrize("given", list(itertools.product([False, True], repeat=4)), ids=str)
def test_bwd_jvp_of_what_is_given_and_wanted(given: tuple[bool, ...], plan: str) -> None:
    names = ("weight", "y_bar_dot", "x_dot", "weight_dot")
    absent = [name for name, has in zip(names, given, strict=True) if not has]
    check_bwd_jvp(draw_point((3, 20), absent=absent), list(itertools.product([False, True], repeat=3)))


@pytest.mark.parametrize(
    "shape, norm_ndim, batch_ndim",
    [((3, 5, 20), 1, 1), ((2, 3, 4, 6), 1, 2), ((2, 3, 4, 6), 2, 1), ((3, 12), 1, 1), ((2, 3, 12), 1, 2), ((6,), 1, 0)],
    ids=str,
)
@pytest.mark.parametrize("expanded", [False, True])
def test_groups(shape: tuple[int, ...], norm_ndim: int, batch_ndim: int, expanded: bool, plan: str) -> None:
    point = draw_point(shape, norm_ndim=norm_ndim, batch_ndim=batch_ndim)
    if expanded:
        first = (0,) * batch_ndim
        shared = {
            name: getattr(point, name)[first].expand(getattr(point, name).shape) for name in ("weight", "weight_dot")
        }
        point = dataclasses.replace(point, **shared)
    check_both(point)


LAYOUTS = {
    "padded rows": lambda: random(6, 24, seed=7)[:, 3:20],
    "every second column": lambda: random(6, 34, seed=7)[:, ::2],
    "transposed": lambda: random(17, 6, seed=7).T,
    "padded outer dim": lambda: random(3, 5, 10, seed=7)[:, 1:4],
    "permuted row dims": lambda: random(4, 3, 10, seed=7).transpose(0, 1),
    "expanded rows": lambda: random(10, seed=7).expand(3, 4, 10),
    "expanded outer dim": lambda: random(4, 10, seed=7).expand(3, 4, 10),
    "needs a copy": lambda: random(2, 3, 4, 10, seed=7).permute(2, 0, 1, 3)[:, :, 1:],
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["x", "y_bar", "y_bar_dot", "x_dot"])
def test_strides_of_each_operand(layout: str, name: str) -> None:
    strided = LAYOUTS[layout]()
    check_both(dataclasses.replace(draw_point(tuple(strided.shape)), **{name: strided}))


@pytest.mark.parametrize("layout", ["transposed", "expanded outer dim", "permuted row dims"])
def test_strides_in_every_plan(layout: str, plan: str) -> None:
    strided = LAYOUTS[layout]()
    check_both(dataclasses.replace(draw_point(tuple(strided.shape)), x=strided, x_dot=strided, y_bar=strided))


def test_strided_parameters() -> None:
    point = draw_point((4, 8))
    check_both(dataclasses.replace(point, weight=random(16)[::2], weight_dot=random(1).expand(8)))
    point = draw_point((3, 4, 8), batch_ndim=1)
    check_both(dataclasses.replace(point, weight=random(8, 3).T, bias_dot=random(8).expand(3, 8)))


def test_more_segments_than_sums_over_rows_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LAYER_NORM_MAX_SEGMENTS", 2)
    check_both(dataclasses.replace(draw_point((3, 3, 10)), x=random(3, 5, 10)[:, 1:4]))


@pytest.mark.parametrize(
    "dtype, batch_ndim, plan",
    [
        (torch.bfloat16, 0, "fused"),
        (torch.bfloat16, 1, "sums apart"),
        (torch.float64, 0, "sums apart"),
        (torch.float64, 1, "fused"),
    ],
    ids=str,
)
def test_programs_with_many_blocks_of_rows_repeat_themselves(
    dtype: torch.dtype,
    batch_ndim: int,
    plan: str,
    use_limits: Callable[..., None],
    use_processors: Callable[[int], None],
) -> None:
    use_plan(use_limits, plan)
    use_processors(1)
    point = draw_point((2, 75, 40), dtype, batch_ndim=batch_ndim)
    sizes = (2, 75) if batch_ndim else (1, 150)
    if plan == "fused":
        chosen = launch.plan_layer_norm_second(*sizes, 40, dtype.itemsize, True, CPU)
        block_rows = chosen.rows.block_rows
    else:
        chosen = launch.plan_layer_norm_second_columns(*sizes, 40, dtype.itemsize, CPU)
        block_rows = chosen.block_rows
    assert chosen.num_splits < launch.cdiv(sizes[1], block_rows)
    check_pairing(point)
    first, again = point.bwd_jvp(), point.bwd_jvp()
    assert all(map(torch.equal, first, again))
    check_results(first, point.true_bwd_jvp(), (True,) * 3, (False, True, True), point)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0, 5), (0, 3, 5), (3, 0)], ids=str)
@pytest.mark.parametrize("batch_ndim", [0, 1])
def test_no_elements(shape: tuple[int, ...], batch_ndim: int) -> None:
    point = draw_point(shape, batch_ndim=batch_ndim)
    param_shape = (*shape[:batch_ndim], shape[-1])
    results = point.pairing()
    assert [tuple(results[i].shape) for i in (0, 1, 3)] == [shape] * 3
    sums = [results[i] for i in (2, 4, 5)] + list(point.bwd_jvp()[1:])
    assert [tuple(result.shape) for result in sums] == [param_shape] * 5
    assert all(not result.any() for result in sums)
    assert point.bwd_jvp()[0].shape == shape


def test_large_means_of_cotangent_and_tangent_cost_no_digits_of_their_product(plan: str) -> None:
    point = draw_point((2, 200), torch.float64, absent=("weight", "weight_dot", "bias_dot"))
    moved = dataclasses.replace(point, y_bar=point.y_bar + 1e4, x_dot=point.x_dot + 1e4)
    # Constants do not matter to the derivative for x; without them, autograd does not lose digits either.
    point = dataclasses.replace(point, y_bar=moved.y_bar - 1e4, x_dot=moved.x_dot - 1e4)
    # A rounding error of 2**-53 of 1e4 is allowed, one of 2**-53 of the product of two such means (1e-8) is not.
    torch.testing.assert_close(moved.pairing()[1], point.true_pairing()[1], rtol=0.0, atol=2e-11)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["x", "y_bar", "y_bar_dot", "x_dot"])
def test_nan_and_inf_stay_in_their_row(name: str, poison: float, plan: str) -> None:
    point = draw_point((4, 40))
    getattr(point, name)[1, 3] = poison
    y_bar_bar, x_bar, weight_bar, x_dot_bar, weight_dot_bar, bias_dot_bar = point.pairing()
    x_bar_dot, weight_bar_dot, bias_bar_dot = point.bwd_jvp()
    rows = torch.arange(4) == 1
    poisoned = {
        "x": [y_bar_bar, x_bar, x_dot_bar, x_bar_dot],
        "y_bar": [x_bar, x_dot_bar, x_bar_dot],
        "y_bar_dot": [x_bar_dot],
        "x_dot": [y_bar_bar, x_bar, x_bar_dot],
    }[name]
    for result in (y_bar_bar, x_bar, x_dot_bar, x_bar_dot):
        is_poisoned = any(result is other for other in poisoned)
        assert torch.equal((~result.isfinite()).any(1), rows & is_poisoned)
    # A sum over rows is poisoned in every column whose addends are.
    assert weight_bar.isfinite().all() == (name == "y_bar_dot")
    assert weight_dot_bar.isfinite().all() == (name in {"x_dot", "y_bar_dot"})
    assert bias_dot_bar.isfinite().all() == (name != "y_bar")
    assert not weight_bar_dot.isfinite().all()
    assert bias_bar_dot.isfinite().all() == (name != "y_bar_dot")


def test_idle_lanes_of_huge_constant_rows(plan: str) -> None:
    # mean * rstd overflows, and 21 columns leave idle lanes, where x_hat must not become infinite.
    point = draw_point((2, 21))
    zero = dataclasses.replace(point, x=torch.zeros(2, 21))
    huge = dataclasses.replace(point, x=torch.full((2, 21), 2.0**122))
    for result, expected in zip((*huge.pairing(), *huge.bwd_jvp()), (*zero.pairing(), *zero.bwd_jvp()), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_number_of_rows_compiles_nothing() -> None:
    from triton_kernels import _layer_norm_second_kernels, _layer_norm_second_looped

    for module in (_layer_norm_second_kernels, _layer_norm_second_looped):
        for name, kernel in vars(module).items():
            if name.endswith("_kernel"):
                constants = {
                    arg for arg, kind in kernel.function.fn.__annotations__.items() if "constexpr" in str(kind)
                }
                assert not constants & {"num_rows", "segment_rows", "num_splits"}


def test_results_do_not_share_memory() -> None:
    results = (*draw_point((4, 40)).pairing(ALL_SIX), *draw_point((4, 40)).bwd_jvp())
    assert len({result.untyped_storage().data_ptr() for result in results}) == len(results)


# In each, a product of a number and a stride that both fit in 32 bits does not.
FAR_VIEWS = {
    "rows": ((3, 20), (1 << 30, 1), 0),
    "columns": ((2, 20), (1, 1 << 27), 0),
    "segments": ((3, 2, 20), (1 << 30, 32, 1), 1),
}


@pytest.mark.parametrize("far", FAR_VIEWS, ids=str)
@pytest.mark.parametrize("name", ["x", "y_bar", "y_bar_dot", "x_dot"])
def test_offsets_past_two_to_the_31(far: str, name: str, plan: str) -> None:
    shape, strides, batch_ndim = FAR_VIEWS[far]
    # Pages that nothing touches take no memory, as long as the allocation is not filled.
    torch.utils.deterministic.fill_uninitialized_memory = False
    buffer = torch.empty(3 * (1 << 30) + 64, dtype=torch.float16)
    torch.utils.deterministic.fill_uninitialized_memory = True
    tensor = buffer.as_strided(shape, strides)
    tensor.copy_(random(*shape))
    point = draw_point(shape, torch.float16, batch_ndim=batch_ndim)
    check_both(dataclasses.replace(point, **{name: tensor}))
