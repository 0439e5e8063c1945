"""Derivatives of softmax on the scaffold of `rows.maps`; `_log_softmax_kernels` has their formulas, and the forward."""

from __future__ import annotations

import triton
import triton.language as tl

from ..rows.tiles import nothing
from ._log_softmax_kernels import scaled


@triton.jit
def double_backward_terms(x, p, r, mask):
    total, dot_total = nothing(), nothing()
    if x[0].type.is_block():
        total = x[1] * x[0]
    if x[2].type.is_block():
        dot_total = x[1] * x[2]
    return total, dot_total


@triton.jit
def double_backward_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    y_bar_bar, output_bar, x_dot_bar = nothing(), nothing(), nothing()
    if s[1].type.is_block():
        change = x[2] - s[1]
        if x[1].type.is_block():
            y_bar_bar = scaled(x[1] * change, r)
        if s[0].type.is_block():
            output_bar = scaled(x[0] * change - x[2] * s[0], r)
    if s[0].type.is_block():
        change_bar = x[0] - s[0]
        if x[1].type.is_block():
            x_dot_bar = scaled(x[1] * change_bar, r)
    return y_bar_bar, output_bar, x_dot_bar


@triton.jit
def bwd_jvp_terms(x, p, r, mask):
    total = nothing()
    if not x[3].type.is_block():
        change = x[1] * x[2]
    else:
        total = x[1] * x[0]
        change = x[3] * x[0]
        if x[2].type.is_block():
            change += x[1] * x[2]
    return total, change


@triton.jit
def bwd_jvp_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    change = x[1] * (x[2] - s[1] if x[2].type.is_block() else -s[1])
    if x[3].type.is_block():
        change += x[3] * (x[0] - s[0])
    return (scaled(change, r),)
