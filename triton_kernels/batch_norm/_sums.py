"""The kernel that sums for batch norm over the channel view `[groups, samples, channels, spatial]` (see `_channels`).

Every rule is at most one reduction over a split of samples and positions, a merge of its partial results per channel,
and one elementwise transform; `batch_norm` says which rule uses which terms. Per-channel
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

from ..rows.tiles import in_places, nothing, rounded, selected, sums_of
from ..runtime.kernel import aligned_by_constants_jit
from ._channels import (
    channels_of,
    count_tiles,
    divide,
    elements_before,
    load_channels,
    load_tile,
    locate_tile,
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
