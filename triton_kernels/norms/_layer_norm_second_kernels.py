"""Second-order layer norm kernels, on the scaffold of `rows` and `sums`.

All of them are parts of the gradient of one scalar, <y_bar, y_dot> + <y_bar_dot, y>: `primitives.ops.norms.formulas`
has it, with A, B, P and the prime. With h = P(x_dot), g = y_bar * weight and k = y_bar * weight_dot + y_bar_dot *
weight, one of them is computed in another way:

    x' = P(k) - rstd * (B * h + A * P(g) + mean(g * h) * x_hat)

where mean(g * h) = rstd * (C / num_cols - A * B), and C is the sum of the products of x_dot and g, each less its mean:
h sums to zero only up to rounding, which a large mean of g would amplify. Tiles of full size are `x = (x_dot, y_bar, x,
y_bar_dot)`, parameters `p = (weight, weight_dot, bias_dot)`, statistics `r = (mean, rstd)` and, of a kernel that owns
columns, sums of x_dot and of x_dot * x_hat. The sums of a row are, each with a bit in `SUM_MASK` if a result takes it,

    s = sum(x_dot), sum(x_dot * x_hat), sum(g), sum(g * x_hat), sum(k), sum(k * x_hat), C

RMS norm has all this without the mean, the first, third and fifth sum, and the subtractions in C.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from ..rows.template import row_kernel, row_sums_kernel
from ..rows.tiles import add_tiles, nothing, sums_of
from ._layer_norm_kernels import project, with_param_dots, x_hat_of


@triton.jit
def _factors(x, p, r, mask):
    """x_hat, g and k, as far as their operands are there."""
    x_hat, g, k = nothing(), x[1], nothing()
    if x[2].type.is_block():
        x_hat = x_hat_of(x[2], r[0], r[1], mask)
    if x[1].type.is_block():
        if p[0].type.is_block():
            g = x[1] * p[0]
        if p[1].type.is_block():
            k = x[1] * p[1]
    if x[3].type.is_block():
        term = x[3]
        if p[0].type.is_block():
            term = x[3] * p[0]
        k = k + term if k.type.is_block() else term
    return x_hat, g, k


@triton.jit
def _terms(x, p, r, mask):
    x_hat, g, k = _factors(x, p, r, mask)
    found = ()
    for v in tl.static_range(3):
        tile = x[0] if v == 0 else g if v == 1 else k
        product = nothing()
        if tile.type.is_block():
            product = tile * x_hat
        found = found + (tile, product)
    return found


@triton.jit
def _all_terms(x, p, r, mask):
    terms = _terms(x, p, r, mask)
    product = nothing()
    if x[0].type.is_block() and terms[2].type.is_block():
        product = x[0] * terms[2]
    return terms + (product,)


@triton.jit
def _without_nothing(tiles):
    found = ()
    for i in tl.static_range(len(tiles)):
        if tiles[i].type.is_block():
            found = found + (tiles[i],)
    return found


@triton.jit
def _in_seven(sums, c):
    """The sums of a row whose x' takes the tangent of x: all, or without those of k."""
    if len(sums) < 6:
        found = sums[0], sums[1], sums[2], sums[3], nothing(), nothing(), c
    else:
        found = sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], c
    return found


# Where x' takes the tangent of x, its operands are all that is there, and so are the terms.


@triton.jit
def _stats(x, p, r, mask, num_cols: tl.constexpr, EPS: tl.constexpr):
    terms = _terms(x, p, r, mask)
    sums = sums_of(_without_nothing(terms))
    product = (x[0] - sums[0] * (1.0 / num_cols)) * (terms[2] - sums[2] * (1.0 / num_cols))
    return _in_seven(sums, sums_of((tl.where(mask, product, 0.0),))[0])


@triton.jit
def _anchor(x, mask, count):
    return (sums_of((x[0],))[0] / count,)


@triton.jit
def _fold(state, x, p, r, anchor, mask):
    # Of C one factor is shifted close to its mean, so that the product of sums that is subtracted in the end is small.
    shifted = tl.where(mask, x[0] - anchor[0], 0.0)
    terms = _terms(x, p, r, mask)
    terms = _in_seven((shifted, terms[1], terms[2], terms[3], terms[4], terms[5]), shifted * terms[2])
    return add_tiles(state, _without_nothing(terms))


@triton.jit
def _merge(state, anchor, sizes, num_cols: tl.constexpr, EPS: tl.constexpr, LEVEL: tl.constexpr, LAST: tl.constexpr):
    NUM: tl.constexpr = len(state)
    sums = sums_of(state)
    if LEVEL == 1:
        c = sums[NUM - 1] - sums[0] * (sums[2] / sizes)
        x_dot_sum = sums[0] + anchor[0] * sizes
    else:
        # An empty slice has a weight of 0, and no mean.
        counts = tl.maximum(sizes, 1.0)
        x_dot_shifts = state[0] / counts - sums[0] * (1.0 / num_cols)
        g_shifts = state[2] / counts - sums[2] * (1.0 / num_cols)
        c = sums[NUM - 1] + sums_of((x_dot_shifts * g_shifts * sizes,))[0]
        x_dot_sum = sums[0]
    if NUM == 7:
        found = x_dot_sum, sums[1], sums[2], sums[3], sums[4], sums[5], c
    else:
        found = x_dot_sum, sums[1], sums[2], sums[3], nothing(), nothing(), c
    return found


@triton.jit
def _emit(x, p, r, s, mask, num_cols: tl.constexpr):
    x_hat, g, k = _factors(x, p, r, mask)
    SHARE: tl.constexpr = 1.0 / num_cols
    y_bar_bar, x_bar, x_dot_bar, h = nothing(), nothing(), nothing(), nothing()
    if x[0].type.is_block():
        h = project(x[0], x_hat, r[1], s[0] * SHARE, s[1] * SHARE)
        y_bar_bar = h * p[0] if p[0].type.is_block() else h
    y_bar_bar = with_param_dots(y_bar_bar, x_hat, p[1], p[2])
    if s[3].type.is_block():
        x_dot_bar = project(g, x_hat, r[1], s[2] * SHARE, s[3] * SHARE)
    if s[6].type.is_block():
        # The term from the dependence of P on x; its part along x_hat shares a factor with that of P(k).
        a, b = s[1] * SHARE, s[3] * SHARE
        along = r[1] * (s[6] * SHARE - a * b)
        if s[5].type.is_block():
            bent = h * (r[1] * b) + x_dot_bar * (r[1] * a)
            x_bar = project(k, x_hat, r[1], s[4] * SHARE, s[5] * SHARE + along) - bent
        else:
            x_bar = -r[1] * (b * h + a * x_dot_bar + along * x_hat)
    elif s[5].type.is_block():
        x_bar = project(k, x_hat, r[1], s[4] * SHARE, s[5] * SHARE)
    return y_bar_bar, x_bar, x_dot_bar


@triton.jit
def _columns(x, p, r, s, mask, num_cols: tl.constexpr):
    SHARE: tl.constexpr = 1.0 / num_cols
    x_hat, weight, weight_dot, bias = nothing(), nothing(), nothing(), x[1]
    if x[2].type.is_block():
        x_hat = x_hat_of(x[2], r[0], r[1], mask)
        if x[1].type.is_block():
            weight_dot = x[1] * x_hat
    if x[0].type.is_block() and x[1].type.is_block():
        if r[3].type.is_block():
            weight = x[1] * project(x[0], x_hat, r[1], r[2] * SHARE, r[3] * SHARE)
        else:
            weight = x[1] * project(x[0], x_hat, r[1], s[0] * SHARE, s[1] * SHARE)
    if x[3].type.is_block():
        bias = x[3]
        if x_hat.type.is_block():
            weight = weight + x[3] * x_hat if weight.type.is_block() else x[3] * x_hat
    return weight, weight_dot, bias


@triton.jit
def _plane_terms(x, p, r, mask):
    # Sums over a group as means, of which `_columns` takes a share of one.
    means = ()
    for i in tl.static_range(2, 4):
        means = means + (r[i] * r[4] if r[i].type.is_block() else r[i],)
    return _columns(x, p, (r[0], r[1]) + means, (), mask, 1)


_OPERANDS: Mapping[str, Any] = {"x": ("x_dot", "y_bar", "x", "y_bar_dot"), "p": ("weight", "weight_dot", "bias_dot")}
_OUT = ("y_bar_bar", "x_bar", "x_dot_bar")
_X_DOT_SUMS = ("x_dot_sum", "x_dot_x_hat_sum")
_PARTS = ("weight_part", "weight_dot_part", "bias_part")

# Derivatives of rows, and the sums of x_dot for a kernel that sums over rows; then derivatives of rows with the sums
# over them, or, from the sums of x_dot, these alone. The second of each is for C, which is no plain sum.
ROWS = [
    row_kernel(
        "layer_norm_second_kernel", **_OPERANDS, r=("mean", "rstd"), out=_OUT, s=_X_DOT_SUMS, emit=_emit, **functions
    )
    for functions in ({"terms": _all_terms}, {"stats": _stats, "anchor": _anchor, "fold": _fold, "merge": _merge})
]
SUMS = [
    row_sums_kernel(
        "layer_norm_second_sums_kernel",
        **_OPERANDS,
        r=("mean", "rstd", *_X_DOT_SUMS),
        out=_OUT,
        s=_PARTS,
        emit=_emit,
        columns=_columns,
        **functions,
    )
    for functions in ({"terms": _all_terms}, {"stats": _stats})
]
# Derivatives of the parameters of each plane of a group norm, from the sums of x_dot over its group.
layer_norm_second_planes_kernel = row_kernel(
    "layer_norm_second_planes_kernel",
    _OPERANDS["x"],
    r=("mean", "rstd", *_X_DOT_SUMS),
    s=_PARTS,
    numbers=1,
    terms=_plane_terms,
)
