"""Kernels of layer norm and RMS norm and their derivatives of first order: `_layer_norm_steps` has their formulas."""

# Pyright takes device functions for Python: it knows neither tuples of tiles nor what is settled at compile time.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton.language as tl

from triton_kernels.norms._layer_norm_steps import (
    bwd_columns,
    bwd_emit,
    bwd_emit_silu,
    bwd_terms,
    bwd_terms_silu,
    fwd_anchor,
    fwd_emit,
    fwd_emit_from_bfloat16,
    fwd_emit_from_float16,
    fwd_emit_silu,
    fwd_fold,
    fwd_merge,
    fwd_stats,
    jvp_emit,
    jvp_emit_silu,
    jvp_terms,
    plane_terms,
    plane_terms_silu,
    rms_fold,
    rms_merge,
    rms_stats,
)
from triton_kernels.rows.kernel import row_op
from triton_kernels.rows.sums import row_sums_op
from triton_kernels.runtime.kernel import batch_independent_jit


@batch_independent_jit
def layer_norm_fwd_kernel(
    x_ptr, x_segment_stride, x_row_stride, x_col_stride,
    x_dot_ptr, x_dot_segment_stride, x_dot_row_stride, x_dot_col_stride,
    weight_ptr, weight_stride, bias_ptr, bias_stride, weight_dot_ptr, weight_dot_stride, bias_dot_ptr, bias_dot_stride,
    y_ptr, y_dot_ptr, out_segment_stride, out_row_stride, out_col_stride, mean_ptr, rstd_ptr,
    parts_ptr, num_splits, num_rows,
    num_cols: tl.constexpr, EPS: tl.constexpr, DTYPE: tl.constexpr, AXES: tl.constexpr, TWO_LEVEL: tl.constexpr,
    ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    MODE: tl.constexpr, SUM_READS: tl.constexpr, EMIT_READS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr, ROUNDED: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Normalize rows: y, mean and rstd; and the tangent of y where there is memory for it.

    With `ROUNDED`, y takes x_hat in the dtype of y, float16 or bfloat16; with `SILU` it goes through SiLU instead.
    """
    PLAIN: tl.constexpr = fwd_emit_silu if SILU else fwd_emit
    CENTERED: tl.constexpr = mean_ptr is not None
    HALF: tl.constexpr = fwd_emit_from_float16 if y_ptr.dtype.element_ty == tl.float16 else fwd_emit_from_bfloat16
    row_op(
        (x_ptr, x_dot_ptr),
        ((x_segment_stride, x_row_stride, x_col_stride), (x_dot_segment_stride, x_dot_row_stride, x_dot_col_stride)),
        (weight_ptr, bias_ptr, weight_dot_ptr, bias_dot_ptr),
        (weight_stride, bias_stride, weight_dot_stride, bias_dot_stride),
        (), 0, (y_ptr, y_dot_ptr), (out_segment_stride, out_row_stride, out_col_stride),
        (mean_ptr, rstd_ptr, None, None),
        parts_ptr, num_splits, num_rows,
        HALF if ROUNDED else PLAIN, (0.0, 0.0) if x_dot_ptr is None else (0.0, 0.0, 0.0, 0.0), num_cols, DTYPE,
        AXES, TWO_LEVEL, ALIGN, ROW_ALIGN, BLOCK_ROWS, BLOCK_COLS, MODE, SUM_READS, EMIT_READS, STAGES, BLOCK_SPLITS,
        STATS=fwd_stats if CENTERED else rms_stats, ANCHOR=fwd_anchor if CENTERED else None,
        FOLD=fwd_fold if CENTERED else rms_fold, MERGE=fwd_merge if CENTERED else rms_merge,
        WANTED=0b1111 if CENTERED else 0b1010, EPS=EPS, GROUPS=GROUPS, RUN=RUN,
    )  # fmt: skip


@batch_independent_jit
def layer_norm_jvp_kernel(
    x_ptr, x_segment_stride, x_row_stride, x_col_stride,
    x_dot_ptr, x_dot_segment_stride, x_dot_row_stride, x_dot_col_stride,
    weight_ptr, weight_stride, weight_dot_ptr, weight_dot_stride, bias_dot_ptr, bias_dot_stride, bias_ptr, bias_stride,
    mean_ptr, rstd_ptr, y_dot_ptr, out_segment_stride, out_row_stride, out_col_stride,
    parts_ptr, num_splits, num_rows,
    num_cols: tl.constexpr, DTYPE: tl.constexpr, AXES: tl.constexpr, TWO_LEVEL: tl.constexpr,
    ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    MODE: tl.constexpr, SUM_READS: tl.constexpr, EMIT_READS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Tangent of rows, of those through SiLU with `SILU`."""
    row_op(
        (x_ptr, x_dot_ptr),
        ((x_segment_stride, x_row_stride, x_col_stride), (x_dot_segment_stride, x_dot_row_stride, x_dot_col_stride)),
        (weight_ptr, weight_dot_ptr, bias_dot_ptr, bias_ptr),
        (weight_stride, weight_dot_stride, bias_dot_stride, bias_stride),
        (mean_ptr, rstd_ptr), 2, (y_dot_ptr,), (out_segment_stride, out_row_stride, out_col_stride), (None, None),
        parts_ptr, num_splits, num_rows,
        jvp_emit_silu if SILU else jvp_emit, () if x_dot_ptr is None else (0.0, 0.0), num_cols, DTYPE, AXES,
        TWO_LEVEL, ALIGN, ROW_ALIGN, BLOCK_ROWS, BLOCK_COLS, MODE, SUM_READS, EMIT_READS, STAGES, BLOCK_SPLITS,
        TERMS=jvp_terms, WANTED=0b11 if mean_ptr is not None else 0b10, GROUPS=GROUPS, RUN=RUN,
    )  # fmt: skip


@batch_independent_jit
def layer_norm_x_bar_kernel(
    y_bar_ptr, y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride,
    x_ptr, x_segment_stride, x_row_stride, x_col_stride, weight_ptr, weight_stride, bias_ptr, bias_stride,
    mean_ptr, rstd_ptr, x_bar_ptr, out_segment_stride, out_row_stride, out_col_stride,
    parts_ptr, num_splits, num_rows,
    num_cols: tl.constexpr, DTYPE: tl.constexpr, AXES: tl.constexpr, TWO_LEVEL: tl.constexpr,
    ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    MODE: tl.constexpr, SUM_READS: tl.constexpr, EMIT_READS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Cotangent of rows, without the sums over them."""
    row_op(
        (y_bar_ptr, x_ptr),
        ((y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride), (x_segment_stride, x_row_stride, x_col_stride)),
        (weight_ptr, bias_ptr), (weight_stride, bias_stride), (mean_ptr, rstd_ptr), 2, (x_bar_ptr,),
        (out_segment_stride, out_row_stride, out_col_stride), (None, None), parts_ptr, num_splits, num_rows,
        bwd_emit_silu if SILU else bwd_emit, (0.0, 0.0), num_cols, DTYPE, AXES, TWO_LEVEL, ALIGN, ROW_ALIGN,
        BLOCK_ROWS, BLOCK_COLS, MODE, SUM_READS, EMIT_READS, STAGES, BLOCK_SPLITS,
        TERMS=bwd_terms_silu if SILU else bwd_terms, WANTED=0b11 if mean_ptr is not None else 0b10, GROUPS=GROUPS,
        RUN=RUN,
    )  # fmt: skip


@batch_independent_jit
def layer_norm_bwd_kernel(
    y_bar_ptr, y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride,
    x_ptr, x_segment_stride, x_row_stride, x_col_stride, weight_ptr, weight_stride,
    mean_ptr, rstd_ptr, x_bar_ptr, out_segment_stride, out_row_stride, out_col_stride,
    weight_part_ptr, bias_part_ptr, num_splits, num_rows,
    num_cols: tl.constexpr, DTYPE: tl.constexpr, AXES: tl.constexpr, ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Cotangent of rows, if there is memory for it, and the sums over them."""
    row_sums_op(
        (y_bar_ptr, x_ptr),
        ((y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride), (x_segment_stride, x_row_stride, x_col_stride)),
        (weight_ptr,), (weight_stride,), (mean_ptr, rstd_ptr), 2, (x_bar_ptr,),
        (out_segment_stride, out_row_stride, out_col_stride), (None, None), (weight_part_ptr, bias_part_ptr), 2,
        num_splits, num_rows, bwd_emit, bwd_columns, () if x_bar_ptr is None else (0.0, 0.0), num_cols, DTYPE, AXES,
        ALIGN, BLOCK_ROWS, BLOCK_COLS, STAGES, x_bar_ptr is not None, TERMS=bwd_terms,
        WANTED=0b11 if mean_ptr is not None else 0b10,
    )  # fmt: skip


@batch_independent_jit
def layer_norm_planes_kernel(
    y_bar_ptr, y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride,
    x_ptr, x_segment_stride, x_row_stride, x_col_stride, weight_ptr, weight_stride, bias_ptr, bias_stride,
    mean_ptr, rstd_ptr, weight_part_ptr, bias_part_ptr, parts_ptr, num_splits, num_rows,
    num_cols: tl.constexpr, DTYPE: tl.constexpr, AXES: tl.constexpr, TWO_LEVEL: tl.constexpr,
    ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    MODE: tl.constexpr, SUM_READS: tl.constexpr, EMIT_READS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr, PLANES: tl.constexpr, WANTED: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Cotangents of the parameters of each plane."""
    row_op(
        (y_bar_ptr, x_ptr),
        ((y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride), (x_segment_stride, x_row_stride, x_col_stride)),
        (weight_ptr, bias_ptr), (weight_stride, bias_stride), (mean_ptr, rstd_ptr), 2, (), (0, 0, 1),
        (weight_part_ptr, bias_part_ptr), parts_ptr, num_splits, num_rows, None, (0.0, 0.0), num_cols, DTYPE, AXES,
        TWO_LEVEL, ALIGN, ROW_ALIGN, BLOCK_ROWS, BLOCK_COLS, MODE, SUM_READS, EMIT_READS, STAGES, BLOCK_SPLITS,
        TERMS=plane_terms_silu if SILU else plane_terms, WANTED=WANTED, GROUPS=GROUPS, RUN=RUN, PLANES=PLANES,
    )  # fmt: skip
