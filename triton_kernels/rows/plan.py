"""Common parts of plans of kernels over rows.

All plan functions of rows take

    num_segments, num_rows, num_cols    segments, rows of each, columns; a program stays within a segment
    itemsize                            bytes of an element of the widest operand
    num_operands, num_inputs            tensors of full size that are read
    num_summed, num_sums                tensors that the sums of a row take, parameters too, and how many sums
    device                              where the kernel runs
    is_aligned                          whether rows can be loaded 16 bytes at a time, as far as strides decide that
"""

from __future__ import annotations

from dataclasses import dataclass

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
from ..runtime.candidates import row_candidates, warp_candidates
from ..runtime.chips import Chip, Limits, chip_of, limits_of
from ..runtime.planned import planned

# The most that a thread of NVIDIA can have, and the least that a program of 1,024 threads leaves each.
_MAX_REGISTERS = 255
_LEAST_REGISTERS = 64


def row_options(plan: RowPlan | SumPlan, chip: Chip) -> dict[str, int]:
    """Options of a launch besides the arguments of the kernel.

    Where a plan says so, the compiler of NVIDIA gets no more registers than several programs leave it. It takes a bound
    for leave to use them all, so plans say it only where it takes more on its own, or loads one operand behind the
    other to save some. AMD's compiler has no such option, nor have graphs.
    """
    options = {"num_warps": plan.num_warps}
    if plan.resident and not chip.name.startswith("gfx"):
        threads = plan.resident * plan.num_warps * chip.warp_size
        # Registers are dealt out to whole warps in units of eight per thread.
        registers = chip.registers // threads // 8 * 8
        # A candidate of the tuner with more warps is not to be held to fewer than a kernel needs.
        if _LEAST_REGISTERS <= registers <= _MAX_REGISTERS:
            options["maxnreg"] = registers
    return options


@dataclass(frozen=True)
class RowPlan:
    """Tile of a kernel whose programs own rows; `looped` means that a row is swept tile by tile.

    `col_splits` programs share a row that is swept: each has as many adjacent tiles as the others, and the last one
    what remains. The loops over tiles have `loop_stages`. The compiler is to leave room for `resident` programs.
    """

    block_rows: int
    block_cols: int
    num_warps: int
    looped: bool
    col_splits: int = 1
    loop_stages: int = 1
    resident: int = 0


@dataclass(frozen=True)
class SumPlan:
    """Tile, loop and partial sums of a kernel that sums over rows, `num_splits` programs over those of a segment.

    `looped` means that its programs own columns, and that whole rows are another kernel's, because a row and its sums
    do not fit in registers together. The compiler is to leave room for `resident` programs; with 0, it does so unasked.
    """

    block_rows: int
    block_cols: int
    num_warps: int
    num_splits: int
    loop_stages: int
    looped: bool
    resident: int = 0


@dataclass(frozen=True)
class ParamReducePlan:
    """Tile of the kernel that adds the partial rows up."""

    block_parts: int
    block_cols: int
    num_warps: int


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
