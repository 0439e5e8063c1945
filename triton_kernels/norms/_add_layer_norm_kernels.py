"""Kernels of the norms of a sum and their derivatives of first order: those of layer norm, of tiles that are mixed.

    forward         s = residual + x * noise,  y of s
    jvp             s_dot = residual_dot + x_dot * noise,  y_dot of it
    vjp             residual_bar = x_bar of layer norm + s_bar,  x_bar = residual_bar * noise

`mix` turns the loaded tiles into the operands of layer norm's functions: s and its tangent, or y_bar and s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from ..rows.template import row_kernel, row_sums_kernel
from ..rows.tiles import nothing
from ..runtime.numbers import cast
from ..runtime.philox_steps import noise_of
from ._launch import Backward
from ._layer_norm_kernels import (
    FORWARD_SUMS,
    bwd_columns,
    bwd_emit,
    bwd_terms,
    fwd_emit,
    fwd_emit_from_bfloat16,
    fwd_emit_from_float16,
    jvp_emit,
    jvp_terms,
)


@triton.jit
def _noise(stream, row, start, num_cols: tl.constexpr, BLOCK_COLS: tl.constexpr, DTYPE: tl.constexpr):
    noise = nothing()
    if len(stream) > 0:
        noise = noise_of(stream, row, start, num_cols, BLOCK_COLS, DTYPE)
    return noise


@triton.jit
def _added(x, residual, noise):
    """`residual + x * noise`; `nothing()` without either."""
    if noise.type.is_block() and x.type.is_block():
        x = x * noise
    if not x.type.is_block():
        total = residual
    elif not residual.type.is_block():
        total = x
    else:
        total = residual + x
    return total


@triton.jit
def _or_zero(tile, mask, DTYPE: tl.constexpr):
    if not tile.type.is_block():
        tile = tl.zeros(mask.shape, DTYPE)
    return tile


# Forward: x, residual, and their tangents; as layer norm of s and s_dot.


@triton.jit
def _fwd_mix(x, stream, out_ptrs, row, start, num_cols: tl.constexpr, BLOCK_COLS: tl.constexpr, DTYPE: tl.constexpr):
    noise = _noise(stream, row, start, num_cols, BLOCK_COLS, DTYPE)
    s = cast(cast(_added(x[0], x[1], noise), out_ptrs[0].dtype.element_ty), DTYPE)
    return s, _added(x[2], x[3], noise)


@triton.jit
def _with_sums(x, values, mask):
    return x[0], values[0], values[1], _or_zero(x[1], mask, tl.float32)


@triton.jit
def _add_fwd_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    return _with_sums(x, fwd_emit(x, p, r, s, mask, num_cols), mask)


@triton.jit
def _add_fwd_emit_from_float16(x, p, r, s, mask, num_cols: tl.constexpr):
    return _with_sums(x, fwd_emit_from_float16(x, p, r, s, mask, num_cols), mask)


@triton.jit
def _add_fwd_emit_from_bfloat16(x, p, r, s, mask, num_cols: tl.constexpr):
    return _with_sums(x, fwd_emit_from_bfloat16(x, p, r, s, mask, num_cols), mask)


# Add and normalize rows: s, y, mean and rstd, and the tangents of y and s; as layer norm's.
FORWARD = {
    (centered, then): row_kernel(
        "add_layer_norm_fwd_kernel",
        ("x", "residual", "x_dot", "residual_dot"),
        p=("weight", "bias", "weight_dot", "bias_dot"),
        out=("s", "y", "y_dot", "s_dot"),
        s=("mean", "rstd"),
        options=("EPS",),
        emit=emit,
        mix=_fwd_mix,
        **sums,
    )
    for centered, sums in FORWARD_SUMS.items()
    for then, emit in (
        (None, _add_fwd_emit),
        (torch.float16, _add_fwd_emit_from_float16),
        (torch.bfloat16, _add_fwd_emit_from_bfloat16),
    )
}


# JVP: s, and the tangents of x and residual; as that of layer norm of s and s_dot.


@triton.jit
def _jvp_mix(x, stream, out_ptrs, row, start, num_cols: tl.constexpr, BLOCK_COLS: tl.constexpr, DTYPE: tl.constexpr):
    return x[0], _added(x[1], x[2], _noise(stream, row, start, num_cols, BLOCK_COLS, DTYPE))


@triton.jit
def _add_jvp_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    return _or_zero(x[1], mask, tl.float32), jvp_emit(x, p, r, s, mask, num_cols)[0]


JVP = row_kernel(
    "add_layer_norm_jvp_kernel",
    ("s", "x_dot", "residual_dot"),
    p=("weight", "weight_dot", "bias_dot"),
    r=("mean", "rstd"),
    out=("s_dot", "y_dot"),
    emit=_add_jvp_emit,
    terms=jvp_terms,
    mix=_jvp_mix,
)


# VJP: y_bar, s and s_bar; as that of layer norm of y_bar and s, and the noise at last.


@triton.jit
def _bwd_mix(x, stream, out_ptrs, row, start, num_cols: tl.constexpr, BLOCK_COLS: tl.constexpr, DTYPE: tl.constexpr):
    return x + (_noise(stream, row, start, num_cols, BLOCK_COLS, DTYPE),)


@triton.jit
def _add_bwd_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    bar = bwd_emit(x, p, r, s, mask, num_cols)[0]
    if x[2].type.is_block():
        bar = bar + x[2]
    return bar * x[3] if x[3].type.is_block() else bar, bar


_OPERANDS: Mapping[str, Any] = {
    "x": ("y_bar", "s", "s_bar"),
    "p": ("weight",),
    "r": ("mean", "rstd"),
    "out": ("x_bar", "residual_bar"),
}
_FUNCTIONS = {"emit": _add_bwd_emit, "terms": bwd_terms, "mix": _bwd_mix}
# Cotangents of rows without the sums over them, and with them.
BACKWARD = Backward(
    row_kernel("add_layer_norm_x_bar_kernel", **_OPERANDS, **_FUNCTIONS),
    row_sums_kernel(
        "add_layer_norm_bwd_kernel", **_OPERANDS, s=("weight_part", "bias_part"), columns=bwd_columns, **_FUNCTIONS
    ),
)
