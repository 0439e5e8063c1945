"""Plans of layer norm and its derivatives of first order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triton_kernels.launch._arithmetic import (
    ACCESS_BYTES,
    CACHE_LINE_BYTES,
    cdiv,
    next_power_of_2,
    register_values,
    row_splits,
    row_warps,
    tile_rows,
)
from triton_kernels.launch._candidates import row_candidates, sum_candidates, warp_candidates
from triton_kernels.launch._planned import planned
from triton_kernels.launch._row_plan import RowPlan
from triton_kernels.launch.chips import Chip, chip_of
from triton_kernels.launch.tables import limits_of

if TYPE_CHECKING:
    import torch


class LayerNormPlan(RowPlan):
    """Of a layer norm kernel."""


@dataclass(frozen=True)
class LayerNormParamPlan:
    """Tile, loop and partial sums of a kernel that also (or only) sums over rows.

    `looped` here means that x_bar and the parameter sums come from two kernels, because a row and both of its
    accumulators do not fit in registers; the tile is then that of the kernel of the sums.
    """

    block_rows: int
    block_cols: int
    num_warps: int
    num_splits: int
    loop_stages: int
    looped: bool


@dataclass(frozen=True)
class ParamReducePlan:
    """Tile of the kernel that adds the partial rows up."""

    block_parts: int
    block_cols: int
    num_warps: int


# Segments of a backward pass without batch dims cost a partial row each; beyond this a copy is cheaper.
LAYER_NORM_MAX_SEGMENTS = 64


@planned(row_candidates)
def plan_layer_norm_rows(
    num_rows: int, num_cols: int, itemsize: int, two_rows: bool, device: torch.device | Chip, num_segments: int = 1
) -> LayerNormPlan:
    """Plan of a kernel whose programs own whole rows and sum nothing over rows: forward, JVP, x_bar alone.

    Args:
        num_rows: Rows of a segment, of which a program may take several.
        num_cols: Columns of a row.
        itemsize: Bytes of an element of x.
        two_rows: Whether two full-size tensors are read (JVP, x_bar) instead of one.
        device: Where the kernel runs.
        num_segments: Segments of rows; a program stays within one.
    """
    chip = chip_of(device)
    limits = limits_of(chip)
    limit = limits.layer_norm_fwd_bytes // itemsize
    if two_rows:
        limit = register_values(limits.layer_norm_two_row_cols, itemsize, chip)
    block_cols = next_power_of_2(num_cols)
    if block_cols > limit:
        block_cols = register_values(limits.layer_norm_sweep_cols, itemsize, chip)
        num_warps = row_warps(block_cols, limits.tile_threads, chip)
        col_splits = row_splits(num_segments * num_rows, num_cols, block_cols, chip)
        return LayerNormPlan(1, block_cols, num_warps, True, col_splits)
    # Short rows share a program, so that one warp has 1024 values (512 of each of two rows) and no barrier.
    tile = register_values(512 if two_rows else 1024, itemsize, chip)
    # Up to 16 warps, then more values per thread; 32 warps only for the longest rows, where registers run out.
    max_threads = limits.row_threads if block_cols == limit else limits.tile_threads
    num_warps = 1 if block_cols <= tile else row_warps(block_cols, max_threads, chip)
    return LayerNormPlan(tile_rows(tile, block_cols, num_rows), block_cols, num_warps, False)


@planned(sum_candidates)
def plan_layer_norm_params(
    num_segments: int,
    num_rows: int,
    num_cols: int,
    itemsize: int,
    device: torch.device | Chip,
    is_aligned: bool = True,
) -> LayerNormParamPlan:
    """Plan of a backward pass that sums weight_bar or bias_bar over the `num_rows` rows of each segment.

    Args:
        num_segments: Segments of rows.
        num_rows: Rows of a segment.
        num_cols: Columns of a row.
        itemsize: Bytes of an element of x.
        device: Where the kernel runs.
        is_aligned: Whether rows can be loaded 16 bytes at a time, as far as that depends on their strides.
    """
    chip = chip_of(device)
    limits = limits_of(chip)
    looped = next_power_of_2(num_cols) > register_values(limits.layer_norm_accumulated_cols, itemsize, chip)
    block_cols = limits.layer_norm_param_cols if looped else next_power_of_2(num_cols)
    # 16 values per thread and accumulator: one warp has a tile of 512, four warps a tile of the looped kernel.
    block_rows = tile_rows(register_values(2048 if looped else 512, itemsize, chip), block_cols, num_rows)
    num_values = block_rows * block_cols * 2048 // register_values(2048, itemsize, chip)
    num_warps = row_warps(num_values, limits.resident_threads, chip)
    programs = resident_programs(num_warps, chip)
    if looped:
        programs = cdiv(programs, cdiv(num_cols, block_cols))
    num_splits = sum_splits(num_segments, num_rows, block_rows, programs, chip)
    # Two stages load the next rows of both tensors while the sums of this one are reduced.
    stages = loop_stages(2 * block_rows * block_cols * itemsize, num_cols * itemsize, is_aligned, chip)
    return LayerNormParamPlan(block_rows, block_cols, num_warps, num_splits, stages, looped)


def resident_programs(num_warps: int, chip: Chip) -> int:
    """Programs of this many warps, with sums in registers, that all run at a time."""
    return chip.num_processors * max(limits_of(chip).resident_threads // (num_warps * chip.warp_size), 1)


def loop_stages(step_bytes: int, row_bytes: int, is_aligned: bool, chip: Chip) -> int:
    """Stages of a loop that loads `step_bytes` per step: two load the next step while this one is reduced."""
    limits = limits_of(chip)
    is_aligned = is_aligned and row_bytes % ACCESS_BYTES == 0
    return 2 if step_bytes <= (limits.staged_bytes if is_aligned else limits.unaligned_staged_bytes) else 1


def sum_splits(num_segments: int, num_rows: int, block_rows: int, programs: int, chip: Chip) -> int:
    """Programs, each with a partial row to write, that share the rows of a segment."""
    # A partial row costs as much traffic as two or three rows of 2-byte tensors, so eight rows at least pay for one,
    # unless processors would idle.
    programs = min(programs, max(chip.num_processors, num_segments * num_rows // 8))
    return max(min(programs // num_segments, cdiv(num_rows, block_rows)), 1)


@planned(warp_candidates)
def plan_param_reduce(num_parts: int, itemsize: int, device: torch.device | Chip) -> ParamReducePlan:
    """Plan of the column sums over `num_parts` partial rows with elements of `itemsize` bytes."""
    chip = chip_of(device)
    # A cache line of every partial row, and enough programs for wide rows; 64 rows of them are 16 float32 values in
    # each of 128 threads. Of few partial rows more columns, so that a warp has 16 bytes for each of its threads.
    block_parts = min(next_power_of_2(num_parts), 64)
    block_cols = max(CACHE_LINE_BYTES, 16 * chip.warp_size // block_parts) // itemsize
    return ParamReducePlan(block_parts, block_cols, row_warps(block_parts * block_cols, 128, chip))
