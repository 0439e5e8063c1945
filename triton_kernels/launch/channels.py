"""Plans of the kernels over channels: batch norm and its derivatives of first and second order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triton_kernels.launch._arithmetic import CACHE_LINE_BYTES, MAX_CHANNEL_SPLITS, cdiv, next_power_of_2, row_warps
from triton_kernels.launch._candidates import channel_candidates, warp_candidates
from triton_kernels.launch._planned import planned
from triton_kernels.launch.chips import Chip, chip_of
from triton_kernels.launch.tables import limits_of

if TYPE_CHECKING:
    import torch

# The second axis of a CUDA grid cannot be longer.
MAX_GRID_Y = 65535

# Adjacent tiles of a program of a transform, where there are many. The programs that run at once then hold less of a
# large tensor than the cache does, and start on its end, which the reduction has left there: 1056 programs on 132
# processors with four tiles of 4 KiB per operand hold 17 MB of each. With a fixed number of programs their shares grow
# with the tensor. By calculation, not measured: 0.27 to 0.30 of the second read then comes from a cache of 0.3 of the
# tensor, where 16 programs per processor get 0.1 to 0.15. Coefficients are 1 to 4 % of what four tiles load.
TRANSFORM_TILES = 4


@dataclass(frozen=True)
class ChannelPlan:
    """How a kernel over channels is cut: its tile, the programs that share a channel tile, and its warps."""

    block_samples: int
    block_spatial: int
    block_channels: int
    num_splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ChannelMergePlan:
    """Channels per program, and the power of two that holds all partial results of a channel."""

    block_channels: int
    block_splits: int
    num_warps: int


def _block_spatial(num_samples: int, num_spatial: int, rows: int) -> int:
    """Positions of one sample that a tile of `rows` rows covers."""
    whole = next_power_of_2(num_spatial)
    # Runs shorter than a sixteenth of a tile are taken only where the plane itself is that short, and there must be
    # enough samples to fill the rest of the tile.
    smallest = max(rows // min(16, next_power_of_2(num_samples)), 1)
    if whole <= smallest:
        return whole
    candidates = []
    block = min(rows, whole)
    while block >= smallest:
        candidates.append((cdiv(num_spatial, block) * block, block))
        block //= 2
    for padded, block in candidates:
        # Long runs are preferred until more than a tenth of the lanes would be idle (56 * 56 in runs of 1024: 23 %).
        if num_spatial >= 0.9 * padded:
            return block
    least = min(padded for padded, _ in candidates)
    return next(block for padded, block in candidates if padded == least)


def _plan_channels(
    sizes: tuple[int, int, int, int],
    spatial_inner: bool,
    itemsize: int,
    tile: int,
    num_programs: int,
    max_splits: int,
    num_stages: int,
    channel_warps: int,
    tiles_per_program: int | None = None,
) -> ChannelPlan:
    """Cut `[groups, samples, channels, spatial]` into tiles of at most `tile` elements.

    Without `tiles_per_program` there are at most `num_programs` programs unless there are more tiles of channels than
    that, with it at least `num_programs` and as many more as it takes.
    """
    num_groups, num_samples, num_channels, num_spatial = sizes
    block_channels = 1 if spatial_inner else min(next_power_of_2(num_channels), CACHE_LINE_BYTES // itemsize)
    rows = tile // block_channels
    block_spatial = _block_spatial(num_samples, num_spatial, rows)
    block_samples = min(rows // block_spatial, next_power_of_2(num_samples))
    num_tiles = cdiv(num_samples, block_samples) * cdiv(num_spatial, block_spatial)
    channel_programs = num_groups * cdiv(num_channels, block_channels)
    if tiles_per_program is None:
        num_splits = max(num_programs // channel_programs, 1)
    else:
        num_splits = max(cdiv(num_programs, channel_programs), cdiv(num_tiles, tiles_per_program))
    return ChannelPlan(
        block_samples=block_samples,
        block_spatial=block_spatial,
        block_channels=block_channels,
        num_splits=min(num_splits, num_tiles, max_splits),
        # Smaller tiles keep the elements per thread of a full one.
        num_warps=max(block_samples * block_spatial * block_channels * channel_warps // tile, 1),
        num_stages=num_stages,
    )


def channel_reduction_programs(spatial_inner: bool, num_inputs: int, device: torch.device | Chip) -> int:
    """Programs of a reduction of first order over channels for each processor.

    All of them must run at once, or those that start later go through memory once more (see
    `_channels.backward_share`). The machine-code gate therefore holds the kernels to the registers that this number
    leaves: on NVIDIA 64 per thread with four programs of 256 threads, 80 with three, 128 with two.

    Args:
        spatial_inner: Whether tiles run along the spatial axis of one channel.
        num_inputs: Full-size tensors that are read, 1 or 2.
        device: Where the kernel runs.
    """
    programs = limits_of(chip_of(device)).channel_reduction_programs
    # ptxas reports up to 64 registers for one tensor along the spatial axis. A second one takes more, and so do offsets
    # across channels: up to 80 with either, up to 100 with both. A cap on registers (`maxnreg`) is no option of a
    # kernel in a graph, and smaller tiles would have less in flight. Of 2-byte elements, three programs with two tiles
    # of 8 KiB load 48 KiB ahead, and two programs 32; a processor's share of 4.8 TB/s during 0.8 microseconds, about
    # what a load takes, is 29 KB (by calculation, not measured).
    programs -= num_inputs - 1 if spatial_inner else num_inputs
    return max(programs, 1)


def channel_second_reduction_programs(device: torch.device | Chip) -> int:
    """Programs of a reduction of second order over channels for each processor, which must run at once likewise.

    Args:
        device: Where the kernel runs.
    """
    # The two that fit the registers: ptxas reports up to 128.
    return max(limits_of(chip_of(device)).channel_reduction_programs // 2, 1)


@planned(channel_candidates)
def plan_channel_reduction(
    sizes: tuple[int, int, int, int],
    spatial_inner: bool,
    align: int,
    itemsize: int,
    device: torch.device | Chip,
    num_inputs: int = 1,
) -> ChannelPlan:
    """Plan for a kernel that reduces `[groups, samples, channels, spatial]` over samples and spatial positions."""
    chip = chip_of(device)
    limits = limits_of(chip)
    tile = limits.channel_tile_bytes // max(itemsize, 4)
    # Elements that are loaded one by one take an address and a mask each, which spills scalar registers on gfx942.
    if align * itemsize < 16:
        tile //= 2
    # With two stages one tile is fetched while another is reduced; a third would not fit the 64 KiB of gfx942.
    programs = channel_reduction_programs(spatial_inner, num_inputs, chip) * chip.num_processors
    return _plan_channels(sizes, spatial_inner, itemsize, tile, programs, MAX_CHANNEL_SPLITS, 2, limits.channel_warps)


@planned(channel_candidates)
def plan_channel_transform(
    sizes: tuple[int, int, int, int], spatial_inner: bool, itemsize: int, device: torch.device | Chip
) -> ChannelPlan:
    """Plan for an elementwise kernel over `[groups, samples, channels, spatial]` with coefficients per channel."""
    chip = chip_of(device)
    limits = limits_of(chip)
    # Coefficients of eight channels and two inputs fit without spills when a tile is half as large as in a reduction.
    tile = limits.channel_tile_bytes // max(itemsize, 4) // 2
    # Programs hide each other's loads without stages.
    programs = limits.channel_transform_programs * chip.num_processors
    cut = (tile, programs, MAX_GRID_Y, 1, limits.channel_warps, TRANSFORM_TILES)
    return _plan_channels(sizes, spatial_inner, itemsize, *cut)


@planned(warp_candidates)
def plan_channel_merge(num_channels: int, num_splits: int, device: torch.device | Chip) -> ChannelMergePlan:
    """Plan for merging `num_splits` partial results for each of `num_channels` channels."""
    block_splits = next_power_of_2(num_splits)
    # 2048 partial results are 16 for each of 128 threads; at most 32 channels, so that several processors take part.
    block_channels = min(max(2048 // block_splits, 1), 32, next_power_of_2(num_channels))
    num_warps = row_warps(block_splits * block_channels, 128, chip_of(device))
    return ChannelMergePlan(block_channels, block_splits, num_warps)


@planned(channel_candidates)
def plan_channel_second_reduction(
    sizes: tuple[int, int, int, int], spatial_inner: bool, align: int, itemsize: int, device: torch.device | Chip
) -> ChannelPlan:
    """Plan for a kernel that takes up to seven sums of `[groups, samples, channels, spatial]` per channel."""
    chip = chip_of(device)
    limits = limits_of(chip)
    # Half of the values per thread that first order takes, because there are up to four operands and seven
    # accumulators instead of two and two: ptxas reports up to 128 registers and no spills.
    tile = limits.channel_tile_bytes // max(itemsize, 4) // 2
    # Narrower loads take so many addresses that two programs do not fit: up to 143 registers.
    if align * itemsize < 8:
        tile //= 2
    # One tile is fetched while another is summed.
    programs = channel_second_reduction_programs(chip) * chip.num_processors
    return _plan_channels(sizes, spatial_inner, itemsize, tile, programs, MAX_CHANNEL_SPLITS, 2, limits.channel_warps)


@planned(channel_candidates)
def plan_channel_second_transform(
    sizes: tuple[int, int, int, int], spatial_inner: bool, itemsize: int, device: torch.device | Chip
) -> ChannelPlan:
    """Plan for an elementwise kernel of up to four operands and three results with coefficients per channel."""
    chip = chip_of(device)
    limits = limits_of(chip)
    # As in first order: 8 values per thread, 16 bytes of 2-byte elements. ptxas reports up to 64 registers along the
    # spatial axis, and up to 128 across channels, with nine coefficients for each. At half the tile it aims at 64 there
    # and spills 16 bytes for sm_100; twice the threads with half the bytes each would have as much memory in flight.
    tile = limits.channel_tile_bytes // max(itemsize, 4) // 2
    # As in first order: at least two waves of resident programs, which hide each other's loads without stages.
    programs = limits.channel_transform_programs * chip.num_processors
    cut = (tile, programs, MAX_GRID_Y, 1, limits.channel_warps, TRANSFORM_TILES)
    return _plan_channels(sizes, spatial_inner, itemsize, *cut)
