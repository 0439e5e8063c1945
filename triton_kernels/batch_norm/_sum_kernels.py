"""Kernels that sum for batch norm over the channel view `[groups, samples, channels, spatial]`, and merge the sums.

Every rule is at most one reduction over a split of samples and positions (see `_channels`), a merge of its partial
results per channel of all groups, and one elementwise transform; `batch_norm` says which rule uses which terms.
Per-channel tensors are `[groups, channels]` with adjacent channels and a stride between groups; pointers of absent
tensors are None.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..rows.tiles import either, in_places, nothing, rounded, selected, sums_of
from ..runtime.kernel import aligned_by_constants_jit, batch_independent_jit
from ..runtime.numbers import float64_of_bits, store_cast
from ._channels import (
    channels_of,
    count_tiles,
    divide,
    elements_before,
    load_channels,
    load_rstd,
    load_tile,
    locate_tile,
    reciprocal_root,
    share_of,
    spatial_extent,
    store_tile,
    through_relu,
)


@triton.jit
def fold(sums, values, FOLD: tl.constexpr):
    """Sums with those of what each thread holds of a tile added: no data moves between threads (see `ChannelPlan`)."""
    rows: tl.constexpr = sums.shape[0]
    repeats: tl.constexpr = FOLD[0]
    if FOLD[1]:
        run: tl.constexpr = values.shape[0] // (rows * repeats)
        added = tl.sum(tl.sum(tl.reshape(values, [repeats, rows, run]), axis=2), axis=0)[:, None]
    else:
        added = tl.sum(tl.reshape(values, [repeats, rows, values.shape[1]]), axis=0)
    return sums + added


@triton.jit
def load_operands(
    ptrs, strides, place, number, num_samples, num_spatial, TILE: tl.constexpr, POLICIES: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """A tile of each operand that is there, and the mask of its rows; `place` is a group, channels and their mask.

    Behind the operands stand a ReLU's output, which masks the first one, and where that is stored then.
    """
    sample, position, row_mask = locate_tile(number, num_samples, num_spatial, TILE[2], TILE[3])
    tiles = ()
    for i in tl.static_range(4):
        if ptrs[i] is None:
            tiles = tiles + (nothing(),)
        else:
            tile, mask = (place[0], place[1], sample, position), row_mask[:, None] & place[2][None, :]
            values = load_tile(ptrs[i], strides[i], tile, mask, TILE, DTYPE, POLICIES[i])
            if i == 0 and ptrs[4] is not None:
                values = through_relu(values, load_tile(ptrs[4], strides[0], tile, mask, TILE, DTYPE, POLICIES[0]))
                store_tile(ptrs[5], values, strides[0], tile, mask, TILE)
            tiles = tiles + (values,)
    return tiles, row_mask


@triton.jit
def add_operands(sums, tiles, center, row_mask, SUMS: tl.constexpr, FOLD: tl.constexpr):
    """The sums of the lanes that have a bit in `SUMS`, with those of another tile added."""
    y_bar, x, x_dot, y_bar_dot = tiles
    c = x
    if x.type.is_block():
        # Absent values are loaded as 0, and stay 0. Each thread has few rows, and an element takes one operation.
        c = x - row_mask[:, None].to(x.dtype) * center[None, :]
    products = (y_bar, y_bar * c, x_dot, x_dot * c, y_bar * x_dot, y_bar_dot, y_bar_dot * c, c, c * c)
    taken = selected(products, SUMS)
    found = ()
    for i in tl.static_range(len(sums)):
        found = found + (fold(sums[i], taken[i], FOLD),)
    return found


@aligned_by_constants_jit
def batch_norm_sums_kernel(
    y_bar_ptr, x_ptr, x_dot_ptr, y_bar_dot_ptr, relu_ptr, masked_ptr, mean_ptr, partials_ptr, num_samples, num_spatial,
    mean_group_stride, y_bar_group_stride, y_bar_sample_stride, y_bar_channel_stride, y_bar_spatial_stride,
    x_group_stride, x_sample_stride, x_channel_stride, x_spatial_stride, x_dot_group_stride, x_dot_sample_stride,
    x_dot_channel_stride, x_dot_spatial_stride, y_bar_dot_group_stride, y_bar_dot_sample_stride,
    y_bar_dot_channel_stride, y_bar_dot_spatial_stride, NUM_CHANNELS: tl.constexpr, ALIGN: tl.constexpr,
    SPATIAL_INNER: tl.constexpr, BLOCK_SAMPLES: tl.constexpr, BLOCK_SPATIAL: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
    REPEATS: tl.constexpr, RUN: tl.constexpr, NUM_STAGES: tl.constexpr, SUMS: tl.constexpr, READ_AGAIN: tl.constexpr,
    X_READ_AGAIN: tl.constexpr,
):  # fmt: skip
    """One program sums the operands that have a pointer over its split of the tiles of its channels.

    The partial results of a channel are sums of 0 `y_bar`, 1 `y_bar * c`, 2 `x_dot`, 3 `x_dot * c`, 4 `y_bar * x_dot`,
    5 `y_bar_dot`, 6 `y_bar_dot * c` with `c = x - mean`. Without a `mean_ptr` the mean is that of the elements summed,
    and 7 their count, 8 their mean and 9 the sum of `c * c` are wanted too. Those that are wanted lie side by side.

    Nothing is reduced across lanes inside the loop. The sums of statistics are taken about the mean of the first tile,
    and moved to the mean of all at the end: the tile is one of the `n` that are summed, so its share of the variance
    bounds what cancels there by a factor of `n`, however far from the others it lies.

    Shapes:
        y_bar_ptr, x_ptr, x_dot_ptr, y_bar_dot_ptr: `[groups, samples, channels, spatial]`, or None.
        relu_ptr: Result of a ReLU behind the norm, in memory as `y_bar`, which is 0 where this is; or None.
        masked_ptr: Memory for `y_bar` with these zeros, in its layout too, or None.
        mean_ptr: `[groups, channels]`, or None.
        partials_ptr: `[num_rows, num_sums, num_splits]`, accumulation dtype; `num_rows = groups * channels`.
        SUMS: Bits of the `num_sums` of them that are wanted.
        READ_AGAIN, X_READ_AGAIN: Whether a transform follows that reads the operands, and x, again.
    """
    # The cache is for what will be read from it.
    policy: tl.constexpr = "evict_last" if READ_AGAIN else "evict_first"
    x_policy: tl.constexpr = "evict_last" if X_READ_AGAIN else "evict_first"
    POLICIES: tl.constexpr = (policy, x_policy, policy, policy)
    STATISTICS: tl.constexpr = mean_ptr is None
    TILE: tl.constexpr = (ALIGN, SPATIAL_INNER, BLOCK_SAMPLES, BLOCK_SPATIAL)
    acc_dtype = partials_ptr.dtype.element_ty
    strides = (
        (y_bar_group_stride, y_bar_sample_stride, y_bar_channel_stride, y_bar_spatial_stride),
        (x_group_stride, x_sample_stride, x_channel_stride, x_spatial_stride),
        (x_dot_group_stride, x_dot_sample_stride, x_dot_channel_stride, x_dot_spatial_stride),
        (y_bar_dot_group_stride, y_bar_dot_sample_stride, y_bar_dot_channel_stride, y_bar_dot_spatial_stride),
    )
    ptrs = (y_bar_ptr, x_ptr, x_dot_ptr, y_bar_dot_ptr, relu_ptr, masked_ptr)
    num_spatial = spatial_extent(num_spatial, ALIGN, SPATIAL_INNER)
    group, channels, channel_mask = channels_of(tl.program_id(0), NUM_CHANNELS, BLOCK_CHANNELS)
    place = (group, channels, channel_mask)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    num_tiles = count_tiles(num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL)
    first, stop = share_of(split, num_splits, num_tiles)

    FOLD: tl.constexpr = (REPEATS, SPATIAL_INNER)
    sums = ()
    for i in tl.static_range(9):
        if (SUMS >> i) & 1:
            sums = sums + (tl.zeros([BLOCK_SAMPLES * BLOCK_SPATIAL // REPEATS // RUN, BLOCK_CHANNELS], acc_dtype),)
    anchor = first
    if STATISTICS:
        # The fuller one of the first two: a tile with few elements has a small share of the variance. From the mean of
        # one of n full tiles, that of all lies within `sqrt(n)` standard deviations: products about it lose at most as
        # many times the rounding of a sum about the mean, and squares n times.
        before = elements_before(first, num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL)
        until = elements_before(first + 1, num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL)
        second = tl.minimum(first + 2, stop)
        second_count = elements_before(second, num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL) - until
        anchor = tl.where(second_count > until - before, first + 1, first)
        anchor_tiles, anchor_mask = load_operands(
            ptrs, strides, place, anchor, num_samples, num_spatial, TILE, POLICIES, acc_dtype
        )
        # In this order the sum cannot overflow; any center near the mean will do.
        weight = 1.0 / tl.maximum(second_count, until - before).to(acc_dtype)
        center = tl.sum(rounded(anchor_tiles[1] * weight), axis=0)
        sums = add_operands(sums, anchor_tiles, center, anchor_mask, SUMS, FOLD)
    else:
        center = load_channels(mean_ptr, group * mean_group_stride + channels, channel_mask, 0.0, acc_dtype)

    for number in tl.range(first + STATISTICS, stop, num_stages=NUM_STAGES):
        # The tile in the place of the first one has been summed.
        other = tl.where(number == anchor, first, number) if STATISTICS else number
        tiles, row_mask = load_operands(
            ptrs, strides, place, other, num_samples, num_spatial, TILE, POLICIES, acc_dtype
        )
        sums = add_operands(sums, tiles, center, row_mask, SUMS, FOLD)

    turned = ()
    for i in tl.static_range(len(sums)):
        turned = turned + (tl.trans(sums[i]),)
    s = in_places(sums_of(turned, 2), 9, SUMS)
    products, counts, means, square_sums = s[3], nothing(), nothing(), nothing()
    if STATISTICS:
        until = elements_before(stop, num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL)
        count = (until - before).to(acc_dtype)
        counts = tl.zeros([BLOCK_CHANNELS, 1], acc_dtype) + count
        # One quotient: each thread of a block of channels has eight of them.
        shift = s[7] * divide(1.0, count)
        means = center[:, None] + shift
        square_sums = s[8] - s[7] * shift
        # Rounding may leave less than nothing of equal elements, and overflow no number; a NaN stays.
        square_sums = tl.where(s[8] == float("inf"), s[8], square_sums)
        square_sums = tl.where(square_sums < 0.0, 0.0, square_sums)
        if x_dot_ptr is not None:
            products -= s[2] * shift
    found = selected((s[0], s[1], s[2], products, s[4], s[5], s[6], counts, means, square_sums), SUMS)
    rows = (group * NUM_CHANNELS + channels)[:, None]
    for i in tl.static_range(len(found)):
        tl.store(partials_ptr + (rows * len(found) + i) * num_splits + split, found[i], mask=channel_mask[:, None])


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
