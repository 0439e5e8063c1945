"""Kernels of the norms of a sum and their derivatives of first order: those of layer norm, of tiles that are mixed.

    forward         s = residual + x * noise,  y of s
    jvp             s_dot = residual_dot + x_dot * noise,  y_dot of it
    vjp             residual_bar = x_bar of layer norm + s_bar,  x_bar = residual_bar * noise

`mix` turns the loaded tiles into the operands of layer norm's functions: s and its tangent, or y_bar and s.
"""

# Pyright takes device functions for Python: it knows neither tuples of tiles nor what is settled at compile time.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false

from __future__ import annotations

import triton
import triton.language as tl

from triton_kernels.norms._layer_norm_steps import (
    bwd_columns,
    bwd_emit,
    bwd_terms,
    fwd_anchor,
    fwd_emit,
    fwd_emit_from_bfloat16,
    fwd_emit_from_float16,
    fwd_fold,
    fwd_merge,
    fwd_stats,
    jvp_emit,
    jvp_terms,
    rms_fold,
    rms_merge,
    rms_stats,
)
from triton_kernels.rows.kernel import row_op
from triton_kernels.rows.sums import row_sums_op
from triton_kernels.rows.tiles import nothing
from triton_kernels.runtime.kernel import batch_independent_jit
from triton_kernels.runtime.numbers import cast
from triton_kernels.runtime.philox_steps import noise_of


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


@batch_independent_jit
def add_layer_norm_fwd_kernel(
    x_ptr, x_segment_stride, x_row_stride, x_col_stride,
    residual_ptr, residual_segment_stride, residual_row_stride, residual_col_stride,
    x_dot_ptr, x_dot_segment_stride, x_dot_row_stride, x_dot_col_stride,
    residual_dot_ptr, residual_dot_segment_stride, residual_dot_row_stride, residual_dot_col_stride,
    weight_ptr, weight_stride, bias_ptr, bias_stride, weight_dot_ptr, weight_dot_stride, bias_dot_ptr, bias_dot_stride,
    s_ptr, y_ptr, y_dot_ptr, s_dot_ptr, out_segment_stride, out_row_stride, out_col_stride, mean_ptr, rstd_ptr,
    seed_ptr, seed_segment_stride, num_stream_rows, last_dropped, scale_low, scale_high,
    parts_ptr, num_splits, num_rows,
    num_cols: tl.constexpr, EPS: tl.constexpr, DTYPE: tl.constexpr, AXES: tl.constexpr, TWO_LEVEL: tl.constexpr,
    ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    MODE: tl.constexpr, SUM_READS: tl.constexpr, EMIT_READS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Add and normalize rows: s, y, mean and rstd; and the tangents of y and s where there is memory for them.

    With `ROUNDED`, y takes x_hat in the dtype of y, float16 or bfloat16.
    """
    CENTERED: tl.constexpr = mean_ptr is not None
    HAS_DOT: tl.constexpr = x_dot_ptr is not None or residual_dot_ptr is not None
    IS_FLOAT16: tl.constexpr = y_ptr.dtype.element_ty == tl.float16
    HALF: tl.constexpr = _add_fwd_emit_from_float16 if IS_FLOAT16 else _add_fwd_emit_from_bfloat16
    row_op(
        (x_ptr, residual_ptr, x_dot_ptr, residual_dot_ptr),
        ((x_segment_stride, x_row_stride, x_col_stride),
         (residual_segment_stride, residual_row_stride, residual_col_stride),
         (x_dot_segment_stride, x_dot_row_stride, x_dot_col_stride),
         (residual_dot_segment_stride, residual_dot_row_stride, residual_dot_col_stride)),
        (weight_ptr, bias_ptr, weight_dot_ptr, bias_dot_ptr),
        (weight_stride, bias_stride, weight_dot_stride, bias_dot_stride),
        (), 0, (s_ptr, y_ptr, y_dot_ptr, s_dot_ptr), (out_segment_stride, out_row_stride, out_col_stride),
        (mean_ptr, rstd_ptr, None, None), parts_ptr, num_splits, num_rows,
        HALF if ROUNDED else _add_fwd_emit, (0.0, 0.0, 0.0, 0.0) if HAS_DOT else (0.0, 0.0), num_cols, DTYPE,
        AXES, TWO_LEVEL, ALIGN, ROW_ALIGN, BLOCK_ROWS, BLOCK_COLS, MODE, SUM_READS, EMIT_READS, STAGES, BLOCK_SPLITS,
        STATS=fwd_stats if CENTERED else rms_stats, ANCHOR=fwd_anchor if CENTERED else None,
        FOLD=fwd_fold if CENTERED else rms_fold, MERGE=fwd_merge if CENTERED else rms_merge,
        WANTED=0b1111 if CENTERED else 0b1010, EPS=EPS, ANCHOR_READS=0b11, MIX=_fwd_mix,
        noise=(seed_ptr, seed_segment_stride, num_stream_rows, last_dropped, scale_low, scale_high),
    )  # fmt: skip


# JVP: s, and the tangents of x and residual; as that of layer norm of s and s_dot.


@triton.jit
def _jvp_mix(x, stream, out_ptrs, row, start, num_cols: tl.constexpr, BLOCK_COLS: tl.constexpr, DTYPE: tl.constexpr):
    return x[0], _added(x[1], x[2], _noise(stream, row, start, num_cols, BLOCK_COLS, DTYPE))


@triton.jit
def _add_jvp_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    return _or_zero(x[1], mask, tl.float32), jvp_emit(x, p, r, s, mask, num_cols)[0]


@batch_independent_jit
def add_layer_norm_jvp_kernel(
    s_ptr, s_segment_stride, s_row_stride, s_col_stride,
    x_dot_ptr, x_dot_segment_stride, x_dot_row_stride, x_dot_col_stride,
    residual_dot_ptr, residual_dot_segment_stride, residual_dot_row_stride, residual_dot_col_stride,
    weight_ptr, weight_stride, weight_dot_ptr, weight_dot_stride, bias_dot_ptr, bias_dot_stride,
    mean_ptr, rstd_ptr, s_dot_ptr, y_dot_ptr, out_segment_stride, out_row_stride, out_col_stride,
    seed_ptr, seed_segment_stride, num_stream_rows, last_dropped, scale_low, scale_high,
    parts_ptr, num_splits, num_rows,
    num_cols: tl.constexpr, DTYPE: tl.constexpr, AXES: tl.constexpr, TWO_LEVEL: tl.constexpr,
    ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    MODE: tl.constexpr, SUM_READS: tl.constexpr, EMIT_READS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Tangents of rows, of s and y."""
    HAS_DOT: tl.constexpr = x_dot_ptr is not None or residual_dot_ptr is not None
    row_op(
        (s_ptr, x_dot_ptr, residual_dot_ptr),
        ((s_segment_stride, s_row_stride, s_col_stride), (x_dot_segment_stride, x_dot_row_stride, x_dot_col_stride),
         (residual_dot_segment_stride, residual_dot_row_stride, residual_dot_col_stride)),
        (weight_ptr, weight_dot_ptr, bias_dot_ptr), (weight_stride, weight_dot_stride, bias_dot_stride),
        (mean_ptr, rstd_ptr), 2, (s_dot_ptr, y_dot_ptr), (out_segment_stride, out_row_stride, out_col_stride),
        (None, None), parts_ptr, num_splits, num_rows,
        _add_jvp_emit, (0.0, 0.0) if HAS_DOT else (), num_cols, DTYPE, AXES, TWO_LEVEL, ALIGN, ROW_ALIGN,
        BLOCK_ROWS, BLOCK_COLS, MODE, SUM_READS, EMIT_READS, STAGES, BLOCK_SPLITS, TERMS=jvp_terms,
        WANTED=0b11 if mean_ptr is not None else 0b10, MIX=_jvp_mix,
        noise=(seed_ptr, seed_segment_stride, num_stream_rows, last_dropped, scale_low, scale_high),
    )  # fmt: skip


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


@batch_independent_jit
def add_layer_norm_x_bar_kernel(
    y_bar_ptr, y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride,
    s_ptr, s_segment_stride, s_row_stride, s_col_stride,
    s_bar_ptr, s_bar_segment_stride, s_bar_row_stride, s_bar_col_stride, weight_ptr, weight_stride,
    mean_ptr, rstd_ptr, x_bar_ptr, residual_bar_ptr, out_segment_stride, out_row_stride, out_col_stride,
    seed_ptr, seed_segment_stride, num_stream_rows, last_dropped, scale_low, scale_high,
    parts_ptr, num_splits, num_rows,
    num_cols: tl.constexpr, DTYPE: tl.constexpr, AXES: tl.constexpr, TWO_LEVEL: tl.constexpr,
    ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    MODE: tl.constexpr, SUM_READS: tl.constexpr, EMIT_READS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Cotangents of rows, without the sums over them."""
    row_op(
        (y_bar_ptr, s_ptr, s_bar_ptr),
        ((y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride), (s_segment_stride, s_row_stride, s_col_stride),
         (s_bar_segment_stride, s_bar_row_stride, s_bar_col_stride)),
        (weight_ptr,), (weight_stride,), (mean_ptr, rstd_ptr), 2, (x_bar_ptr, residual_bar_ptr),
        (out_segment_stride, out_row_stride, out_col_stride), (None, None), parts_ptr, num_splits, num_rows,
        _add_bwd_emit, (0.0, 0.0), num_cols, DTYPE, AXES, TWO_LEVEL, ALIGN, ROW_ALIGN,
        BLOCK_ROWS, BLOCK_COLS, MODE, SUM_READS, EMIT_READS, STAGES, BLOCK_SPLITS, TERMS=bwd_terms,
        WANTED=0b11 if mean_ptr is not None else 0b10, MIX=_bwd_mix,
        noise=(seed_ptr, seed_segment_stride, num_stream_rows, last_dropped, scale_low, scale_high),
    )  # fmt: skip


@batch_independent_jit
def add_layer_norm_bwd_kernel(
    y_bar_ptr, y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride,
    s_ptr, s_segment_stride, s_row_stride, s_col_stride,
    s_bar_ptr, s_bar_segment_stride, s_bar_row_stride, s_bar_col_stride, weight_ptr, weight_stride,
    mean_ptr, rstd_ptr, x_bar_ptr, residual_bar_ptr, out_segment_stride, out_row_stride, out_col_stride,
    weight_part_ptr, bias_part_ptr, seed_ptr, seed_segment_stride, num_stream_rows, last_dropped, scale_low,
    scale_high, num_splits, num_rows,
    num_cols: tl.constexpr, DTYPE: tl.constexpr, AXES: tl.constexpr, ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Cotangents of rows, if there is memory for them, and the sums over them."""
    WRITES: tl.constexpr = x_bar_ptr is not None or residual_bar_ptr is not None
    row_sums_op(
        (y_bar_ptr, s_ptr, s_bar_ptr),
        ((y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride), (s_segment_stride, s_row_stride, s_col_stride),
         (s_bar_segment_stride, s_bar_row_stride, s_bar_col_stride)),
        (weight_ptr,), (weight_stride,), (mean_ptr, rstd_ptr), 2, (x_bar_ptr, residual_bar_ptr),
        (out_segment_stride, out_row_stride, out_col_stride), (None, None), (weight_part_ptr, bias_part_ptr), 2,
        num_splits, num_rows, _add_bwd_emit, bwd_columns, (0.0, 0.0) if WRITES else (), num_cols, DTYPE, AXES,
        ALIGN, BLOCK_ROWS, BLOCK_COLS, STAGES, WRITES, TERMS=bwd_terms,
        WANTED=0b11 if mean_ptr is not None else 0b10, MIX=_bwd_mix,
        noise=(seed_ptr, seed_segment_stride, num_stream_rows, last_dropped, scale_low, scale_high),
    )  # fmt: skip
