"""Second-order layer norm kernel that holds whole rows in registers.

All second-order derivatives of layer norm are parts of the gradient of one scalar, the sum of the pairings of y_bar
with the tangent of y and of y_bar_dot with y itself,

    L = <y_bar, P(x_dot) * weight + x_hat * weight_dot + bias_dot> + <y_bar_dot, x_hat * weight + bias>

With h = P(x_dot), g = y_bar * weight, k = y_bar * weight_dot + y_bar_dot * weight, A = mean(x_dot * x_hat) and
B = mean(g * x_hat), and a prime for the derivative of L with respect to what is primed,

    y_bar'  = h * weight + x_hat * weight_dot + bias_dot
    x'      = P(k) - rstd * (B * h + A * P(g) + mean(g * h) * x_hat)
    x_dot'  = P(g)
    weight' = sum(y_bar * h + y_bar_dot * x_hat),   weight_dot' = sum(y_bar * x_hat)
    bias'   = sum(y_bar_dot),                       bias_dot'   = sum(y_bar)

Rows, or rows and accumulators, that exceed the registers are served by `_layer_norm_second_looped`. Shared arguments:

    y_bar, x, y_bar_dot, x_dot      seen as [segments, segment_rows, num_cols], any strides
    y_bar_bar, x_bar, x_dot_bar     the derivatives y_bar', x' and x_dot', contiguous
    weight, weight_dot, bias_dot    seen as [segments, num_cols], or one row shared by all segments
    mean, rstd                      [segments * segment_rows], contiguous; all arithmetic is in their dtype
    weight_part, weight_dot_part, bias_part
                                    [segments * num_splits, num_cols], partial sums of weight', of weight_dot', and of
                                    bias' where there is a y_bar_dot, otherwise of bias_dot'
    x_dot_means                     [2, segments * segment_rows], the row means of x_dot and of x_dot * x_hat, for a
                                    kernel that sums over rows
    num_rows                        segments * segment_rows
    READ_X, READ_Y_BAR, HAS_*       whether the operand takes part; what does not is never read
    WANT_*                          whether the derivative is wanted
"""

# Pyright knows neither that branches on constexpr flags are settled at compile time nor what a kernel may iterate over.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from triton_kernels._rows import aligned, apply_projection, normalize, project, tile_offsets
from triton_kernels._runtime import batch_independent_jit, store_cast


@triton.jit
def curvature(g_x_hat_mean, h, x_dot_x_hat_mean, projected_g, g_h_mean, x_hat, rstd):
    """What the dependence of P on x adds to x': `-rstd * (B * h + A * P(g) + mean(g * h) * x_hat)`."""
    bent = g_x_hat_mean[:, None] * h + x_dot_x_hat_mean[:, None] * projected_g + g_h_mean[:, None] * x_hat
    return -rstd[:, None] * bent


# Most of the branches are settled when the kernel is compiled.
@batch_independent_jit
def layer_norm_second_kernel(  # noqa: C901 - its branches are settled when it is compiled
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
    weight_part_ptr,
    weight_dot_part_ptr,
    bias_part_ptr,
    x_dot_means_ptr,
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
    WANT_WEIGHT: tl.constexpr,
    WANT_WEIGHT_DOT: tl.constexpr,
    WANT_BIAS: tl.constexpr,
    WANT_X_DOT_MEANS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    LOOP_STAGES: tl.constexpr,
):
    """Own every `num_splits`-th block of BLOCK_ROWS rows of one segment: writes their y_bar', x' and x_dot'.

    One partial row of each sum over rows is written as well. The sums are carried in registers; their order is fixed,
    so the result is the same in every run.
    """
    part = tl.program_id(0)
    segment = (part // num_splits).to(tl.int64)
    col_offsets = tl.arange(0, BLOCK_COLS)
    col_mask = (col_offsets < num_cols)[None, :]
    dtype: tl.constexpr = mean_ptr.dtype.element_ty
    if READ_X:
        x_ptr += segment * aligned(x_segment_stride, ALIGN)
    if READ_Y_BAR:
        y_bar_ptr += segment * aligned(y_bar_segment_stride, ALIGN)
    if HAS_Y_BAR_DOT:
        y_bar_dot_ptr += segment * aligned(y_bar_dot_segment_stride, ALIGN)
    if HAS_X_DOT:
        x_dot_ptr += segment * aligned(x_dot_segment_stride, ALIGN)
    if HAS_WEIGHT:
        weight_ptr += segment * aligned(weight_segment_stride, ALIGN)
        weight = tl.load(weight_ptr + col_offsets[None, :], mask=col_mask, other=0.0)
    if HAS_WEIGHT_DOT:
        weight_dot_ptr += segment * aligned(weight_dot_segment_stride, ALIGN)
        weight_dot = tl.load(weight_dot_ptr + col_offsets[None, :], mask=col_mask, other=0.0)
    if HAS_BIAS_DOT:
        bias_dot_ptr += segment * aligned(bias_dot_segment_stride, ALIGN)
        bias_dot = tl.load(bias_dot_ptr + col_offsets[None, :], mask=col_mask, other=0.0)
    if WANT_WEIGHT:
        weight_sum = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype)
    if WANT_WEIGHT_DOT:
        weight_dot_sum = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype)
    if WANT_BIAS:
        bias_sum = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype)

    for block in tl.range(part % num_splits, tl.cdiv(segment_rows, BLOCK_ROWS), num_splits, num_stages=LOOP_STAGES):
        row = tl.arange(0, BLOCK_ROWS).to(tl.int64) + block * BLOCK_ROWS
        row_mask = row < segment_rows
        mask = row_mask[:, None] & col_mask
        out_offsets = tile_offsets((segment * segment_rows + row) * num_cols, col_offsets, 1)
        if READ_X:
            offset = row * aligned(x_row_stride, ALIGN)
            x = tl.load(x_ptr + tile_offsets(offset, col_offsets, x_col_stride), mask=mask, other=0.0).to(dtype)
            mean = tl.load(mean_ptr + segment * segment_rows + row, mask=row_mask, other=0.0)
            rstd = tl.load(rstd_ptr + segment * segment_rows + row, mask=row_mask, other=0.0)
            x_hat = normalize(x, mean, rstd, mask)
        if READ_Y_BAR:
            offset = row * aligned(y_bar_row_stride, ALIGN)
            y_bar_ptrs = y_bar_ptr + tile_offsets(offset, col_offsets, y_bar_col_stride)
            y_bar = tl.load(y_bar_ptrs, mask=mask, other=0.0).to(dtype)
        if HAS_Y_BAR_DOT:
            offset = row * aligned(y_bar_dot_row_stride, ALIGN)
            y_bar_dot_ptrs = y_bar_dot_ptr + tile_offsets(offset, col_offsets, y_bar_dot_col_stride)
            y_bar_dot = tl.load(y_bar_dot_ptrs, mask=mask, other=0.0).to(dtype)
        if HAS_X_DOT:
            offset = row * aligned(x_dot_row_stride, ALIGN)
            x_dot_ptrs = x_dot_ptr + tile_offsets(offset, col_offsets, x_dot_col_stride)
            x_dot = tl.load(x_dot_ptrs, mask=mask, other=0.0).to(dtype)
            x_dot_x_hat_mean = tl.sum(x_dot * x_hat, axis=1) / num_cols
            x_dot_mean = tl.sum(x_dot, axis=1) / num_cols
            h = apply_projection(x_dot, x_hat, rstd, x_dot_mean, x_dot_x_hat_mean)
            if WANT_X_DOT_MEANS:
                tl.store(x_dot_means_ptr + segment * segment_rows + row, x_dot_mean, mask=row_mask)
                tl.store(x_dot_means_ptr + num_rows + segment * segment_rows + row, x_dot_x_hat_mean, mask=row_mask)

        if WANT_Y_BAR:
            y_bar_bar = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype)
            if HAS_X_DOT:
                y_bar_bar = h
                if HAS_WEIGHT:
                    y_bar_bar *= weight.to(dtype)
            if HAS_WEIGHT_DOT:
                y_bar_bar += x_hat * weight_dot.to(dtype)
            if HAS_BIAS_DOT:
                y_bar_bar += bias_dot.to(dtype)
            tl.store(y_bar_bar_ptr + out_offsets, y_bar_bar, mask=mask)
        if WANT_WEIGHT:
            if HAS_X_DOT:
                weight_sum += y_bar * h
            if HAS_Y_BAR_DOT:
                weight_sum += y_bar_dot * x_hat
        if WANT_WEIGHT_DOT:
            weight_dot_sum += y_bar * x_hat
        if WANT_BIAS:
            if HAS_Y_BAR_DOT:
                bias_sum += y_bar_dot
            else:
                bias_sum += y_bar

        if WANT_X_DOT or (WANT_X and HAS_X_DOT):
            g = y_bar
            if HAS_WEIGHT:
                g *= weight.to(dtype)
            g_x_hat_mean = tl.sum(g * x_hat, axis=1) / num_cols
            # Centered first, for the mean of g * h: h sums to zero only up to rounding, which a large mean of g would
            # amplify.
            g = tl.where(mask, g - (tl.sum(g, axis=1) / num_cols)[:, None], 0.0)
            projected_g = rstd[:, None] * (g - x_hat * g_x_hat_mean[:, None])
            if WANT_X_DOT:
                tl.store(x_dot_bar_ptr + out_offsets, projected_g, mask=mask)
        if WANT_X:
            x_bar = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype)
            if HAS_WEIGHT_DOT or HAS_Y_BAR_DOT:
                k = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype)
                if HAS_WEIGHT_DOT:
                    k += y_bar * weight_dot.to(dtype)
                if HAS_Y_BAR_DOT:
                    if HAS_WEIGHT:
                        k += y_bar_dot * weight.to(dtype)
                    else:
                        k += y_bar_dot
                x_bar = project(k, x_hat, rstd, num_cols)
            if HAS_X_DOT:
                g_h_mean = tl.sum(g * h, axis=1) / num_cols
                x_bar += curvature(g_x_hat_mean, h, x_dot_x_hat_mean, projected_g, g_h_mean, x_hat, rstd)
            tl.store(x_bar_ptr + out_offsets, x_bar, mask=mask)

    part_offset = part.to(tl.int64) * num_cols + col_offsets
    if WANT_WEIGHT:
        store_cast(weight_part_ptr + part_offset, tl.sum(weight_sum, axis=0), col_offsets < num_cols)
    if WANT_WEIGHT_DOT:
        store_cast(weight_dot_part_ptr + part_offset, tl.sum(weight_dot_sum, axis=0), col_offsets < num_cols)
    if WANT_BIAS:
        store_cast(bias_part_ptr + part_offset, tl.sum(bias_sum, axis=0), col_offsets < num_cols)
