"""Plans of layer norm and its derivatives of first order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triton_kernels.launch._arithmetic import (
    ACCESS_BYTES,
    CACHE_LINE_BYTES,
    MAX_TILE_ROWS,
    SECTOR_BYTES,
    cdiv,
    next_power_of_2,
    register_values,
    row_splits,
    row_warps,
    tile_rows,
)
from triton_kernels.launch._candidates import row_candidates, sum_candidates, warp_candidates
from triton_kernels.launch._planned import planned
from triton_kernels.launch._row_plan import RowPlan, SumPlan
from triton_kernels.launch.chips import Chip, chip_of
from triton_kernels.launch.tables import limits_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ParamReducePlan:
    """Tile of the kernel that adds the partial rows up."""

    block_parts: int
    block_cols: int
    num_warps: int


# Rows that the limits of plans count; of more, of which some are mixed into one, fewer columns fit.
MOST_HELD = 2
# Segments of a backward pass without batch dims cost a partial row each; beyond this a copy is cheaper.
LAYER_NORM_MAX_SEGMENTS = 64


@planned(row_candidates)
def plan_layer_norm_rows(
    num_segments: int,
    num_rows: int,
    num_cols: int,
    itemsize: int,
    num_operands: int,
    num_summed: int,
    num_sums: int,
    device: torch.device | Chip,
    is_aligned: bool = True,
) -> RowPlan:
    """Plan of a kernel whose programs own whole rows and sum nothing over rows: forward, JVP, x_bar alone."""
    chip = chip_of(device)
    limits = limits_of(chip)
    limit = limits.layer_norm_fwd_bytes // itemsize
    if num_operands > 1:
        limit = register_values(limits.layer_norm_two_row_cols >> (num_operands > MOST_HELD), itemsize, chip)
    block_cols = next_power_of_2(num_cols)
    if block_cols > limit:
        tile = register_values(limits.layer_norm_sweep_cols, itemsize, chip)
        sizes = (num_segments * num_rows, num_cols, itemsize, num_summed, num_sums, tile)
        return sweep_plan(*sizes, chip, is_aligned)
    # Short rows share a program of one warp, and so the loads of the parameters, without a barrier: 64 values in each
    # thread, or 32 of each of two rows. Longer rows take up to 16 warps, then more values per thread; 32 warps only the
    # longest, where registers run out.
    tile = register_values(2048 // min(num_operands, MOST_HELD), itemsize, chip)
    max_threads = limits.row_threads if block_cols == limit else limits.tile_threads
    num_warps = 1 if block_cols <= tile else row_warps(block_cols, max_threads, chip)
    is_paired = num_operands == 2 and num_sums >= limits.layer_norm_paired_sums
    resident = 2 if is_paired and num_warps * chip.warp_size == limits.tile_threads else 0
    return RowPlan(tile_rows(tile, block_cols, num_rows), block_cols, num_warps, False, resident=resident)


def sweep_plan(
    num_rows: int, num_cols: int, itemsize: int, num_summed: int, num_sums: int, tile: int, chip: Chip, is_aligned: bool
) -> RowPlan:
    """Plan of a kernel that sweeps rows by tiles of `tile` columns, half or twice as many, as memory allows."""
    limits = limits_of(chip)
    num_warps = row_warps(tile, limits.tile_threads, chip)
    if num_summed * tile * itemsize > limits.sweep_staged_bytes:
        # As many threads with half the values each: a step that is loaded ahead, where a whole tile could not be.
        tile //= 2
    col_splits = row_splits(num_rows, num_cols, tile, chip)
    if col_splits == 1 and num_sums + num_summed < 4 and 2 * num_warps <= chip.max_warps and num_cols > tile:
        # One program per processor, but of kernels of 32 registers, of which two fit unless their rows overrun the
        # cache (see `cached_stages`). It has as many threads as two, and loads ahead. With more sums and tensors than
        # this its lanes would spill; half the threads then have registers for most of a processor.
        num_warps *= 2
        # Twice as many columns, unless another tenth of all tiles would be empty: a step issues as much for these.
        is_emptier = cdiv(num_cols, 2 * tile) * 2 * tile > 1.1 * cdiv(num_cols, tile) * tile
        if 2 * num_summed * tile * itemsize <= limits.sweep_staged_bytes and not is_emptier:
            tile *= 2
    step_bytes = num_summed * tile * itemsize
    stages = limits.prefetch_stages if step_bytes <= limits.sweep_staged_bytes and num_summed else 1
    if not is_aligned or num_cols * itemsize % ACCESS_BYTES:
        stages = min(stages, loop_stages(step_bytes, 1, False, chip))
    if col_splits == 1:
        stages = cached_stages(stages, step_bytes, num_summed * num_cols * itemsize, num_warps, chip)
    return RowPlan(1, tile, num_warps, True, col_splits, stages)


@planned(sum_candidates)
def plan_layer_norm_params(
    num_segments: int,
    num_rows: int,
    num_cols: int,
    itemsize: int,
    device: torch.device | Chip,
    is_aligned: bool = True,
    has_noise: bool = False,
) -> SumPlan:
    """Plan of a backward pass that sums weight_bar or bias_bar over the `num_rows` rows of each segment.

    With noise, whose words take up to 40 registers beside the sums, fewer programs fit, and half as many columns.
    """
    chip = chip_of(device)
    limits = limits_of(chip)
    most = register_values(limits.layer_norm_accumulated_cols >> has_noise, itemsize, chip)
    looped = next_power_of_2(num_cols) > most
    block_cols = limits.layer_norm_param_cols if looped else next_power_of_2(num_cols)
    # 16 values per thread and accumulator: one warp has a tile of 512, four warps one of the looped kernel.
    tile, most_rows = 2048 if looped else 512, MAX_TILE_ROWS
    if not (looped or has_noise):
        tile = shared_tile(tile, block_cols, num_cols, num_segments * num_rows, chip)
        most_rows *= tile // 512
    block_rows = tile_rows(register_values(tile, itemsize, chip), block_cols, num_rows, most_rows)
    num_values = block_rows * block_cols * 2048 // register_values(2048, itemsize, chip)
    num_warps = row_warps(num_values, limits.resident_threads, chip)
    resident = resident_programs(num_warps, chip)
    if has_noise:
        resident = max(3 * resident // 4, 1)
    programs = resident * chip.num_processors
    if looped:
        programs = max(programs // cdiv(num_cols, block_cols), 1)
    num_splits = sum_splits(num_segments, num_rows, block_rows, programs, chip)
    stages = loop_stages(2 * block_rows * block_cols * itemsize, num_cols * itemsize, is_aligned, chip)
    # Left alone, the compiler takes 136 registers for several long rows of float32, and room for one program.
    is_bound = block_rows > 1 and block_cols >= 512 and not looped
    return SumPlan(block_rows, block_cols, num_warps, num_splits, stages, looped, resident if is_bound else 0)


def shared_tile(tile: int, block_cols: int, num_cols: int, num_rows: int, chip: Chip) -> int:
    """Values of a tile of rows that are summed over, of which one warp has `tile`.

    Up to eight warps share a program, and so a partial row: two for each processor, not sixteen. There are to be rows
    for about four steps. Where much of a tile is empty, the call is bound by what it issues, and tiles of several long
    rows take a tenth more.
    """
    largest, is_filled = 8 * tile, block_cols <= 512 or 3 * num_cols >= 2 * block_cols
    while is_filled and tile < largest and num_rows * block_cols >= 15 * tile * chip.num_processors:
        tile *= 2
    return tile


def resident_programs(num_warps: int, chip: Chip) -> int:
    """Programs of this many warps, with sums in registers, that a processor holds at a time."""
    return max(limits_of(chip).resident_threads // (num_warps * chip.warp_size), 1)


def loop_stages(step_bytes: int, row_bytes: int, is_aligned: bool, chip: Chip) -> int:
    """Stages of a loop that loads `step_bytes` per step: as many as have one step under way while one is reduced.

    Triton's loops copy behind the reductions on NVIDIA, and wait at the top for all but the newest copies: that takes
    three stages. On AMD, where the step ahead waits in registers, it takes two.
    """
    limits = limits_of(chip)
    is_aligned = is_aligned and row_bytes % ACCESS_BYTES == 0
    if step_bytes > (limits.staged_bytes if is_aligned else limits.unaligned_staged_bytes):
        return 1
    return limits.prefetch_stages


def cached_stages(stages: int, step_bytes: int, row_bytes: int, num_warps: int, chip: Chip) -> int:
    """Stages of the first of two sweeps: so many that only programs fit together whose rows the last cache holds.

    The steps that wait in shared memory keep others out; with more rows under way, memory serves part of the second
    sweep too. AMD's wait in registers.
    """
    if stages < 3:
        return stages
    most = max(chip.l2_bytes // (chip.num_processors * row_bytes), 1)
    if most >= 2 * chip.max_warps // num_warps:
        return stages
    steps = cdiv(chip.processor_shared_bytes, (most + 1) * step_bytes)
    return max(stages, steps + 1) if steps * step_bytes < chip.shared_bytes else stages


def sum_splits(num_segments: int, num_rows: int, block_rows: int, programs: int, chip: Chip) -> int:
    """Programs, each with a partial row to write, that share the rows of a segment."""
    # A partial row costs as much traffic as two or three rows of 2-byte tensors, so eight rows at least pay for one,
    # unless processors would idle. With more rows to each, too few bytes would be under way.
    programs = min(programs, max(chip.num_processors, num_segments * num_rows // 8))
    return max(min(programs // num_segments, cdiv(num_rows, block_rows)), 1)


@planned(warp_candidates)
def plan_param_reduce(
    num_groups: int, num_parts: int, num_cols: int, itemsize: int, device: torch.device | Chip
) -> ParamReducePlan:
    """Plan of the column sums of `num_groups` groups of `num_parts` partial rows, with elements of `itemsize` bytes."""
    chip = chip_of(device)
    # A cache line of every partial row; of narrow ones a sector, rather than that most processors idle.
    line = CACHE_LINE_BYTES
    while line > SECTOR_BYTES and num_groups * cdiv(num_cols * itemsize, line) < chip.num_processors:
        line //= 2
    # 16 float32 values of the tile in each of up to 256 threads: few steps, each of which waits for its loads. Of few
    # partial rows more columns, so that a warp has 16 bytes for each of its threads.
    block_parts = min(next_power_of_2(num_parts), 4096 * 4 // line)
    block_cols = max(line, 16 * chip.warp_size // block_parts) // itemsize
    return ParamReducePlan(block_parts, block_cols, row_warps(block_parts * block_cols, 256, chip))
