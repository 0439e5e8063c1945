"""Log-softmax kernels, in the interpreter, against float64 formulas and against torch's own errors."""

from __future__ import annotations

import math

import pytest
import torch

from triton_kernels import _reduction_view, launch
from triton_kernels import log_softmax as launchers
from triton_kernels.log_softmax import log_softmax_bwd, log_softmax_fwd, log_softmax_jvp

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

# Reduced dim last, first, in the middle and alone; one column, powers of two, primes, a row that is not short.
SHAPES_AND_DIMS = [
    ((5, 1), 1),
    ((7, 3), 1),
    ((2, 3, 8), 2),
    ((3, 257), 1),
    ((2, 1024), 1),
    ((8, 5), 0),
    ((257, 3), 0),
    ((2, 3, 4, 2), 1),
    ((2, 100, 33), 1),
    ((3, 1, 5), 1),
    ((17,), 0),
]

BIG = 2**31


def random(shape, dtype, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def exact_bwd(y_bar, y, dim):
    y_bar, y = y_bar.double(), y.double()
    return y_bar - y.exp() * y_bar.sum(dim, keepdim=True)


def exact_jvp(x_dot, y, dim):
    x_dot, y = x_dot.double(), y.double()
    return x_dot - (y.exp() * x_dot).sum(dim, keepdim=True)


def assert_as_accurate(actual, peer, exact, scale=1.0, eps=0.0):
    """`actual` is at most twice as far from `exact` as `peer` (torch's result) is, give or take two roundings.

    The roundings are those of a number of size `scale`, to the dtype of `actual` or to a relative precision of `eps`.
    """
    assert actual.shape == exact.shape
    assert actual.dtype == peer.dtype
    assert actual.is_contiguous()
    error, peer_error = ((result.double() - exact).abs().max() for result in (actual, peer))
    eps = max(torch.finfo(actual.dtype).eps, eps)
    assert error <= 2 * peer_error + 2 * eps * max(exact.abs().max().item(), scale)


def check_all(x, v, dim):
    """Forward, backward and JVP at `x`, with cotangent or tangent `v`."""
    y = log_softmax_fwd(x, dim, None)
    assert_as_accurate(y, torch.log_softmax(x, dim), torch.log_softmax(x.double(), dim))
    y = torch.log_softmax(x, dim)
    scale = v.abs().max().item()
    x_bar = log_softmax_bwd(v, y, dim, x.dtype)
    assert_as_accurate(x_bar, torch._log_softmax_backward_data(v, y, dim, x.dtype), exact_bwd(v, y, dim), scale)
    # torch has no JVP kernel; the float64 formula, rounded, stands in for one.
    exact = exact_jvp(v, y, dim)
    assert_as_accurate(log_softmax_jvp(v, y, dim), exact.to(y.dtype), exact, scale)


@pytest.fixture
def short_registers(use_limits):
    """Plans as for a chip that holds almost nothing, so that short rows are swept tile by tile."""
    cols = {"log_softmax_row_cols": 128, "log_softmax_two_row_cols": 128, "log_softmax_sweep_cols": 128}
    use_limits(**cols, log_softmax_tile=256, log_softmax_two_tile=256)


@pytest.fixture
def no_copies(monkeypatch):
    """Any copy of an input fails the test."""

    def contiguous(self, **_):
        raise AssertionError(f"copied a tensor of strides {self.stride()}")

    monkeypatch.setattr(torch.Tensor, "contiguous", contiguous)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, dim", SHAPES_AND_DIMS, ids=str)
def test_rows_in_registers(shape, dim, dtype):
    check_all(random(shape, dtype), random(shape, dtype, seed=1), dim)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(
    "shape, dim", [((2, 257), 1), ((1, 256), 1), ((150, 3), 0), ((2, 40, 7), 1), ((1, 150, 2), 1)], ids=str
)
def test_rows_longer_than_registers(shape, dim, dtype, short_registers):
    sizes = (math.prod(shape[:dim]), math.prod(shape[dim + 1 :]), shape[dim])
    for num_inputs in (1, 2):
        rows_adjacent = dim < len(shape) - 1
        plan = launch.plan_log_softmax(
            sizes, rows_adjacent, dtype.itemsize, max(dtype.itemsize, 4), num_inputs, torch.device("cpu")
        )
        assert plan.looped
    check_all(random(shape, dtype), random(shape, dtype, seed=1), dim)


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_large_offsets_cost_no_digits(dim, looped, request):
    if looped:
        request.getfixturevalue("short_registers")
    x = random((150, 3) if dim == 0 else (3, 150), torch.float32) + 1e4
    # In ascending order every tile moves the running maximum, in descending order only the first does.
    for ordered in (x.sort(dim).values, x.sort(dim, descending=True).values):
        y = log_softmax_fwd(ordered, dim, None)
        assert_as_accurate(y, torch.log_softmax(ordered, dim), torch.log_softmax(ordered.double(), dim))


STRIDED = {
    "transposed": (lambda t: t.T, (9, 40), (0, 1)),
    "every other column": (lambda t: t[:, ::2], (5, 80), (0, 1)),
    "rows of a wider tensor": (lambda t: t[:, 3:40], (5, 60), (0, 1)),
    "exchanged leading dims": (lambda t: t.transpose(0, 1), (4, 3, 10), (0, 1, 2)),
    "channels last": (lambda t: t.permute(0, 3, 1, 2), (2, 4, 5, 7), (1,)),
    "one row expanded": (lambda t: t.expand(6, 12), (1, 12), (0, 1)),
    "one column expanded": (lambda t: t.expand(6, 12), (6, 1), (0, 1)),
    "one element expanded": (lambda t: t.expand(3, 4, 5), (1, 1, 1), (0, 1, 2)),
    "planes expanded": (lambda t: t.expand(3, 4, 5), (3, 1, 5), (0, 1, 2)),
}


@pytest.mark.parametrize("what", STRIDED)
def test_strided_inputs_are_read_in_place(what, no_copies):
    view, shape, dims = STRIDED[what]
    x, v = (view(random(shape, torch.float32, seed)) for seed in (0, 1))
    for dim in dims:
        check_all(x, v, dim)


def test_strided_inputs_swept(short_registers, no_copies):
    x, v = random((100, 6), torch.float32), random((6, 100), torch.float32, seed=1).T
    check_all(x[:, ::2], v[:, ::2], 0)
    check_all(x.T, v.T, 1)


def test_strides_without_a_view_are_copied():
    x = random((3, 6, 2, 4), torch.float32).transpose(0, 2)[:, ::2].transpose(1, 3)
    for dim in (1, 3):
        check_all(x, x.sin(), dim)
        check_all(x, torch.ones(()).expand(x.shape), dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
def test_dtype_is_applied_before_anything_else(x_dtype, dtype):
    x, y_bar = random((3, 50), x_dtype), random((3, 50), dtype, seed=1)
    y = log_softmax_fwd(x, 1, dtype)
    assert_as_accurate(y, torch.log_softmax(x, 1, dtype=dtype), torch.log_softmax(x.to(dtype).double(), 1))
    x_bar = log_softmax_bwd(y_bar, y, 1, x_dtype)
    y_bar, y = (t.to(torch.promote_types(dtype, torch.float32)) for t in (y_bar, y))
    peer = torch._log_softmax_backward_data(y_bar, y, 1, y.dtype).to(x_dtype)
    assert_as_accurate(x_bar, peer, exact_bwd(y_bar, y, 1), eps=torch.finfo(y.dtype).eps)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_input_is_rounded_to_dtype_first():
    # 1 + 2**-12 is 1 in float16, and 1e5 is infinite.
    x = torch.tensor([[1.0, 1 + 2**-12], [1.0, 1e5]])
    y = log_softmax_fwd(x, 1, torch.float16)
    assert y[0, 0] == y[0, 1]
    assert y[1].isnan().all()


def special_rows(dtype):
    inf, nan = math.inf, math.nan
    rows = torch.zeros(9, 140, dtype=dtype)
    rows[1, :] = -inf
    rows[2, 5:] = -inf
    rows[3, :130] = -inf
    rows[4, 133] = inf
    rows[5, 7] = nan
    rows[6, :3], rows[6, 3:139] = nan, -inf
    rows[7, 0], rows[7, 139] = inf, -inf
    rows[8, :] = inf
    return rows


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_infinities_and_nans_as_in_torch(dim, looped, dtype, request):
    if looped:
        request.getfixturevalue("short_registers")
    x = special_rows(dtype) if dim == 1 else special_rows(dtype).T.contiguous()
    y = torch.log_softmax(x, dim)
    torch.testing.assert_close(log_softmax_fwd(x, dim, None), y, equal_nan=True)

    v = random(x.shape, dtype)
    v.select(1 - dim, 0)[3] = math.nan
    v.select(1 - dim, 2)[4] = math.inf
    # A row some of whose probabilities are zero, and an infinity among its cotangents.
    v.select(1 - dim, 3)[139] = -math.inf
    expected = torch._log_softmax_backward_data(v, y, dim, dtype)
    torch.testing.assert_close(log_softmax_bwd(v, y, dim, dtype), expected, equal_nan=True)
    expected = exact_jvp(v, y, dim).to(dtype)
    torch.testing.assert_close(log_softmax_jvp(v, y, dim), expected, equal_nan=True)


def test_masked_class_has_zero_gradient():
    x = random((2, 6), torch.float32)
    x[:, 4] = -math.inf
    y = log_softmax_fwd(x, 1, None)
    y_bar = torch.zeros(2, 6).index_fill(1, torch.tensor([1]), 1.0)
    assert torch.equal(log_softmax_bwd(y_bar, y, 1, torch.float32)[:, 4], torch.zeros(2))


@pytest.mark.parametrize("shape, dim", [((0, 5), 1), ((0, 5), 0), ((3, 0), 1), ((3, 0), 0), ((0,), 0)], ids=str)
def test_empty_tensors(shape, dim):
    x = torch.empty(shape, dtype=torch.float16)
    assert log_softmax_fwd(x, dim, torch.float32).shape == shape
    assert log_softmax_fwd(x, dim, torch.float32).dtype == torch.float32
    assert log_softmax_bwd(x, x, dim, torch.float32).dtype == torch.float32
    assert log_softmax_jvp(x, x, dim).shape == shape


@pytest.fixture
def big_memory(poisoned_memory):
    """Two pieces of memory longer than 2**31 elements, of which only the pages that are used exist."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    return [torch.empty(2 * BIG + 200, dtype=torch.float16) for _ in range(2)]


# Segments, rows or columns 2**31 elements apart, and an offset of 2**31 elements only at the last row or column.
BIG_STRIDES = [(BIG, 40, 1), (BIG // 2, 40, 1), (40, BIG, 1), (40, 1, BIG), (10, BIG // 2, 1), (10, 1, BIG // 2)]


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("strides", BIG_STRIDES, ids=str)
def test_offsets_past_31_bits(strides, looped, big_memory, use_limits):
    if looped:
        use_limits(log_softmax_row_cols=2, log_softmax_tile=8)
    shape = (3, 3, 3)
    x, y = (memory.as_strided(shape, strides) for memory in big_memory)
    x.copy_(random(shape, torch.float16))
    y.zero_()
    view = _reduction_view.ReductionView(3, 3, 3, (x, y), (strides, strides))
    kernels = (launchers.log_softmax_fwd_kernel, launchers.log_softmax_fwd_looped_kernel)
    _reduction_view.launch_reduction(*kernels, 2, ("X", "Y"), view, torch.float32)
    torch.testing.assert_close(y, torch.log_softmax(x.double(), 2).half())

    if not looped:
        v, out = x, y.clone()
        exact = exact_bwd(v, out, 2).half()
        # y is read where it was written, and the result lands on top of it.
        view = _reduction_view.ReductionView(3, 3, 3, (v, y, y), (strides,) * 3)
        kernels = (launchers.log_softmax_linear_kernel, launchers.log_softmax_linear_looped_kernel)
        _reduction_view.launch_reduction(*kernels, 1, ("V", "Y", "OUT"), view, torch.float32, TRANSPOSED=True)
        torch.testing.assert_close(y, exact)


@pytest.mark.parametrize("dim", [0, 1])
def test_same_bits_again(dim):
    x, v = random((9, 300), torch.float32), random((9, 300), torch.float32, seed=1)
    y = log_softmax_fwd(x, dim, None)
    assert torch.equal(y, log_softmax_fwd(x, dim, None))
    assert torch.equal(log_softmax_bwd(v, y, dim, x.dtype), log_softmax_bwd(v, y, dim, x.dtype))


def test_result_of_a_row_does_not_depend_on_the_others():
    x = random((64, 100), torch.float32)
    alone = torch.cat([log_softmax_fwd(row[None], 1, None) for row in x[:4]])
    assert torch.equal(log_softmax_fwd(x, 1, None)[:4], alone)
