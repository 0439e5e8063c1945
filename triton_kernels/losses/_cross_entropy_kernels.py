"""Kernels of cross-entropy and its derivatives of first and second order, on the scaffold of `rows`.

`primitives.ops.losses.cross_entropy` has the formulas of the sums, and p and m. With t = keep * target + share, where a
label stands for the probability 1 of its class, T = sum(t), and cotangents u and v of loss and lse,

    a = u * T + v,    a_dot = u_dot * T + v_dot

    x_bar = a_dot * p - u_dot * t  +  p * (a * (x_dot - m) + u * T_dot) - u * t_dot
    target_bar = keep * (u_dot * (lse - x)  +  u * (m - x_dot))

The first half of a gradient is the vjp, with the cotangents in the place of their tangents; all of it is the jvp of the
vjp. Numbers of a row come behind the label: keep, and share where it is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from ..rows.template import row_kernel
from ..rows.tiles import exponential, in_places, nothing, sums_of
from ..softmax._log_softmax_kernels import fold_exponentials, merged_exponentials

# Sums: x, probabilities, x_dot and the tangent of the probabilities. The places are the maximum; relative to it the sum
# of exponentials, and that of x_dot weighted with them; the sums of t * x, of t * x_dot + t_dot * x, of the
# probabilities and of their tangent. Beside a label, t is the share alone: of its own class x and x_dot are read by
# themselves. The numbers of a row are the label, these of the operands, keep and share.
_PLACES = tl.constexpr(7)


@triton.jit
def _share_of_target(target, keep, share):
    """t, without the class of a label; `nothing()` if nothing is left."""
    t = nothing()
    if target.type.is_block():
        t = target * keep
        if share.type.is_block():
            t += share
    elif share.type.is_block():
        t = share
    return t


@triton.jit
def _plain_tiles(x, target, x_dot, target_dot, keep, share):
    """The tiles whose sums are not relative to the maximum; x is 0 past the end of a row."""
    t = _share_of_target(target, keep, share)
    tiles = ()
    if t.type.is_block():
        tiles = tiles + (t * x,)
    if target_dot.type.is_block():
        more = keep * target_dot * x
        if x_dot.type.is_block():
            more += t * x_dot
        tiles = tiles + (more,)
    elif t.type.is_block() and x_dot.type.is_block():
        tiles = tiles + (t * x_dot,)
    for tile in tl.static_range(2):
        if (target, target_dot)[tile].type.is_block():
            tiles = tiles + ((target, target_dot)[tile],)
    return tiles


@triton.jit
def _fwd_stats(x, p, r, mask, num_cols: tl.constexpr, SUM_MASK: tl.constexpr):
    top = tl.max(x[0], axis=1)[:, None]
    weights = exponential(x[0] - top)
    tiles = (weights,)
    if x[2].type.is_block():
        tiles = tiles + (weights * x[2],)
    tiles = tiles + _plain_tiles(tl.where(mask, x[0], 0.0), x[1], x[2], x[3], r[5], r[6])
    return in_places((top,) + sums_of(tiles, 2), _PLACES, SUM_MASK)


@triton.jit
def _fwd_fold(state, x, p, r, anchor, mask):
    found = fold_exponentials(state, x[0], x[2], mask)
    tiles = _plain_tiles(x[0], x[1], x[2], x[3], r[5], r[6])
    for i in tl.static_range(len(tiles)):
        found = found + (state[len(found)] + tl.sum(tiles[i], axis=1),)
    return found


@triton.jit
def _fwd_merge(
    state, anchor, sizes, num_cols: tl.constexpr, SUM_MASK: tl.constexpr, LEVEL: tl.constexpr, LAST: tl.constexpr
):
    RELATIVE: tl.constexpr = 1 + ((SUM_MASK >> 2) & 1)
    top, tiles = merged_exponentials(state, RELATIVE)
    for i in tl.static_range(1 + RELATIVE, len(state)):
        tiles = tiles + (state[i],)
    return in_places((top,) + sums_of(tiles, 2), _PLACES, SUM_MASK)


@triton.jit
def _total(plain_sum, keep, share, num_cols: tl.constexpr):
    """Sum of t: of labels 1, or of probabilities by their sum."""
    if plain_sum.type.is_block():
        total = plain_sum * keep
        if share.type.is_block():
            total += share * num_cols
    else:
        total = keep * 0.0 + 1.0
    return total


@triton.jit
def _fwd_rows(s, r, num_cols: tl.constexpr):
    log_sum = tl.log(s[1])
    lse = s[0] + log_sum
    keep, share = r[5], r[6]
    total = _total(s[5], keep, share, num_cols)
    # The sum of t * x.
    product = keep * 0.0
    if s[3].type.is_block():
        product = s[3]
    if r[1].type.is_block():
        product += keep * r[1]
    loss = log_sum * total - (product - s[0] * total)
    loss_dot, lse_dot = nothing(), nothing()
    if s[2].type.is_block():
        lse_dot = s[2] / s[1]
        loss_dot = lse_dot * total
        if r[3].type.is_block():
            loss_dot -= keep * r[3]
        if s[4].type.is_block():
            loss_dot -= s[4]
    elif s[4].type.is_block():
        lse_dot = s[0] * 0.0
        loss_dot = -s[4]
    if s[6].type.is_block():
        loss_dot += lse * keep * s[6]
    if r[1].type.is_block():
        # A label that is negative ignores its row.
        loss = tl.where(r[0] >= 0, loss, 0.0)
        if loss_dot.type.is_block():
            loss_dot = tl.where(r[0] >= 0, loss_dot, 0.0)
    return loss, lse, loss_dot, lse_dot


_OPERANDS: Mapping[str, Any] = {
    "x": ("x", "target", "x_dot", "target_dot"),
    "numbers": 2,
    "other": -math.inf,
    "any_strides": True,
}
# Loss and lse of each row, and their tangents where there is one of x or of the probabilities.
cross_entropy_sums_kernel = row_kernel(
    "cross_entropy_sums_kernel",
    **_OPERANDS,
    r=("label",),
    s=("loss", "lse", "loss_dot", "lse_dot"),
    options=("EPS", "GROUP", "PICKS"),
    first=-math.inf,
    stats=_fwd_stats,
    fold=_fwd_fold,
    merge=_fwd_merge,
    rows=_fwd_rows,
)


# Gradient: the same operands; the sums of the probabilities, of p * x_dot and of the tangent of the probabilities. The
# numbers of a row are the label, lse, u, v, u_dot, v_dot.


@triton.jit
def _target(x, p, r, factor, KEEP: tl.constexpr, SHARE: tl.constexpr):
    """`factor` times t: 0 beside a label, whatever the factor is there, unless there is a share."""
    if x[1].type.is_block():
        found = x[1] * r[KEEP] * factor
    else:
        found = tl.where(p[0].to(tl.int32) == r[0].to(tl.int32), r[KEEP] * factor, 0.0)
    if r[SHARE].type.is_block():
        found += r[SHARE] * factor
    return found


@triton.jit
def _gradient_terms(x, p, r, mask):
    total, mean, total_dot = nothing(), nothing(), nothing()
    if x[1].type.is_block():
        total = x[1]
    if x[2].type.is_block():
        mean = exponential(x[0] - r[1]) * x[2]
    if x[3].type.is_block():
        total_dot = x[3]
    return total, mean, total_dot


@triton.jit
def _kept(bar, r, x):
    """A cotangent of the loss: that of a row which is ignored is 0."""
    return bar if x[1].type.is_block() else tl.where(r[0] >= 0, bar, 0.0)


@triton.jit
def _gradient_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    log_p = x[0] - r[1]
    prob = exponential(log_p)
    total = _total(s[0], r[6], r[7], num_cols)
    # Sums of tiles times numbers of rows, which begin with nothing.
    x_bar = prob * 0.0
    target_bar = x_bar
    a_dot = r[1] * 0.0
    if r[4].type.is_block():
        u_dot = _kept(r[4], r, x)
        a_dot = u_dot * total
        x_bar -= _target(x, p, r, u_dot, 6, 7)
        target_bar -= u_dot * tl.where(mask, log_p, 0.0)
    if r[5].type.is_block():
        a_dot += r[5]
    if r[2].type.is_block():
        u = _kept(r[2], r, x)
        a = u * total
        if r[3].type.is_block():
            a += r[3]
        if x[3].type.is_block():
            a_dot += u * r[6] * s[2]
            x_bar -= u * r[6] * x[3]
        if x[2].type.is_block():
            target_bar -= u * (x[2] - s[1])
            x_bar += prob * a * (x[2] - s[1])
    elif r[3].type.is_block() and x[2].type.is_block():
        x_bar += prob * r[3] * (x[2] - s[1])
    return x_bar + prob * a_dot, target_bar * r[6]


# x_bar and target_bar, or their tangents, those for which there is memory.
cross_entropy_gradient_kernel = row_kernel(
    "cross_entropy_gradient_kernel",
    **_OPERANDS,
    r=("label", "lse", "u", "v", "u_dot", "v_dot"),
    out=("x_bar", "target_bar"),
    terms=_gradient_terms,
    emit=_gradient_emit,
)
