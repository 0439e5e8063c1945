"""Kernels that merge the partial results of `_batch_norm_sums`, per channel of all groups."""

# Pyright takes device functions for Python: it knows neither constexpr arguments and branches nor what a kernel may
# iterate over, nor that Triton reads the annotation of a scalar as its type.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportInvalidTypeForm=false, reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from triton_kernels._channels import divide, load_channels, load_rstd, reciprocal_root
from triton_kernels._runtime import batch_independent_jit, float64_of_bits, store_cast


@triton.jit
def load_parts(partials, SUM: tl.constexpr, num_splits, mask, WRITTEN: tl.constexpr):
    """Partial results `[rows, splits]` of one sum, 0 where there is none, or not `WRITTEN` by any program."""
    if WRITTEN:
        parts = tl.load(partials + SUM * num_splits, mask=mask, other=0.0)
    else:
        parts = tl.zeros(mask.shape, partials.dtype.element_ty)
    return parts


@triton.jit
def locate_parts(partials_ptr, num_rows, num_splits, BLOCK_ROWS: tl.constexpr, BLOCK_SPLITS: tl.constexpr):
    """Rows of this program and their mask, pointers `[rows, splits]` to their first sums, and the mask of these."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    splits = tl.arange(0, BLOCK_SPLITS)
    row_mask = rows < num_rows
    mask = row_mask[:, None] & (splits < num_splits)[None, :]
    return rows, row_mask, partials_ptr + (rows * 10 * num_splits)[:, None] + splits[None, :], mask


@batch_independent_jit
def batch_norm_statistics_kernel(
    partials_ptr, mean_ptr, rstd_ptr, means_ptr, running_mean_ptr, running_var_ptr, new_running_mean_ptr,
    new_running_var_ptr, num_rows, num_splits, count, running_group_stride, momentum_low, momentum_high,
    EPS: tl.constexpr, NUM_CHANNELS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """One program merges the partial statistics of `BLOCK_ROWS` channels and updates their running statistics.

    Shapes:
        partials_ptr: As `batch_norm_sums_kernel` wrote it without a mean.
        mean_ptr, rstd_ptr: `[num_rows]`, `num_rows = groups * channels`, accumulation dtype.
        means_ptr: `[6, num_rows]`, or None without an x_dot: its rows 2 and 3, as in `batch_norm_merge_kernel`.
        running_mean_ptr, running_var_ptr: `[groups, channels]`, or None.
        new_running_mean_ptr, new_running_var_ptr: `[num_rows]`, or None.
        count: Elements per channel.
        momentum_low, momentum_high: Weight of the new statistics (see `float64_bits`).
    """
    acc_dtype = partials_ptr.dtype.element_ty
    rows, row_mask, partials, mask = locate_parts(partials_ptr, num_rows, num_splits, BLOCK_ROWS, BLOCK_SPLITS)
    counts = load_parts(partials, 7, num_splits, mask, True)
    means = load_parts(partials, 8, num_splits, mask, True)
    square_sums = load_parts(partials, 9, num_splits, mask, True)

    # Sums about the first partial mean keep the digits that a large common offset would take.
    first_mean = tl.load(partials_ptr + (rows * 10 + 8) * num_splits, mask=row_mask, other=0.0)
    total = tl.zeros([BLOCK_ROWS], acc_dtype) + tl.cast(count, acc_dtype)
    shifted = tl.where(mask, means - first_mean[:, None], 0.0)
    mean = first_mean + divide(tl.sum(counts * shifted, axis=1), total)
    centered = tl.where(mask, means - mean[:, None], 0.0)
    square_sum = tl.sum(square_sums + counts * centered * centered, axis=1)
    rstd = reciprocal_root(divide(square_sum, total) + EPS)
    tl.store(mean_ptr + rows, mean, mask=row_mask)
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)
    if means_ptr is not None:
        x_dot_sums = load_parts(partials, 2, num_splits, mask, True)
        products = load_parts(partials, 3, num_splits, mask, True) + x_dot_sums * centered
        column, step = means_ptr + rows, tl.cast(num_rows, tl.int64)
        tl.store(column + 2 * step, divide(tl.sum(x_dot_sums, axis=1), total), mask=row_mask)
        tl.store(column + 3 * step, divide(tl.sum(products, axis=1) * rstd, total), mask=row_mask)

    momentum = float64_of_bits(momentum_low, momentum_high)
    running_offsets = rows // NUM_CHANNELS * running_group_stride + rows % NUM_CHANNELS
    if running_mean_ptr is not None:
        running_mean = tl.load(running_mean_ptr + running_offsets, mask=row_mask, other=0.0).to(acc_dtype)
        new_running_mean = (1.0 - momentum) * running_mean + momentum * mean
        store_cast(new_running_mean_ptr + rows, new_running_mean, row_mask)
    if running_var_ptr is not None:
        running_var = tl.load(running_var_ptr + running_offsets, mask=row_mask, other=0.0).to(acc_dtype)
        new_running_var = (1.0 - momentum) * running_var + momentum * divide(square_sum, total - 1.0)
        store_cast(new_running_var_ptr + rows, new_running_var, row_mask)


@batch_independent_jit
def batch_norm_merge_kernel(  # noqa: C901 - likewise
    partials_ptr, means_ptr, scale_statistic_ptr, weight_ptr, weight_bar_ptr, bias_bar_ptr, mean_bar_ptr, var_bar_ptr,
    weight_bar_dot_ptr, bias_bar_dot_ptr, num_rows, num_splits, count, statistic_group_stride, weight_group_stride,
    HAS_Y_BAR: tl.constexpr, HAS_X: tl.constexpr, HAS_X_DOT: tl.constexpr, HAS_Y_BAR_DOT: tl.constexpr,
    EPS: tl.constexpr, NUM_CHANNELS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """One program merges the partial sums of `BLOCK_ROWS` channels into whatever has a pointer.

    With `P(u) = rstd * (u - mean(u) - x_hat * mean(u * x_hat))`, rows of the means are those of 0 `y_bar`,
    1 `y_bar * x_hat`, 2 `x_dot`, 3 `x_dot * x_hat`, 4 `y_bar_dot`, 5 `y_bar * P(x_dot) + y_bar_dot * x_hat`.

    Shapes:
        partials_ptr: As `batch_norm_sums_kernel` wrote it with a mean.
        means_ptr: `[6, num_rows]`, or None; `num_rows = groups * channels`. Those of absent operands are not written.
        scale_statistic_ptr: `[groups, channels]`, rstd if `EPS` is None, else the variance.
        weight_ptr: `[groups, channels]`, or None for 1.
        weight_bar_ptr, bias_bar_ptr: `[num_rows]` or None: sums of `y_bar * x_hat` and `y_bar`.
        mean_bar_ptr, var_bar_ptr: `[num_rows]` or None: cotangents of a given mean and variance.
        weight_bar_dot_ptr, bias_bar_dot_ptr: `[num_rows]` or None: sums of what row 5 has the mean of, and `y_bar_dot`.
        count: Elements per channel.
        HAS_Y_BAR, HAS_X, HAS_X_DOT, HAS_Y_BAR_DOT: Operands of the partial sums; the others count as 0.
    """
    acc_dtype = partials_ptr.dtype.element_ty
    rows, row_mask, partials, mask = locate_parts(partials_ptr, num_rows, num_splits, BLOCK_ROWS, BLOCK_SPLITS)
    group, channels = rows // NUM_CHANNELS, rows % NUM_CHANNELS
    rstd = load_rstd(scale_statistic_ptr, group * statistic_group_stride + channels, row_mask, EPS, acc_dtype)
    y_bar_sum = tl.sum(load_parts(partials, 0, num_splits, mask, HAS_Y_BAR), axis=1)
    y_bar_product = tl.sum(load_parts(partials, 1, num_splits, mask, HAS_Y_BAR and HAS_X), axis=1) * rstd
    x_dot_sum = tl.sum(load_parts(partials, 2, num_splits, mask, HAS_X_DOT), axis=1)
    x_dot_product = tl.sum(load_parts(partials, 3, num_splits, mask, HAS_X_DOT and HAS_X), axis=1) * rstd
    pair_sum = tl.sum(load_parts(partials, 4, num_splits, mask, HAS_Y_BAR and HAS_X_DOT), axis=1)
    y_bar_dot_sum = tl.sum(load_parts(partials, 5, num_splits, mask, HAS_Y_BAR_DOT), axis=1)
    y_bar_dot_product = tl.sum(load_parts(partials, 6, num_splits, mask, HAS_Y_BAR_DOT and HAS_X), axis=1) * rstd

    total = tl.zeros([BLOCK_ROWS], acc_dtype) + tl.cast(count, acc_dtype)
    y_bar_mean, y_bar_tilt = divide(y_bar_sum, total), divide(y_bar_product, total)
    x_dot_mean, x_dot_tilt = divide(x_dot_sum, total), divide(x_dot_product, total)
    bend = divide(y_bar_dot_product, total)
    if HAS_Y_BAR and HAS_X_DOT:
        bend += rstd * (divide(pair_sum, total) - y_bar_mean * x_dot_mean - y_bar_tilt * x_dot_tilt)

    if means_ptr is not None:
        column, step = means_ptr + rows, tl.cast(num_rows, tl.int64)
        if HAS_Y_BAR:
            tl.store(column, y_bar_mean, mask=row_mask)
            tl.store(column + step, y_bar_tilt, mask=row_mask)
        if HAS_X_DOT:
            tl.store(column + 2 * step, x_dot_mean, mask=row_mask)
            tl.store(column + 3 * step, x_dot_tilt, mask=row_mask)
        if HAS_Y_BAR_DOT:
            tl.store(column + 4 * step, divide(y_bar_dot_sum, total), mask=row_mask)
        tl.store(column + 5 * step, bend, mask=row_mask)
    if weight_bar_ptr is not None:
        store_cast(weight_bar_ptr + rows, y_bar_product, row_mask)
    if bias_bar_ptr is not None:
        store_cast(bias_bar_ptr + rows, y_bar_sum, row_mask)
    if weight_bar_dot_ptr is not None:
        store_cast(weight_bar_dot_ptr + rows, total * bend, row_mask)
    if bias_bar_dot_ptr is not None:
        store_cast(bias_bar_dot_ptr + rows, y_bar_dot_sum, row_mask)
    slope = rstd * load_channels(weight_ptr, group * weight_group_stride + channels, row_mask, 1.0, acc_dtype)
    if mean_bar_ptr is not None:
        store_cast(mean_bar_ptr + rows, -slope * y_bar_sum, row_mask)
    if var_bar_ptr is not None:
        store_cast(var_bar_ptr + rows, -0.5 * rstd * slope * y_bar_product, row_mask)
