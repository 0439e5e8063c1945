"""Tests of attention alone: rows that see nothing, numerics, dropout, blocks and memory."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vjp

import primitives as pr
from perf.measuring import peak
from perf.ops.attention import true_attention
from perf.ops.samples import normal
from primitives._audit.nestings import nested
from tests.call_properties import CallRecorder, check_fake, distinct
from tests.support import nestings

attention = pr.functional.attention


def problem(heads=(2, 2), rows=3, keys=4, widths=(4, 4), batch=(2,), bias_shape=None, dtype=torch.float64):
    """q, k, v and the bias, if it has a shape, their tangents, and the cotangents of o and lse."""
    shapes = [
        (*batch, heads[0], rows, widths[0]),
        (*batch, heads[1], keys, widths[0]),
        (*batch, heads[1], keys, widths[1]),
    ]
    shapes += [] if bias_shape is None else [bias_shape]
    outputs = [(*batch, heads[0], rows, widths[1]), (*batch, heads[0], rows)]
    numbers = itertools.count()
    return [tuple(normal(shape, next(numbers)).to(dtype) for shape in each) for each in (shapes, shapes, outputs)]


def every_mode(function, primals, tangents, cotangents):
    """Outputs and derivatives to order two: every way to take them that has kernels of its own."""
    places = tuple(range(len(primals)))

    def pull(*x):
        return vjp(function, *x)[1](cotangents)

    def push(*x):
        return jvp(function, x, tangents)[1]

    return {
        "outputs": function(*primals),
        "backward": pull(*primals),
        "jvp": push(*primals),
        "forward over reverse": jvp(pull, primals, tangents)[1],
        "backward of the jvp": vjp(push, *primals)[1](cotangents),
        "double backward": grad(
            lambda *x: sum((y * x_dot).sum() for y, x_dot in zip(pull(*x), tangents, strict=True)), places
        )(*primals),
    }


def definition(q, k, v, bias=None, *, mask=None, causal=False):
    """O and lse by dense matrices."""
    return true_attention(q, k, v, bias, mask, causal, max(q.shape[-1], 1) ** -0.5)


def ours(**options):
    def function(q, k, v, bias=None):
        return attention(q, k, v, bias=bias, return_lse=True, **options)

    return function


def assert_same(found, expected, **tolerance):
    for mode, values in expected.items():
        torch.testing.assert_close(found[mode], values, msg=lambda text, mode=mode: f"{mode}: {text}", **tolerance)


@pytest.fixture(params=["auto", "reference"])
def implementation(request):
    with pr.use_backend(request.param):
        yield


ROWS, KEYS = 420, 320
SEEN = normal((2, 1, ROWS, KEYS), 0) > -2
MANY_BLOCKS = {
    "mask": (None, {"mask": SEEN}),
    "causal": ((2, 1, ROWS, 1), {"causal": True}),
    "bias": ((1, 4, 1, KEYS), {}),
}


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("name", MANY_BLOCKS)
def test_many_blocks_in_every_axis(name):
    """The results do not depend on how batch, heads and rows are cut, and are the same bits in every run."""
    bias_shape, options = MANY_BLOCKS[name]
    case = problem(heads=(4, 2), rows=ROWS, keys=KEYS, widths=(3, 2), bias_shape=bias_shape)
    found = every_mode(ours(**options), *case)
    assert_same(found, every_mode(lambda *x: definition(*x, **options), *case), rtol=1e-9, atol=1e-10)
    if name == "bias":
        assert_same(every_mode(ours(**options), *case), found, rtol=0, atol=0)


@pytest.mark.usefixtures("implementation")
def test_a_tangent_with_a_large_common_part_loses_no_digits():
    """A part of S_dot that all keys of a row share, as time has it in a model that is modulated by it."""
    (q, k, v), (q_dot, k_dot, v_dot), cotangents = problem(rows=32, keys=64, widths=(16, 16), dtype=torch.bfloat16)
    # Along the first axis all keys are alike.
    k, k_dot = (x.clone() for x in (k, k_dot))
    k[..., 0], k_dot[..., 0] = 1.0, 0.0
    shifted = q_dot.clone()
    shifted[..., 0] += 100.0

    def errors(q_dot):
        case = ((q, k, v), (q_dot, k_dot, v_dot), cotangents[:1])
        wide = [tuple(x.double() for x in each) for each in case]
        found = every_mode(lambda *x: (attention(*x),), *case)
        expected = every_mode(lambda *x: definition(*x)[:1], *wide)
        pairs = [
            (x, y) for mode in ("jvp", "forward over reverse") for x, y in zip(found[mode], expected[mode], strict=True)
        ]
        return [(x.double() - y).norm() / y.norm() for x, y in pairs]

    for plain, moved in zip(errors(q_dot), errors(shifted), strict=True):
        assert moved < max(4 * plain, 8e-3)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("most", [20.0, 300.0, 1e5])
def test_a_float32_bias_is_not_rounded(dtype, most):
    (q, k, v), *_ = problem(dtype=dtype, widths=(8, 8))
    bias = (most + torch.arange(12).remainder(5).div(5.3).view(3, 4)).requires_grad_()
    wide = [x.double() for x in (q, k, v)]
    expected = definition(*wide, bias.double())[0]
    actual = attention(q, k, v, bias=bias)
    tolerance = {"rtol": 0, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(actual.double(), expected, **tolerance)
    of_bias = [torch.autograd.grad(y.square().sum(), bias)[0] for y in (actual, expected)]
    torch.testing.assert_close(*of_bias, rtol=0, atol=40 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype, keys", [(torch.bfloat16, 40), (torch.float32, 4)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_row_with_a_score_that_is_not_finite_is_nan(dtype, keys, is_causal, value):
    """ATen says 0 at times, by where the score lies."""
    q, k, v = (normal((1, count, 1), seed).abs().to(dtype) for seed, count in enumerate((2, keys, keys)))
    q[0, 0] = value
    o = pr.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    assert o.isnan().flatten().tolist() == [True, False]
    if not is_causal:
        q[0, 0], k[0, 3], q[0, 1] = 1.0, math.inf, -1.0
        o = pr.functional.scaled_dot_product_attention(q, k, v)
        assert o.isnan().flatten().tolist() == [True, False]


# One that has kernels by day, and one that differentiates a reference.
WORDS = [pytest.param(word, marks=[pytest.mark.nightly] * (word not in ("rr", "frf"))) for word in nestings(1, 2, 3)]


@pytest.mark.parametrize("word", WORDS)
def test_memory_grows_with_the_number_of_rows(word):
    def peak_of(rows):
        """Bytes alive at one time, for a number of rows and keys."""
        primals, tangents, cotangents = problem((1, 1), rows, rows, (8, 8), (1,), (1, 1, rows), torch.float32)

        def scalar(*x):
            return (attention(*x[:3], bias=x[3]) * cotangents[0]).sum()

        return peak(lambda: nested(scalar, tangents, word)(*primals))

    small, large = (peak_of(rows) for rows in (700, 1400))
    assert large < 2.2 * small, f"{small} bytes at 700 rows, {large} at twice as many"


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("how", ["functional", "repaired"])
@pytest.mark.parametrize("hidden", [False, -float("inf"), "min"])
def test_a_row_whose_keys_are_all_hidden_in_any_way_has_the_derivatives_of_the_definition(hidden, how):
    """As left padding does in causal models: beside the least number lse cannot hold the logarithm of a count."""
    q, k, v = torch.randn(3, 1, 2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen = torch.ones(4, 4, dtype=torch.bool).tril()
    seen[0] = False
    least = torch.finfo(torch.float64).min if hidden == "min" else hidden
    mask = seen if hidden is False else torch.zeros(4, 4, dtype=torch.float64).masked_fill(~seen, least)
    hides = {"mask": mask} if hidden is False else {"bias": mask}

    def orders(attention):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        first = torch.autograd.grad(attention(*leaves).sin().sum(), leaves)
        gradient = torch.autograd.grad(attention(*leaves).sin().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in gradient), leaves)
        slope = torch.func.grad(lambda *x: attention(*x).sin().sum(), (0, 1, 2))
        dot, slope_dot = (torch.func.jvp(f, (q, k, v), (v, q, k))[1] for f in (attention, slope))
        return [*first, *gradient, *second, dot, *slope_dot]

    if how == "functional":
        found = orders(lambda q, k, v: pr.functional.scaled_dot_product_attention(q, k, v, mask))
    else:
        with pr.repair_torch():
            found = orders(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask))
    for got, expected in zip(found, orders(lambda *x: definition(*x, **hides)[0]), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_a_compiler_is_told_how_results_lie_also_where_values_are_wider_than_keys():
    primals, dots, (o_bar, _) = problem(widths=(4, 6), bias_shape=(2, 2, 3, 4))

    def of(q, k, v, bias):
        return attention(q, k, v, bias=bias)

    with CallRecorder() as recorder:
        jvp(lambda *primals: vjp(of, *primals)[1](o_bar), primals, dots)
        vjp(lambda *primals: jvp(of, primals, dots)[1], *primals)[1](o_bar)
    assert {*recorder.names} == {f"attention{suffix}" for suffix in ("", "_bwd", "_jvp", "_double_backward")}
    for call in distinct(recorder.calls):
        check_fake(call, call.outputs())
