"""The log-softmax launchers of first and second order, in Triton's interpreter, against float64 formulas.

Each of their kernels and plans meets its truth in `test_every_launcher`; here is what it does not vary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from tests.kernels.calls import DTYPES, Call, LogSoftmax, far_apart, pairwise, random, short_rows
from tests.kernels.interpreting import watched
from tests.kernels.truth import check_values
from triton_kernels import _reduction_view, launch
from triton_kernels import log_softmax as launchers
from triton_kernels.log_softmax import log_softmax_bwd, log_softmax_fwd, log_softmax_jvp

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
INF, NAN = math.inf, math.nan
# The interpreter computes in numpy, which mentions what a GPU does silently.
NUMPY_WARNS = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.fixture(params=["in registers", "swept", "shared"])
def plan(request: pytest.FixtureRequest, use_limits: Callable[..., None]) -> str:
    """Rows of more than 16 columns are those of each of the plans."""
    if request.param != "in registers":
        use_limits(**short_rows(16, 1 if request.param == "swept" else 4))
    return request.param


# Numbers of tensors read and written, and the longest rows that a chip holds.
@pytest.mark.parametrize("inputs, outputs, most", [(1, 1, 32768), (2, 1, 16384), (3, 1, 16384), (3, 3, 8192)])
@pytest.mark.parametrize("itemsize", [4, 8])
def test_rows_are_swept_where_they_do_not_fit(inputs: int, outputs: int, most: int, itemsize: int) -> None:
    most = most * 4 // itemsize // (2 if itemsize == 8 else 1)
    for num_cols in (most, most + 1):
        plan = launch.plan_log_softmax((1, 64, num_cols), False, itemsize, itemsize, inputs, CPU, outputs)
        assert plan.looped == (num_cols > most)


# One column, a few, rows that are adjacent, a single row.
@pytest.mark.parametrize("shape, dim", [((5, 1), 1), ((8, 5), 0), ((2, 3, 4, 2), 1), ((3, 1, 5), 1), ((17,), 0)])
def test_shapes(shape: tuple[int, ...], dim: int) -> None:
    for call in LogSoftmax.draw(shape, dim, DTYPES[len(shape) % 4]).calls():
        check_values(call)


# One column in the last tile.
@pytest.mark.parametrize("shape, dim", [((3, 17), 1), ((33, 3), 0)])
def test_a_column_of_another_tile(shape: tuple[int, ...], dim: int, plan: str) -> None:
    for call in LogSoftmax.draw(shape, dim, torch.float64).calls():
        check_values(call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtype_is_applied_before_anything_else(dtype: torch.dtype) -> None:
    for x_dtype in DTYPES:
        rows = LogSoftmax.draw((3, 20), 1, dtype).change(x=random(3, 20, dtype=x_dtype), output_dtype=dtype)
        check_values(rows.call("backward"))
        # The interpreter truncates to bfloat16, where a GPU rounds.
        if dtype != torch.bfloat16 or x_dtype == dtype:
            check_values(rows.call("forward"))


@NUMPY_WARNS
def test_input_is_rounded_to_dtype_first() -> None:
    # 1 + 2**-12 is 1 in float16, and 1e5 is infinite.
    y = log_softmax_fwd(torch.tensor([[1.0, 1 + 2**-12], [1.0, 1e5]]), 1, torch.float16)
    assert y[0, 0] == y[0, 1]
    assert y[1].isnan().all()


# Dtypes of y_bar, of y, and of x.
MIXED = [
    (torch.float32, torch.bfloat16, torch.float16),
    (torch.float64, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float64, torch.float16),
]


@pytest.mark.parametrize("dtypes", MIXED, ids=str)
def test_mixed_dtypes_in_second_order(dtypes: tuple[torch.dtype, ...], plan: str) -> None:
    dim = (MIXED.index(dtypes) + len(plan)) % 2
    rows = LogSoftmax.draw((3, 33) if dim else (33, 3), dim, torch.float64)
    of_y_bar, of_y, of_x = dtypes
    rows = rows.change(y_bar=rows.y_bar.to(of_y_bar), y_bar_dot=rows.y_bar_dot.to(of_y_bar), y=rows.y.to(of_y))
    rows = rows.change(x=rows.x.to(of_x), x_dot=rows.x_dot.to(of_x), y_dot=rows.y_dot.to(of_y))
    for call in (rows.call("pairing"), rows.call("pairing", (True, True, False)), rows.call("bwd_jvp")):
        check_values(call)


@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_given_and_wanted(dim: int, plan: str) -> None:
    rows = LogSoftmax.draw((2, 33) if dim else (33, 2), dim)
    for wanted in pairwise(3):
        check_values(rows.call("pairing", wanted))
    # What is not needed is not read either.
    poison = torch.full_like(rows.x, NAN)
    for wanted, unread in (((True, False, False), "y_bar"), ((False, False, True), "x_dot")):
        check_values(rows.call("pairing", wanted), rows.change(**{unread: poison}).call("pairing", wanted).results())
    no_y_dot = rows.change(y_dot=None)
    check_values(rows.change(y_bar_dot=None).call("bwd_jvp"))
    check_values(no_y_dot.call("bwd_jvp"), no_y_dot.change(y_bar=poison).call("bwd_jvp").results())


def test_nothing_wanted_launches_nothing() -> None:
    rows = LogSoftmax.draw((2, 5), 1)
    with watched() as launches:
        check_values(rows.call("pairing", (False,) * 3))
        check_values(rows.change(y_dot=None, y_bar_dot=None).call("bwd_jvp"))
    assert not launches


STRIDED = {
    "transposed": (lambda t: t.T, (9, 40), (0, 1)),
    "every other column": (lambda t: t[:, ::2], (5, 80), (0, 1)),
    "exchanged leading dims": (lambda t: t.transpose(0, 1), (4, 3, 10), (0, 1, 2)),
    "channels last": (lambda t: t.permute(0, 3, 1, 2), (2, 4, 5, 7), (1,)),
    "planes expanded": (lambda t: t.expand(3, 4, 5), (3, 1, 5), (0, 1, 2)),
}


@pytest.mark.parametrize("layout", STRIDED)
def test_strided_operands_are_read_in_place(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    view, shape, dims = STRIDED[layout]
    tensors = [view(random(*shape, seed=seed)) for seed in range(6)]
    for dim in dims:
        rows = LogSoftmax(*tensors, dim=dim)
        for call in rows.calls():
            check_values(call)
        one = rows.change(y_bar=torch.ones(()).expand(rows.y.shape), y=rows.y.contiguous())
        for call in one.calls("backward", "pairing", "bwd_jvp"):
            check_values(call)

    def contiguous(self: torch.Tensor, **_: object) -> None:
        raise AssertionError(f"copied a tensor of strides {self.stride()}")

    monkeypatch.setattr(torch.Tensor, "contiguous", contiguous)
    for call in LogSoftmax(*tensors, dim=dims[0]).calls():
        call.results()


def test_strided_operands_swept(use_limits: Callable[..., None]) -> None:
    use_limits(**short_rows(16, 1))
    tensors = [random(40, 6, seed=seed)[:, ::2] - 2 for seed in range(6)]
    mixed = [tensor.T if number % 3 else tensor.T.contiguous() for number, tensor in enumerate(tensors)]
    for call in (*LogSoftmax(*tensors, dim=0).calls(), *LogSoftmax(*mixed, dim=1).calls()):
        check_values(call)


def test_strides_without_a_view_are_copied() -> None:
    tensors = [
        random(3, 6, 2, 4, seed=seed).transpose(0, 2)[:, ::2].transpose(1, 3) - 2 if seed % 3 else random(2, 4, 3, 3)
        for seed in range(6)
    ]
    for dim in (1, 3):
        for call in LogSoftmax(*tensors, dim=dim).calls():
            check_values(call)


@pytest.mark.parametrize("dim", [0, 1])
def test_large_offsets_cost_no_digits(dim: int, plan: str) -> None:
    x = random(*((33, 3) if dim == 0 else (3, 33)), seed=1) + 1e4
    # In ascending order every tile moves the running maximum, in descending order only the first does.
    for ordered in (x.sort(dim).values, x.sort(dim, descending=True).values):
        check_values(Call(log_softmax_fwd, (ordered, dim, None)))


def special_rows(num_cols: int = 37) -> torch.Tensor:
    rows = torch.zeros(9, num_cols)
    rows[1, :], rows[2, 5:], rows[3, :30], rows[4, 33], rows[5, 7] = -INF, -INF, -INF, INF, NAN
    rows[6, :3], rows[6, 3:36] = NAN, -INF
    rows[7, 0], rows[7, 36] = INF, -INF
    rows[8, :] = INF
    return rows


@NUMPY_WARNS
@pytest.mark.parametrize("dim", [0, 1])
def test_infinities_and_nans_as_in_torch(dim: int, plan: str) -> None:
    dtype = torch.float16 if plan == "shared" else torch.float32
    x = (special_rows() if dim == 1 else special_rows().T.contiguous()).to(dtype)
    y = torch.log_softmax(x, dim)
    torch.testing.assert_close(log_softmax_fwd(x, dim, None), y, equal_nan=True)
    v = random(*x.shape, dtype=dtype)
    v.select(1 - dim, 0)[3] = NAN
    v.select(1 - dim, 2)[4] = INF
    # A row some of whose probabilities are zero, and an infinity among its cotangents.
    v.select(1 - dim, 3)[36] = -INF
    expected = torch._log_softmax_backward_data(v, y, dim, dtype)
    torch.testing.assert_close(log_softmax_bwd(v, y, dim, dtype), expected, equal_nan=True)
    wide, tangent = y.double(), v.double()
    expected = (tangent - (wide.exp() * tangent).sum(dim, keepdim=True)).to(dtype)
    torch.testing.assert_close(log_softmax_jvp(v, y, dim), expected, equal_nan=True)


@NUMPY_WARNS
def test_infinities_and_nans_as_in_the_formula(plan: str) -> None:
    rows = LogSoftmax.draw((8, 37), 1)
    rows.y[0], rows.y[1, 7] = NAN, -INF
    rows.y_bar[1, 7], rows.y_bar[2, 36] = INF, NAN
    rows.x_dot[3, 5], rows.x_dot[4, 33], rows.x_dot[1, 7] = INF, NAN, -INF
    rows.y_dot[5, 0], rows.y_dot[6, 35] = -INF, NAN
    p, y_bar_sum, dots = rows.y.exp(), rows.y_bar.sum(1, keepdim=True), rows.x_dot
    pairing = (dots - (p * dots).sum(1, keepdim=True), -p * dots * y_bar_sum, rows.y_bar - p * y_bar_sum)
    dots = rows.y_bar_dot
    expected = (*pairing, dots - p * (rows.y_dot * y_bar_sum + dots.sum(1, keepdim=True)))
    for actual, exact in zip((*rows.call("pairing").results(), *rows.call("bwd_jvp").results()), expected, strict=True):
        torch.testing.assert_close(actual, exact, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dim", [0, 1])
def test_classes_of_probability_zero(dim: int, plan: str) -> None:
    x = random(3, 37, dtype=torch.float64)
    x[0, 3:], x[1, :34], x[2, 35] = -INF, -INF, -INF
    y = torch.log_softmax(x, 1).float()
    y = y if dim == 1 else y.T.contiguous()
    rows = LogSoftmax.draw(y.shape, dim).change(y=y)
    zero = y == -INF
    y_bar_bar, output_bar, x_dot_bar = check_values(rows.call("pairing"))
    assert (output_bar[zero] == 0).all()
    assert torch.equal(x_dot_bar[zero], rows.y_bar[zero])
    assert y_bar_bar.isfinite().all()
    (x_bar_dot,) = check_values(rows.change(y_bar_dot=None).call("bwd_jvp"))
    assert (x_bar_dot[zero] == 0).all()
    # A masked class of a loss has no gradient at all.
    (x_bar,) = rows.change(y_bar=rows.y_bar.masked_fill(zero, 0.0)).call("backward").results()
    assert (x_bar[zero] == 0).all()


@pytest.mark.parametrize("shape, dim", [((0, 5), 1), ((0, 5), 0), ((3, 0), 1), ((0,), 0)])
def test_empty_tensors(shape: tuple[int, ...], dim: int) -> None:
    rows = LogSoftmax.draw(shape, dim)
    rows = rows.change(y_bar=torch.empty(shape, dtype=torch.bfloat16), x=torch.empty(shape, dtype=torch.float16))
    for call in (
        rows.change(output_dtype=torch.float32).call("forward"),
        *rows.calls(),
        rows.call("pairing", (True, True, False)),
    ):
        check_values(call)


# Segments, rows or columns 2**31 elements apart, and an offset of 2**31 elements only at the last row or column.
FAR_STRIDES = [(2**31, 40, 1), (2**30, 40, 1), (40, 2**31, 1), (40, 1, 2**31), (10, 2**30, 1), (10, 1, 2**30)]


@pytest.mark.parametrize("strides", FAR_STRIDES)
@pytest.mark.parametrize("limits", [{}, {"log_softmax_row_cols": 2, "log_softmax_tile": 8}], ids=["whole", "swept"])
def test_offsets_of_results_past_31_bits(
    strides: tuple[int, ...], limits: dict[str, int], use_limits: Callable[..., None]
) -> None:
    """Launchers make their results dense, which this does not: hence the launch below them."""
    use_limits(**limits)
    x, y = far_apart(random(3, 3, 3, dtype=torch.float16), strides), far_apart(torch.zeros(3, 3, 3).half(), strides)
    view = _reduction_view.ReductionView(3, 3, 3, (x, y), (strides, strides))
    kernels = (launchers.log_softmax_fwd_kernel, launchers.log_softmax_fwd_looped_kernel)
    _reduction_view.launch_reduction(*kernels, 2, ("X", "Y"), view, torch.float32)
    torch.testing.assert_close(y, torch.log_softmax(x.double(), 2).half())


@pytest.mark.parametrize("strides", [(2**30, 1), (1, 2**30)])
def test_offsets_of_operands_past_31_bits(strides: tuple[int, ...], plan: str) -> None:
    shape = (3, 17) if plan != "in registers" and strides[1] == 1 else (3, 3)
    rows = LogSoftmax.draw(shape, 1, torch.float16, lambda x: far_apart(x, strides))
    for call in rows.calls():
        check_values(call)


def test_result_of_a_row_does_not_depend_on_the_others() -> None:
    x = random(64, 100)
    alone = torch.cat([log_softmax_fwd(row[None], 1, None) for row in x[:4]])
    assert torch.equal(log_softmax_fwd(x, 1, None)[:4], alone)
