"""Kernels of batch norm over the channel view `[groups, samples, channels, spatial]` (see `_channels`).

Every rule is at most one reduction over a split of samples and positions, a merge of its partial results per channel,
and one elementwise transform; `batch_norm` says which rule uses which terms. Per-channel tensors are
`[groups, channels]` with adjacent channels and a stride between groups; pointers of absent tensors are None.
"""

# Pyright takes device functions for Python: it knows neither constexpr arguments and branches nor what a kernel may
# iterate over, nor that Triton reads the annotation of a scalar as its type.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportInvalidTypeForm=false, reportAssignmentType=false

from __future__ import annotations

import triton.language as tl

from triton_kernels._channels import (
    backward_share,
    count_tiles,
    divide,
    load_channels,
    load_rstd,
    locate_tile,
    spatial_extent,
    split_channel_program,
    tile_offsets,
)
from triton_kernels._runtime import batch_independent_jit, float64_of_bits, store_cast


@batch_independent_jit
def batch_norm_statistics_kernel(
    x_ptr,
    partials_ptr,
    num_samples,
    num_spatial,
    x_group_stride,
    x_sample_stride,
    x_channel_stride,
    x_spatial_stride,
    NUM_CHANNELS: tl.constexpr,
    ALIGN: tl.constexpr,
    SPATIAL_INNER: tl.constexpr,
    BLOCK_SAMPLES: tl.constexpr,
    BLOCK_SPATIAL: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program writes count, mean and centered sum of squares of every `num_splits`-th tile of its channels.

    Within a tile the squares are taken about the mean of that tile; tiles are merged by Chan's formula. Programs that
    run side by side read neighboring tiles.

    Shapes:
        x_ptr: `[groups, samples, channels, spatial]`.
        partials_ptr: `[groups * channels, 3, num_splits]`, accumulation dtype.
    """
    acc_dtype = partials_ptr.dtype.element_ty
    x_strides = (x_group_stride, x_sample_stride, x_channel_stride, x_spatial_stride)
    num_spatial = spatial_extent(num_spatial, ALIGN, SPATIAL_INNER)
    group, channels, channel_mask = split_channel_program(NUM_CHANNELS, BLOCK_CHANNELS, False)
    split, num_splits = tl.program_id(1), tl.num_programs(1)

    # All is summed relative to one element of the channel, so that a large common offset in x costs no digits.
    origin = tl.arange(0, 1).to(tl.int64)
    first_offsets = tile_offsets(group, origin, origin, channels, x_strides, ALIGN, SPATIAL_INNER)
    first = tl.load(x_ptr + first_offsets, mask=channel_mask[None, :], other=0.0).to(acc_dtype)

    count = tl.full([], 0.0, acc_dtype)
    mean = tl.zeros([BLOCK_CHANNELS], acc_dtype)
    square_sum = tl.zeros([BLOCK_CHANNELS], acc_dtype)
    num_tiles = count_tiles(num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL)
    for tile in tl.range(split, num_tiles, num_splits, num_stages=NUM_STAGES):
        samples, positions, row_mask, tile_rows = locate_tile(
            tile, num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL
        )
        mask = row_mask[:, None] & channel_mask[None, :]
        offsets = tile_offsets(group, samples, positions, channels, x_strides, ALIGN, SPATIAL_INNER)
        # The transform reads x again: what it finds in the cache costs no memory traffic.
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_last").to(acc_dtype)
        shifted = tl.where(mask, x - first, 0.0)
        # The reciprocal is exact for all but partly filled tiles: their sizes are powers of two.
        tile_count = tile_rows.to(acc_dtype)
        tile_mean = tl.sum(shifted, axis=0) * divide(1.0, tile_count)
        centered = tl.where(mask, shifted - tile_mean[None, :], 0.0)
        tile_square_sum = tl.sum(centered * centered, axis=0)

        total = count + tile_count
        delta = tile_mean - mean
        ratio = divide(tile_count, total)
        mean += delta * ratio
        # In this order a large first mean, merged with a count of zero, cannot overflow.
        square_sum += tile_square_sum + (delta * count * ratio) * delta
        count = total

    rows = (group * NUM_CHANNELS + channels) * 3
    counts = tl.zeros([BLOCK_CHANNELS], acc_dtype) + count
    tl.store(partials_ptr + rows * num_splits + split, counts, mask=channel_mask)
    tl.store(partials_ptr + (rows + 1) * num_splits + split, tl.sum(first, axis=0) + mean, mask=channel_mask)
    tl.store(partials_ptr + (rows + 2) * num_splits + split, square_sum, mask=channel_mask)


@batch_independent_jit
def batch_norm_statistics_merge_kernel(
    partials_ptr,
    running_mean_ptr,
    running_var_ptr,
    mean_ptr,
    rstd_ptr,
    new_running_mean_ptr,
    new_running_var_ptr,
    num_rows,
    num_splits,
    count,
    running_group_stride,
    momentum_low,
    momentum_high,
    EPS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """One program merges the partial statistics of `BLOCK_ROWS` channels and updates their running statistics.

    Shapes:
        partials_ptr: `[num_rows, 3, num_splits]`, accumulation dtype.
        running_mean_ptr, running_var_ptr: `[groups, channels]`, or None.
        mean_ptr, rstd_ptr: `[num_rows]`, `num_rows = groups * channels`, accumulation dtype.
        new_running_mean_ptr, new_running_var_ptr: `[num_rows]`, or None.
        count: Elements per channel.
        momentum_low, momentum_high: Weight of the new statistics (see `float64_bits`).
    """
    acc_dtype = partials_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    splits = tl.arange(0, BLOCK_SPLITS)
    row_mask = rows < num_rows
    mask = row_mask[:, None] & (splits < num_splits)[None, :]
    partials = partials_ptr + (rows * 3 * num_splits)[:, None] + splits[None, :]
    counts = tl.load(partials, mask=mask, other=0.0)
    means = tl.load(partials + num_splits, mask=mask, other=0.0)
    square_sums = tl.load(partials + 2 * num_splits, mask=mask, other=0.0)

    # Sums about the first partial mean keep the digits that a large common offset would take.
    first_mean = tl.load(partials_ptr + (rows * 3 + 1) * num_splits, mask=row_mask, other=0.0)
    total = tl.zeros([BLOCK_ROWS], acc_dtype) + tl.cast(count, acc_dtype)
    shifted = tl.where(mask, means - first_mean[:, None], 0.0)
    mean = first_mean + divide(tl.sum(counts * shifted, axis=1), total)
    centered = tl.where(mask, means - mean[:, None], 0.0)
    square_sum = tl.sum(square_sums + counts * centered * centered, axis=1)
    rstd = 1.0 / tl.sqrt(divide(square_sum, total) + EPS)
    tl.store(mean_ptr + rows, mean, mask=row_mask)
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)

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
def batch_norm_product_sums_kernel(
    u_ptr,
    x_ptr,
    mean_ptr,
    partials_ptr,
    num_samples,
    num_spatial,
    mean_group_stride,
    u_group_stride,
    u_sample_stride,
    u_channel_stride,
    u_spatial_stride,
    x_group_stride,
    x_sample_stride,
    x_channel_stride,
    x_spatial_stride,
    NUM_CHANNELS: tl.constexpr,
    ALIGN: tl.constexpr,
    SPATIAL_INNER: tl.constexpr,
    BLOCK_SAMPLES: tl.constexpr,
    BLOCK_SPATIAL: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    U_READ_AGAIN: tl.constexpr,
    X_READ_AGAIN: tl.constexpr,
):
    """One program writes the sums of `u` and `u * (x - mean)` over every `num_splits`-th tile of its channels.

    Shapes:
        u_ptr: `[groups, samples, channels, spatial]`, a cotangent or a tangent.
        x_ptr: As `u`, or None if the sum of products is not wanted; it is then written as 0.
        mean_ptr: `[groups, channels]`.
        partials_ptr: `[groups * channels, 2, num_splits]`, accumulation dtype.
        U_READ_AGAIN, X_READ_AGAIN: Whether a transform follows that reads the tensor again.
    """
    # The cache is for what will be read from it.
    u_policy: tl.constexpr = "evict_last" if U_READ_AGAIN else "evict_first"
    x_policy: tl.constexpr = "evict_last" if X_READ_AGAIN else "evict_first"
    acc_dtype = partials_ptr.dtype.element_ty
    u_strides = (u_group_stride, u_sample_stride, u_channel_stride, u_spatial_stride)
    x_strides = (x_group_stride, x_sample_stride, x_channel_stride, x_spatial_stride)
    num_spatial = spatial_extent(num_spatial, ALIGN, SPATIAL_INNER)
    group, channels, channel_mask = split_channel_program(NUM_CHANNELS, BLOCK_CHANNELS, False)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    if x_ptr is not None:
        mean_offsets = group * mean_group_stride + channels
        mean = tl.load(mean_ptr + mean_offsets, mask=channel_mask, other=0.0).to(acc_dtype)

    # One accumulator per lane: nothing is reduced across threads inside the loop.
    u_sums = tl.zeros([BLOCK_SAMPLES * BLOCK_SPATIAL, BLOCK_CHANNELS], acc_dtype)
    product_sums = tl.zeros([BLOCK_SAMPLES * BLOCK_SPATIAL, BLOCK_CHANNELS], acc_dtype)
    num_tiles = count_tiles(num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL)
    for tile in tl.range(split, num_tiles, num_splits, num_stages=NUM_STAGES):
        samples, positions, row_mask, _ = locate_tile(tile, num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL)
        mask = row_mask[:, None] & channel_mask[None, :]
        offsets = tile_offsets(group, samples, positions, channels, u_strides, ALIGN, SPATIAL_INNER)
        u = tl.load(u_ptr + offsets, mask=mask, other=0.0, eviction_policy=u_policy).to(acc_dtype)
        u_sums += u
        if x_ptr is not None:
            offsets = tile_offsets(group, samples, positions, channels, x_strides, ALIGN, SPATIAL_INNER)
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy=x_policy).to(acc_dtype)
            product_sums += u * (x - mean[None, :])

    rows = (group * NUM_CHANNELS + channels) * 2
    tl.store(partials_ptr + rows * num_splits + split, tl.sum(u_sums, axis=0), mask=channel_mask)
    tl.store(partials_ptr + (rows + 1) * num_splits + split, tl.sum(product_sums, axis=0), mask=channel_mask)


@batch_independent_jit
def batch_norm_product_sums_merge_kernel(
    partials_ptr,
    scale_statistic_ptr,
    weight_ptr,
    u_mean_ptr,
    product_mean_ptr,
    weight_bar_ptr,
    bias_bar_ptr,
    mean_bar_ptr,
    var_bar_ptr,
    num_rows,
    num_splits,
    count,
    statistic_group_stride,
    weight_group_stride,
    EPS: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """One program merges the partial sums of `BLOCK_ROWS` channels into whatever outputs have a pointer.

    Shapes:
        partials_ptr: `[num_rows, 2, num_splits]`, accumulation dtype; `num_rows = groups * channels`.
        scale_statistic_ptr: `[groups, channels]`, rstd if `EPS` is None, else the variance.
        weight_ptr: `[groups, channels]`, or None for 1.
        u_mean_ptr, product_mean_ptr: `[num_rows]` or None: means of `u` and `u * x_hat`.
        weight_bar_ptr, bias_bar_ptr: `[num_rows]` or None: sums of `u * x_hat` and `u`.
        mean_bar_ptr, var_bar_ptr: `[num_rows]` or None: cotangents of running mean and running variance.
        count: Elements per channel.
    """
    acc_dtype = partials_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    splits = tl.arange(0, BLOCK_SPLITS)
    row_mask = rows < num_rows
    mask = row_mask[:, None] & (splits < num_splits)[None, :]
    partials = partials_ptr + (rows * 2 * num_splits)[:, None] + splits[None, :]
    group, channels = rows // NUM_CHANNELS, rows % NUM_CHANNELS
    rstd = load_rstd(scale_statistic_ptr, group * statistic_group_stride + channels, row_mask, EPS, acc_dtype)
    u_sum = tl.sum(tl.load(partials, mask=mask, other=0.0), axis=1)
    product_sum = tl.sum(tl.load(partials + num_splits, mask=mask, other=0.0), axis=1) * rstd

    total = tl.zeros([BLOCK_ROWS], acc_dtype) + tl.cast(count, acc_dtype)
    if u_mean_ptr is not None:
        tl.store(u_mean_ptr + rows, u_sum / total, mask=row_mask)
    if product_mean_ptr is not None:
        tl.store(product_mean_ptr + rows, product_sum / total, mask=row_mask)
    if weight_bar_ptr is not None:
        store_cast(weight_bar_ptr + rows, product_sum, row_mask)
    if bias_bar_ptr is not None:
        store_cast(bias_bar_ptr + rows, u_sum, row_mask)
    weight = load_channels(weight_ptr, group * weight_group_stride + channels, row_mask, 1.0, acc_dtype)
    slope = rstd * weight
    if mean_bar_ptr is not None:
        store_cast(mean_bar_ptr + rows, -slope * u_sum, row_mask)
    if var_bar_ptr is not None:
        store_cast(var_bar_ptr + rows, -0.5 * rstd * slope * product_sum, row_mask)


@batch_independent_jit
def batch_norm_transform_kernel(
    out_ptr,
    u_ptr,
    x_ptr,
    mean_ptr,
    scale_statistic_ptr,
    weight_ptr,
    slope_ptr,
    shift_ptr,
    u_center_ptr,
    tilt_ptr,
    num_samples,
    num_spatial,
    statistic_group_stride,
    weight_group_stride,
    slope_group_stride,
    shift_group_stride,
    term_group_stride,
    out_group_stride,
    out_sample_stride,
    out_channel_stride,
    out_spatial_stride,
    u_group_stride,
    u_sample_stride,
    u_channel_stride,
    u_spatial_stride,
    x_group_stride,
    x_sample_stride,
    x_channel_stride,
    x_spatial_stride,
    EPS: tl.constexpr,
    DEFAULT_SLOPE: tl.constexpr,
    TILT_IS_VAR_DOT: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    ALIGN: tl.constexpr,
    SPATIAL_INNER: tl.constexpr,
    BLOCK_SAMPLES: tl.constexpr,
    BLOCK_SPATIAL: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program writes its share of the tiles of its channels, from the last one on, of the sum of terms below.

        out = weight * rstd * (u - u_center - x_hat * tilt) + x_hat * slope + shift

    Absent terms are 0, and an absent weight is 1.

    Shapes:
        out_ptr: `[groups, samples, channels, spatial]`.
        u_ptr, x_ptr: As `out`, or None; `x` may be None only where `x_hat = (x - mean) * rstd` has no factor.
        mean_ptr: `[groups, channels]`, or None without `x`.
        scale_statistic_ptr: `[groups, channels]`, rstd if `EPS` is None, else the variance.
        weight_ptr, slope_ptr, shift_ptr, u_center_ptr: `[groups, channels]`, or None.
        tilt_ptr: `[groups, channels]`, or None; with `TILT_IS_VAR_DOT` the tangent `var_dot` of the variance, which
            stands for `tilt = rstd / 2 * var_dot`.
        DEFAULT_SLOPE: Slope of an absent `slope_ptr`.
    """
    out_strides = (out_group_stride, out_sample_stride, out_channel_stride, out_spatial_stride)
    u_strides = (u_group_stride, u_sample_stride, u_channel_stride, u_spatial_stride)
    x_strides = (x_group_stride, x_sample_stride, x_channel_stride, x_spatial_stride)
    num_spatial = spatial_extent(num_spatial, ALIGN, SPATIAL_INNER)
    group, channels, channel_mask = split_channel_program(NUM_CHANNELS, BLOCK_CHANNELS, True)

    statistic_offsets = group * statistic_group_stride + channels
    rstd = load_rstd(scale_statistic_ptr, statistic_offsets, channel_mask, EPS, ACC_DTYPE)
    mean = load_channels(mean_ptr, statistic_offsets, channel_mask, 0.0, ACC_DTYPE)
    weight = load_channels(weight_ptr, group * weight_group_stride + channels, channel_mask, 1.0, ACC_DTYPE)
    slope = load_channels(slope_ptr, group * slope_group_stride + channels, channel_mask, DEFAULT_SLOPE, ACC_DTYPE)
    shift = load_channels(shift_ptr, group * shift_group_stride + channels, channel_mask, 0.0, ACC_DTYPE)
    u_center = load_channels(u_center_ptr, group * term_group_stride + channels, channel_mask, 0.0, ACC_DTYPE)
    tilt = load_channels(tilt_ptr, group * term_group_stride + channels, channel_mask, 0.0, ACC_DTYPE)
    if TILT_IS_VAR_DOT:
        tilt *= 0.5 * rstd
    u_factor = rstd * weight
    x_factor = rstd * (slope - u_factor * tilt)
    if u_ptr is None:
        shift -= u_factor * u_center

    num_tiles = count_tiles(num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL)
    first, stop = backward_share(num_tiles)
    for step in tl.range(first, stop, num_stages=NUM_STAGES):
        samples, positions, row_mask, _ = locate_tile(
            num_tiles - 1 - step, num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL
        )
        mask = row_mask[:, None] & channel_mask[None, :]
        # Nothing here is read again, and should leave the cache before what other programs are about to read does.
        out = tl.zeros([BLOCK_SAMPLES * BLOCK_SPATIAL, BLOCK_CHANNELS], ACC_DTYPE) + shift[None, :]
        if x_ptr is not None:
            offsets = tile_offsets(group, samples, positions, channels, x_strides, ALIGN, SPATIAL_INNER)
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(ACC_DTYPE)
            out += (x - mean[None, :]) * x_factor[None, :]
        if u_ptr is not None:
            offsets = tile_offsets(group, samples, positions, channels, u_strides, ALIGN, SPATIAL_INNER)
            u = tl.load(u_ptr + offsets, mask=mask, other=0.0, eviction_policy="evict_first").to(ACC_DTYPE)
            out += (u - u_center[None, :]) * u_factor[None, :]
        offsets = tile_offsets(group, samples, positions, channels, out_strides, ALIGN, SPATIAL_INNER)
        tl.store(out_ptr + offsets, out, mask=mask, eviction_policy="evict_first")
