"""The elementwise kernel of batch norm over the channel view `[groups, samples, channels, spatial]` (see `_channels`).

With centered operands u~ and factors per channel,

    y         = scale * x~ + bias
    y_dot     = scale * x_dot~ + alpha * x~ + bias_dot
    x_bar     = scale * y_bar~ + beta * x~
    x_bar_dot = scale * y_bar_dot~ + alpha * y_bar~ + beta * x_dot~ + gamma * x~

to which the end of a residual block adds a residual in y and y_dot, and a ReLU.

    scale = weight * rstd,  alpha = rstd * (weight_dot - scale * A),  beta = -scale * rstd * B
    gamma = -rstd * (alpha * B + beta * A + scale * (S + D))

    A = mean(x_dot * x_hat),  B = mean(y_bar * x_hat),  D = mean(y_bar_dot * x_hat)
    S = mean(y_bar * P(x_dot)) = rstd * (mean(y_bar~ * x_dot~) - A * B)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.kernel import batch_independent_jit
from ..runtime.numbers import cast
from ._channels import (
    channels_of,
    count_tiles,
    load_channels,
    load_rstd,
    load_tile,
    locate_tile,
    share_of,
    spatial_extent,
    store_tile,
    through_relu,
)


@triton.jit
def load_mean(means_ptr, SUM: tl.constexpr, num_rows, rows, mask, IS_THERE: tl.constexpr, acc_dtype: tl.constexpr):
    """Row `SUM` of the means that a merge wrote, or 0."""
    if IS_THERE:
        values = tl.load(means_ptr + SUM * tl.cast(num_rows, tl.int64) + rows, mask=mask, other=0.0)
    else:
        values = tl.zeros(mask.shape, acc_dtype)
    return values


@triton.jit
def backward_share(num_tiles, num_blocks, num_splits, num_resident, num_parts, part_tiles):
    """Block of channels of this program, its first tile, and one past its last: at most `part_tiles` adjacent ones.

    The reduction before this gave each of its programs a share. Its last `num_resident` programs ran at once and left
    the ends of their shares in the cache, so the transform goes backwards: the first `num_resident` programs take the
    last part of each of these shares, the next ones the parts before them, and when the shares are done follow those of
    the programs that ran earlier. So it reads from the cache all that is there, by calculation; this was not measured.
    """
    program = tl.program_id(0)
    wave, place = program // (num_resident * num_parts), program % (num_resident * num_parts)
    share = num_blocks * num_splits - 1 - wave * num_resident - place % num_resident
    number = tl.maximum(share, 0)
    start, stop = share_of(number // num_blocks, num_splits, num_tiles)
    # Nothing is left of a program for the first wave where that was not full.
    stop += tl.maximum(tl.minimum(share, 0), -1) * num_tiles - place // num_resident * part_tiles
    stop = tl.maximum(stop, start)
    return number % num_blocks, tl.maximum(stop - part_tiles, start), stop


@batch_independent_jit
def batch_norm_transform_kernel(  # noqa: C901 - its branches are settled when it is compiled
    y_ptr, y_dot_ptr, x_bar_ptr, x_bar_dot_ptr, y_bar_ptr, x_ptr, x_dot_ptr, y_bar_dot_ptr, relu_ptr, residual_ptr,
    residual_dot_ptr, mean_ptr, scale_statistic_ptr, weight_ptr, bias_ptr, weight_dot_ptr, bias_dot_ptr, means_ptr,
    mean_dot_ptr, var_dot_ptr, num_rows, num_samples, num_spatial, num_blocks, num_splits, num_resident, num_parts,
    part_tiles, statistic_group_stride, weight_group_stride, bias_group_stride, weight_dot_group_stride,
    bias_dot_group_stride, statistic_dot_group_stride, out_group_stride, out_sample_stride, out_channel_stride,
    out_spatial_stride, y_bar_group_stride, y_bar_sample_stride, y_bar_channel_stride, y_bar_spatial_stride,
    x_group_stride, x_sample_stride, x_channel_stride, x_spatial_stride, x_dot_group_stride, x_dot_sample_stride,
    x_dot_channel_stride, x_dot_spatial_stride, y_bar_dot_group_stride, y_bar_dot_sample_stride,
    y_bar_dot_channel_stride, y_bar_dot_spatial_stride, EPS: tl.constexpr, ACC_DTYPE: tl.constexpr,
    NUM_CHANNELS: tl.constexpr, ALIGN: tl.constexpr, SPATIAL_INNER: tl.constexpr, BLOCK_SAMPLES: tl.constexpr,
    BLOCK_SPATIAL: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """One program writes up to `part_tiles` adjacent tiles of the outputs that have a pointer.

    Shapes:
        y_ptr, y_dot_ptr, x_bar_ptr, x_bar_dot_ptr: `[groups, samples, channels, spatial]`, or None; one layout.
        y_bar_ptr, x_ptr, x_dot_ptr, y_bar_dot_ptr: As the outputs, or None for 0 and where no output has a factor.
        relu_ptr: Result of a ReLU behind the norm, in memory as the outputs, or None: `y_bar` and `y_dot` are 0
            where it is.
        residual_ptr, residual_dot_ptr: Added to `y` and `y_dot`, in memory as these, or None.
        mean_ptr: `[groups, channels]`.
        scale_statistic_ptr: `[groups, channels]`, rstd if `EPS` is None, else the variance.
        weight_ptr, bias_ptr: `[groups, channels]`, or None for 1 and 0.
        weight_dot_ptr, bias_dot_ptr: `[groups, channels]`, or None for 0.
        means_ptr: `[6, num_rows]` as the merge wrote them, or None for 0; `num_rows = groups * channels`.
        mean_dot_ptr, var_dot_ptr: `[groups, channels]`, or None for 0: tangents of a given mean and variance.
        num_blocks, num_splits, num_resident: Of the reduction before this, or any (see `backward_share`).
        num_parts, part_tiles: Programs for each of its shares, and tiles of each of these.
        RELU: Whether a ReLU follows `y`, and `y_dot` is that of its output.
    """
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
    TILE: tl.constexpr = (ALIGN, SPATIAL_INNER, BLOCK_SAMPLES, BLOCK_SPATIAL)
    # Means of what the sums read; a reduction reads x where it reads anything with a product.
    HAS_Y_BAR: tl.constexpr = means_ptr is not None and y_bar_ptr is not None
    HAS_X_DOT: tl.constexpr = means_ptr is not None and x_dot_ptr is not None
    HAS_Y_BAR_DOT: tl.constexpr = means_ptr is not None and y_bar_dot_ptr is not None
    HAS_ALPHA: tl.constexpr = HAS_X_DOT or var_dot_ptr is not None or weight_dot_ptr is not None
    # Nothing is read again, and should leave the cache before what other programs are about to read does.
    policy: tl.constexpr = "evict_first"
    num_spatial = spatial_extent(num_spatial, ALIGN, SPATIAL_INNER)
    num_tiles = count_tiles(num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL)
    block, first, stop = backward_share(num_tiles, num_blocks, num_splits, num_resident, num_parts, part_tiles)
    group, channels, channel_mask = channels_of(block, NUM_CHANNELS, BLOCK_CHANNELS)
    rows = group * NUM_CHANNELS + channels
    at = group * statistic_group_stride + channels
    rstd = load_rstd(scale_statistic_ptr, at, channel_mask, EPS, ACC_DTYPE)
    mean = load_channels(mean_ptr, at, channel_mask, 0.0, ACC_DTYPE)[None, :]
    scale = rstd * load_channels(weight_ptr, group * weight_group_stride + channels, channel_mask, 1.0, ACC_DTYPE)
    bias = load_channels(bias_ptr, group * bias_group_stride + channels, channel_mask, 0.0, ACC_DTYPE)[None, :]
    at = group * weight_dot_group_stride + channels
    weight_dot = load_channels(weight_dot_ptr, at, channel_mask, 0.0, ACC_DTYPE)
    at = group * bias_dot_group_stride + channels
    bias_dot = load_channels(bias_dot_ptr, at, channel_mask, 0.0, ACC_DTYPE)[None, :]
    y_bar_mean = load_mean(means_ptr, 0, num_rows, rows, channel_mask, HAS_Y_BAR, ACC_DTYPE)[None, :]
    y_bar_tilt = load_mean(means_ptr, 1, num_rows, rows, channel_mask, HAS_Y_BAR, ACC_DTYPE)
    y_bar_dot_mean = load_mean(means_ptr, 4, num_rows, rows, channel_mask, HAS_Y_BAR_DOT, ACC_DTYPE)[None, :]
    if means_ptr is None:
        at = group * statistic_dot_group_stride + channels
        x_dot_mean = load_channels(mean_dot_ptr, at, channel_mask, 0.0, ACC_DTYPE)[None, :]
        x_dot_tilt = load_channels(var_dot_ptr, at, channel_mask, 0.0, ACC_DTYPE) * 0.5 * rstd
    else:
        x_dot_mean = load_mean(means_ptr, 2, num_rows, rows, channel_mask, HAS_X_DOT, ACC_DTYPE)[None, :]
        x_dot_tilt = load_mean(means_ptr, 3, num_rows, rows, channel_mask, HAS_X_DOT, ACC_DTYPE)
    alpha = rstd * (weight_dot - scale * x_dot_tilt)
    beta = -scale * rstd * y_bar_tilt
    HAS_BEND: tl.constexpr = means_ptr is not None and x_bar_dot_ptr is not None
    bend = load_mean(means_ptr, 5, num_rows, rows, channel_mask, HAS_BEND, ACC_DTYPE)
    gamma = (-rstd * (alpha * y_bar_tilt + beta * x_dot_tilt + scale * bend))[None, :]
    scale, alpha, beta = scale[None, :], alpha[None, :], beta[None, :]
    if x_dot_ptr is None:
        bias_dot -= scale * x_dot_mean

    # Programs hide each other's loads without stages.
    for number in tl.range(first, stop, num_stages=1):
        sample, position, row_mask = locate_tile(number, num_samples, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL)
        mask = row_mask[:, None] & channel_mask[None, :]
        tile = (group, channels, sample, position)
        nothing = tl.zeros([BLOCK_SAMPLES * BLOCK_SPATIAL, BLOCK_CHANNELS], ACC_DTYPE)
        y, y_dot, x_bar, x_bar_dot = nothing + bias, nothing + bias_dot, nothing, nothing
        if relu_ptr is not None:
            relu = load_tile(relu_ptr, out_strides, tile, mask, TILE, ACC_DTYPE, policy)
        if x_ptr is not None:
            x = load_tile(x_ptr, x_strides, tile, mask, TILE, ACC_DTYPE, policy) - mean
            y += scale * x
            if HAS_ALPHA:
                y_dot += alpha * x
            if HAS_Y_BAR:
                x_bar += beta * x
            if HAS_ALPHA or y_bar_dot_ptr is not None:
                x_bar_dot += gamma * x
        if y_bar_ptr is not None:
            y_bar = load_tile(y_bar_ptr, y_bar_strides, tile, mask, TILE, ACC_DTYPE, policy)
            if relu_ptr is not None:
                y_bar = through_relu(y_bar, relu)
            y_bar -= y_bar_mean
            x_bar += scale * y_bar
            if HAS_ALPHA:
                x_bar_dot += alpha * y_bar
        if x_dot_ptr is not None:
            x_dot = load_tile(x_dot_ptr, x_dot_strides, tile, mask, TILE, ACC_DTYPE, policy) - x_dot_mean
            y_dot += scale * x_dot
            if HAS_Y_BAR:
                x_bar_dot += beta * x_dot
        if y_bar_dot_ptr is not None:
            y_bar_dot = load_tile(y_bar_dot_ptr, y_bar_dot_strides, tile, mask, TILE, ACC_DTYPE, policy)
            x_bar_dot += scale * (y_bar_dot - y_bar_dot_mean)
        if residual_ptr is not None:
            y += load_tile(residual_ptr, out_strides, tile, mask, TILE, ACC_DTYPE, policy)
        if residual_dot_ptr is not None:
            y_dot += load_tile(residual_dot_ptr, out_strides, tile, mask, TILE, ACC_DTYPE, policy)
        if relu_ptr is not None:
            y_dot = through_relu(y_dot, relu)
        if RELU:
            # A number that is too small for the dtype of the output is 0 there.
            y_dot = through_relu(y_dot, cast(cast(y, y_ptr.dtype.element_ty), ACC_DTYPE))
            y = through_relu(y, y)
        store_tile(y_ptr, y, out_strides, tile, mask, TILE)
        store_tile(y_dot_ptr, y_dot, out_strides, tile, mask, TILE)
        store_tile(x_bar_ptr, x_bar, out_strides, tile, mask, TILE)
        store_tile(x_bar_dot_ptr, x_bar_dot, out_strides, tile, mask, TILE)
