"""Plans of the kernels over channels: batch norm and its derivatives of first and second order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..runtime.arithmetic import ACCESS_BYTES, CACHE_LINE_BYTES, MAX_CHANNEL_SPLITS, cdiv, next_power_of_2, row_warps
from ..runtime.candidates import channel_candidates, warp_candidates
from ..runtime.chips import Chip, chip_of, limits_of
from ..runtime.planned import planned

# Adjacent tiles of a program of a transform, where there are many. The programs that run at once then hold less of a
# large tensor than the cache does, and start on its end, which the reduction has left there: 1056 programs on 132
# processors with four tiles of 4 KiB per operand hold 17 MB of each. With a fixed number of programs their shares grow
# with the tensor. By calculation, not measured: 0.27 to 0.30 of the second read then comes from a cache of 0.3 of the
# tensor, where 16 programs per processor get 0.1 to 0.15. Coefficients are 1 to 4 % of what four tiles load.
TRANSFORM_TILES = 4
# Tiles of a program of a reduction at least, on average, unless processors would have less than two programs: what it
# does besides them (the first one's mean, sums across threads) takes six times as many instructions as a tile.
REDUCTION_TILES = 5.5


@dataclass(frozen=True)
class ChannelPlan:
    """How a kernel over channels is cut.

    Attributes:
        block_samples: Samples of a tile.
        block_spatial: Spatial positions of a tile.
        block_channels: Channels of a tile.
        num_tiles: Tiles that cover a channel.
        num_blocks: Blocks of channels, of all groups.
        num_splits: Programs that share the tiles of a block of channels.
        most_splits: As many as there may be of other numbers of samples and positions.
        num_resident: Programs that run at once.
        repeats: Accesses of a thread that its part of a tile takes.
        run: Elements of one access.
        num_warps: Warps of a program.
        num_stages: Steps of its loop under way, the one at work included.
        part_tiles: Tiles of a program of a transform.
    """

    block_samples: int
    block_spatial: int
    block_channels: int
    num_tiles: int
    num_blocks: int
    num_splits: int
    most_splits: int
    num_resident: int
    repeats: int
    run: int
    num_warps: int
    num_stages: int = 1
    part_tiles: int = 1


@dataclass(frozen=True)
class ChannelMergePlan:
    """Channels per program, and the power of two that holds all partial results of a channel there may be."""

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


def _num_splits(num_tiles: int, num_blocks: int, most: int, slots: int) -> int:
    """Programs, at most `most`, that share each of `num_blocks` blocks of channels, where `slots` run at once."""
    # The empty slots of the last wave of programs may cost more than the others. Every wave waits for its first loads
    # about as long as a tile takes: 2 MB per microsecond, of which a wave of tiles has 6 MB.
    return min(range(1, min(num_tiles, most) + 1), key=lambda n: cdiv(num_blocks * n, slots) * (cdiv(num_tiles, n) + 1))


def _plan_channels(
    sizes: tuple[int, int, int, int], spatial_inner: bool, align: int, itemsize: int, tile: int, slots: int,
    chip: Chip, num_stages: int = 1, least_tiles: float = 1,
) -> ChannelPlan:  # fmt: skip
    """Cut `[groups, samples, channels, spatial]` into tiles of at most `tile` elements for `slots` programs.

    Each program has `least_tiles` tiles if there are as many, and each processor two programs.
    """
    num_groups, num_samples, num_channels, num_spatial = sizes
    block_channels = 1 if spatial_inner else min(next_power_of_2(num_channels), CACHE_LINE_BYTES // itemsize)
    max_warps = limits_of(chip).channel_warps
    while max_warps > 1 and num_groups * num_channels * spatial_inner > slots and num_samples * num_spatial < 4 * tile:
        # More channels than programs that run at once, of few tiles: smaller programs do less beside these.
        max_warps, tile, slots = max_warps // 2, tile // 2, 2 * slots
    rows = tile // block_channels
    block_spatial = _block_spatial(num_samples, num_spatial, rows)
    block_samples = min(rows // block_spatial, next_power_of_2(num_samples))
    num_tiles = cdiv(num_samples, block_samples) * cdiv(num_spatial, block_spatial)
    num_blocks = num_groups * cdiv(num_channels, block_channels)
    enough = max(int(num_blocks * num_tiles / least_tiles) // chip.num_processors, 2) * chip.num_processors
    # Up to four waves of programs.
    most_splits = max(min(MAX_CHANNEL_SPLITS, 4 * slots // num_blocks), 1)
    rows = block_samples * block_spatial
    # Smaller tiles keep the elements per thread of a full one.
    num_warps = max(rows * block_channels * max_warps // tile, 1)
    threads, run = num_warps * chip.warp_size, min(ACCESS_BYTES // itemsize, align)
    access = threads * run
    # A small tile has no whole access for each thread, and threads that had one together would move sums.
    run = min(run, max(rows // threads, 1)) if spatial_inner else 1
    return ChannelPlan(
        *(block_samples, block_spatial, block_channels, num_tiles, num_blocks),
        _num_splits(num_tiles, num_blocks, most_splits, min(slots, enough)),
        most_splits,
        slots,
        repeats=min(max(rows * block_channels // access, 1), rows // run),
        run=run,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def channel_programs(
    spatial_inner: bool, num_inputs: int, statistics: bool, itemsize: int, device: torch.device | Chip
) -> int:
    """Programs of a reduction over channels, of up to four tensors, for each processor, which run at once.

    The machine-code gate holds the kernels to the registers that this number leaves: on NVIDIA 64 per thread with four
    programs of 256 threads, 80 with three, 128 with two. With `spatial_inner`, tiles run along the spatial axis.
    """
    most = limits_of(chip_of(device)).channel_reduction_programs
    # ptxas reports up to 64 registers for sums of two tensors of 2-byte elements along the spatial axis, up to 80 of
    # more or wider ones; sums of several channels, of which a thread holds eight, take up to 80 of two and 128 of more.
    # Statistics take up to 64 of one tensor of 2-byte elements, and up to 80 of two or wider ones. Two steps of copies
    # are under way in turn, one of them always: 24 to 64 KiB, where a processor's share of 4.8 TB/s during 0.8
    # microseconds, about what a load takes, is 29 KB (by calculation, not measured).
    if statistics:
        fewer = int(num_inputs > 1 or itemsize > 2)
    else:
        fewer = (not spatial_inner) + (num_inputs > 2 or (spatial_inner and itemsize > 2))
    programs = max(most - fewer if fewer < 2 else most // 2, 1)
    # All channels may lie in one block.
    return programs if spatial_inner else min(programs, MAX_CHANNEL_SPLITS // chip_of(device).num_processors)


@planned(channel_candidates)
def plan_channel_sums(
    sizes: tuple[int, int, int, int], spatial_inner: bool, align: int, itemsize: int, device: torch.device | Chip,
    num_inputs: int, statistics: bool = False,
) -> ChannelPlan:  # fmt: skip
    """Plan for a kernel that sums `num_inputs` tensors `[groups, samples, channels, spatial]` per channel."""
    chip = chip_of(device)
    tile = limits_of(chip).channel_tile_bytes // max(itemsize, 4)
    # Half of the values per thread where there are more than two sums: of wide elements, whose copies would leave the
    # shared memory to one program, and of several channels, of each of which a thread has sums of its own.
    if num_inputs > 2 - statistics and (itemsize > 2 or not spatial_inner):
        tile //= 2
    # Elements that are loaded one by one take an address and a mask each, which spills scalar registers on gfx942.
    if align * itemsize < ACCESS_BYTES:
        tile //= 2
    # On NVIDIA a step waits for all copies but those of the next one: with two stages for all there are, with three
    # one step stays under way. On AMD the loads of the next step are issued before the work of this one with two.
    num_stages = 2 if chip.name.startswith("gfx") else 3
    programs = channel_programs(spatial_inner, num_inputs, statistics, itemsize, chip)
    if num_stages == 3:
        # Buffers of two steps, and what the system takes of each program.
        programs = min(programs, chip.processor_shared_bytes // (2 * num_inputs * tile * itemsize + 1024))
    slots = max(programs, 1) * chip.num_processors
    return _plan_channels(sizes, spatial_inner, align, itemsize, tile, slots, chip, num_stages, REDUCTION_TILES)


@planned(channel_candidates)
def plan_channel_transform(
    sizes: tuple[int, int, int, int], spatial_inner: bool, align: int, itemsize: int, device: torch.device | Chip,
    num_tensors: int,
) -> ChannelPlan:  # fmt: skip
    """Plan for an elementwise kernel of `num_tensors` tensors with coefficients per channel."""
    chip = chip_of(device)
    tile = limits_of(chip).channel_tile_bytes // max(itemsize, 4)
    # Two accesses of 16 bytes of each tensor per thread, as far as the registers go round: what a tile takes beside its
    # elements is then a third less of each (ptxas: 9.6 instructions for 13.5 in a forward along the spatial axis), and
    # five programs of 48 registers load 40 KiB at once where six of 40 with half the tile load 24. Coefficients of
    # eight channels take registers too, and so do elements that are loaded one by one.
    if align * itemsize < ACCESS_BYTES or not (spatial_inner or num_tensors <= 2):
        tile //= 2
    # Programs hide each other's loads without stages.
    slots = limits_of(chip).channel_reduction_programs * chip.num_processors
    plan = _plan_channels(sizes, spatial_inner, align, itemsize, tile, slots, chip)
    # Where tiles are more than the programs that fill the processors twice, each takes more than one: its coefficients
    # take as many instructions as a tile of a small plane.
    programs = limits_of(chip).channel_transform_programs * chip.num_processors
    if align * itemsize < ACCESS_BYTES:
        # Elements that are loaded one by one take as many instructions as the coefficients.
        programs *= 2
    return replace(plan, part_tiles=min(cdiv(plan.num_blocks * plan.num_tiles, programs), TRANSFORM_TILES))


@planned(warp_candidates)
def plan_channel_merge(num_channels: int, most_splits: int, device: torch.device | Chip) -> ChannelMergePlan:
    """Plan for merging up to `most_splits` partial results for each of `num_channels` channels.

    It is the same for every number of samples: a new one compiles no merge.
    """
    block_splits = next_power_of_2(most_splits)
    # Two per thread where there are few: nothing runs beside a merge, and eight take twice as long. At most 32
    # channels, so that several processors take part.
    block_channels = min(max(256 // block_splits, 1), 32, next_power_of_2(num_channels))
    num_warps = row_warps(8 * block_splits * block_channels, 128, chip_of(device))
    return ChannelMergePlan(block_channels, block_splits, num_warps)
