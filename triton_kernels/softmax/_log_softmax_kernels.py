"""Kernels of log-softmax and of softmax, and of their derivatives of first and second order, on the scaffold of `rows`.

`primitives.ops.softmax` has the formulas; u is `scale * x + mask`. The jvp is the first result of the double backward
by itself, the vjp its last.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ..rows.template import row_kernel
from ..rows.tiles import exponential, nothing, rounded, sums_of

_LOWEST = tl.constexpr(float("-inf"))

# Forward: x, and for the tangent of y as well x_dot, and a mask. The sums are the maximum, the logarithm of the sum of
# exponentials relative to it, or one over that sum, and the mean of x_dot weighted with them.
LOGARITHM, SHARE, MASKED = range(3)
_LOGARITHM, _SHARE, _MASKED = (tl.constexpr(kind) for kind in (LOGARITHM, SHARE, MASKED))


@triton.jit
def _finite(top):
    """The maximum to subtract before the exponential: 0 until an element is finite, because -inf - -inf is NaN."""
    return tl.where(top == _LOWEST, 0.0, top)


@triton.jit
def scaled(value, r):
    """Times the scale, if there is one."""
    return value * r[0] if len(r) > 0 else value


@triton.jit
def _logits(x, r, mask):
    """u; what a mask takes out is -inf, whatever x is there."""
    u = x[0]
    if len(r) > 0:
        u = u * r[0]
        if mask.type.is_block():
            # Beside the row x is -inf, which a scale may turn around.
            u = tl.where(mask, u, x[0])
    if x[2].type.is_block():
        u = tl.where(x[2] == _LOWEST, _LOWEST, u + x[2])
    return u


@triton.jit
def _numbers(top, sums, KIND: tl.constexpr):
    if KIND == _LOGARITHM:
        found = top, tl.log(sums[0])
        if len(sums) == 2:
            found = found + (sums[1] / sums[0],)
    else:
        total = sums[0]
        if KIND == _MASKED:
            # A row in which no position takes part is 0.
            total = tl.where(total == 0.0, 1.0, total)
        share = 1.0 / total
        found = top, share
        if len(sums) == 2:
            found = found + (sums[1] * share,)
    return found


@triton.jit
def _fwd_stats(x, p, r, mask, num_cols: tl.constexpr, KIND: tl.constexpr):
    u = _logits(x, r, mask)
    top = tl.max(u, axis=1)[:, None]
    if KIND == _MASKED:
        top = _finite(top)
    weights = exponential(u - top)
    if x[1].type.is_block():
        sums = sums_of((weights, weights * x[1]), 2)
    else:
        sums = sums_of((weights,))
    return _numbers(top, sums, KIND)


@triton.jit
def fold_exponentials(state, x, weighted, mask):
    """The lanes' maxima, sums of exponentials relative to them, and sums weighted with these, with one more group each.

    Nothing leaves the thread that has loaded a group: each element takes one exponential, each group one more.
    """
    BY_GROUP: tl.constexpr = mask.shape[1] == 1
    if not BY_GROUP:
        x = tl.where(mask, x, _LOWEST)
    top = tl.max(x, axis=1)
    if BY_GROUP:
        top = tl.where(tl.reshape(mask, (1, mask.shape[2])), top, _LOWEST)
    top = tl.maximum(state[0], top)
    shift = _finite(top)
    scale = exponential(state[0] - shift)
    weights = exponential(x - shift[:, None, :])
    if BY_GROUP:
        weights = tl.where(mask, weights, 0.0)
    found = top, state[1] * scale + tl.sum(weights, axis=1)
    if weighted.type.is_block():
        found = found + (state[2] * scale + tl.sum(weights * weighted, axis=1),)
    return found


@triton.jit
def _fwd_fold(state, x, p, r, anchor, mask):
    return fold_exponentials(state, _logits(x, r, nothing()), x[1], mask)


@triton.jit
def merged_exponentials(state, NUM: tl.constexpr):
    """The maximum of the lanes or slices of a row, and the first `NUM` sums of `fold_exponentials` relative to it."""
    top = tl.max(state[0], axis=1)[:, None]
    # Of a row of nothing but -inf, or a slice, all sums are 0; what is made of a row's is NaN.
    scale = exponential(state[0] - _finite(top))
    tiles = ()
    for i in tl.static_range(NUM):
        tiles = tiles + (rounded(state[1 + i] * scale),)
    return top, tiles


@triton.jit
def _fwd_merge(
    state, anchor, sizes, num_cols: tl.constexpr, KIND: tl.constexpr, LEVEL: tl.constexpr, LAST: tl.constexpr
):
    top, tiles = merged_exponentials(state, len(state) - 1)
    if KIND == _MASKED and LAST:
        top = _finite(top)
    sums = sums_of(tiles, 2)
    return _numbers(top, sums, KIND) if LAST else (top,) + sums


@triton.jit
def _log_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    y_dot = nothing()
    if x[1].type.is_block():
        y_dot = x[1] - s[2]
    return x[0] - s[0] - s[1], y_dot


@triton.jit
def _share_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    y = exponential(_logits(x, r, mask) - s[0]) * s[1]
    y_dot = nothing()
    if x[1].type.is_block():
        y_dot = scaled(y * (x[1] - s[2]), r)
    return y, y_dot


# y, of x rounded to the dtype of y as in torch, and the tangent of y where there is one of x; the second is softmax's.
FORWARD = [
    row_kernel(
        f"{name}_fwd_kernel",
        ("x", "x_dot", "mask"),
        out=("y", "y_dot"),
        options=("EPS", "ROUNDED", "GROUP"),
        first=-math.inf,
        other=-math.inf,
        scaled=True,
        repeats=True,
        any_strides=True,
        stats=_fwd_stats,
        fold=_fwd_fold,
        merge=_fwd_merge,
        emit=emit,
    )
    for name, emit in (("log_softmax", _log_emit), ("softmax", _share_emit))
]


# Derivatives (see `rows.maps`): the double backward sums y_bar and p * x_dot, the jvp of the vjp y_bar and y_bar_dot.


@triton.jit
def double_backward_terms(x, p, r, mask):
    weighted = nothing()
    if x[2].type.is_block():
        weighted = exponential(x[1]) * x[2]
    return x[0], weighted


@triton.jit
def double_backward_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    y_bar_bar, output_bar, x_dot_bar = nothing(), nothing(), nothing()
    if s[1].type.is_block():
        y_bar_bar = x[2] - s[1]
    if s[0].type.is_block():
        share = exponential(x[1]) * s[0]
        if x[2].type.is_block():
            output_bar = -share * x[2]
        if x[0].type.is_block():
            x_dot_bar = x[0] - share
    return y_bar_bar, output_bar, x_dot_bar


@triton.jit
def bwd_jvp_terms(x, p, r, mask):
    return x[0], x[2]


@triton.jit
def bwd_jvp_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    if not s[0].type.is_block():
        change = s[1]
    elif s[1].type.is_block():
        change = x[3] * s[0] + s[1]
    else:
        change = x[3] * s[0]
    # Of `exponential`, ptxas spills 8 bytes where three tensors of float32 are swept along rows.
    change = -tl.exp(x[1]) * change
    return (x[2] + change if x[2].type.is_block() else change,)
