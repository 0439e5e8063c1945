"""The kernel that sums for batch norm over the channel view `[groups, samples, channels, spatial]` (see `_channels`).

Every rule is at most one reduction over a split of samples and positions, a merge of its partial results per channel,
and one elementwise transform; `batch_norm` and `batch_norm_second_order` say which rule uses which terms. Per-channel
tensors are `[groups, channels]` with adjacent channels and a stride between groups; pointers of absent tensors
are None.
"""

# Pyright takes device functions for Python: it knows neither constexpr arguments and branches nor what a kernel may
# iterate over, nor that Triton reads the annotation of a scalar as its type.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportInvalidTypeForm=false, reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from triton_kernels._channels import (
    channels_of,
    count_tiles,
    divide,
    load_channels,
    load_tile,
    locate_tile,
    share_of,
    spatial_extent,
)
from triton_kernels._runtime import batch_independent_jit


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
def add_tile(  # noqa: C901 - its branches are settled when it is compiled
    sums, center, ptrs, strides, tile, mask, count, TILE: tl.constexpr, POLICIES: tl.constexpr,
    STATISTICS: tl.constexpr, IS_ANCHOR: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """The nine sums of the lanes with those of another tile of `count` rows added, and the center of x.

    Sums of what is absent stay as they are. The center is the one given, or the mean of the tile if it `IS_ANCHOR`.
    """
    y_bar_sum, y_bar_product, x_dot_sum, x_dot_product, pair_sum, y_bar_dot_sum, y_bar_dot_product, c_sum, cc_sum = sums
    acc_dtype: tl.constexpr = c_sum.dtype
    if ptrs[1] is not None:
        c = load_tile(ptrs[1], strides[1], tile, mask, TILE, acc_dtype, POLICIES[1])
        if IS_ANCHOR:
            # In this order the sum cannot overflow.
            center = tl.sum(c * divide(1.0, count.to(acc_dtype)), axis=0)
        c -= center[None, :]
        if STATISTICS:
            c = tl.where(mask, c, 0.0)
            c_sum = fold(c_sum, c, FOLD)
            cc_sum = fold(cc_sum, c * c, FOLD)
    if ptrs[0] is not None:
        y_bar = load_tile(ptrs[0], strides[0], tile, mask, TILE, acc_dtype, POLICIES[0])
        y_bar_sum = fold(y_bar_sum, y_bar, FOLD)
        if ptrs[1] is not None:
            y_bar_product = fold(y_bar_product, y_bar * c, FOLD)
    if ptrs[2] is not None:
        x_dot = load_tile(ptrs[2], strides[2], tile, mask, TILE, acc_dtype, POLICIES[0])
        x_dot_sum = fold(x_dot_sum, x_dot, FOLD)
        if ptrs[1] is not None:
            x_dot_product = fold(x_dot_product, x_dot * c, FOLD)
        if ptrs[0] is not None:
            pair_sum = fold(pair_sum, y_bar * x_dot, FOLD)
    if ptrs[3] is not None:
        y_bar_dot = load_tile(ptrs[3], strides[3], tile, mask, TILE, acc_dtype, POLICIES[0])
        y_bar_dot_sum = fold(y_bar_dot_sum, y_bar_dot, FOLD)
        if ptrs[1] is not None:
            y_bar_dot_product = fold(y_bar_dot_product, y_bar_dot * c, FOLD)
    sums = (
        y_bar_sum,
        y_bar_product,
        x_dot_sum,
        x_dot_product,
        pair_sum,
        y_bar_dot_sum,
        y_bar_dot_product,
        c_sum,
        cc_sum,
    )
    return sums, center


@batch_independent_jit
def batch_norm_sums_kernel(  # noqa: C901 - likewise
    y_bar_ptr, x_ptr, x_dot_ptr, y_bar_dot_ptr, mean_ptr, partials_ptr, num_samples, num_spatial, mean_group_stride,
    y_bar_group_stride, y_bar_sample_stride, y_bar_channel_stride, y_bar_spatial_stride, x_group_stride,
    x_sample_stride, x_channel_stride, x_spatial_stride, x_dot_group_stride, x_dot_sample_stride, x_dot_channel_stride,
    x_dot_spatial_stride, y_bar_dot_group_stride, y_bar_dot_sample_stride, y_bar_dot_channel_stride,
    y_bar_dot_spatial_stride, NUM_CHANNELS: tl.constexpr, ALIGN: tl.constexpr, SPATIAL_INNER: tl.constexpr,
    BLOCK_SAMPLES: tl.constexpr, BLOCK_SPATIAL: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, REPEATS: tl.constexpr,
    RUN: tl.constexpr, NUM_STAGES: tl.constexpr, READ_AGAIN: tl.constexpr, X_READ_AGAIN: tl.constexpr,
):  # fmt: skip
    """One program sums the operands that have a pointer over its split of the tiles of its channels.

    The partial results of a channel are sums of 0 `y_bar`, 1 `y_bar * c`, 2 `x_dot`, 3 `x_dot * c`, 4 `y_bar * x_dot`,
    5 `y_bar_dot`, 6 `y_bar_dot * c` with `c = x - mean`. Without a `mean_ptr` the mean is that of the elements summed,
    and 7 their count, 8 their mean and 9 the sum of `c * c` are written too. What takes an absent operand is not.

    Nothing is reduced across lanes inside the loop. The sums of statistics are taken about the mean of the first tile,
    and moved to the mean of all at the end: the tile is one of the `n` that are summed, so its share of the variance
    bounds what cancels there by a factor of `n`, however far from the others it lies.

    Shapes:
        y_bar_ptr, x_ptr, x_dot_ptr, y_bar_dot_ptr: `[groups, samples, channels, spatial]`, or None.
        mean_ptr: `[groups, channels]`, or None.
        partials_ptr: `[num_rows, 10, num_splits]`, accumulation dtype; `num_rows = groups * channels`.
        READ_AGAIN, X_READ_AGAIN: Whether a transform follows that reads the operands, and x, again.
    """
    # The cache is for what will be read from it.
    policy: tl.constexpr = "evict_last" if READ_AGAIN else "evict_first"
    x_policy: tl.constexpr = "evict_last" if X_READ_AGAIN else "evict_first"
    POLICIES: tl.constexpr = (policy, x_policy)
    STATISTICS: tl.constexpr = mean_ptr is None
    TILE: tl.constexpr = (ALIGN, SPATIAL_INNER, BLOCK_SAMPLES, BLOCK_SPATIAL)
    acc_dtype = partials_ptr.dtype.element_ty
    y_bar_strides = (y_bar_group_stride, y_bar_sample_stride, y_bar_channel_stride, y_bar_spatial_stride)
    x_strides = (x_group_stride, x_sample_stride, x_channel_stride, x_spatial_stride)
    x_dot_strides = (x_dot_group_stride, x_dot_sample_stride, x_dot_channel_stride, x_dot_spatial_stride)
    y_bar_dot_strides = (
        y_bar_dot_group_stride,
        y_bar_dot_sample_stride,
        y_bar_dot_channel_stride,
        y_bar_dot_spatial_stride,
    )
    ptrs = (y_bar_ptr, x_ptr, x_dot_ptr, y_bar_dot_ptr)
    strides = (y_bar_strides, x_strides, x_dot_strides, y_bar_dot_strides)
    num_spatial = spatial_extent(num_spatial, ALIGN, SPATIAL_INNER)
    group, channels, channel_mask = channels_of(tl.program_id(0), NUM_CHANNELS, BLOCK_CHANNELS)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    num_tiles = count_tiles(num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL)
    first, stop = share_of(split, num_splits, num_tiles)

    FOLD: tl.constexpr = (REPEATS, SPATIAL_INNER)
    nothing = tl.zeros([BLOCK_SAMPLES * BLOCK_SPATIAL // REPEATS // RUN, BLOCK_CHANNELS], acc_dtype)
    sums = (nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    count = tl.zeros([], tl.int64)
    anchor_tile = first
    if STATISTICS:
        # The fuller one of the first two: a tile with few elements has a small share of the variance. From the mean of
        # one of n full tiles, that of all lies within `sqrt(n)` standard deviations: products about it lose at most as
        # many times the rounding of a sum about the mean, and squares n times.
        second = tl.minimum(first + 1, stop - 1)
        first_count = locate_tile(first, num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL)[3]
        second_count = locate_tile(second, num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL)[3]
        anchor_tile = tl.where(second_count > first_count, second, first)
        sample, position, row_mask, tile_count = locate_tile(
            anchor_tile, num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL
        )
        mask = row_mask[:, None] & channel_mask[None, :]
        tile = (group, channels, sample, position)
        center = tl.zeros([BLOCK_CHANNELS], acc_dtype)
        sums, center = add_tile(sums, center, ptrs, strides, tile, mask, tile_count, TILE, POLICIES, True, True, FOLD)
        count += tile_count
    else:
        center = load_channels(mean_ptr, group * mean_group_stride + channels, channel_mask, 0.0, acc_dtype)

    for number in tl.range(first + STATISTICS, stop, num_stages=NUM_STAGES):
        # What took the place of the first one has been summed.
        place = tl.where(number == anchor_tile, first, number) if STATISTICS else number
        sample, position, row_mask, tile_count = locate_tile(
            place, num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL
        )
        mask = row_mask[:, None] & channel_mask[None, :]
        tile = (group, channels, sample, position)
        sums, center = add_tile(
            sums, center, ptrs, strides, tile, mask, tile_count, TILE, POLICIES, STATISTICS, False, FOLD
        )
        count += tile_count

    results = partials_ptr + (group * NUM_CHANNELS + channels) * 10 * num_splits + split
    if y_bar_ptr is not None:
        tl.store(results, tl.sum(sums[0], axis=0), mask=channel_mask)
        if x_ptr is not None:
            tl.store(results + num_splits, tl.sum(sums[1], axis=0), mask=channel_mask)
        if x_dot_ptr is not None:
            tl.store(results + 4 * num_splits, tl.sum(sums[4], axis=0), mask=channel_mask)
    if y_bar_dot_ptr is not None:
        tl.store(results + 5 * num_splits, tl.sum(sums[5], axis=0), mask=channel_mask)
        if x_ptr is not None:
            tl.store(results + 6 * num_splits, tl.sum(sums[6], axis=0), mask=channel_mask)
    shift = tl.zeros([BLOCK_CHANNELS], acc_dtype)
    if STATISTICS:
        c_sum = tl.sum(sums[7], axis=0)
        counts = tl.zeros([BLOCK_CHANNELS], acc_dtype) + count.to(acc_dtype)
        shift = divide(c_sum, counts)
        cc_sum = tl.sum(sums[8], axis=0)
        square_sum = cc_sum - c_sum * shift
        # Rounding may leave less than nothing of equal elements, and overflow no number; a NaN stays.
        square_sum = tl.where(square_sum < 0.0, 0.0, tl.where(cc_sum == float("inf"), cc_sum, square_sum))
        tl.store(results + 7 * num_splits, counts, mask=channel_mask)
        tl.store(results + 8 * num_splits, center + shift, mask=channel_mask)
        tl.store(results + 9 * num_splits, square_sum, mask=channel_mask)
    if x_dot_ptr is not None:
        x_dot_sum = tl.sum(sums[2], axis=0)
        tl.store(results + 2 * num_splits, x_dot_sum, mask=channel_mask)
        if x_ptr is not None:
            product = tl.sum(sums[3], axis=0)
            if STATISTICS:
                product -= x_dot_sum * shift
            tl.store(results + 3 * num_splits, product, mask=channel_mask)
