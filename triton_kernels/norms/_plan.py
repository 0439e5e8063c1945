"""Plans of layer norm and its derivatives of first and second order."""

from __future__ import annotations

import torch

from ..rows.plan import RowPlan, SumPlan, loop_stages, resident_programs, sum_splits, sweep_plan
from ..runtime.arithmetic import (
    ACCESS_BYTES,
    MAX_TILE_ROWS,
    cdiv,
    next_power_of_2,
    register_values,
    row_splits,
    row_warps,
    tile_rows,
)
from ..runtime.candidates import row_candidates, sum_candidates
from ..runtime.chips import Chip, chip_of, limits_of
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


# Rows whose sums do not fit in registers beside them take two passes over their operands: one kernel holds whole rows
# for the row outputs, another one reads the operands again and owns columns, so that few accumulators stay in registers
# over many rows. One pass with a scratch row per program would move 8 bytes through the L2 cache for each element of
# each sum, up to 24; the second pass costs 6 to 8 bytes of 2-byte operands, 12 to 16 of 4-byte ones (by calculation,
# not measured), and waits for no store.


def _per_thread(is_wide: bool, itemsize: int) -> int:
    """Values of each tensor in a thread: two loads of 16 bytes, or as many as registers allow."""
    # A row's sums take as much of each thread, whatever it holds: with 16 values a jvp of the backward issues three
    # quarters of the instructions that it does with 8. Of 4-byte operands a double backward takes 130 registers then,
    # and elements that are loaded one by one take registers for their addresses.
    return 16 if is_wide and itemsize == 2 else 8


def _second_warps(num_values: int, per_thread: int, itemsize: int, chip: Chip) -> int:
    # Of float64, whose values take two registers and whose division takes more, a quarter as in first order.
    values = num_values * 16 // per_thread * 1024 // register_values(1024, itemsize, chip)
    return row_warps(values, limits_of(chip).tile_threads, chip)


def _stages(step_bytes: int, is_wide: bool, programs: int, chip: Chip) -> int:
    limits = limits_of(chip)
    if programs == 1 and is_wide and step_bytes <= limits.sweep_staged_bytes:
        return limits.prefetch_stages
    return loop_stages(step_bytes, 0, is_wide, chip)


@planned(row_candidates)
def plan_layer_norm_second_rows(
    num_segments: int, num_rows: int, num_cols: int, itemsize: int, num_operands: int, device: torch.device | Chip,
    is_aligned: bool = True,
) -> RowPlan:  # fmt: skip
    """Plan of the kernel of the second-order derivatives of layer norm that sums nothing over rows."""
    chip = chip_of(device)
    limits = limits_of(chip)
    block_cols, is_wide = next_power_of_2(num_cols), is_aligned and num_cols * itemsize % ACCESS_BYTES == 0
    if block_cols > register_values(limits.layer_norm_second_cols, itemsize, chip):
        # 8 values of each tensor and of up to seven sums per thread: a program has a processor for itself.
        tile = register_values(limits.layer_norm_second_sweep_cols, itemsize, chip)
        if num_operands * tile * itemsize > limits.sweep_staged_bytes:
            tile //= 2
        col_splits = row_splits(num_segments * num_rows, num_cols, tile, chip)
        stages = _stages(num_operands * tile * itemsize, is_wide, 1, chip)
        return RowPlan(1, tile, _second_warps(tile, 8, itemsize, chip), True, col_splits, stages)
    # Short rows share a program of one warp, without a barrier.
    per_thread = _per_thread(is_wide, itemsize)
    block_rows = tile_rows(register_values(per_thread * chip.warp_size, itemsize, chip), block_cols, num_rows)
    return RowPlan(block_rows, block_cols, _second_warps(block_rows * block_cols, per_thread, itemsize, chip), False)


@planned(sum_candidates)
def plan_layer_norm_second_sums(
    num_segments: int, num_rows: int, num_cols: int, itemsize: int, num_operands: int, num_sums: int, num_params: int,
    device: torch.device | Chip, is_aligned: bool = True,
) -> SumPlan:  # fmt: skip
    """Plan of the kernel that sums the second-order derivatives of layer norm over the rows of each segment.

    `num_sums` are the sums over rows, up to three, and `num_params` the parameters that are read.
    """
    chip = chip_of(device)
    limits = limits_of(chip)
    is_wide = is_aligned and num_cols * itemsize % ACCESS_BYTES == 0
    block_cols = next_power_of_2(num_cols)
    num_tiles = num_operands + num_sums + num_params
    fits_once = block_cols <= register_values(limits.layer_norm_second_summed_cols, itemsize, chip)
    per_thread = _per_thread(is_wide, itemsize)
    is_long = not fits_once and block_cols <= 2 * limits.layer_norm_second_summed_cols and itemsize < 8
    looped = not fits_once and not (is_long and num_tiles <= limits.layer_norm_second_long_tiles)
    if not (looped or fits_once):
        per_thread = 16
    is_few = num_tiles <= limits.layer_norm_second_few_tiles or not fits_once
    tile = per_thread * chip.warp_size
    if looped:
        # Whole cache lines of a row, and 8 values of each tensor and sum in each of four warps.
        block_cols, per_thread, tile = limits.layer_norm_param_cols, 8, 1024
    block_rows = tile_rows(register_values(tile, itemsize, chip), block_cols, num_rows)
    num_warps = _second_warps(block_rows * block_cols, per_thread, itemsize, chip)
    # Threads with 16 values of more tiles than that take up to 254 registers, and half as many fit a processor. Of
    # 4,096 columns, two programs bound to 128 would spill 216 bytes and more, and issue a sixth more (58 to 67 of the
    # 115 microseconds of an hvp's bytes on an H100, by the model); 16 warps with 8 values issue a quarter more.
    resident = resident_programs(num_warps * (2 if per_thread == 16 and not is_few else 1), chip)
    programs = resident * chip.num_processors
    step_bytes = num_operands * block_rows * block_cols * itemsize
    stages = _stages(step_bytes, is_wide, resident, chip)
    if not (is_wide or looped) and num_sums > 2:
        # Three sums and the addresses of a step under way spill.
        stages = 1
    if looped:
        programs = max(programs // cdiv(num_cols, block_cols), 1)
    num_splits = sum_splits(num_segments, num_rows, block_rows, programs, chip)
    # Left alone, the compiler takes up to 180 registers for programs of eight warps that have room for 128, and for
    # sm_100 up to 141 for fewer warps; and of long rows with elements that are loaded one by one, it loads one operand
    # behind the other to save some.
    takes_more = num_warps > 4 or chip.name == "sm_100"
    is_bound = is_few and per_thread == 16 and (takes_more if fits_once else not is_wide)
    return SumPlan(block_rows, block_cols, num_warps, num_splits, stages, looped, resident if is_bound else 0)
