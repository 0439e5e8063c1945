"""Plans of layer norm and its derivatives of first order."""

from __future__ import annotations

import torch

from ..rows.plan import RowPlan, SumPlan, loop_stages, resident_programs, sum_splits, sweep_plan
from ..runtime.arithmetic import MAX_TILE_ROWS, cdiv, next_power_of_2, register_values, row_warps, tile_rows
from ..runtime.candidates import row_candidates, sum_candidates
from ..runtime.chips import Chip, chip_of
from ..runtime.limits import limits_of
from ..runtime.planned import planned

# Rows that the limits of plans count; of more, of which some are mixed into one, fewer columns fit.
MOST_HELD = 2
# Segments of a backward pass without batch dims cost a partial row each; beyond this a copy is cheaper.
LAYER_NORM_MAX_SEGMENTS = 64


@planned(row_candidates)
def plan_layer_norm_rows(
    num_segments: int, num_rows: int, num_cols: int, itemsize: int, num_operands: int, num_summed: int, num_sums: int,
    device: torch.device | Chip, is_aligned: bool = True,
) -> RowPlan:  # fmt: skip
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


@planned(sum_candidates)
def plan_layer_norm_params(
    num_segments: int, num_rows: int, num_cols: int, itemsize: int, device: torch.device | Chip,
    is_aligned: bool = True, has_noise: bool = False,
) -> SumPlan:  # fmt: skip
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
