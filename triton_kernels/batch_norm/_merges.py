"""Kernels that merge the partial results of `_sums`, per channel of all groups."""

# Pyright takes device functions for Python: it knows neither constexpr arguments and branches nor what a kernel may
# iterate over, nor that Triton reads the annotation of a scalar as its type.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportInvalidTypeForm=false, reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from ..rows.tiles import either, in_places, selected, sums_of
from ..runtime.kernel import batch_independent_jit
from ..runtime.numbers import float64_of_bits, store_cast
from ._channels import divide, load_channels, load_rstd, reciprocal_root


@triton.jit
def load_parts(
    partials_ptr, num_rows, num_splits, SUMS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_SPLITS: tl.constexpr
):
    """Rows `[rows, 1]` of this program, their mask, and partial results `[rows, splits]` of sums with a bit in `SUMS`.

    Partial results past the end are 0, and their mean is too.
    """
    NUM_SUMS: tl.constexpr = len(selected((0, 0, 0, 0, 0, 0, 0, 0, 0, 0), SUMS))
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    splits = tl.arange(0, BLOCK_SPLITS)[None, :]
    row_mask = rows < num_rows
    parts = ()
    for i in tl.static_range(NUM_SUMS):
        ptrs = partials_ptr + (rows * NUM_SUMS + i) * num_splits + splits
        parts = parts + (tl.load(ptrs, mask=row_mask & (splits < num_splits), other=0.0),)
    return rows, row_mask, parts


@batch_independent_jit
def batch_norm_statistics_kernel(
    partials_ptr, mean_ptr, rstd_ptr, means_ptr, running_mean_ptr, running_var_ptr, new_running_mean_ptr,
    new_running_var_ptr, num_rows, num_splits, count, running_group_stride, momentum_low, momentum_high,
    SUMS: tl.constexpr, EPS: tl.constexpr, NUM_CHANNELS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
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
    HAS_X_DOT: tl.constexpr = means_ptr is not None
    rows, row_mask, parts = load_parts(partials_ptr, num_rows, num_splits, SUMS, BLOCK_ROWS, BLOCK_SPLITS)
    _, _, x_dots, products, _, _, _, counts, means, square_sums = in_places(parts, 10, SUMS)

    # Sums about the first partial mean keep the digits that a large common offset would take.
    first_mean = tl.load(partials_ptr + (rows * len(parts) + len(parts) - 2) * num_splits, mask=row_mask, other=0.0)
    total = tl.zeros([BLOCK_ROWS, 1], acc_dtype) + tl.cast(count, acc_dtype)
    sums = sums_of(selected((counts * (means - first_mean), x_dots), HAS_X_DOT * 2 + 1), 2)
    mean = first_mean + divide(sums[0], total)
    centered = means - mean
    squares = square_sums + counts * centered * centered
    moments = sums_of(selected((squares, products + x_dots * centered), HAS_X_DOT * 2 + 1), 2)
    rstd = reciprocal_root(divide(moments[0], total) + EPS)
    tl.store(mean_ptr + rows, mean, mask=row_mask)
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)
    if HAS_X_DOT:
        column, step = means_ptr + rows, tl.cast(num_rows, tl.int64)
        tl.store(column + 2 * step, divide(sums[1], total), mask=row_mask)
        tl.store(column + 3 * step, divide(moments[1] * rstd, total), mask=row_mask)

    momentum = float64_of_bits(momentum_low, momentum_high)
    running_offsets = rows // NUM_CHANNELS * running_group_stride + rows % NUM_CHANNELS
    if running_mean_ptr is not None:
        running_mean = tl.load(running_mean_ptr + running_offsets, mask=row_mask, other=0.0).to(acc_dtype)
        new_running_mean = (1.0 - momentum) * running_mean + momentum * mean
        store_cast(new_running_mean_ptr + rows, new_running_mean, row_mask)
    if running_var_ptr is not None:
        running_var = tl.load(running_var_ptr + running_offsets, mask=row_mask, other=0.0).to(acc_dtype)
        new_running_var = (1.0 - momentum) * running_var + momentum * divide(moments[0], total - 1.0)
        store_cast(new_running_var_ptr + rows, new_running_var, row_mask)


@batch_independent_jit
def batch_norm_merge_kernel(  # noqa: C901 - likewise
    partials_ptr, means_ptr, scale_statistic_ptr, weight_ptr, weight_bar_ptr, bias_bar_ptr, mean_bar_ptr, var_bar_ptr,
    weight_bar_dot_ptr, bias_bar_dot_ptr, num_rows, num_splits, count, statistic_group_stride, weight_group_stride,
    SUMS: tl.constexpr, EPS: tl.constexpr, NUM_CHANNELS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
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
        SUMS: Bits of the sums that there are; the others count as 0.
    """
    acc_dtype = partials_ptr.dtype.element_ty
    HAS_Y_BAR: tl.constexpr = SUMS & 1
    HAS_X_DOT: tl.constexpr = SUMS >> 2 & 1
    rows, row_mask, parts = load_parts(partials_ptr, num_rows, num_splits, SUMS, BLOCK_ROWS, BLOCK_SPLITS)
    group, channels = rows // NUM_CHANNELS, rows % NUM_CHANNELS
    rstd = load_rstd(scale_statistic_ptr, group * statistic_group_stride + channels, row_mask, EPS, acc_dtype)
    zero = tl.zeros([BLOCK_ROWS, 1], acc_dtype)
    sums = either(in_places(sums_of(parts, 2), 7, SUMS), (zero, zero, zero, zero, zero, zero, zero))
    y_bar_sum, y_bar_product, x_dot_sum, x_dot_product, pair_sum, y_bar_dot_sum, y_bar_dot_product = sums
    y_bar_product, x_dot_product, y_bar_dot_product = (
        y_bar_product * rstd,
        x_dot_product * rstd,
        y_bar_dot_product * rstd,
    )

    total = zero + tl.cast(count, acc_dtype)
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
        if SUMS >> 5 & 1:
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
