"""Layer norm kernels for rows that do not fit in registers: every row is swept twice, tile by tile.

The first sweep finds the row's sums, the second writes the result and mostly reads from cache. A program owns one row,
or a slice of one in each of two launches: `_split_rows` says which, and what `parts_ptr`, `num_splits`, `NUM_SLOTS`,
`BLOCK_SPLITS`, `SUMS` and `WRITES` are. The other arguments are those of `_layer_norm_kernels`.
"""

# Pyright knows neither that branches on constexpr flags are settled at compile time nor what a kernel may iterate over.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

import triton.language as tl

from triton_kernels._rows import aligned, apply_projection, load_param, normalize, row_offset, tile_offsets
from triton_kernels._runtime import batch_independent_jit, store_cast
from triton_kernels._split_rows import load_parts, merged_sum, opposite_tile, row_slice, slice_sizes, store_part


@batch_independent_jit
def layer_norm_fwd_looped_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    parts_ptr,
    num_splits,
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
    BLOCK_COLS: tl.constexpr,
    SUMS: tl.constexpr,
    WRITES: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Normalize one long row of x: writes its y, mean and rstd.

    Each tile has its own mean and centered sum of squares; tiles and slices are merged by Chan's formula.
    """
    block, split, first_col, stop_col = row_slice(num_splits, num_cols, BLOCK_COLS, SUMS, WRITES)
    first = block.to(tl.int64)
    row = first + tl.arange(0, 1)
    dtype: tl.constexpr = mean_ptr.dtype.element_ty
    x_ptr += row_offset(first, segment_rows, x_segment_stride, x_row_stride, TWO_LEVEL, ALIGN)

    mean = tl.zeros((1,), dtype)
    squares = tl.zeros((1,), dtype)
    if SUMS:
        for start in range(first_col, stop_col, BLOCK_COLS):
            col_offsets = (start + tl.arange(0, BLOCK_COLS)).to(tl.int64)
            mask = (col_offsets < num_cols)[None, :]
            x_ptrs = x_ptr + col_offsets[None, :] * x_col_stride
            x = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy="evict_last").to(dtype)
            cols_before = start - first_col
            tile_cols = tl.minimum(num_cols - start, BLOCK_COLS).to(dtype)
            tile_mean = tl.sum(x, axis=1) / tile_cols
            centered = tl.where(mask, x - tile_mean[:, None], 0.0)
            delta = tile_mean - mean
            tile_share = tile_cols / (tile_cols + cols_before)
            mean += delta * tile_share
            squares += tl.sum(centered * centered, axis=1) + delta * delta * (tile_share * cols_before)
    if not WRITES:
        store_part(parts_ptr, block, split, num_splits, mean, 0, NUM_SLOTS)
        store_part(parts_ptr, block, split, num_splits, squares, 1, NUM_SLOTS)
    if WRITES and not SUMS:
        sizes = slice_sizes(num_splits, num_cols, BLOCK_COLS, BLOCK_SPLITS).to(dtype)
        means = load_parts(parts_ptr, block, num_splits, 0.0, 0, NUM_SLOTS, 1, BLOCK_SPLITS)
        # Relative to the mean of the first slice, so that a large common offset in x costs no digits.
        origin = tl.load(parts_ptr + first * NUM_SLOTS * num_splits + tl.arange(0, 1))
        shifted = tl.where(sizes > 0, means - origin[:, None], 0.0)
        mean = origin + tl.sum(shifted * (sizes / num_cols), axis=1)
        shifted = tl.where(sizes > 0, means - mean[:, None], 0.0)
        squares = merged_sum(parts_ptr, block, num_splits, 1, NUM_SLOTS, 1, BLOCK_SPLITS)
        squares += tl.sum(shifted * shifted * sizes, axis=1)

    if WRITES:
        rstd = 1.0 / tl.sqrt(squares / num_cols + tl.full((1,), EPS, dtype))
        if split == 0:
            tl.store(mean_ptr + row, mean)
            tl.store(rstd_ptr + row, rstd)
        for step in range(first_col, stop_col, BLOCK_COLS):
            start = opposite_tile(step, first_col, stop_col, BLOCK_COLS)
            col_offsets = (start + tl.arange(0, BLOCK_COLS)).to(tl.int64)
            mask = (col_offsets < num_cols)[None, :]
            x_ptrs = x_ptr + col_offsets[None, :] * x_col_stride
            x = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy="evict_first").to(dtype)
            y = (x - mean[:, None]) * rstd[:, None]
            if HAS_WEIGHT:
                y *= load_param(
                    weight_ptr, row, segment_rows, weight_segment_stride, col_offsets, mask, dtype, TWO_LEVEL, ALIGN
                )
            if HAS_BIAS:
                y += load_param(
                    bias_ptr, row, segment_rows, bias_segment_stride, col_offsets, mask, dtype, TWO_LEVEL, ALIGN
                )
            tl.store(y_ptr + tile_offsets(row * num_cols, col_offsets, 1), y, mask=mask)


@batch_independent_jit
def layer_norm_x_bar_looped_kernel(
    y_bar_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    x_bar_ptr,
    parts_ptr,
    num_splits,
    segment_rows,
    y_bar_segment_stride,
    y_bar_row_stride,
    y_bar_col_stride,
    x_segment_stride,
    x_row_stride,
    x_col_stride,
    weight_segment_stride,
    num_cols: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    SUMS: tl.constexpr,
    WRITES: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Pull one long row of y_bar back: writes `x_bar = P(y_bar * weight)`."""
    block, split, first_col, stop_col = row_slice(num_splits, num_cols, BLOCK_COLS, SUMS, WRITES)
    first = block.to(tl.int64)
    row = first + tl.arange(0, 1)
    dtype: tl.constexpr = mean_ptr.dtype.element_ty
    x_ptr += row_offset(first, segment_rows, x_segment_stride, x_row_stride, TWO_LEVEL, ALIGN)
    y_bar_ptr += row_offset(first, segment_rows, y_bar_segment_stride, y_bar_row_stride, TWO_LEVEL, ALIGN)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)

    v_sum = tl.zeros((1,), dtype)
    v_x_hat_sum = tl.zeros((1,), dtype)
    # Sweep 0 sums, sweep 1 writes.
    for sweep in tl.static_range(0 if SUMS else 1, 2 if WRITES else 1):
        if not SUMS:
            v_sum = merged_sum(parts_ptr, block, num_splits, 0, NUM_SLOTS, 1, BLOCK_SPLITS)
            v_x_hat_sum = merged_sum(parts_ptr, block, num_splits, 1, NUM_SLOTS, 1, BLOCK_SPLITS)
        for step in range(first_col, stop_col, BLOCK_COLS):
            start = step if sweep == 0 else opposite_tile(step, first_col, stop_col, BLOCK_COLS)
            col_offsets = (start + tl.arange(0, BLOCK_COLS)).to(tl.int64)
            mask = (col_offsets < num_cols)[None, :]
            policy: tl.constexpr = "evict_last" if sweep == 0 else "evict_first"
            x_ptrs = x_ptr + col_offsets[None, :] * x_col_stride
            y_bar_ptrs = y_bar_ptr + col_offsets[None, :] * y_bar_col_stride
            x = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy=policy).to(dtype)
            v = tl.load(y_bar_ptrs, mask=mask, other=0.0, eviction_policy=policy).to(dtype)
            if HAS_WEIGHT:
                v *= load_param(
                    weight_ptr, row, segment_rows, weight_segment_stride, col_offsets, mask, dtype, TWO_LEVEL, ALIGN
                )
            x_hat = normalize(x, mean, rstd, mask)
            if sweep == 0:
                v_sum += tl.sum(v, axis=1)
                v_x_hat_sum += tl.sum(v * x_hat, axis=1)
            else:
                x_bar = apply_projection(v, x_hat, rstd, v_sum / num_cols, v_x_hat_sum / num_cols)
                tl.store(x_bar_ptr + tile_offsets(row * num_cols, col_offsets, 1), x_bar, mask=mask)
    if not WRITES:
        store_part(parts_ptr, block, split, num_splits, v_sum, 0, NUM_SLOTS)
        store_part(parts_ptr, block, split, num_splits, v_x_hat_sum, 1, NUM_SLOTS)


@batch_independent_jit
def layer_norm_param_bar_kernel(
    y_bar_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
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
    num_cols: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    LOOP_STAGES: tl.constexpr,
):
    """Own BLOCK_COLS columns of every `num_splits`-th block of rows of one segment: writes a piece of a partial row.

    weight_part, bias_part: `[segments * num_splits, num_cols]`, as of `layer_norm_bwd_kernel`.
    """
    NUM_COL_BLOCKS: tl.constexpr = tl.cdiv(num_cols, BLOCK_COLS)
    part = tl.program_id(0) // NUM_COL_BLOCKS
    segment = (part // num_splits).to(tl.int64)
    col_offsets = ((tl.program_id(0) % NUM_COL_BLOCKS) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)).to(tl.int64)
    col_mask = col_offsets < num_cols
    dtype: tl.constexpr = mean_ptr.dtype.element_ty
    y_bar_ptr += segment * aligned(y_bar_segment_stride, ALIGN)
    x_ptr += segment * aligned(x_segment_stride, ALIGN)
    weight_sum = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype)
    bias_sum = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype)
    for block in tl.range(part % num_splits, tl.cdiv(segment_rows, BLOCK_ROWS), num_splits, num_stages=LOOP_STAGES):
        row = tl.arange(0, BLOCK_ROWS).to(tl.int64) + block * BLOCK_ROWS
        row_mask = row < segment_rows
        mask = row_mask[:, None] & col_mask[None, :]
        y_bar_offset = row * aligned(y_bar_row_stride, ALIGN)
        y_bar_ptrs = y_bar_ptr + tile_offsets(y_bar_offset, col_offsets, y_bar_col_stride)
        y_bar = tl.load(y_bar_ptrs, mask=mask, other=0.0).to(dtype)
        if WANT_WEIGHT:
            x_offset = row * aligned(x_row_stride, ALIGN)
            x = tl.load(x_ptr + tile_offsets(x_offset, col_offsets, x_col_stride), mask=mask, other=0.0).to(dtype)
            mean = tl.load(mean_ptr + segment * segment_rows + row, mask=row_mask, other=0.0)
            rstd = tl.load(rstd_ptr + segment * segment_rows + row, mask=row_mask, other=0.0)
            weight_sum += y_bar * normalize(x, mean, rstd, mask)
        if WANT_BIAS:
            bias_sum += y_bar
    part_offset = part.to(tl.int64) * num_cols + col_offsets
    if WANT_WEIGHT:
        store_cast(weight_part_ptr + part_offset, tl.sum(weight_sum, axis=0), col_mask)
    if WANT_BIAS:
        store_cast(bias_part_ptr + part_offset, tl.sum(bias_sum, axis=0), col_mask)


@batch_independent_jit
def layer_norm_jvp_looped_kernel(  # noqa: C901 - its branches are settled when it is compiled
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    x_dot_ptr,
    weight_dot_ptr,
    bias_dot_ptr,
    y_dot_ptr,
    parts_ptr,
    num_splits,
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
    BLOCK_COLS: tl.constexpr,
    SUMS: tl.constexpr,
    WRITES: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Tangent of one long row: writes `y_dot = P(x_dot) * weight + x_hat * weight_dot + bias_dot`."""
    block, split, first_col, stop_col = row_slice(num_splits, num_cols, BLOCK_COLS, SUMS, WRITES)
    first = block.to(tl.int64)
    row = first + tl.arange(0, 1)
    dtype: tl.constexpr = mean_ptr.dtype.element_ty
    x_ptr += row_offset(first, segment_rows, x_segment_stride, x_row_stride, TWO_LEVEL, ALIGN)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)

    v_sum = tl.zeros((1,), dtype)
    v_x_hat_sum = tl.zeros((1,), dtype)
    if HAS_X_DOT:
        x_dot_ptr += row_offset(first, segment_rows, x_dot_segment_stride, x_dot_row_stride, TWO_LEVEL, ALIGN)
    if HAS_X_DOT and SUMS:
        for start in range(first_col, stop_col, BLOCK_COLS):
            col_offsets = (start + tl.arange(0, BLOCK_COLS)).to(tl.int64)
            mask = (col_offsets < num_cols)[None, :]
            x_ptrs = x_ptr + col_offsets[None, :] * x_col_stride
            x_dot_ptrs = x_dot_ptr + col_offsets[None, :] * x_dot_col_stride
            x = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy="evict_last").to(dtype)
            x_dot = tl.load(x_dot_ptrs, mask=mask, other=0.0, eviction_policy="evict_last").to(dtype)
            v_sum += tl.sum(x_dot, axis=1)
            v_x_hat_sum += tl.sum(x_dot * normalize(x, mean, rstd, mask), axis=1)
    if not WRITES:
        store_part(parts_ptr, block, split, num_splits, v_sum, 0, NUM_SLOTS)
        store_part(parts_ptr, block, split, num_splits, v_x_hat_sum, 1, NUM_SLOTS)
    if HAS_X_DOT and not SUMS:
        v_sum = merged_sum(parts_ptr, block, num_splits, 0, NUM_SLOTS, 1, BLOCK_SPLITS)
        v_x_hat_sum = merged_sum(parts_ptr, block, num_splits, 1, NUM_SLOTS, 1, BLOCK_SPLITS)

    if WRITES:
        for step in range(first_col, stop_col, BLOCK_COLS):
            start = opposite_tile(step, first_col, stop_col, BLOCK_COLS)
            col_offsets = (start + tl.arange(0, BLOCK_COLS)).to(tl.int64)
            mask = (col_offsets < num_cols)[None, :]
            y_dot = tl.zeros((1, BLOCK_COLS), dtype)
            if HAS_X_DOT or HAS_WEIGHT_DOT:
                x_ptrs = x_ptr + col_offsets[None, :] * x_col_stride
                x = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy="evict_first").to(dtype)
                x_hat = normalize(x, mean, rstd, mask)
            if HAS_X_DOT:
                x_dot_ptrs = x_dot_ptr + col_offsets[None, :] * x_dot_col_stride
                x_dot = tl.load(x_dot_ptrs, mask=mask, other=0.0, eviction_policy="evict_first").to(dtype)
                y_dot = apply_projection(x_dot, x_hat, rstd, v_sum / num_cols, v_x_hat_sum / num_cols)
                if HAS_WEIGHT:
                    y_dot *= load_param(
                        weight_ptr, row, segment_rows, weight_segment_stride, col_offsets, mask, dtype, TWO_LEVEL, ALIGN
                    )
            if HAS_WEIGHT_DOT:
                y_dot += x_hat * load_param(
                    weight_dot_ptr,
                    row,
                    segment_rows,
                    weight_dot_segment_stride,
                    col_offsets,
                    mask,
                    dtype,
                    TWO_LEVEL,
                    ALIGN,
                )
            if HAS_BIAS_DOT:
                y_dot += load_param(
                    bias_dot_ptr, row, segment_rows, bias_dot_segment_stride, col_offsets, mask, dtype, TWO_LEVEL, ALIGN
                )
            tl.store(y_dot_ptr + tile_offsets(row * num_cols, col_offsets, 1), y_dot, mask=mask)
