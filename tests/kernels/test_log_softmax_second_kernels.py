"""Second-order log-softmax kernels, in the interpreter, against torch's autograd of the plain float64 formulas."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from triton_kernels import launch, log_softmax_second_order
from triton_kernels.log_softmax_second_order import log_softmax_bwd_jvp, log_softmax_pairing

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

# Reduced dim last, first, in the middle and alone; one column, a few, a prime, a row of several tiles.
SHAPES_AND_DIMS = [
    ((5, 1), 1),
    ((7, 3), 1),
    ((3, 257), 1),
    ((2, 1024), 1),
    ((8, 5), 0),
    ((250, 3), 0),
    ((2, 3, 4, 2), 1),
    ((2, 30, 33), 1),
    ((17,), 0),
]
LOOPED_SHAPES_AND_DIMS = [((2, 257), 1), ((1, 256), 1), ((150, 3), 0), ((2, 40, 7), 1), ((1, 150, 2), 1)]
MASKS = [mask for mask in itertools.product((False, True), repeat=3) if any(mask)]
ALL = (True, True, True)
# Which tangents there are: of y_bar, of y.
TANGENTS = [(True, True), (True, False), (False, True)]


def random(shape, dtype, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def operands(shape, dim, dtype):
    """y_bar, y, x_dot (or y_bar_dot) and y_dot."""
    y = torch.log_softmax(random(shape, torch.float64, seed=1), dim).to(dtype)
    return random(shape, dtype), y, random(shape, dtype, seed=2), random(shape, dtype, seed=3)


def exact_pairing(y_bar, y, x_dot, dim):
    y_bar, y, x_dot = (t.detach().double().requires_grad_() for t in (y_bar, y, x_dot))
    y_dot = x_dot - (y.exp() * x_dot).sum(dim, keepdim=True)
    return torch.autograd.grad((y_bar * y_dot).sum(), (y_bar, y, x_dot))


def exact_bwd_jvp(y_bar, y, y_bar_dot, y_dot, dim):
    def bwd(y_bar, y):
        return y_bar - y.exp() * y_bar.sum(dim, keepdim=True)

    primals = (y_bar.double(), y.double())
    tangents = (
        torch.zeros_like(p) if t is None else t.double() for p, t in zip(primals, (y_bar_dot, y_dot), strict=True)
    )
    return torch.func.jvp(bwd, primals, tuple(tangents))[1]


def pairing_scales(y_bar, y, x_dot, dim):
    """Sums of the magnitudes of all terms of each result: what rounding errors are in proportion to."""
    y_bar, p, x_dot = y_bar.double().abs(), y.double().exp(), x_dot.double().abs()
    y_bar_sum = y_bar.sum(dim, keepdim=True)
    return x_dot + (p * x_dot).sum(dim, keepdim=True), p * x_dot * y_bar_sum, y_bar + p * y_bar_sum


def bwd_jvp_scale(y_bar, y, y_bar_dot, y_dot, dim):
    y_bar, p = y_bar.double().abs(), y.double().exp()
    y_bar_dot, y_dot = (torch.zeros_like(p) if t is None else t.double().abs() for t in (y_bar_dot, y_dot))
    return y_bar_dot + p * (y_dot * y_bar.sum(dim, keepdim=True) + y_bar_dot.sum(dim, keepdim=True))


def assert_close(actual, exact, scale, dtype, compute_dtype):
    """Off by no more than the rounding to `dtype` and a few roundings of the terms to `compute_dtype`."""
    assert actual.dtype == dtype
    assert actual.shape == exact.shape
    assert actual.is_contiguous()
    out, compute = torch.finfo(dtype), torch.finfo(compute_dtype)
    bound = out.eps * exact.abs() + out.smallest_normal * out.eps + 16 * compute.eps * scale
    error = (actual.double() - exact).abs()
    assert (error <= bound).all(), f"error {error.max()}, {(error / bound).max()} times the bound"


def compute_dtype_of(*tensors):
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def check_pairing(y_bar, y, x_dot, dim, wanted=ALL):
    results = log_softmax_pairing(y_bar, y, x_dot, dim, wanted)
    exact, scales = exact_pairing(y_bar, y, x_dot, dim), pairing_scales(y_bar, y, x_dot, dim)
    read = (y_bar if wanted[1] or wanted[2] else None, y, x_dot if wanted[0] or wanted[1] else None)
    for result, like, want, e, scale in zip(results, (y_bar, y, x_dot), wanted, exact, scales, strict=True):
        if want:
            assert_close(result, e, scale, like.dtype, compute_dtype_of(*read))
        else:
            assert result.shape == (0,)
            assert result.dtype == y.dtype


def check_bwd_jvp(y_bar, y, y_bar_dot, y_dot, dim, x_dtype):
    arguments = (y_bar, y, y_bar_dot, y_dot, dim)
    compute_dtype = compute_dtype_of(y_bar if y_dot is not None else None, y, y_bar_dot, y_dot)
    result = log_softmax_bwd_jvp(*arguments, x_dtype)
    assert_close(result, exact_bwd_jvp(*arguments), bwd_jvp_scale(*arguments), x_dtype, compute_dtype)


def check_all(y_bar, y, v, y_dot, dim):
    check_pairing(y_bar, y, v, dim)
    check_bwd_jvp(y_bar, y, v, y_dot, dim, y.dtype)


@pytest.fixture
def short_registers(use_limits):
    """Plans as for a chip that holds almost nothing, so that short rows are swept tile by tile."""
    cols = dict.fromkeys(("row_cols", "two_row_cols", "three_row_cols", "sweep_cols"), 128)
    use_limits(**{f"log_softmax_{name}": size for name, size in (cols | {"tile": 256, "two_tile": 256}).items()})


@pytest.fixture
def plans(monkeypatch):
    """The plans of all launches of the test."""
    made, plan = [], launch.plan_log_softmax

    def recorded(*args):
        made.append(plan(*args))
        return made[-1]

    monkeypatch.setattr(launch, "plan_log_softmax", recorded)
    return made


@pytest.fixture
def no_copies(monkeypatch):
    """Any copy of an input by the launchers fails the test."""

    def contiguous(self, **_):
        raise AssertionError(f"copied a tensor of strides {self.stride()}")

    monkeypatch.setattr(torch.Tensor, "contiguous", contiguous)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape, dim", SHAPES_AND_DIMS, ids=str)
def test_rows_in_registers(shape, dim, dtype, plans):
    check_all(*operands(shape, dim, dtype), dim)
    assert not any(plan.looped for plan in plans)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("shape, dim", LOOPED_SHAPES_AND_DIMS, ids=str)
def test_rows_longer_than_registers(shape, dim, dtype, short_registers, plans):
    check_all(*operands(shape, dim, dtype), dim)
    assert all(plan.looped for plan in plans)


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("shape, dim", [((2, 150), 1), ((150, 2), 0)], ids=str)
def test_only_what_is_wanted_is_computed_and_read(shape, dim, looped, request):
    if looped:
        request.getfixturevalue("short_registers")
    y_bar, y, x_dot, y_dot = operands(shape, dim, torch.float32)
    poison = torch.full(shape, math.nan)
    for wanted in MASKS:
        check_pairing(y_bar, y, x_dot, dim, wanted)
    for wanted, arguments, unread in (
        ((True, False, False), (y_bar, y, x_dot), (poison, y, x_dot)),
        ((False, False, True), (y_bar, y, x_dot), (y_bar, y, poison)),
    ):
        results = (log_softmax_pairing(*tensors, dim, wanted) for tensors in (arguments, unread))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for has_y_bar_dot, has_y_dot in TANGENTS:
        tangents = (x_dot if has_y_bar_dot else None, y_dot if has_y_dot else None)
        check_bwd_jvp(y_bar, y, *tangents, dim, torch.float32)
    expected = log_softmax_bwd_jvp(y_bar, y, x_dot, None, dim, torch.float32)
    assert torch.equal(log_softmax_bwd_jvp(poison, y, x_dot, None, dim, torch.float32), expected)


def test_nothing_wanted_launches_nothing(monkeypatch):
    monkeypatch.setattr(log_softmax_second_order, "launch_reduction", None)
    y_bar, y, x_dot, _ = operands((2, 5), 1, torch.float32)
    results = log_softmax_pairing(y_bar, y, x_dot, 1, (False, False, False))
    assert [result.shape for result in results] == [(0,)] * 3
    assert len({id(result) for result in results}) == 3
    assert torch.equal(log_softmax_bwd_jvp(y_bar, y, None, None, 1, torch.float64), torch.zeros(2, 5).double())


MIXED = [
    (torch.float32, torch.bfloat16, torch.float16),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.float64, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float64, torch.float16),
]


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("dtypes", MIXED, ids=str)
def test_mixed_dtypes(dtypes, looped, request):
    if looped:
        request.getfixturevalue("short_registers")
    # Of rows that are swept, one orientation for each choice of dtypes.
    for dim in (MIXED.index(dtypes) % 2,) if looped else (0, 1):
        y_bar, y, v, y_dot = operands((140, 140), dim, torch.float64)
        y_bar, y, v = (t[:3] if dim == 1 else t[:, :3] for t in (y_bar, y, v))
        y_bar, y, v = (t.to(dtype) for t, dtype in zip((y_bar, y, v), dtypes, strict=True))
        y_dot = (y_dot[:3] if dim == 1 else y_dot[:, :3]).to(dtypes[1])
        check_pairing(y_bar, y, v, dim)
        check_pairing(y_bar, y, v, dim, (True, True, False))
        check_bwd_jvp(y_bar, y, v.to(dtypes[0]), y_dot, dim, dtypes[2])


STRIDED = {
    "transposed": (lambda t: t.T, (9, 40), (0, 1)),
    "every other column": (lambda t: t[:, ::2], (5, 80), (0, 1)),
    "rows of a wider tensor": (lambda t: t[:, 3:40], (5, 60), (0, 1)),
    "exchanged leading dims": (lambda t: t.transpose(0, 1), (4, 3, 10), (0, 1, 2)),
    "one row expanded": (lambda t: t.expand(6, 12), (1, 12), (0, 1)),
    "one column expanded": (lambda t: t.expand(6, 12), (6, 1), (0, 1)),
    "one element expanded": (lambda t: t.expand(3, 4, 5), (1, 1, 1), (0, 1, 2)),
}


@pytest.mark.parametrize("what", STRIDED)
def test_strided_inputs_are_read_in_place(what, request):
    view, shape, dims = STRIDED[what]
    y_bar, y, v, y_dot = (view(random(shape, torch.float32, seed)) for seed in range(4))
    ones = torch.ones(()).expand(y.shape)
    for dim in dims:
        check_all(y_bar, y, v, y_dot, dim)
        check_all(ones, y.contiguous(), v, y_dot, dim)
        check_all(y_bar, y, ones, y_dot, dim)
    request.getfixturevalue("no_copies")
    for dim in dims:
        log_softmax_pairing(y_bar, y, v, dim, (True, True, False))
        log_softmax_bwd_jvp(y_bar, y, v, y_dot, dim, torch.float32)


def test_strided_inputs_swept(short_registers):
    y_bar, y, v, y_dot = (random((100, 6), torch.float32, seed)[:, ::2] - 2 for seed in range(4))
    check_all(y_bar, y, v, y_dot, 0)
    check_all(y_bar.T, y.T, v.T.contiguous(), y_dot.T, 1)


def test_strides_without_a_view_are_copied():
    y_bar, y, v, y_dot = (
        random((3, 6, 2, 4), torch.float32, seed).transpose(0, 2)[:, ::2].transpose(1, 3) - 2 for seed in range(4)
    )
    for dim in (1, 3):
        check_all(y_bar, y, v, y_dot, dim)
        check_all(y_bar.contiguous(), y, v.contiguous(), y_dot, dim)


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_classes_of_probability_zero(dim, looped, request):
    if looped:
        request.getfixturevalue("short_registers")
    x = random((4, 140), torch.float64)
    x[0, 3:], x[1, :130], x[2, 137] = -math.inf, -math.inf, -math.inf
    y = torch.log_softmax(x, 1).float()
    y_bar, _, v, y_dot = operands((4, 140), 1, torch.float32)
    y_bar, y, v, y_dot = (t if dim == 1 else t.T.contiguous() for t in (y_bar, y, v, y_dot))
    check_all(y_bar, y, v, y_dot, dim)
    zero = y == -math.inf
    y_bar_bar, output_bar, x_dot_bar = log_softmax_pairing(y_bar, y, v, dim, ALL)
    assert (output_bar[zero] == 0).all()
    assert torch.equal(x_dot_bar[zero], y_bar[zero])
    assert torch.isfinite(y_bar_bar).all()
    assert (log_softmax_bwd_jvp(y_bar, y, None, y_dot, dim, y.dtype)[zero] == 0).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("looped", [False, True])
def test_infinities_and_nans_as_in_the_formula(looped, request):
    if looped:
        request.getfixturevalue("short_registers")
    y_bar, y, v, y_dot = operands((8, 140), 1, torch.float32)
    y[0], y[1, 7] = math.nan, -math.inf
    y_bar[1, 7], y_bar[2, 139] = math.inf, math.nan
    v[3, 5], v[4, 136], v[1, 7] = math.inf, math.nan, -math.inf
    y_dot[5, 0], y_dot[6, 138] = -math.inf, math.nan
    p, y_bar_sum = y.exp(), y_bar.sum(1, keepdim=True)
    pairing = (v - (p * v).sum(1, keepdim=True), -p * v * y_bar_sum, y_bar - p * y_bar_sum)
    expected = (*pairing, v - p * (y_dot * y_bar_sum + v.sum(1, keepdim=True)))
    actual = (*log_softmax_pairing(y_bar, y, v, 1, ALL), log_softmax_bwd_jvp(y_bar, y, v, y_dot, 1, y.dtype))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_same_bits_again(dim, looped, request):
    if looped:
        request.getfixturevalue("short_registers")
    y_bar, y, v, y_dot = operands((3, 300) if dim == 1 else (300, 3), dim, torch.float32)
    first, again = (
        (*log_softmax_pairing(y_bar, y, v, dim, ALL), log_softmax_bwd_jvp(y_bar, y, v, y_dot, dim, y.dtype))
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("shape, dim", [((0, 5), 1), ((0, 5), 0), ((3, 0), 1), ((0,), 0)], ids=str)
def test_empty_tensors(shape, dim):
    y_bar, y = torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape)
    results = log_softmax_pairing(y_bar, y, y, dim, (True, True, False))
    assert [result.dtype for result in results] == [torch.bfloat16, torch.float32, torch.float32]
    assert [result.shape for result in results] == [shape, shape, (0,)]
    x_bar_dot = log_softmax_bwd_jvp(y_bar, y, None, y, dim, torch.float16)
    assert (x_bar_dot.shape, x_bar_dot.dtype) == (shape, torch.float16)


def test_offsets_past_31_bits(poisoned_memory):
    torch.utils.deterministic.fill_uninitialized_memory = False
    # Of memory longer than 2**31 elements only the pages that are used exist.
    memory = torch.empty(2**32 + 200, dtype=torch.float16)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for strides in ((2**31, 1), (2**30, 1), (1, 2**31), (1, 2**30)):
        y_bar, y, v, y_dot = (memory.as_strided((3, 3), strides, start) for start in (0, 40, 80, 120))
        for tensor, values in zip((y_bar, y, v, y_dot), operands((3, 3), 1, torch.float16), strict=True):
            tensor.copy_(values)
        check_all(y_bar, y, v, y_dot, 1)
