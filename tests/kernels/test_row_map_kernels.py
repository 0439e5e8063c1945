"""The generic kernel of a map's derivatives, on a map that keeps x, a number of its rows, and takes three sums.

The factor 3 of its second derivative is a constant that the launch makes.
"""

import dataclasses
import itertools

import pytest
import torch
import triton
import triton.language as tl

from perf.calls import random
from primitives.kernels.rows.maps import Part, RowMapKernels
from primitives.kernels.rows.tiles import nothing
from tests.kernels.calls import ROW_PLANS
from tests.row_maps import UNIT, unit_p
from tests.support import assert_close


@triton.jit
def _map(v, x, total, norm):
    return (v - x * total / (norm * norm)) / norm


@triton.jit
def fwd_terms(x, p, r, mask):
    along = nothing()
    if x[1].type.is_block():
        along = x[0] * x[1]
    return x[0] * x[0], along


@triton.jit
def fwd_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    norm = tl.sqrt(s[0])
    y_dot = nothing()
    if x[1].type.is_block():
        y_dot = _map(x[1], x[0], s[1], norm)
    return x[0] / norm, y_dot


@triton.jit
def double_backward_terms(x, p, r, mask):
    a, b, c = nothing(), nothing(), nothing()
    if x[0].type.is_block():
        a = x[1] * x[0]
    if x[2].type.is_block():
        b = x[1] * x[2]
        if x[0].type.is_block():
            c = x[0] * x[2]
    return a, b, c


@triton.jit
def _along_x(x, s, norm, factor):
    return (x[1] * (factor * s[0] * s[1] / (norm * norm) - s[2]) - x[0] * s[1]) / (norm * norm * norm)


@triton.jit
def double_backward_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    y_bar_bar, x_bar, x_dot_bar = nothing(), nothing(), nothing()
    if s[1].type.is_block():
        y_bar_bar = _map(x[2], x[1], s[1], r[0])
    if s[0].type.is_block():
        x_dot_bar = _map(x[0], x[1], s[0], r[0])
    if s[2].type.is_block():
        x_bar = _along_x(x, s, r[0], r[1]) - x[2] * s[0] / (r[0] * r[0] * r[0])
    return y_bar_bar, x_bar, x_dot_bar


@triton.jit
def bwd_jvp_terms(x, p, r, mask):
    a, b, c = nothing(), nothing(), nothing()
    if x[2].type.is_block():
        c = x[1] * x[2]
    if x[3].type.is_block():
        a, b = x[1] * x[0], x[1] * x[3]
        c = x[0] * x[3] + c if x[2].type.is_block() else x[0] * x[3]
    return a, b, c


@triton.jit
def bwd_jvp_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    if not x[3].type.is_block():
        return (_map(x[2], x[1], s[2], r[0]),)
    moved = _along_x(x, s, r[0], r[1]) - x[3] * s[0] / (r[0] * r[0] * r[0])
    return (moved + x[2] / r[0] if x[2].type.is_block() else moved,)


_EVERY = ("y_bar", "x", "x_dot")
KERNELS = RowMapKernels(
    "unit",
    globals(),
    "x",
    double_backward=(
        Part((1,), ("x", "x_dot"), ("x", "x_dot")),
        Part((0, 1, 2), _EVERY, _EVERY),
        Part((0,), ("x", "y_bar"), ("x", "y_bar")),
    ),
    bwd_jvp=(Part((2,), ("x", "y_bar_dot"), ("x", "y_bar_dot")), Part((0, 1, 2), _EVERY, _EVERY)),
    numbers=("norm",),
    num_constants=1,
    constants=lambda given: (3.0,),
    forward=(Part((0,), ("x",), ("x",)), Part((0, 1), ("x", "x_dot"), ("x", "x_dot"))),
)
JVP, _, DOUBLE_BACKWARD, BWD_JVP, FWD, FWD_JVP = KERNELS.launchers()


# Rows past the end have a norm of 0, and are not stored.
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("plan", ROW_PLANS)
@pytest.mark.parametrize("shape, dim", [((3, 40), 1), ((40, 3), 0)], ids=str)
def test_every_result_is_that_of_the_formulas(plan, shape, dim, use_limits):
    use_limits(**ROW_PLANS[plan])
    x, y_bar, x_dot, y_bar_dot = (random(*shape, dtype=torch.float64, seed=seed) for seed in range(4))
    norm = x.norm(dim=dim)
    for output_mask in set(itertools.product((False, True), repeat=3)) - {(False,) * 3}:
        found = DOUBLE_BACKWARD(y_bar, x, norm, x_dot, dim, output_mask)
        for got, true in zip(found, UNIT.ops["double_backward"](y_bar, x, norm, x_dot, dim, output_mask), strict=True):
            assert_close(got, true, what=str(output_mask))
    for dots in ((y_bar_dot, None), (None, x_dot), (y_bar_dot, x_dot)):
        got = BWD_JVP(y_bar, x, norm, *dots, dim)
        assert_close(got, UNIT.ops["bwd_jvp"](y_bar, x, norm, *dots, dim))
    y, y_dot = torch.func.jvp(lambda x: unit_p(x, dim)[0], (x,), (x_dot,))[:2]
    for got, true in zip(
        (FWD(x, dim), *FWD_JVP(x, x_dot, dim), JVP(x_dot, x, norm, dim)), (y, y, y_dot, y_dot), strict=True
    ):
        assert_close(got, true)


def test_a_missing_device_function_is_named():
    functions = {name: function for name, function in globals().items() if name != "bwd_jvp_emit"}
    with pytest.raises(TypeError, match="unit_bwd_jvp_kernel needs the device functions emit: it has terms"):
        dataclasses.replace(KERNELS, functions=functions)
