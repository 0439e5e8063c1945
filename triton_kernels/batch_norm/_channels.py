"""Channel view of a tensor, and the device functions that walk it.

Batch norm sees `x: [*batch, N, C, *spatial]` as `[groups, samples, channels, spatial]` with one stride per axis, which
covers NCHW, channels_last, `[N, C]`, sliced and expanded tensors without a copy. Where samples and spatial positions
lie at one common stride they become a single axis (channels_last is then a matrix of rows by channels).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._prims_common import suggest_memory_format

from ..runtime.arithmetic import MAX_ALIGN
from ..runtime.numbers import cast
from ..runtime.views import collapse, param_view

# Below this many adjacent positions a program per channel would fetch mostly bytes of other channels; tiles then span
# several channels, and the unused part of a cache line serves the neighbors in the same tile.
MIN_SPATIAL_RUN = 16

Strides = tuple[int, int, int, int]


class ChannelView(NamedTuple):
    """Common `[groups, samples, channels, spatial]` geometry of several tensors of one shape.

    Attributes:
        sizes: Groups, samples, channels, spatial positions.
        strides: Per tensor, the strides of these axes in elements; 0 for an axis of size 1.
        spatial_inner: Whether tiles run along the spatial axis of one channel, otherwise they span channels.
        align: Power of two that divides the extent of the inner axis and all strides but the inner one. Kernels get
            those numbers divided by it, and so know at compile time how wide their loads may be.
    """

    sizes: tuple[int, int, int, int]
    strides: tuple[Strides, ...]
    spatial_inner: bool
    align: int

    @property
    def num_channels(self) -> int:
        """Channels of all groups together."""
        return self.sizes[0] * self.sizes[2]

    @property
    def num_reduced(self) -> int:
        """Elements per channel."""
        return self.sizes[1] * self.sizes[3]

    def extents(self) -> tuple[int, int]:
        """Samples and spatial positions as the kernels take them."""
        return self.sizes[1], self.sizes[3] // self.align if self.spatial_inner else self.sizes[3]

    def kernel_strides(self, index: int) -> Strides:
        """Strides of tensor `index` as the kernels take them."""
        group, sample, channel, spatial = self.strides[index]
        align = self.align
        if self.spatial_inner:
            return group // align, sample // align, channel // align, spatial
        return group // align, sample // align, channel, spatial // align


def channel_strides(x: Tensor, batch_ndim: int) -> Strides | None:
    """Strides of groups, samples, channels and spatial positions of `x`, or None if one of them does not collapse."""
    strides = collapse(x, (batch_ndim, batch_ndim + 1, batch_ndim + 2))
    if strides is None:
        return None
    group, sample, channel, spatial = strides
    return group, sample, channel, spatial


def readable(x: Tensor, batch_ndim: int) -> Tensor:
    """`x` itself if it has a channel view, else a contiguous copy."""
    return x if channel_strides(x, batch_ndim) is not None else x.contiguous()


def output_format(x: Tensor, batch_ndim: int) -> torch.memory_format:
    """The layout that torch gives to outputs for `x`: channels_last if the strides of `x` are."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if batch_ndim or last is None or x.is_contiguous():
        return torch.contiguous_format
    return last if x.is_contiguous(memory_format=last) else suggest_memory_format(x)


def new_output(x: Tensor, batch_ndim: int) -> Tensor:
    """An uninitialized output for `x` (see `output_format`)."""
    if batch_ndim == 0 and x.numel() == 0:
        # It is contiguous in every layout at once: as it was made.
        return torch.empty_like(x)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=output_format(x, batch_ndim))


def view_channels(tensors: list[Tensor], batch_ndim: int) -> ChannelView:
    """Channel view shared by `tensors`, non-empty tensors of one shape that each have one; the first sets the tile."""
    shape = tensors[0].shape
    num_groups = math.prod(shape[:batch_ndim])
    num_samples, num_channels = shape[batch_ndim : batch_ndim + 2]
    num_spatial = math.prod(shape[batch_ndim + 2 :])
    strides = [found for tensor in tensors if (found := channel_strides(tensor, batch_ndim)) is not None]
    if num_samples == 1 or num_spatial == 1 or all(n == s * num_spatial for _, n, _, s in strides):
        strides = [(group, 0, channel, spatial or sample) for group, sample, channel, spatial in strides]
        num_samples, num_spatial = 1, num_samples * num_spatial

    _, _, channel, spatial = strides[0]
    spatial_inner = num_spatial >= MIN_SPATIAL_RUN and (spatial == 1 or channel != 1)
    align = 1
    if (spatial if spatial_inner else channel) == 1:
        align = math.gcd(MAX_ALIGN, num_spatial if spatial_inner else num_channels)
        for group, sample, channel, spatial in strides:
            align = math.gcd(align, group, sample, channel if spatial_inner else spatial)
    return ChannelView((num_groups, num_samples, num_channels, num_spatial), tuple(strides), spatial_inner, align)


def param_pair_view(
    first: Tensor | None, second: Tensor | None, batch_ndim: int
) -> tuple[Tensor | None, Tensor | None, int]:
    """Two parameters as `param_view` gives them, and the one group stride that holds for both."""
    first, first_stride = param_view(first, batch_ndim)
    second, second_stride = param_view(second, batch_ndim)
    if first is None or second is None or first_stride == second_stride:
        return first, second, first_stride or second_stride
    return first.contiguous(), second.contiguous(), first.shape[-1]


@triton.jit
def count_tiles(num_samples, num_spatial, BLOCK_SAMPLES: tl.constexpr, BLOCK_SPATIAL: tl.constexpr):
    """Tiles that cover one channel."""
    return (tl.cdiv(num_samples, BLOCK_SAMPLES) * tl.cdiv(num_spatial, BLOCK_SPATIAL)).to(tl.int32)


@triton.jit
def share_of(split, num_splits, num_tiles):
    """First tile of one of the splits of a channel, and one past its last; splits differ by one tile at most."""
    tiles, longer = num_tiles // num_splits, num_tiles % num_splits
    return split * tiles + tl.minimum(split, longer), (split + 1) * tiles + tl.minimum(split + 1, longer)


@triton.jit
def channels_of(block, NUM_CHANNELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr):
    """Group and channels `[BLOCK_CHANNELS]` of a block of channels, both int64, and the mask of the channels."""
    blocks_per_group: tl.constexpr = (NUM_CHANNELS + BLOCK_CHANNELS - 1) // BLOCK_CHANNELS
    block = block.to(tl.int64)
    channels = (block % blocks_per_group) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    return block // blocks_per_group, channels, channels < NUM_CHANNELS


@triton.jit
def spatial_extent(num_spatial, ALIGN: tl.constexpr, SPATIAL_INNER: tl.constexpr):
    """Spatial positions as int64, from the number that the host passes (see `ChannelView.extents`)."""
    # A function, because a 1 is a constant in graphs, and constants have no methods.
    extent = tl.cast(num_spatial, tl.int64)
    if SPATIAL_INNER:
        extent = extent * ALIGN
    return extent


@triton.jit
def corner_of(tile, num_spatial, BLOCK_SAMPLES: tl.constexpr, BLOCK_SPATIAL: tl.constexpr):
    """First sample and position of a tile of a channel (int64)."""
    # Division of numbers without a sign takes half of the instructions.
    tiles_per_sample, tile = tl.cdiv(num_spatial, BLOCK_SPATIAL).to(tl.uint32), tl.cast(tile, tl.uint32)
    sample = (tile // tiles_per_sample).to(tl.int64) * BLOCK_SAMPLES
    return sample, (tile % tiles_per_sample).to(tl.int64) * BLOCK_SPATIAL


@triton.jit
def locate_tile(tile, num_samples, num_spatial, BLOCK_SAMPLES: tl.constexpr, BLOCK_SPATIAL: tl.constexpr):
    """First sample and position of a tile of a channel (int64), and the mask of its rows.

    Row `i` of a tile is position `i % BLOCK_SPATIAL` of sample `i // BLOCK_SPATIAL`: powers of two, so that no
    division by a run-time number is left and the compiler sees which rows are adjacent.
    """
    sample, position = corner_of(tile, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL)
    # In 32 bits, which one instruction compares.
    num_samples = tl.minimum(num_samples - sample, BLOCK_SAMPLES).to(tl.int32)
    num_positions = tl.minimum(num_spatial - position, BLOCK_SPATIAL).to(tl.int32)
    rows = tl.arange(0, BLOCK_SAMPLES * BLOCK_SPATIAL)
    return sample, position, (rows // BLOCK_SPATIAL < num_samples) & (rows % BLOCK_SPATIAL < num_positions)


@triton.jit
def elements_before(tile, num_samples, num_spatial, BLOCK_SAMPLES: tl.constexpr, BLOCK_SPATIAL: tl.constexpr):
    """Elements of a channel in the tiles before this one, which need not be there (int64)."""
    sample, position = corner_of(tile, num_spatial, BLOCK_SAMPLES, BLOCK_SPATIAL)
    in_block = tl.minimum(num_samples - sample, BLOCK_SAMPLES) * tl.minimum(position, num_spatial)
    return tl.minimum(sample, num_samples) * num_spatial + in_block


@triton.jit
def tile_pointers(ptr, strides, tile, TILE: tl.constexpr):
    """Pointers `[rows, channels]` to a tile of a tensor with `strides` from `ChannelView.kernel_strides`.

    `tile` is the group, channels, first sample and first position, `TILE` alignment, whether the spatial axis is the
    inner one, samples and positions. Nothing here is the same for all tiles: what a loop could keep of addresses would
    take registers (ptxas: 79 for 48 in a forward of float32) and save an instruction of a hundred.
    """
    group, channels, sample, position = tile
    group_stride, sample_stride, channel_stride, spatial_stride = strides
    ALIGN: tl.constexpr = TILE[0]
    rows = tl.arange(0, TILE[2] * TILE[3])
    samples, positions = sample + rows // TILE[3], position + rows % TILE[3]
    along_samples, along_channels = group * group_stride + samples * sample_stride, channels * channel_stride
    if TILE[1]:
        offsets = (along_samples * ALIGN + positions * spatial_stride)[:, None] + (along_channels * ALIGN)[None, :]
    else:
        offsets = ((along_samples + positions * spatial_stride) * ALIGN)[:, None] + along_channels[None, :]
    return ptr + offsets


@triton.jit
def load_tile(ptr, strides, tile, mask, TILE: tl.constexpr, acc_dtype: tl.constexpr, policy: tl.constexpr):
    """A tile `[rows, channels]` (see `tile_pointers`)."""
    ptrs = tile_pointers(ptr, strides, tile, TILE)
    values = tl.load(ptrs, mask=mask, other=0.0, eviction_policy=policy)  # pyright: ignore[reportArgumentType]
    return cast(values, acc_dtype)


@triton.jit
def store_tile(ptr, values, strides, tile, mask, TILE: tl.constexpr):
    """Store a tile (see `tile_pointers`) that nothing reads soon; nothing without a pointer."""
    if ptr is not None:
        tl.store(tile_pointers(ptr, strides, tile, TILE), values, mask=mask, eviction_policy="evict_first")


@triton.jit
def through_relu(values, y):
    """The part of a cotangent or tangent that passes a ReLU which returned `y`: all where that is NaN, as in torch."""
    return tl.where(y <= 0.0, 0.0, values)


@triton.jit
def load_channels(ptr, offsets, mask, DEFAULT: tl.constexpr, acc_dtype: tl.constexpr):
    """Values per channel, or `DEFAULT` everywhere without a pointer."""
    if ptr is None:
        values = tl.full(mask.shape, DEFAULT, acc_dtype)
    else:
        values = cast(tl.load(ptr + offsets, mask=mask, other=0.0), acc_dtype)
    return values


@triton.jit
def load_rstd(ptr, offsets, mask, EPS: tl.constexpr, acc_dtype: tl.constexpr):
    """Reciprocal standard deviations, loaded as they are (`EPS` None) or computed from variances."""
    statistic = tl.load(ptr + offsets, mask=mask, other=1.0).to(acc_dtype)
    if EPS is not None:
        statistic = reciprocal_root(statistic + EPS)
    return statistic


@triton.jit
def divide(numerator, denominator):
    """Quotient rounded to nearest: the fp32 `/` of GPUs may be off by two units in the last place."""
    return tl.div_rn(numerator, denominator) if denominator.dtype == tl.float32 else numerator / denominator


@triton.jit
def reciprocal_root(value):
    """`1 / sqrt(value)`, both steps rounded to nearest: the fp32 `tl.sqrt` of GPUs is an approximation too."""
    root = tl.sqrt_rn(value) if value.dtype == tl.float32 else tl.sqrt(value)
    return divide(1.0, root)
