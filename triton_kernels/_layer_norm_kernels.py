"""Layer norm kernels that hold whole rows in registers, and the reduction of the parameter sums.

Rows longer than the registers are served by `_layer_norm_looped`. Shared arguments:

    x, y, y_bar, x_bar, x_dot, y_dot    seen as [segments, segment_rows, num_cols]; outputs are contiguous
    weight, bias and their tangents     seen as [segments, num_cols], or one row shared by all segments
    mean, rstd                          [segments * segment_rows], contiguous; all arithmetic is in their dtype
"""

# Pyright knows neither that branches on constexpr flags are settled at compile time nor what a kernel may iterate over.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton.language as tl

from triton_kernels._rows import aligned, load_param, normalize, project, row_offset, tile_offsets
from triton_kernels._runtime import batch_independent_jit, store_cast


@batch_independent_jit
def layer_norm_fwd_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    num_rows,
    segment_rows,
    x_segment_stride,
    x_row_stride,
    x_col_stride,
    weight_segment_stride,
    bias_segment_stride,
    num_cols: tl.constexpr,
    EPS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Normalize BLOCK_ROWS whole rows of x: writes their y, mean and rstd.

    The variance is summed over centered values, so that a large common offset in x costs no digits.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col_offsets = tl.arange(0, BLOCK_COLS)
    row_mask = row < num_rows
    col_mask = (col_offsets < num_cols)[None, :]
    mask = row_mask[:, None] & col_mask
    param_mask = mask if TWO_LEVEL else col_mask
    dtype: tl.constexpr = mean_ptr.dtype.element_ty

    offset = row_offset(row, segment_rows, x_segment_stride, x_row_stride, TWO_LEVEL, ALIGN)
    x = tl.load(x_ptr + tile_offsets(offset, col_offsets, x_col_stride), mask=mask, other=0.0).to(dtype)
    mean = tl.sum(x, axis=1) / num_cols
    centered = tl.where(mask, x - mean[:, None], 0.0)
    variance = tl.sum(centered * centered, axis=1) / num_cols
    # A float argument would arrive rounded to float32; tl.rsqrt would be an approximation on GPUs.
    rstd = 1.0 / tl.sqrt(variance + tl.full((BLOCK_ROWS,), EPS, dtype))

    y = centered * rstd[:, None]
    if HAS_WEIGHT:
        y *= load_param(
            weight_ptr, row, segment_rows, weight_segment_stride, col_offsets, param_mask, dtype, TWO_LEVEL, ALIGN
        )
    if HAS_BIAS:
        y += load_param(
            bias_ptr, row, segment_rows, bias_segment_stride, col_offsets, param_mask, dtype, TWO_LEVEL, ALIGN
        )
    tl.store(y_ptr + tile_offsets(row * num_cols, col_offsets, 1), y, mask=mask)
    tl.store(mean_ptr + row, mean, mask=row_mask)
    tl.store(rstd_ptr + row, rstd, mask=row_mask)


# Most of the branches are settled when the kernel is compiled.
@batch_independent_jit
def layer_norm_bwd_kernel(  # noqa: C901 - its branches are settled when it is compiled
    y_bar_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    x_bar_ptr,
    weight_part_ptr,
    bias_part_ptr,
    segment_rows,
    num_splits,
    y_bar_segment_stride,
    y_bar_row_stride,
    y_bar_col_stride,
    x_segment_stride,
    x_row_stride,
    x_col_stride,
    weight_segment_stride,
    num_cols: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WANT_X: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    LOOP_STAGES: tl.constexpr,
):
    """Own every `num_splits`-th block of BLOCK_ROWS rows of one segment: writes their x_bar and one partial row.

    weight_part, bias_part: `[segments * num_splits, num_cols]`, the sums of `y_bar * x_hat` and `y_bar` over the rows
    of this program, carried in registers. The order of every sum is fixed, so the result is the same in every run.
    """
    part = tl.program_id(0)
    segment = (part // num_splits).to(tl.int64)
    col_offsets = tl.arange(0, BLOCK_COLS)
    col_mask = (col_offsets < num_cols)[None, :]
    dtype: tl.constexpr = mean_ptr.dtype.element_ty
    y_bar_ptr += segment * aligned(y_bar_segment_stride, ALIGN)
    x_ptr += segment * aligned(x_segment_stride, ALIGN)
    if HAS_WEIGHT:
        weight_ptr += segment * aligned(weight_segment_stride, ALIGN)
        weight = tl.load(weight_ptr + col_offsets[None, :], mask=col_mask, other=0.0)
    if WANT_WEIGHT:
        weight_sum = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype)
    if WANT_BIAS:
        bias_sum = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype)

    for block in tl.range(part % num_splits, tl.cdiv(segment_rows, BLOCK_ROWS), num_splits, num_stages=LOOP_STAGES):
        row = tl.arange(0, BLOCK_ROWS).to(tl.int64) + block * BLOCK_ROWS
        row_mask = row < segment_rows
        mask = row_mask[:, None] & col_mask
        y_bar_offset = row * aligned(y_bar_row_stride, ALIGN)
        y_bar_ptrs = y_bar_ptr + tile_offsets(y_bar_offset, col_offsets, y_bar_col_stride)
        y_bar = tl.load(y_bar_ptrs, mask=mask, other=0.0).to(dtype)
        if WANT_X or WANT_WEIGHT:
            x_offset = row * aligned(x_row_stride, ALIGN)
            x = tl.load(x_ptr + tile_offsets(x_offset, col_offsets, x_col_stride), mask=mask, other=0.0).to(dtype)
            mean = tl.load(mean_ptr + segment * segment_rows + row, mask=row_mask, other=0.0)
            rstd = tl.load(rstd_ptr + segment * segment_rows + row, mask=row_mask, other=0.0)
            x_hat = normalize(x, mean, rstd, mask)
        if WANT_WEIGHT:
            weight_sum += y_bar * x_hat
        if WANT_BIAS:
            bias_sum += y_bar
        if WANT_X:
            if HAS_WEIGHT:
                y_bar *= weight.to(dtype)
            x_bar = project(y_bar, x_hat, rstd, num_cols)
            x_bar_offset = (segment * segment_rows + row) * num_cols
            tl.store(x_bar_ptr + tile_offsets(x_bar_offset, col_offsets, 1), x_bar, mask=mask)

    part_offset = part.to(tl.int64) * num_cols + col_offsets
    if WANT_WEIGHT:
        store_cast(weight_part_ptr + part_offset, tl.sum(weight_sum, axis=0), col_offsets < num_cols)
    if WANT_BIAS:
        store_cast(bias_part_ptr + part_offset, tl.sum(bias_sum, axis=0), col_offsets < num_cols)


@batch_independent_jit
def layer_norm_jvp_kernel(
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    x_dot_ptr,
    weight_dot_ptr,
    bias_dot_ptr,
    y_dot_ptr,
    num_rows,
    segment_rows,
    x_segment_stride,
    x_row_stride,
    x_col_stride,
    x_dot_segment_stride,
    x_dot_row_stride,
    x_dot_col_stride,
    weight_segment_stride,
    weight_dot_segment_stride,
    bias_dot_segment_stride,
    num_cols: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_X_DOT: tl.constexpr,
    HAS_WEIGHT_DOT: tl.constexpr,
    HAS_BIAS_DOT: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Tangent of BLOCK_ROWS whole rows: writes `y_dot = P(x_dot) * weight + x_hat * weight_dot + bias_dot`."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col_offsets = tl.arange(0, BLOCK_COLS)
    row_mask = row < num_rows
    col_mask = (col_offsets < num_cols)[None, :]
    mask = row_mask[:, None] & col_mask
    param_mask = mask if TWO_LEVEL else col_mask
    dtype: tl.constexpr = mean_ptr.dtype.element_ty

    y_dot = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype)
    if HAS_X_DOT or HAS_WEIGHT_DOT:
        offset = row_offset(row, segment_rows, x_segment_stride, x_row_stride, TWO_LEVEL, ALIGN)
        x = tl.load(x_ptr + tile_offsets(offset, col_offsets, x_col_stride), mask=mask, other=0.0).to(dtype)
        mean = tl.load(mean_ptr + row, mask=row_mask, other=0.0)
        rstd = tl.load(rstd_ptr + row, mask=row_mask, other=0.0)
        x_hat = normalize(x, mean, rstd, mask)
    if HAS_X_DOT:
        offset = row_offset(row, segment_rows, x_dot_segment_stride, x_dot_row_stride, TWO_LEVEL, ALIGN)
        x_dot_ptrs = x_dot_ptr + tile_offsets(offset, col_offsets, x_dot_col_stride)
        y_dot = project(tl.load(x_dot_ptrs, mask=mask, other=0.0).to(dtype), x_hat, rstd, num_cols)
        if HAS_WEIGHT:
            y_dot *= load_param(
                weight_ptr, row, segment_rows, weight_segment_stride, col_offsets, param_mask, dtype, TWO_LEVEL, ALIGN
            )
    if HAS_WEIGHT_DOT:
        y_dot += x_hat * load_param(
            weight_dot_ptr,
            row,
            segment_rows,
            weight_dot_segment_stride,
            col_offsets,
            param_mask,
            dtype,
            TWO_LEVEL,
            ALIGN,
        )
    if HAS_BIAS_DOT:
        y_dot += load_param(
            bias_dot_ptr, row, segment_rows, bias_dot_segment_stride, col_offsets, param_mask, dtype, TWO_LEVEL, ALIGN
        )
    tl.store(y_dot_ptr + tile_offsets(row * num_cols, col_offsets, 1), y_dot, mask=mask)


@batch_independent_jit
def param_reduce_kernel(
    weight_part_ptr,
    bias_part_ptr,
    weight_bar_ptr,
    bias_bar_ptr,
    num_parts,
    num_cols: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Sum BLOCK_COLS columns of one group over its `num_parts` partial rows, and cast to the dtype of the output.

    weight_part, bias_part: `[groups * num_parts, num_cols]`; weight_bar, bias_bar: `[groups, num_cols]`.
    """
    NUM_COL_BLOCKS: tl.constexpr = tl.cdiv(num_cols, BLOCK_COLS)
    group = (tl.program_id(0) // NUM_COL_BLOCKS).to(tl.int64)
    col_offsets = (tl.program_id(0) % NUM_COL_BLOCKS) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    col_mask = col_offsets < num_cols
    # The scratch of the sums that are wanted has the accumulation dtype.
    if WANT_WEIGHT:
        weight_sum = tl.zeros((BLOCK_PARTS, BLOCK_COLS), weight_part_ptr.dtype.element_ty)
    if WANT_BIAS:
        bias_sum = tl.zeros((BLOCK_PARTS, BLOCK_COLS), bias_part_ptr.dtype.element_ty)
    for start in range(0, num_parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        mask = (part < num_parts)[:, None] & col_mask[None, :]
        offset = tile_offsets((group * num_parts + part) * num_cols, col_offsets, 1)
        if WANT_WEIGHT:
            weight_sum += tl.load(weight_part_ptr + offset, mask=mask, other=0.0)
        if WANT_BIAS:
            bias_sum += tl.load(bias_part_ptr + offset, mask=mask, other=0.0)
    if WANT_WEIGHT:
        store_cast(weight_bar_ptr + group * num_cols + col_offsets, tl.sum(weight_sum, axis=0), col_mask)
    if WANT_BIAS:
        store_cast(bias_bar_ptr + group * num_cols + col_offsets, tl.sum(bias_sum, axis=0), col_mask)
