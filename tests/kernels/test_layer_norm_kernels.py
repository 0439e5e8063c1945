"""The layer norm launchers of first and second order, in Triton's interpreter, against float64 formulas.

Each of their kernels and plans meets its truth in `test_every_launcher`; here is what it does not vary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from tests.kernels.calls import LayerNorm, far_apart, pairwise, random, short_rows
from tests.kernels.truth import EPS, Exact, assert_close, check_values, expected
from triton_kernels import launch
from triton_kernels._layer_norm_kernels import param_reduce_kernel
from triton_kernels._runtime import row_view
from triton_kernels.layer_norm import layer_norm_fwd

if TYPE_CHECKING:
    from collections.abc import Callable

FULL_SIZE = ("x", "y_bar", "x_dot", "y_bar_dot")
CPU = torch.device("cpu")


@pytest.fixture(params=["in registers", "sums apart", "swept", "shared"])
def plan(request: pytest.FixtureRequest, use_limits: Callable[..., None]) -> str:
    """Rows of more than 16 columns are those of each of the plans."""
    if request.param == "sums apart":
        use_limits(layer_norm_second_summed_cols=16, layer_norm_accumulated_cols=16, layer_norm_param_cols=16)
    elif request.param != "in registers":
        use_limits(**short_rows(16, 1 if request.param == "swept" else 4))
    return request.param


# The longest rows that a chip holds, and rows of one column more.
BOUNDARIES = [
    (launch.plan_layer_norm_rows, (2, False), 32768),
    (launch.plan_layer_norm_rows, (4, False), 16384),
    (launch.plan_layer_norm_rows, (2, True), 16384),
    (launch.plan_layer_norm_rows, (8, True), 4096),
    (launch.plan_layer_norm_second, (2, True), 8192),
]


@pytest.mark.parametrize("planner, arguments, most", BOUNDARIES)
def test_rows_are_swept_where_they_do_not_fit(planner: Callable, arguments: tuple, most: int) -> None:
    segments = (1,) if planner is launch.plan_layer_norm_second else ()
    plans = [planner(*segments, 64, num_cols, *arguments, CPU) for num_cols in (most, most + 1)]
    assert [getattr(plan, "rows", plan).looped for plan in plans] == [False, True]


@pytest.mark.parametrize("num_cols", [4096, 4097])
def test_sums_are_apart_where_they_do_not_fit(num_cols: int) -> None:
    assert launch.plan_layer_norm_second(1, 64, num_cols, 2, True, CPU).fused == (num_cols == 4096)


# One column, and fewer than a vector load.
@pytest.mark.parametrize("num_cols, dtype", [(1, torch.float32), (3, torch.float64)])
def test_few_columns(num_cols: int, dtype: torch.dtype) -> None:
    for call in LayerNorm.draw((3, num_cols), dtype).calls():
        check_values(call)


# Parameters in another dtype than x: wider, or narrower than the arithmetic; 17 columns begin another tile.
DTYPES_OF_PARAMETERS = [((3, 17), 0, torch.bfloat16, torch.float32), ((2, 2, 20), 1, torch.float64, torch.bfloat16)]


@pytest.mark.parametrize("shape, batch_ndim, dtype, param_dtype", DTYPES_OF_PARAMETERS)
def test_dtypes_of_parameters(
    shape: tuple[int, ...], batch_ndim: int, dtype: torch.dtype, param_dtype: torch.dtype, plan: str
) -> None:
    rows = LayerNorm.draw(shape, dtype, param_dtype, batch_ndim=batch_ndim)
    for call in rows.calls() if plan != "shared" else rows.calls("forward", "jvp"):
        check_values(call)


def test_what_is_given_and_wanted(plan: str) -> None:
    """Any two of the operands that may be absent and the results meet in all four ways."""
    # Several programs that share a row sum nothing over rows.
    shapes = {"in registers": (2, 2, 20), "sums apart": (2, 20), "swept": (2, 1, 20), "shared": (1, 20)}
    rows = LayerNorm.draw(shapes[plan], batch_ndim=len(shapes[plan]) - 2)
    names = ("weight", "x_dot", "weight_dot", "bias_dot")
    for choice in pairwise(10):
        check_values(rows.given(choice[:4], *names).call("pairing", choice[4:]))
    for choice in pairwise(7):
        of_bwd = rows.given(choice[:4], "weight", "y_bar_dot", "x_dot", "weight_dot")
        check_values(of_bwd.call("bwd_jvp", choice[4:]))
    for choice in pairwise(4):
        check_values(rows.given(choice, *names).call("jvp"))
        check_values(rows.given(choice[:1], "weight").call("backward", choice[1:]))
    for choice in pairwise(2):
        check_values(rows.given(choice, "weight", "bias").call("forward"))


LAYOUTS = {
    "padded rows": lambda seed: random(6, 24, seed=seed)[:, 3:20],
    "every second column": lambda seed: random(6, 24, seed=seed)[:, ::2],
    "transposed": lambda seed: random(17, 6, seed=seed).T,
    "padded outer dim": lambda seed: random(3, 5, 10, seed=seed)[:, 1:4],
    "permuted row dims": lambda seed: random(4, 3, 10, seed=seed).transpose(0, 1),
    "expanded rows": lambda seed: random(10, seed=seed).expand(3, 4, 10),
    "expanded outer dim": lambda seed: random(4, 10, seed=seed).expand(3, 4, 10),
    "one row": lambda seed: random(1, 24, seed=seed)[:, ::2],
    "no view": lambda seed: random(2, 3, 4, 10, seed=seed).permute(2, 0, 1, 3)[:, :, 1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str) -> None:
    """Each operand alone in a layout, and all of them; they are read in place where a view fits."""
    strided = {name: LAYOUTS[layout](seed) for seed, name in enumerate(FULL_SIZE)}
    x = strided["x"]
    assert (row_view([x, torch.empty(x.shape)], 1, None).tensors[0] is x) == (layout != "no view")
    rows = LayerNorm.draw(x.shape)
    modes = {"x": rows.MODES, "y_bar": ("backward", "pairing"), "x_dot": ("jvp", "bwd_jvp"), "y_bar_dot": ("bwd_jvp",)}
    for name, of_name in modes.items():
        for call in rows.change(**{name: strided[name]}).calls(*of_name):
            check_values(call)
    for call in rows.change(**strided).calls("jvp", "backward", "pairing"):
        check_values(call)


def test_strides_of_parameters() -> None:
    rows = LayerNorm.draw((4, 8))
    params = {"weight": random(16)[::2], "bias": random(1).expand(8), "weight_dot": random(1).expand(8)}
    for call in rows.change(**params).calls():
        check_values(call)


# In some one parameter for all groups, beside others that differ.
GROUPS = [((2, 3, 4, 6), 1, 2, True), ((2, 3, 4, 6), 2, 1, False), ((2, 3, 20), 1, 2, True), ((5, 4, 6), 2, 0, False)]


@pytest.mark.parametrize("shape, norm_ndim, batch_ndim, expanded", GROUPS)
def test_groups(shape: tuple[int, ...], norm_ndim: int, batch_ndim: int, expanded: bool) -> None:
    rows = LayerNorm.draw(shape, norm_ndim=norm_ndim, batch_ndim=batch_ndim)
    if expanded:
        params = {name: getattr(rows, name) for name in ("weight", "weight_dot", "bias")}
        rows = rows.change(**{name: param[(0,) * batch_ndim].expand(param.shape) for name, param in params.items()})
    for call in rows.calls():
        check_values(call)


def test_groups_that_share_x_or_lie_elsewhere() -> None:
    shared = LayerNorm.draw((3, 5, 12), batch_ndim=1).change(x=random(5, 12).expand(3, 5, 12))
    moved = shared.change(x=random(5, 3, 12).transpose(0, 1), weight=random(12, 3).T)
    for call in (*shared.calls(), *moved.calls()):
        check_values(call)


def test_more_segments_than_sums_over_rows_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LAYER_NORM_MAX_SEGMENTS", 2)
    rows = LayerNorm.draw((3, 3, 10)).change(x=random(3, 5, 10)[:, 1:4])
    for call in rows.calls("backward", "pairing", "bwd_jvp"):
        check_values(call)


# In each, a product of a number and a stride that both fit in 32 bits does not.
FAR_VIEWS = {
    "rows": ((3, 20), (1 << 30, 1), 0),
    "columns": ((2, 20), (1, 1 << 27), 0),
    "segments": ((3, 1, 20), (1 << 30, 32, 1), 1),
}


@pytest.mark.parametrize("far", FAR_VIEWS)
def test_offsets_past_two_to_the_31(far: str, plan: str) -> None:
    shape, strides, batch_ndim = FAR_VIEWS[far]
    rows = LayerNorm.draw(shape, torch.float16, batch_ndim=batch_ndim)
    # Several programs that share a row read it as one does.
    modes = ("forward", "jvp") if plan == "shared" else rows.MODES
    for call in rows.change(x=far_apart(rows.x, strides)).calls(*modes):
        check_values(call)
    others = {name: far_apart(getattr(rows, name), strides) for name in FULL_SIZE[1:]}
    for call in rows.change(**others).calls(*list(modes)[1:]):
        check_values(call)


def test_groups_past_two_to_the_31(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of the partial rows of two groups on either side of element 2**31, as the last programs of a launch."""
    groups, num_cols, num_parts = 2**20 + 1, 1024, 2
    parts, sums = (
        far_apart(torch.zeros(2, num_cols).half(), ((size - 1) * num_cols, 1)).as_strided(
            (size, num_cols), (num_cols, 1)
        )
        for size in (groups * num_parts, groups)
    )
    parts[-2 * num_parts :] = random(2 * num_parts, num_cols, dtype=torch.float16)
    program_id = interpreter.InterpreterBuilder.create_get_program_id

    def shifted(self, axis):
        handle = program_id(self, axis)
        return interpreter.TensorHandle(handle.data + np.int32(groups - 2), handle.dtype)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_get_program_id", shifted)
    flags = {"WANT_WEIGHT": True, "WANT_BIAS": False, "BLOCK_PARTS": 2, "BLOCK_COLS": 1024}
    param_reduce_kernel[(2,)](parts, None, sums, None, num_parts, num_cols, **flags)
    expected = parts[-2 * num_parts :].reshape(2, num_parts, num_cols).sum(1)
    assert torch.equal(sums[-2:], expected)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom.*")
@pytest.mark.parametrize("shape, batch_ndim", [((0, 5), 0), ((3, 0, 5), 1), ((0, 3, 5), 0), ((0, 3, 5), 1)])
def test_no_rows(shape: tuple[int, ...], batch_ndim: int) -> None:
    rows, param_shape = LayerNorm.draw(shape, batch_ndim=batch_ndim), (*shape[:batch_ndim], 5)
    (y, mean, rstd), (y_dot,), first, second, third = (call.results() for call in rows.calls())
    assert mean.shape == rstd.shape == shape[:-1]
    for result in (y, y_dot, first[0], second[0], second[1], second[3], third[0]):
        assert result.shape == shape
    for result in (*first[1:], second[2], *second[4:], *third[1:]):
        assert torch.equal(result, torch.zeros(param_shape))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom.*")
def test_no_columns() -> None:
    y, mean, rstd = layer_norm_fwd(torch.empty(3, 0), None, None, 1, 0, EPS)
    assert y.shape == (3, 0)
    assert mean.tolist() == [0.0] * 3
    assert rstd.isnan().tolist() == [True] * 3
    assert [result.shape for result in LayerNorm.draw((3, 0)).call("pairing").results()][:2] == [(3, 0)] * 2


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_nan_and_inf_stay_in_their_row(plan: str) -> None:
    """Each operand has one, in a row of its own, in the last column of the last tile."""
    rows = LayerNorm.draw((5, 33))
    for number, name in enumerate(FULL_SIZE):
        getattr(rows, name)[number, 32] = math.nan if number % 2 else math.inf
    for call in rows.calls():
        for result, exact in zip(call.results(), expected(call), strict=True):
            assert torch.equal(result.isfinite(), exact.value.isfinite())


def test_large_common_offset_costs_no_digits(plan: str) -> None:
    x = random(2, 70, dtype=torch.float64).float() + 1e4
    y, _, _ = layer_norm_fwd(x, None, None, 1, 0, EPS)
    wide = x.double() - x.double().mean(1, keepdim=True)
    # The mean itself is rounded to 2**-10 here; a variance from a difference of squares would have no digit right.
    exact = wide / (wide.square().mean(1, keepdim=True) + EPS).sqrt()
    torch.testing.assert_close(y.double(), exact, rtol=0.0, atol=2e-3)


def test_large_means_of_cotangent_and_tangent_cost_no_digits_of_their_product(plan: str) -> None:
    rows = LayerNorm.draw((1, 80), torch.float64).change(weight=None, weight_dot=None, bias_dot=None)
    moved = rows.change(y_bar=rows.y_bar + 1e4, x_dot=rows.x_dot + 1e4)
    # Constants do not matter to the derivative for x; without them, autograd does not lose digits either.
    rows = rows.change(y_bar=moved.y_bar - 1e4, x_dot=moved.x_dot - 1e4)
    # A rounding error of 2**-53 of 1e4 is allowed, one of 2**-53 of the product of two such means (1e-8) is not.
    results = [each.call("pairing").results()[1] for each in (moved, rows)]
    torch.testing.assert_close(*results, rtol=0.0, atol=2e-11)


def test_idle_lanes_of_huge_constant_rows(plan: str) -> None:
    # mean * rstd overflows, and 21 columns leave idle lanes, where x_hat must not become infinite.
    zero = LayerNorm.draw((1, 21)).change(x=torch.zeros(1, 21))
    huge = zero.change(x=torch.full((1, 21), 2.0**122))
    for mode in ("jvp", "backward", "pairing", "bwd_jvp"):
        for result, plain in zip(huge.call(mode).results(), zero.call(mode).results(), strict=True):
            torch.testing.assert_close(result, plain, rtol=1e-5, atol=1e-5)


def test_eps_keeps_float64_digits() -> None:
    _, _, rstd = layer_norm_fwd(torch.full((2, 4), 3.0, dtype=torch.float64), None, None, 1, 0, 1e-5)
    assert_close(rstd, Exact(torch.full((2,), 1e-5, dtype=torch.float64) ** -0.5, torch.float64))
