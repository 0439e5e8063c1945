"""Kernels of the second-order derivatives of batch norm in training, over the channel view (see `_channels`).

`batch_norm_second_order` derives what they compute. A centered operand is one minus its mean over its channel:

    y_bar_bar = scale * x_dot + alpha * x + bias_dot
    x_bar     = alpha * y_bar + beta * x_dot + scale * y_bar_dot + gamma * x
    x_dot_bar = scale * y_bar + beta * x                                       (all operands centered)

The sums over a channel that means and coefficients take come from one reduction over a split of samples and positions
and a merge of its partial results. Per-channel tensors are `[groups, channels]` with adjacent channels and a stride
between groups; pointers of absent tensors are None.
"""

# Pyright takes device functions for Python: it knows neither constexpr arguments and branches nor what a kernel may
# iterate over.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from triton_kernels._channels import (
    backward_share,
    count_tiles,
    load_channels,
    locate_tile,
    spatial_extent,
    split_channel_program,
    tile_offsets,
)
from triton_kernels._runtime import batch_independent_jit, cast, store_cast


@triton.jit
def load_tile(
    ptr,
    tile,
    strides,
    ALIGN: tl.constexpr,
    SPATIAL_INNER: tl.constexpr,
    acc_dtype: tl.constexpr,
    eviction_policy: tl.constexpr,
):
    """A tile `[rows, channels]` of a full-size tensor; `tile` is group, samples, positions, channels and mask."""
    offsets = tile_offsets(tile[0], tile[1], tile[2], tile[3], strides, ALIGN, SPATIAL_INNER)
    return cast(tl.load(ptr + offsets, mask=tile[4], other=0.0, eviction_policy=eviction_policy), acc_dtype)


@triton.jit
def store_sums(partials_ptr, rows, mask, sums, SLOT: tl.constexpr):
    """Write what the lanes of a program summed, per channel, as partial sum number `SLOT` of the seven."""
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    tl.store(partials_ptr + (rows * 7 + SLOT) * num_splits + split, tl.sum(sums, axis=0), mask=mask)


@triton.jit
def merged_sums(partials, num_splits, mask, SLOT: tl.constexpr, WRITTEN: tl.constexpr):
    """Sum number `SLOT` of each row, or 0 where no kernel wrote it."""
    if WRITTEN:
        sums = tl.sum(tl.load(partials + SLOT * num_splits, mask=mask, other=0.0), axis=1)
    else:
        sums = tl.zeros([mask.shape[0]], partials.dtype.element_ty)
    return sums


@batch_independent_jit
def batch_norm_second_sums_kernel(  # noqa: C901 - its branches are settled when it is compiled
    y_bar_ptr,
    x_ptr,
    x_dot_ptr,
    y_bar_dot_ptr,
    mean_ptr,
    partials_ptr,
    num_samples,
    num_spatial,
    mean_group_stride,
    y_bar_group_stride,
    y_bar_sample_stride,
    y_bar_channel_stride,
    y_bar_spatial_stride,
    x_group_stride,
    x_sample_stride,
    x_channel_stride,
    x_spatial_stride,
    x_dot_group_stride,
    x_dot_sample_stride,
    x_dot_channel_stride,
    x_dot_spatial_stride,
    y_bar_dot_group_stride,
    y_bar_dot_sample_stride,
    y_bar_dot_channel_stride,
    y_bar_dot_spatial_stride,
    NUM_CHANNELS: tl.constexpr,
    ALIGN: tl.constexpr,
    SPATIAL_INNER: tl.constexpr,
    BLOCK_SAMPLES: tl.constexpr,
    BLOCK_SPATIAL: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    READ_AGAIN: tl.constexpr,
):
    """One program sums the operands that have a pointer over every `num_splits`-th tile of its channels.

    The seven partial sums of a channel are those of `y_bar`, `y_bar * c`, `x_dot`, `x_dot * c`, `y_bar * x_dot`,
    `y_bar_dot` and `y_bar_dot * c` with `c = x - mean`; one that takes an absent operand is not written.

    Shapes:
        y_bar_ptr, x_ptr, x_dot_ptr, y_bar_dot_ptr: `[groups, samples, channels, spatial]`, or None.
        mean_ptr: `[groups, channels]`.
        partials_ptr: `[groups * channels, 7, num_splits]`, accumulation dtype.
        READ_AGAIN: Whether a transform follows, which reads the operands again.
    """
    # The cache is for what will be read from it.
    policy: tl.constexpr = "evict_last" if READ_AGAIN else "evict_first"
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
    num_spatial = spatial_extent(num_spatial, ALIGN, SPATIAL_INNER)
    group, channels, channel_mask = split_channel_program(NUM_CHANNELS, BLOCK_CHANNELS, False)
    mean = load_channels(mean_ptr, group * mean_group_stride + channels, channel_mask, 0.0, acc_dtype)

    # One accumulator per lane: nothing is reduced across threads inside the loop.
    nothing = tl.zeros([BLOCK_SAMPLES * BLOCK_SPATIAL, BLOCK_CHANNELS], acc_dtype)
    y_bar_sums, x_dot_sums, y_bar_dot_sums, pair_sums = nothing, nothing, nothing, nothing
    y_bar_products, x_dot_products, y_bar_dot_products = nothing, nothing, nothing
    num_tiles = count_tiles(num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL)
    for step in tl.range(tl.program_id(1), num_tiles, tl.num_programs(1), num_stages=NUM_STAGES):
        samples, positions, row_mask, _ = locate_tile(step, num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL)
        mask = row_mask[:, None] & channel_mask[None, :]
        tile = (group, samples, positions, channels, mask)
        if x_ptr is not None:
            x = load_tile(x_ptr, tile, x_strides, ALIGN, SPATIAL_INNER, acc_dtype, policy)
            centered = x - mean[None, :]
        if y_bar_ptr is not None:
            y_bar = load_tile(y_bar_ptr, tile, y_bar_strides, ALIGN, SPATIAL_INNER, acc_dtype, policy)
            y_bar_sums += y_bar
            if x_ptr is not None:
                y_bar_products += y_bar * centered
        if x_dot_ptr is not None:
            x_dot = load_tile(x_dot_ptr, tile, x_dot_strides, ALIGN, SPATIAL_INNER, acc_dtype, policy)
            x_dot_sums += x_dot
            if x_ptr is not None:
                x_dot_products += x_dot * centered
            if y_bar_ptr is not None:
                pair_sums += y_bar * x_dot
        if y_bar_dot_ptr is not None:
            y_bar_dot = load_tile(y_bar_dot_ptr, tile, y_bar_dot_strides, ALIGN, SPATIAL_INNER, acc_dtype, policy)
            y_bar_dot_sums += y_bar_dot
            if x_ptr is not None:
                y_bar_dot_products += y_bar_dot * centered

    rows = group * NUM_CHANNELS + channels
    if y_bar_ptr is not None:
        store_sums(partials_ptr, rows, channel_mask, y_bar_sums, 0)
        if x_ptr is not None:
            store_sums(partials_ptr, rows, channel_mask, y_bar_products, 1)
        if x_dot_ptr is not None:
            store_sums(partials_ptr, rows, channel_mask, pair_sums, 4)
    if x_dot_ptr is not None:
        store_sums(partials_ptr, rows, channel_mask, x_dot_sums, 2)
        if x_ptr is not None:
            store_sums(partials_ptr, rows, channel_mask, x_dot_products, 3)
    if y_bar_dot_ptr is not None:
        store_sums(partials_ptr, rows, channel_mask, y_bar_dot_sums, 5)
        if x_ptr is not None:
            store_sums(partials_ptr, rows, channel_mask, y_bar_dot_products, 6)


@batch_independent_jit
def batch_norm_second_merge_kernel(
    partials_ptr,
    coefficients_ptr,
    rstd_ptr,
    weight_ptr,
    weight_dot_ptr,
    weight_bar_ptr,
    weight_dot_bar_ptr,
    bias_dot_bar_ptr,
    bias_bar_ptr,
    num_rows,
    num_splits,
    count,
    rstd_group_stride,
    weight_group_stride,
    weight_dot_group_stride,
    HAS_Y_BAR: tl.constexpr,
    HAS_X: tl.constexpr,
    HAS_X_DOT: tl.constexpr,
    HAS_Y_BAR_DOT: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """One program merges the partial sums of `BLOCK_ROWS` channels into coefficients and whatever has a pointer.

    Shapes:
        partials_ptr: `[num_rows, 7, num_splits]`, accumulation dtype; `num_rows = groups * channels`.
        coefficients_ptr: `[7, num_rows]` or None: means of `y_bar`, `x_dot` and `y_bar_dot`; scale, alpha, beta, gamma.
        rstd_ptr: `[groups, channels]`.
        weight_ptr: `[groups, channels]`, or None for 1.
        weight_dot_ptr: `[groups, channels]`, or None for 0.
        weight_bar_ptr: `[num_rows]` or None: sum of `y_bar * P(x_dot) + y_bar_dot * x_hat`.
        weight_dot_bar_ptr, bias_dot_bar_ptr: `[num_rows]` or None: sums of `y_bar * x_hat` and `y_bar`.
        bias_bar_ptr: `[num_rows]` or None: sum of `y_bar_dot`.
        count: Elements per channel.
        HAS_Y_BAR, HAS_X, HAS_X_DOT, HAS_Y_BAR_DOT: Operands of the partial sums; the others count as 0.
    """
    acc_dtype = partials_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    splits = tl.arange(0, BLOCK_SPLITS)
    row_mask = rows < num_rows
    mask = row_mask[:, None] & (splits < num_splits)[None, :]
    partials = partials_ptr + (rows * 7 * num_splits)[:, None] + splits[None, :]
    group, channels = rows // NUM_CHANNELS, rows % NUM_CHANNELS
    rstd = load_channels(rstd_ptr, group * rstd_group_stride + channels, row_mask, 1.0, acc_dtype)
    weight = load_channels(weight_ptr, group * weight_group_stride + channels, row_mask, 1.0, acc_dtype)
    weight_dot = load_channels(weight_dot_ptr, group * weight_dot_group_stride + channels, row_mask, 0.0, acc_dtype)

    y_bar_sum = merged_sums(partials, num_splits, mask, 0, HAS_Y_BAR)
    y_bar_product = merged_sums(partials, num_splits, mask, 1, HAS_Y_BAR and HAS_X) * rstd
    y_bar_dot_sum = merged_sums(partials, num_splits, mask, 5, HAS_Y_BAR_DOT)
    y_bar_dot_product = merged_sums(partials, num_splits, mask, 6, HAS_Y_BAR_DOT and HAS_X) * rstd

    total = tl.zeros([BLOCK_ROWS], acc_dtype) + tl.cast(count, acc_dtype)
    y_bar_mean, y_bar_tilt = y_bar_sum / total, y_bar_product / total
    x_dot_mean = merged_sums(partials, num_splits, mask, 2, HAS_X_DOT) / total
    x_dot_tilt = merged_sums(partials, num_splits, mask, 3, HAS_X_DOT and HAS_X) * rstd / total
    pairing = tl.zeros([BLOCK_ROWS], acc_dtype)
    if HAS_Y_BAR and HAS_X_DOT:
        pair_mean = merged_sums(partials, num_splits, mask, 4, True) / total
        pairing = rstd * (pair_mean - y_bar_mean * x_dot_mean - y_bar_tilt * x_dot_tilt)

    if weight_bar_ptr is not None:
        store_cast(weight_bar_ptr + rows, total * pairing + y_bar_dot_product, row_mask)
    if weight_dot_bar_ptr is not None:
        store_cast(weight_dot_bar_ptr + rows, y_bar_product, row_mask)
    if bias_dot_bar_ptr is not None:
        store_cast(bias_dot_bar_ptr + rows, y_bar_sum, row_mask)
    if bias_bar_ptr is not None:
        store_cast(bias_bar_ptr + rows, y_bar_dot_sum, row_mask)

    if coefficients_ptr is not None:
        scale = weight * rstd
        alpha = rstd * (weight_dot - scale * x_dot_tilt)
        beta = -scale * rstd * y_bar_tilt
        slope = alpha * y_bar_tilt + beta * x_dot_tilt + scale * (pairing + y_bar_dot_product / total)
        column = coefficients_ptr + rows
        step = tl.cast(num_rows, tl.int64)
        tl.store(column, y_bar_mean, mask=row_mask)
        tl.store(column + step, x_dot_mean, mask=row_mask)
        tl.store(column + 2 * step, y_bar_dot_sum / total, mask=row_mask)
        tl.store(column + 3 * step, scale, mask=row_mask)
        tl.store(column + 4 * step, alpha, mask=row_mask)
        tl.store(column + 5 * step, beta, mask=row_mask)
        tl.store(column + 6 * step, -rstd * slope, mask=row_mask)


@batch_independent_jit
def batch_norm_second_transform_kernel(  # noqa: C901 - its branches are settled when it is compiled
    y_bar_bar_ptr,
    x_bar_ptr,
    x_dot_bar_ptr,
    y_bar_ptr,
    x_ptr,
    x_dot_ptr,
    y_bar_dot_ptr,
    mean_ptr,
    bias_dot_ptr,
    coefficients_ptr,
    num_samples,
    num_spatial,
    num_rows,
    mean_group_stride,
    bias_dot_group_stride,
    out_group_stride,
    out_sample_stride,
    out_channel_stride,
    out_spatial_stride,
    y_bar_group_stride,
    y_bar_sample_stride,
    y_bar_channel_stride,
    y_bar_spatial_stride,
    x_group_stride,
    x_sample_stride,
    x_channel_stride,
    x_spatial_stride,
    x_dot_group_stride,
    x_dot_sample_stride,
    x_dot_channel_stride,
    x_dot_spatial_stride,
    y_bar_dot_group_stride,
    y_bar_dot_sample_stride,
    y_bar_dot_channel_stride,
    y_bar_dot_spatial_stride,
    HAS_ALPHA: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    ALIGN: tl.constexpr,
    SPATIAL_INNER: tl.constexpr,
    BLOCK_SAMPLES: tl.constexpr,
    BLOCK_SPATIAL: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program writes its share of the tiles of its channels, from the last one on, of the outputs with a pointer.

    Shapes:
        y_bar_bar_ptr, x_bar_ptr, x_dot_bar_ptr: `[groups, samples, channels, spatial]`, or None; one layout.
        y_bar_ptr, x_ptr, x_dot_ptr, y_bar_dot_ptr: As the outputs, or None where no output has a factor for it.
        mean_ptr: `[groups, channels]`.
        bias_dot_ptr: `[groups, channels]`, or None for 0.
        coefficients_ptr: `[7, num_rows]` from the merge; `num_rows = groups * channels`.
        HAS_ALPHA: Whether there is an `x_dot` or a `weight_dot`, without which alpha is 0.
    """
    acc_dtype = coefficients_ptr.dtype.element_ty
    out_strides = (out_group_stride, out_sample_stride, out_channel_stride, out_spatial_stride)
    y_bar_strides = (y_bar_group_stride, y_bar_sample_stride, y_bar_channel_stride, y_bar_spatial_stride)
    x_strides = (x_group_stride, x_sample_stride, x_channel_stride, x_spatial_stride)
    x_dot_strides = (x_dot_group_stride, x_dot_sample_stride, x_dot_channel_stride, x_dot_spatial_stride)
    y_bar_dot_strides = (
        y_bar_dot_group_stride,
        y_bar_dot_sample_stride,
        y_bar_dot_channel_stride,
        y_bar_dot_spatial_stride,
    )
    num_spatial = spatial_extent(num_spatial, ALIGN, SPATIAL_INNER)
    group, channels, channel_mask = split_channel_program(NUM_CHANNELS, BLOCK_CHANNELS, True)
    mean = load_channels(mean_ptr, group * mean_group_stride + channels, channel_mask, 0.0, acc_dtype)
    bias_dot = load_channels(bias_dot_ptr, group * bias_dot_group_stride + channels, channel_mask, 0.0, acc_dtype)
    column = coefficients_ptr + group * NUM_CHANNELS + channels
    step = tl.cast(num_rows, tl.int64)
    y_bar_mean = tl.load(column, mask=channel_mask, other=0.0)[None, :]
    x_dot_mean = tl.load(column + step, mask=channel_mask, other=0.0)[None, :]
    y_bar_dot_mean = tl.load(column + 2 * step, mask=channel_mask, other=0.0)[None, :]
    scale = tl.load(column + 3 * step, mask=channel_mask, other=0.0)[None, :]
    alpha = tl.load(column + 4 * step, mask=channel_mask, other=0.0)[None, :]
    beta = tl.load(column + 5 * step, mask=channel_mask, other=0.0)[None, :]
    gamma = tl.load(column + 6 * step, mask=channel_mask, other=0.0)[None, :]

    # Nothing here is read again, and should leave the cache before what other programs are about to read does.
    policy: tl.constexpr = "evict_first"
    num_tiles = count_tiles(num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL)
    first, stop = backward_share(num_tiles)
    for step in tl.range(first, stop, num_stages=NUM_STAGES):
        samples, positions, row_mask, _ = locate_tile(
            num_tiles - 1 - step, num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL
        )
        mask = row_mask[:, None] & channel_mask[None, :]
        tile = (group, samples, positions, channels, mask)
        y_bar_bar = tl.zeros([BLOCK_SAMPLES * BLOCK_SPATIAL, BLOCK_CHANNELS], acc_dtype) + bias_dot[None, :]
        x_bar = tl.zeros([BLOCK_SAMPLES * BLOCK_SPATIAL, BLOCK_CHANNELS], acc_dtype)
        x_dot_bar = x_bar
        if x_ptr is not None:
            x = load_tile(x_ptr, tile, x_strides, ALIGN, SPATIAL_INNER, acc_dtype, policy)
            x -= mean[None, :]
            x_dot_bar += beta * x
            if HAS_ALPHA:
                y_bar_bar += alpha * x
            if HAS_ALPHA or y_bar_dot_ptr is not None:
                x_bar += gamma * x
        if y_bar_ptr is not None:
            y_bar = load_tile(y_bar_ptr, tile, y_bar_strides, ALIGN, SPATIAL_INNER, acc_dtype, policy)
            y_bar -= y_bar_mean
            x_dot_bar += scale * y_bar
            if HAS_ALPHA:
                x_bar += alpha * y_bar
        if x_dot_ptr is not None:
            x_dot = load_tile(x_dot_ptr, tile, x_dot_strides, ALIGN, SPATIAL_INNER, acc_dtype, policy)
            x_dot -= x_dot_mean
            y_bar_bar += scale * x_dot
            x_bar += beta * x_dot
        if y_bar_dot_ptr is not None:
            y_bar_dot = load_tile(y_bar_dot_ptr, tile, y_bar_dot_strides, ALIGN, SPATIAL_INNER, acc_dtype, policy)
            x_bar += scale * (y_bar_dot - y_bar_dot_mean)
        offsets = tile_offsets(group, samples, positions, channels, out_strides, ALIGN, SPATIAL_INNER)
        if y_bar_bar_ptr is not None:
            tl.store(y_bar_bar_ptr + offsets, y_bar_bar, mask=mask, eviction_policy=policy)
        if x_bar_ptr is not None:
            tl.store(x_bar_ptr + offsets, x_bar, mask=mask, eviction_policy=policy)
        if x_dot_bar_ptr is not None:
            tl.store(x_dot_bar_ptr + offsets, x_dot_bar, mask=mask, eviction_policy=policy)
