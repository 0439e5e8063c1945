"""Plans of log-softmax and its derivatives of first and second order."""

from __future__ import annotations

import torch

from ..runtime.arithmetic import (
    ACCESS_BYTES,
    CACHE_LINE_BYTES,
    SECTOR_BYTES,
    cdiv,
    next_power_of_2,
    register_values,
    row_splits,
    row_warps,
    tile_rows,
)
from ..runtime.candidates import row_candidates
from ..runtime.chips import Chip, chip_of
from ..runtime.limits import Limits, limits_of
from ..runtime.planned import planned
from .plan import RowPlan, cached_stages, loop_stages, sweep_plan

# Of programs that only sum rows.
_SUM_THREADS = 128


def _row_cols(itemsize: int, num_inputs: int, num_outputs: int, limits: Limits) -> int:
    """Longest rows that are held."""
    if num_inputs == 1:
        return limits.log_softmax_row_cols
    if num_outputs == 3:
        return limits.log_softmax_three_row_cols
    # Tensors wait for the sums in their own dtype, but for a second result or a fourth operand in float32: ptxas then
    # spills 88 to 112 bytes of twice as many columns of 2-byte elements.
    held = min(itemsize, 4) if num_inputs < 4 and num_outputs == 1 else 4
    return limits.log_softmax_two_row_bytes // held


@planned(row_candidates)
def plan_log_softmax(
    sizes: tuple[int, int, int], rows_adjacent: bool, itemsize: int, compute_itemsize: int, num_inputs: int,
    device: torch.device | Chip, num_outputs: int = 1, num_summed: int = 1, num_sums: int = 1, is_aligned: bool = True,
) -> RowPlan:  # fmt: skip
    """Plan of a kernel that reduces `[segments, rows, columns]`, whose `sizes` these are, over the columns.

    With `rows_adjacent` it is the rows that are adjacent in memory, so that loads must run along them.
    `compute_itemsize` is that of the arithmetic; up to four inputs are read, and up to three outputs written,
    or none by sums alone.
    """
    chip = chip_of(device)
    if rows_adjacent:
        return _plan_adjacent_rows(
            sizes, itemsize, compute_itemsize, num_inputs, num_outputs, num_summed, chip, is_aligned
        )
    limits = limits_of(chip)
    num_segments, num_rows, num_cols = sizes
    block_cols = next_power_of_2(num_cols)
    limit = register_values(_row_cols(itemsize, num_inputs, num_outputs, limits), compute_itemsize, chip)
    if not num_outputs:
        # Sums alone: a sweep reads a row but once too. A thread loads 64 bytes per step, and keeps few sums.
        tile = min(_SUM_THREADS * 64 // (itemsize * next_power_of_2(num_inputs)), limits.log_softmax_sweep_cols)
        limit = min(max(tile, 1024), limit)
        if block_cols > limit:
            col_splits = row_splits(num_segments * num_rows, num_cols, tile, chip)
            stages = loop_stages(num_summed * tile * itemsize, num_cols * itemsize, is_aligned, chip)
            return RowPlan(1, tile, _SUM_THREADS // chip.warp_size, True, col_splits, stages)
    if block_cols > limit:
        all_rows, is_second = num_segments * num_rows, num_inputs > 2 or num_outputs > 1
        sweep_cols = limits.log_softmax_second_sweep_cols if is_second else limits.log_softmax_sweep_cols
        tile = min(register_values(sweep_cols, compute_itemsize, chip), limit)
        if not is_second:
            return sweep_plan(all_rows, num_cols, itemsize, num_summed, num_sums, tile, chip, is_aligned)
        # 8 values of each tensor in each thread, beside as many of each sum.
        num_warps = row_warps(2 * tile, limits.tile_threads, chip)
        col_splits = row_splits(all_rows, num_cols, tile, chip)
        step_bytes, is_wide = num_summed * tile * itemsize, is_aligned and num_cols * itemsize % ACCESS_BYTES == 0
        stages = loop_stages(step_bytes, num_cols * itemsize, is_aligned, chip)
        # Of more sums, ptxas spills 40 to 48 bytes.
        has_room = 2 * step_bytes <= limits.sweep_staged_bytes and 2 * num_warps <= chip.max_warps and num_sums < 5
        if is_wide and col_splits == 1 and has_room and num_cols > tile:
            # One program per processor, as in `sweep_plan`: with wide loads, 64 registers hold all of that.
            tile, num_warps, step_bytes = 2 * tile, 2 * num_warps, 2 * step_bytes
        if col_splits == 1:
            stages = cached_stages(stages, step_bytes, num_summed * num_cols * itemsize, num_warps, chip)
        return RowPlan(1, tile, num_warps, True, col_splits, stages)
    # Short rows share a program, so that one warp has 1024 values (512 of each of two tensors, 256 of each of three or
    # four) and no barrier.
    tile = register_values(1024 // (next_power_of_2(num_inputs) if num_outputs else 1), compute_itemsize, chip)
    # Up to 16 warps, then more values per thread; 32 warps only for the longest rows, where registers run out.
    max_threads = limits.row_threads if block_cols == limit else limits.tile_threads
    num_warps = 1 if block_cols <= tile else row_warps(block_cols, max_threads, chip)
    return RowPlan(tile_rows(tile, block_cols, num_rows), block_cols, num_warps, False)


def _plan_adjacent_rows(
    sizes: tuple[int, int, int], itemsize: int, compute_itemsize: int, num_inputs: int, num_outputs: int,
    num_summed: int, chip: Chip, is_aligned: bool,
) -> RowPlan:  # fmt: skip
    limits = limits_of(chip)
    num_segments, num_rows, num_cols = sizes
    block_cols = next_power_of_2(num_cols)
    tile = limits.log_softmax_tile if num_inputs == 1 else limits.log_softmax_two_tile
    tile = register_values(tile, compute_itemsize, chip)
    block_rows = min(CACHE_LINE_BYTES // itemsize, next_power_of_2(num_rows))
    looped = block_rows * block_cols > tile
    # Rather half a cache line per load than idle processors.
    while block_rows * itemsize > SECTOR_BYTES and num_segments * cdiv(num_rows, block_rows) < chip.num_processors:
        block_rows //= 2
    col_splits = stages = 1
    if looped:
        block_cols = max(tile // block_rows, 1)
        col_splits = row_splits(num_segments * cdiv(num_rows, block_rows), num_cols, block_cols, chip)
        stages = loop_stages(num_summed * tile * itemsize, ACCESS_BYTES, is_aligned, chip)
    else:
        # Few columns: one warp has all of them, so that no reduction waits for another one.
        few = register_values(2048 if num_inputs * itemsize <= 8 else 1024, compute_itemsize, chip)
        block_rows = min(max(block_rows, few // block_cols), next_power_of_2(num_rows))
        if block_rows * block_cols <= few:
            return RowPlan(block_rows, block_cols, 1, looped)
    # Of several results 8 values per thread: with 16, ptxas spills 8 to 16 bytes (sm_90).
    num_values = block_rows * block_cols * (2 if looped and num_outputs > 1 else 1)
    num_warps = row_warps(num_values, limits.tile_threads, chip)
    return RowPlan(block_rows, block_cols, num_warps, looped, col_splits, stages)
