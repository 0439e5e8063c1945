"""Second-order layer norm kernels for rows that do not fit in registers, alone or with accumulators of sums.

One kernel sweeps rows twice, tile by tile: the first sweep finds the row's means, the second writes the row outputs
and mostly reads from cache. It owns one row, or a slice of one in each of two launches: `_split_rows` says which, and
what `parts_ptr`, `num_splits`, `NUM_SLOTS`, `BLOCK_SPLITS`, `SUMS` and `WRITES` are. Another kernel owns columns and
sums over rows. Full-size operands are thus read twice for row outputs, and once more for sums. The other arguments are
those of `_layer_norm_second_kernels`.
"""

# Pyright knows neither that branches on constexpr flags are settled at compile time nor what a kernel may iterate over.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton.language as tl

from triton_kernels._layer_norm_second_kernels import curvature
from triton_kernels._rows import aligned, apply_projection, load_param, normalize, row_offset, tile_offsets
from triton_kernels._runtime import batch_independent_jit, store_cast
from triton_kernels._split_rows import load_parts, merged_sum, opposite_tile, row_slice, slice_sizes, store_part


# Most of the branches are settled when the kernel is compiled.
@batch_independent_jit
def layer_norm_second_looped_kernel(  # noqa: C901 - its branches are settled when it is compiled
    y_bar_ptr,
    x_ptr,
    y_bar_dot_ptr,
    x_dot_ptr,
    weight_ptr,
    weight_dot_ptr,
    bias_dot_ptr,
    mean_ptr,
    rstd_ptr,
    y_bar_bar_ptr,
    x_bar_ptr,
    x_dot_bar_ptr,
    x_dot_means_ptr,
    parts_ptr,
    num_splits,
    num_rows,
    segment_rows,
    y_bar_segment_stride,
    y_bar_row_stride,
    y_bar_col_stride,
    x_segment_stride,
    x_row_stride,
    x_col_stride,
    y_bar_dot_segment_stride,
    y_bar_dot_row_stride,
    y_bar_dot_col_stride,
    x_dot_segment_stride,
    x_dot_row_stride,
    x_dot_col_stride,
    weight_segment_stride,
    weight_dot_segment_stride,
    bias_dot_segment_stride,
    num_cols: tl.constexpr,
    READ_X: tl.constexpr,
    READ_Y_BAR: tl.constexpr,
    HAS_Y_BAR_DOT: tl.constexpr,
    HAS_X_DOT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_WEIGHT_DOT: tl.constexpr,
    HAS_BIAS_DOT: tl.constexpr,
    WANT_Y_BAR: tl.constexpr,
    WANT_X: tl.constexpr,
    WANT_X_DOT: tl.constexpr,
    WANT_X_DOT_MEANS: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    SUMS: tl.constexpr,
    WRITES: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Own one long row: writes its y_bar', x', x_dot', and the means of its x_dot for the sums over rows."""
    block, split, first_col, stop_col = row_slice(num_splits, num_cols, BLOCK_COLS, SUMS, WRITES)
    first = block.to(tl.int64)
    row = first + tl.arange(0, 1)
    dtype: tl.constexpr = mean_ptr.dtype.element_ty
    PROJECT_G: tl.constexpr = WANT_X_DOT or (WANT_X and HAS_X_DOT)
    PROJECT_K: tl.constexpr = WANT_X and (HAS_WEIGHT_DOT or HAS_Y_BAR_DOT)
    HAS_MEANS: tl.constexpr = NUM_SLOTS > 0
    HAS_OUTPUTS: tl.constexpr = WANT_Y_BAR or WANT_X or WANT_X_DOT
    HAS_COVARIANCE: tl.constexpr = WANT_X and HAS_X_DOT
    if READ_X:
        x_ptr += row_offset(first, segment_rows, x_segment_stride, x_row_stride, TWO_LEVEL, ALIGN)
        mean = tl.load(mean_ptr + row)
        rstd = tl.load(rstd_ptr + row)
    if READ_Y_BAR:
        y_bar_ptr += row_offset(first, segment_rows, y_bar_segment_stride, y_bar_row_stride, TWO_LEVEL, ALIGN)
    if HAS_Y_BAR_DOT:
        y_bar_dot_ptr += row_offset(
            first, segment_rows, y_bar_dot_segment_stride, y_bar_dot_row_stride, TWO_LEVEL, ALIGN
        )
    if HAS_X_DOT:
        x_dot_ptr += row_offset(first, segment_rows, x_dot_segment_stride, x_dot_row_stride, TWO_LEVEL, ALIGN)

    x_dot_mean = tl.zeros((1,), dtype)
    x_dot_x_hat_mean = tl.zeros((1,), dtype)
    g_mean = tl.zeros((1,), dtype)
    g_x_hat_mean = tl.zeros((1,), dtype)
    k_mean = tl.zeros((1,), dtype)
    k_x_hat_mean = tl.zeros((1,), dtype)
    # Mean of the product of g and x_dot, each less its mean.
    covariance = tl.zeros((1,), dtype)
    # Sweep 0 finds the means, sweep 1 writes.
    for sweep in tl.static_range(2):
        if sweep == 1 and HAS_MEANS and WRITES:
            if not SUMS:
                if HAS_X_DOT:
                    x_dot_mean = merged_sum(parts_ptr, block, num_splits, 0, NUM_SLOTS, 1, BLOCK_SPLITS)
                    x_dot_x_hat_mean = merged_sum(parts_ptr, block, num_splits, 1, NUM_SLOTS, 1, BLOCK_SPLITS)
                if PROJECT_G:
                    g_mean = merged_sum(parts_ptr, block, num_splits, 2, NUM_SLOTS, 1, BLOCK_SPLITS)
                    g_x_hat_mean = merged_sum(parts_ptr, block, num_splits, 3, NUM_SLOTS, 1, BLOCK_SPLITS)
                if PROJECT_K:
                    k_mean = merged_sum(parts_ptr, block, num_splits, 4, NUM_SLOTS, 1, BLOCK_SPLITS)
                    k_x_hat_mean = merged_sum(parts_ptr, block, num_splits, 5, NUM_SLOTS, 1, BLOCK_SPLITS)
                if HAS_COVARIANCE:
                    sizes = slice_sizes(num_splits, num_cols, BLOCK_COLS, BLOCK_SPLITS).to(dtype)
                    x_dot_sums = load_parts(parts_ptr, block, num_splits, 0.0, 0, NUM_SLOTS, 1, BLOCK_SPLITS)
                    g_sums = load_parts(parts_ptr, block, num_splits, 0.0, 2, NUM_SLOTS, 1, BLOCK_SPLITS)
                    # An empty slice has a weight of 0, and no mean.
                    x_dot_shifts = x_dot_sums / tl.maximum(sizes, 1.0) - x_dot_mean[:, None] / num_cols
                    g_shifts = g_sums / tl.maximum(sizes, 1.0) - g_mean[:, None] / num_cols
                    covariance = merged_sum(parts_ptr, block, num_splits, 6, NUM_SLOTS, 1, BLOCK_SPLITS)
                    covariance += tl.sum(x_dot_shifts * g_shifts * sizes, axis=1)
            x_dot_mean /= num_cols
            x_dot_x_hat_mean /= num_cols
            g_mean /= num_cols
            g_x_hat_mean /= num_cols
            k_mean /= num_cols
            k_x_hat_mean /= num_cols
            covariance /= num_cols
            if WANT_X_DOT_MEANS:  # noqa: SIM102 - one is settled when the kernel is compiled, the other one when it runs
                if split == 0:
                    tl.store(x_dot_means_ptr + row, x_dot_mean)
                    tl.store(x_dot_means_ptr + num_rows + row, x_dot_x_hat_mean)
        if (sweep == 0 and HAS_MEANS and SUMS) or (sweep == 1 and HAS_OUTPUTS and WRITES):
            for step in range(first_col, stop_col, BLOCK_COLS):
                start = step if sweep == 0 else opposite_tile(step, first_col, stop_col, BLOCK_COLS)
                col_offsets = (start + tl.arange(0, BLOCK_COLS)).to(tl.int64)
                mask = (col_offsets < num_cols)[None, :]
                policy: tl.constexpr = "evict_last" if sweep == 0 and HAS_OUTPUTS else "evict_first"
                if READ_X:
                    x_ptrs = x_ptr + col_offsets[None, :] * x_col_stride
                    x = tl.load(x_ptrs, mask=mask, other=0.0, eviction_policy=policy).to(dtype)
                    x_hat = normalize(x, mean, rstd, mask)
                if HAS_X_DOT:
                    x_dot_ptrs = x_dot_ptr + col_offsets[None, :] * x_dot_col_stride
                    x_dot = tl.load(x_dot_ptrs, mask=mask, other=0.0, eviction_policy=policy).to(dtype)
                if PROJECT_G or PROJECT_K or (sweep == 1 and WANT_Y_BAR):
                    if HAS_WEIGHT:
                        weight = load_param(
                            weight_ptr,
                            row,
                            segment_rows,
                            weight_segment_stride,
                            col_offsets,
                            mask,
                            dtype,
                            TWO_LEVEL,
                            ALIGN,
                        )
                    if HAS_WEIGHT_DOT:
                        weight_dot = load_param(
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
                if READ_Y_BAR:
                    y_bar_ptrs = y_bar_ptr + col_offsets[None, :] * y_bar_col_stride
                    y_bar = tl.load(y_bar_ptrs, mask=mask, other=0.0, eviction_policy=policy).to(dtype)
                if PROJECT_G:
                    g = y_bar
                    if HAS_WEIGHT:
                        g *= weight
                if PROJECT_K:
                    k = tl.zeros((1, BLOCK_COLS), dtype)
                    if HAS_WEIGHT_DOT:
                        k += y_bar * weight_dot
                    if HAS_Y_BAR_DOT:
                        y_bar_dot_ptrs = y_bar_dot_ptr + col_offsets[None, :] * y_bar_dot_col_stride
                        y_bar_dot = tl.load(y_bar_dot_ptrs, mask=mask, other=0.0, eviction_policy=policy).to(dtype)
                        if HAS_WEIGHT:
                            k += y_bar_dot * weight
                        else:
                            k += y_bar_dot

                if sweep == 0:
                    tile_cols = tl.minimum(num_cols - start, BLOCK_COLS).to(dtype)
                    if HAS_COVARIANCE:
                        # Chan's merge of the tile's co-moment with that of the columns before it: a product of the
                        # means subtracted at the end would cost digits.
                        x_dot_tile = tl.sum(x_dot, axis=1) / tile_cols
                        g_tile = tl.sum(g, axis=1) / tile_cols
                        centered = tl.where(mask, (x_dot - x_dot_tile[:, None]) * (g - g_tile[:, None]), 0.0)
                        before = tl.full((1,), 0.0, dtype) + (start - first_col)
                        x_dot_before = x_dot_mean / tl.maximum(before, 1.0)
                        g_before = g_mean / tl.maximum(before, 1.0)
                        share = before * tile_cols / (before + tile_cols)
                        covariance += tl.sum(centered, axis=1)
                        covariance += (x_dot_tile - x_dot_before) * (g_tile - g_before) * share
                    if HAS_X_DOT:
                        x_dot_mean += tl.sum(x_dot, axis=1)
                        x_dot_x_hat_mean += tl.sum(x_dot * x_hat, axis=1)
                    if PROJECT_G:
                        g_mean += tl.sum(g, axis=1)
                        g_x_hat_mean += tl.sum(g * x_hat, axis=1)
                    if PROJECT_K:
                        k_mean += tl.sum(k, axis=1)
                        k_x_hat_mean += tl.sum(k * x_hat, axis=1)
                else:
                    out_offsets = tile_offsets(row * num_cols, col_offsets, 1)
                    if HAS_X_DOT:
                        h = apply_projection(x_dot, x_hat, rstd, x_dot_mean, x_dot_x_hat_mean)
                    if WANT_Y_BAR:
                        y_bar_bar = tl.zeros((1, BLOCK_COLS), dtype)
                        if HAS_X_DOT:
                            y_bar_bar = h
                            if HAS_WEIGHT:
                                y_bar_bar *= weight
                        if HAS_WEIGHT_DOT:
                            y_bar_bar += x_hat * weight_dot
                        if HAS_BIAS_DOT:
                            y_bar_bar += load_param(
                                bias_dot_ptr,
                                row,
                                segment_rows,
                                bias_dot_segment_stride,
                                col_offsets,
                                mask,
                                dtype,
                                TWO_LEVEL,
                                ALIGN,
                            )
                        tl.store(y_bar_bar_ptr + out_offsets, y_bar_bar, mask=mask)
                    if PROJECT_G:
                        projected_g = apply_projection(g, x_hat, rstd, g_mean, g_x_hat_mean)
                        if WANT_X_DOT:
                            tl.store(x_dot_bar_ptr + out_offsets, projected_g, mask=mask)
                    if WANT_X:
                        x_bar = tl.zeros((1, BLOCK_COLS), dtype)
                        if PROJECT_K:
                            x_bar = apply_projection(k, x_hat, rstd, k_mean, k_x_hat_mean)
                        if HAS_X_DOT:
                            g_h_mean = rstd * (covariance - x_dot_x_hat_mean * g_x_hat_mean)
                            x_bar += curvature(g_x_hat_mean, h, x_dot_x_hat_mean, projected_g, g_h_mean, x_hat, rstd)
                        tl.store(x_bar_ptr + out_offsets, x_bar, mask=mask)
    if not WRITES:
        if HAS_X_DOT:
            store_part(parts_ptr, block, split, num_splits, x_dot_mean, 0, NUM_SLOTS)
            store_part(parts_ptr, block, split, num_splits, x_dot_x_hat_mean, 1, NUM_SLOTS)
        if PROJECT_G:
            store_part(parts_ptr, block, split, num_splits, g_mean, 2, NUM_SLOTS)
            store_part(parts_ptr, block, split, num_splits, g_x_hat_mean, 3, NUM_SLOTS)
        if PROJECT_K:
            store_part(parts_ptr, block, split, num_splits, k_mean, 4, NUM_SLOTS)
            store_part(parts_ptr, block, split, num_splits, k_x_hat_mean, 5, NUM_SLOTS)
        if HAS_COVARIANCE:
            store_part(parts_ptr, block, split, num_splits, covariance, 6, NUM_SLOTS)


# Most of the branches are settled when the kernel is compiled.
@batch_independent_jit
def layer_norm_second_param_kernel(  # noqa: C901 - its branches are settled when it is compiled
    y_bar_ptr,
    x_ptr,
    y_bar_dot_ptr,
    x_dot_ptr,
    mean_ptr,
    rstd_ptr,
    x_dot_means_ptr,
    weight_part_ptr,
    weight_dot_part_ptr,
    bias_part_ptr,
    num_rows,
    segment_rows,
    num_splits,
    y_bar_segment_stride,
    y_bar_row_stride,
    y_bar_col_stride,
    x_segment_stride,
    x_row_stride,
    x_col_stride,
    y_bar_dot_segment_stride,
    y_bar_dot_row_stride,
    y_bar_dot_col_stride,
    x_dot_segment_stride,
    x_dot_row_stride,
    x_dot_col_stride,
    num_cols: tl.constexpr,
    READ_X: tl.constexpr,
    READ_Y_BAR: tl.constexpr,
    HAS_Y_BAR_DOT: tl.constexpr,
    HAS_X_DOT: tl.constexpr,
    WANT_WEIGHT: tl.constexpr,
    WANT_WEIGHT_DOT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    LOOP_STAGES: tl.constexpr,
):
    """Own BLOCK_COLS columns of every `num_splits`-th block of rows of one segment: writes pieces of partial rows."""
    NUM_COL_BLOCKS: tl.constexpr = tl.cdiv(num_cols, BLOCK_COLS)
    part = tl.program_id(0) // NUM_COL_BLOCKS
    segment = (part // num_splits).to(tl.int64)
    col_offsets = ((tl.program_id(0) % NUM_COL_BLOCKS) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)).to(tl.int64)
    col_mask = col_offsets < num_cols
    dtype: tl.constexpr = mean_ptr.dtype.element_ty
    weight_sum = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype)
    weight_dot_sum = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype)
    bias_sum = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype)
    if READ_X:
        x_ptr += segment * aligned(x_segment_stride, ALIGN)
    if READ_Y_BAR:
        y_bar_ptr += segment * aligned(y_bar_segment_stride, ALIGN)
    if HAS_Y_BAR_DOT:
        y_bar_dot_ptr += segment * aligned(y_bar_dot_segment_stride, ALIGN)
    if HAS_X_DOT:
        x_dot_ptr += segment * aligned(x_dot_segment_stride, ALIGN)

    for block in tl.range(part % num_splits, tl.cdiv(segment_rows, BLOCK_ROWS), num_splits, num_stages=LOOP_STAGES):
        row = tl.arange(0, BLOCK_ROWS).to(tl.int64) + block * BLOCK_ROWS
        row_mask = row < segment_rows
        mask = row_mask[:, None] & col_mask[None, :]
        stat = segment * segment_rows + row
        if READ_X:
            offset = row * aligned(x_row_stride, ALIGN)
            x = tl.load(x_ptr + tile_offsets(offset, col_offsets, x_col_stride), mask=mask, other=0.0).to(dtype)
            mean = tl.load(mean_ptr + stat, mask=row_mask, other=0.0)
            rstd = tl.load(rstd_ptr + stat, mask=row_mask, other=0.0)
            x_hat = normalize(x, mean, rstd, mask)
        if READ_Y_BAR:
            offset = row * aligned(y_bar_row_stride, ALIGN)
            y_bar_ptrs = y_bar_ptr + tile_offsets(offset, col_offsets, y_bar_col_stride)
            y_bar = tl.load(y_bar_ptrs, mask=mask, other=0.0).to(dtype)
        if HAS_Y_BAR_DOT:
            offset = row * aligned(y_bar_dot_row_stride, ALIGN)
            y_bar_dot_ptrs = y_bar_dot_ptr + tile_offsets(offset, col_offsets, y_bar_dot_col_stride)
            y_bar_dot = tl.load(y_bar_dot_ptrs, mask=mask, other=0.0).to(dtype)
        if WANT_WEIGHT:
            if HAS_X_DOT:
                offset = row * aligned(x_dot_row_stride, ALIGN)
                x_dot_ptrs = x_dot_ptr + tile_offsets(offset, col_offsets, x_dot_col_stride)
                x_dot = tl.load(x_dot_ptrs, mask=mask, other=0.0).to(dtype)
                x_dot_mean = tl.load(x_dot_means_ptr + stat, mask=row_mask, other=0.0)
                x_dot_x_hat_mean = tl.load(x_dot_means_ptr + num_rows + stat, mask=row_mask, other=0.0)
                weight_sum += y_bar * apply_projection(x_dot, x_hat, rstd, x_dot_mean, x_dot_x_hat_mean)
            if HAS_Y_BAR_DOT:
                weight_sum += y_bar_dot * x_hat
        if WANT_WEIGHT_DOT:
            weight_dot_sum += y_bar * x_hat
        if WANT_BIAS:
            if HAS_Y_BAR_DOT:
                bias_sum += y_bar_dot
            else:
                bias_sum += y_bar

    part_offset = part.to(tl.int64) * num_cols + col_offsets
    if WANT_WEIGHT:
        store_cast(weight_part_ptr + part_offset, tl.sum(weight_sum, axis=0), col_mask)
    if WANT_WEIGHT_DOT:
        store_cast(weight_dot_part_ptr + part_offset, tl.sum(weight_dot_sum, axis=0), col_mask)
    if WANT_BIAS:
        store_cast(bias_part_ptr + part_offset, tl.sum(bias_sum, axis=0), col_mask)
