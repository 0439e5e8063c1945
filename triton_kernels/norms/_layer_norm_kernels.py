"""Kernels of layer norm and RMS norm and their derivatives of first order, on the scaffold of `rows` and `sums`.

`primitives.ops.norms.formulas` has the formulas. With `SILU`, z = x_hat * weight + bias goes through silu(z) = z *
sigmoid(z), as after a group norm: y_dot = silu'(z) * z_dot, and silu'(z) * y_bar stands in the place of y_bar, with z
computed anew from x, the statistics and the parameters, so that nothing else is kept.

RMS norm is layer norm without means but those of products. Its steps have None for the mean, and `nothing()` in the
place of every sum of a tile that is not a product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from ..rows.template import row_kernel, row_sums_kernel
from ..rows.tiles import add_tiles, exponential, nothing, sums_of
from ..runtime.numbers import cast
from ._launch import Backward


@triton.jit
def rstd_of(variance, EPS: tl.constexpr):
    """`1 / sqrt(variance + EPS)`; a float argument would arrive rounded to float32.

    Of float32, the approximation of GPUs (two bits short) and a step of Newton's method: within a unit in the last
    place, as a root and a quotient that are each rounded to nearest would be, and a tenth of their instructions, which
    every thread of a row runs.
    """
    shifted = variance + tl.full(variance.shape, EPS, variance.dtype)
    if variance.dtype == tl.float32:
        guess = tl.rsqrt(shifted)
        ratio = shifted * guess * guess
        # Far from 1 the guess is 0 or infinity, as of infinity and of 0: GPUs take subnormal numbers for 0 here.
        rstd = guess * tl.where(ratio < 2.0, 1.5 - 0.5 * ratio, 1.0)
    else:
        rstd = 1.0 / tl.sqrt(shifted)
    return rstd


@triton.jit
def x_hat_of(x, mean, rstd, mask):
    """Normalized input, zero outside `mask`, where `-mean * rstd` could overflow and spoil a sum."""
    if mean.type.is_block():
        x = tl.where(mask, x - mean, 0.0)
    return x * rstd


@triton.jit
def project(v, x_hat, rstd, v_mean, v_x_hat_mean):
    """`P(v)` from the two row means that it takes, of which RMS norm has the second alone."""
    if v_mean.type.is_block():
        v = v - v_mean
    return rstd * (v - x_hat * v_x_hat_mean)


@triton.jit
def silu_of(x_hat, weight, bias):
    """SiLU of `x_hat * weight + bias`, and its derivative there."""
    z = x_hat * weight if weight.type.is_block() else x_hat
    if bias.type.is_block():
        z = z + bias
    share = 1.0 / (1.0 + exponential(-z))
    y = z * share
    return y, share + y * (1.0 - share)


# Forward: x, and for the tangent of y as well x_dot. The sums are mean and rstd, and the two means of x_dot.


@triton.jit
def fwd_stats(x, p, r, mask, num_cols: tl.constexpr, EPS: tl.constexpr):
    HAS_X_DOT: tl.constexpr = x[1].type.is_block()
    # The sum of x_dot beside that of x: beside three others, it would spill where a program has 64 registers a thread.
    sums = sums_of(x, 2) if HAS_X_DOT else sums_of((x[0],))
    # The mean of x is never rounded before it is subtracted, or the sum about it is added.
    share = tl.full(sums[0].shape, 1.0 / num_cols, sums[0].dtype)
    centered = tl.where(mask, tl.fma(-sums[0], share, x[0]), 0.0)
    # The sum about the mean says how far that is off: a constant row is normalized to zero.
    if HAS_X_DOT:
        about = sums_of((centered, centered * centered, x[1] * centered))
    else:
        about = sums_of((centered, centered * centered), 2)
    shift = about[0] * (1.0 / num_cols)
    variance = about[1] * (1.0 / num_cols) - shift * shift
    rstd = rstd_of(tl.where(variance < 0.0, 0.0, variance), EPS)
    s = tl.fma(sums[0], share, shift), rstd
    if HAS_X_DOT:
        x_dot_mean = sums[1] * (1.0 / num_cols)
        s = s + (x_dot_mean, (about[2] * (1.0 / num_cols) - shift * x_dot_mean) * rstd)
    return s


@triton.jit
def fwd_anchor(x, mask, count):
    return (sums_of((x[0],))[0] / count,)


@triton.jit
def fwd_fold(state, x, p, r, anchor, mask):
    shifted = tl.where(mask, x[0] - anchor[0], 0.0)
    if x[1].type.is_block():
        terms = shifted, shifted * shifted, x[1], x[1] * shifted
    else:
        terms = shifted, shifted * shifted
    return add_tiles(state, terms)


@triton.jit
def fwd_merge(state, anchor, sizes, num_cols: tl.constexpr, EPS: tl.constexpr, LEVEL: tl.constexpr, LAST: tl.constexpr):
    """Of lanes, or of slices by Chan's formula: the mean, squares about it, and the sums of x_dot and its products.

    A row of n tiles lies within `sqrt(n)` of its standard deviations from its first one's mean: about that anchor
    products lose at most as many times the rounding of a sum about the mean, and squares n times.
    """
    HAS_X_DOT: tl.constexpr = len(state) == 4
    if LEVEL == 1:
        sums = sums_of(state)
        shift = sums[0] / sizes
        mean = anchor[0] + shift
        if HAS_X_DOT:
            sums = sums[1] - sums[0] * shift, sums[2], sums[3] - sums[2] * shift
        else:
            sums = (sums[1] - sums[0] * shift,)
    else:
        # Relative to the mean of the first slice, so that a large common offset in x costs no digits.
        is_first = tl.arange(0, state[0].shape[1])[None, :] == 0
        first = tl.where(is_first, state[0], 0.0)
        origins = sums_of((first, state[2]), 2) if HAS_X_DOT else sums_of((first,))
        origin = origins[0]
        shifted = tl.where(sizes > 0, state[0] - origin, 0.0)
        mean = origin + sums_of((shifted * (sizes * (1.0 / num_cols)),))[0]
        shifted = tl.where(sizes > 0, state[0] - mean, 0.0)
        squares = state[1] + shifted * shifted * sizes
        if HAS_X_DOT:
            # The means of slices are rounded: nothing of the mean of x_dot is multiplied by what that takes.
            x_dot = state[2] - sizes * (origins[1] * (1.0 / num_cols))
            sums = sums_of((squares, state[3] + shifted * x_dot), 2)
            sums = sums[0], origins[1], sums[1]
        else:
            sums = sums_of((squares,))
    if LAST:
        rstd = rstd_of(sums[0] * (1.0 / num_cols), EPS)
        if HAS_X_DOT:
            sums = rstd, sums[1] * (1.0 / num_cols), sums[2] * rstd * (1.0 / num_cols)
        else:
            sums = (rstd,)
    return (mean,) + sums


# Forward of RMS norm, with the same sums in the same places.


@triton.jit
def rms_terms(x):
    terms = (x[0] * x[0],)
    if x[1].type.is_block():
        terms = terms + (x[1] * x[0],)
    return terms


@triton.jit
def rms_places(sums, num_cols: tl.constexpr, EPS: tl.constexpr, LAST: tl.constexpr):
    SHARE: tl.constexpr = 1.0 / num_cols
    first = rstd_of(sums[0] * SHARE, EPS) if LAST else sums[0]
    found = nothing(), first
    if len(sums) == 2:
        found = found + (nothing(), sums[1] * first * SHARE if LAST else sums[1])
    return found


@triton.jit
def rms_stats(x, p, r, mask, num_cols: tl.constexpr, EPS: tl.constexpr):
    return rms_places(sums_of(rms_terms(x)), num_cols, EPS, True)


@triton.jit
def rms_fold(state, x, p, r, anchor, mask):
    return add_tiles(state, rms_terms(x))


@triton.jit
def rms_merge(state, anchor, sizes, num_cols: tl.constexpr, EPS: tl.constexpr, LEVEL: tl.constexpr, LAST: tl.constexpr):
    return rms_places(sums_of(state), num_cols, EPS, LAST)


@triton.jit
def fwd_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    return emitted(x, p, s, None)


@triton.jit
def fwd_emit_silu(x, p, r, s, mask, num_cols: tl.constexpr):
    return emitted(x, p, s, None, True)


@triton.jit
def fwd_emit_from_float16(x, p, r, s, mask, num_cols: tl.constexpr):
    return emitted(x, p, s, tl.float16)


@triton.jit
def fwd_emit_from_bfloat16(x, p, r, s, mask, num_cols: tl.constexpr):
    return emitted(x, p, s, tl.bfloat16)


@triton.jit
def emitted(x, p, s, ROUNDED: tl.constexpr, SILU: tl.constexpr = False):
    """The value, of x_hat rounded to `ROUNDED` if that is not None, or through SiLU, and the tangent."""
    x_hat = (x[0] - s[0] if s[0].type.is_block() else x[0]) * s[1]
    y_dot = nothing()
    if x[1].type.is_block():
        y_dot = project(x[1], x_hat, s[1], s[2], s[3])
        if p[0].type.is_block():
            y_dot = y_dot * p[0]
    y_dot = with_param_dots(y_dot, x_hat, p[2], p[3])
    y = x_hat
    if SILU:
        y, slope = silu_of(x_hat, p[0], p[1])
        if y_dot.type.is_block():
            y_dot = y_dot * slope
    else:
        if ROUNDED is not None:
            y = cast(cast(y, ROUNDED), y.dtype)
        if p[0].type.is_block():
            y = y * p[0]
        if p[1].type.is_block():
            y = y + p[1]
    return y, y_dot


@triton.jit
def with_param_dots(y_dot, x_hat, weight_dot, bias_dot):
    """The tangent of y with the terms of the parameters' tangents; `nothing()` without terms."""
    if weight_dot.type.is_block():
        term = x_hat * weight_dot
        y_dot = y_dot + term if y_dot.type.is_block() else term
    if bias_dot.type.is_block():
        y_dot = y_dot + bias_dot if y_dot.type.is_block() else bias_dot
    return y_dot


# JVP: x and x_dot; the sums of x_dot and of x_dot * x_hat.


@triton.jit
def jvp_terms(x, p, r, mask):
    return x[1], x[1] * x_hat_of(x[0], r[0], r[1], mask)


@triton.jit
def jvp_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    x_hat = x_hat_of(x[0], r[0], r[1], mask) if x[0].type.is_block() else nothing()
    y_dot = nothing()
    if x[1].type.is_block():
        y_dot = project(x[1], x_hat, r[1], s[0] * (1.0 / num_cols), s[1] * (1.0 / num_cols))
        if p[0].type.is_block():
            y_dot = y_dot * p[0]
    return (with_param_dots(y_dot, x_hat, p[1], p[2]),)


@triton.jit
def jvp_emit_silu(x, p, r, s, mask, num_cols: tl.constexpr):
    _, slope = silu_of(x_hat_of(x[0], r[0], r[1], mask), p[0], p[3])
    return (jvp_emit(x, p, r, s, mask, num_cols)[0] * slope,)


# VJP: y_bar and x; the sums of v = y_bar * weight and of v * x_hat.


@triton.jit
def bwd_terms(x, p, r, mask):
    v = x[0] * p[0] if p[0].type.is_block() else x[0]
    return v, v * x_hat_of(x[1], r[0], r[1], mask)


@triton.jit
def bwd_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    v = x[0] * p[0] if p[0].type.is_block() else x[0]
    return (project(v, x_hat_of(x[1], r[0], r[1], mask), r[1], s[0] * (1.0 / num_cols), s[1] * (1.0 / num_cols)),)


@triton.jit
def through_silu(x, p, r, mask):
    """The operands with silu'(z) * y_bar in the place of y_bar."""
    _, slope = silu_of(x_hat_of(x[1], r[0], r[1], mask), p[0], p[1])
    return x[0] * slope, x[1]


@triton.jit
def bwd_terms_silu(x, p, r, mask):
    return bwd_terms(through_silu(x, p, r, mask), p, r, mask)


@triton.jit
def bwd_emit_silu(x, p, r, s, mask, num_cols: tl.constexpr):
    return bwd_emit(through_silu(x, p, r, mask), p, r, s, mask, num_cols)


@triton.jit
def bwd_columns(x, p, r, s, mask, num_cols: tl.constexpr):
    return x[0] * x_hat_of(x[1], r[0], r[1], mask) if x[1].type.is_block() else nothing(), x[0]


# Group norm: a plane is what a sample has of one channel. Its rows are the planes, `PLANES` of a group.


@triton.jit
def plane_terms(x, p, r, mask):
    return bwd_columns(x, p, r, (), mask, 1)


@triton.jit
def plane_terms_silu(x, p, r, mask):
    return bwd_columns(through_silu(x, p, r, mask), p, r, (), mask, 1)


# How a row is summed up in the forward, by whether it is centered.
FORWARD_SUMS = {
    True: {"stats": fwd_stats, "anchor": fwd_anchor, "fold": fwd_fold, "merge": fwd_merge},
    False: {"stats": rms_stats, "fold": rms_fold, "merge": rms_merge},
}
# By whether the norm is centered, and by what follows x_hat: SiLU, or the dtype that it is rounded to.
FORWARD = {
    (centered, then): row_kernel(
        "layer_norm_fwd_kernel",
        ("x", "x_dot"),
        p=("weight", "bias", "weight_dot", "bias_dot"),
        out=("y", "y_dot"),
        s=("mean", "rstd"),
        options=("EPS",),
        emit=emit,
        **sums,
    )
    for centered, sums in FORWARD_SUMS.items()
    for then, emit in (
        (None, fwd_emit),
        ("silu", fwd_emit_silu),
        (torch.float16, fwd_emit_from_float16),
        (torch.bfloat16, fwd_emit_from_bfloat16),
    )
}
# The others by whether SiLU follows.
JVP = [
    row_kernel(
        "layer_norm_jvp_kernel",
        ("x", "x_dot"),
        p=("weight", "weight_dot", "bias_dot", "bias"),
        r=("mean", "rstd"),
        out=("y_dot",),
        emit=emit,
        terms=jvp_terms,
    )
    for emit in (jvp_emit, jvp_emit_silu)
]
_OPERANDS: Mapping[str, Any] = {"x": ("y_bar", "x"), "p": ("weight", "bias"), "r": ("mean", "rstd")}
# The cotangent of rows without the sums over them, and with them.
_X_BAR = [
    row_kernel("layer_norm_x_bar_kernel", **_OPERANDS, out=("x_bar",), emit=emit, terms=terms)
    for emit, terms in ((bwd_emit, bwd_terms), (bwd_emit_silu, bwd_terms_silu))
]
_BWD = row_sums_kernel(
    "layer_norm_bwd_kernel",
    ("y_bar", "x"),
    p=("weight",),
    r=("mean", "rstd"),
    out=("x_bar",),
    s=("weight_part", "bias_part"),
    emit=bwd_emit,
    columns=bwd_columns,
    terms=bwd_terms,
)
# Cotangents of the parameters of each plane of a group norm.
_PLANES = [
    row_kernel("layer_norm_planes_kernel", **_OPERANDS, s=("weight_part", "bias_part"), terms=terms)
    for terms in (plane_terms, plane_terms_silu)
]
BACKWARD = [Backward(rows, _BWD, planes) for rows, planes in zip(_X_BAR, _PLANES, strict=True)]
