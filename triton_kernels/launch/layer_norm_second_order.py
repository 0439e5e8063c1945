"""Plans of the second-order derivatives of layer norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triton_kernels.launch._arithmetic import (
    cdiv,
    next_power_of_2,
    register_values,
    row_splits,
    row_warps,
    tile_rows,
)
from triton_kernels.launch._candidates import second_candidates, sum_candidates
from triton_kernels.launch._planned import planned
from triton_kernels.launch._row_plan import RowPlan
from triton_kernels.launch.chips import Chip, chip_of
from triton_kernels.launch.layer_norm import loop_stages, resident_programs, sum_splits
from triton_kernels.launch.tables import limits_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LayerNormSecondPlan:
    """Tile, loop and partial sums of the kernel that owns whole rows; `looped` means that it sweeps them by tiles.

    Sums over rows, where they are wanted and not `fused`, come from a kernel of their own, because a row and its
    accumulators do not fit in registers; `rows` is then planned without sums, and `num_splits` is 1 per block of rows.
    """

    rows: RowPlan
    num_splits: int
    loop_stages: int
    fused: bool


@dataclass(frozen=True)
class LayerNormColumnPlan:
    """Tile, loop and partial sums of the kernel that owns columns and sums over rows."""

    block_rows: int
    block_cols: int
    num_warps: int
    num_splits: int
    loop_stages: int


# Rows whose sums do not fit in registers beside them take two passes over their operands: one kernel holds whole rows
# for the row outputs, another one reads the operands again and owns columns, so that few accumulators stay in registers
# over many rows.
#
# One pass that adds to a scratch row per program would keep the accumulators in the L2 cache: by calculation, not
# measured, 8 bytes of cache traffic (a float32 read and written) per element of every row and sum. The second pass
# costs 2 to 4 bytes per element and operand:
#
#     bytes per element of a row      scratch row (L2)    second pass, 2-byte    second pass, 4-byte
#     double backward                 1 sum:   8          3 operands: 6          12
#     jvp of the backward             2 sums: 16          4 operands: 8          16
#     backward of the jvp             3 sums: 24          3 operands: 6          12
#
# So it pays for 2-byte operands nowhere, and for 4-byte ones only where a single sum is wanted; there each addition
# would also wait for the load of what the row before it has stored.


def _second_warps(num_values: int, itemsize: int, chip: Chip) -> int:
    # 8 values per thread: 16 bytes per load of 2-byte elements; of float64, whose values take two registers and whose
    # division takes more, 2 as in first order.
    values = num_values * 2 * 1024 // register_values(1024, itemsize, chip)
    return row_warps(values, limits_of(chip).tile_threads, chip)


@planned(second_candidates)
def plan_layer_norm_second(
    num_segments: int,
    num_rows: int,
    num_cols: int,
    itemsize: int,
    has_sums: bool,
    device: torch.device | Chip,
    is_aligned: bool = True,
) -> LayerNormSecondPlan:
    """Plan of the kernel of the second-order derivatives of layer norm that owns rows.

    Args:
        num_segments: Segments of rows; a program stays within one.
        num_rows: Rows of a segment.
        num_cols: Columns of a row.
        itemsize: Bytes of an element of x.
        has_sums: Whether anything is summed over the rows of a segment.
        device: Where the kernel runs.
        is_aligned: Whether rows can be loaded 16 bytes at a time, as far as that depends on their strides.
    """
    chip = chip_of(device)
    limits = limits_of(chip)
    block_cols = next_power_of_2(num_cols)
    if block_cols > register_values(limits.layer_norm_second_cols, itemsize, chip):
        block_cols = register_values(limits.layer_norm_second_sweep_cols, itemsize, chip)
        col_splits = row_splits(num_segments * num_rows, num_cols, block_cols, chip)
        rows = RowPlan(1, block_cols, _second_warps(block_cols, itemsize, chip), True, col_splits)
        return LayerNormSecondPlan(rows, num_rows, 1, False)
    # Short rows share a program, so that one warp has 8 values of each tensor per thread and no barrier.
    block_rows = tile_rows(register_values(8 * chip.warp_size, itemsize, chip), block_cols, num_rows)
    num_values = block_rows * block_cols
    rows = RowPlan(block_rows, block_cols, _second_warps(num_values, itemsize, chip), False)
    if has_sums and block_cols <= register_values(limits.layer_norm_second_summed_cols, itemsize, chip):
        programs = resident_programs(rows.num_warps, chip)
        num_splits = sum_splits(num_segments, num_rows, block_rows, programs, chip)
        # A step loads up to four tensors.
        stages = loop_stages(4 * num_values * itemsize, num_cols * itemsize, is_aligned, chip)
        return LayerNormSecondPlan(rows, num_splits, stages, True)
    # One block of rows per program: the loop of the kernel runs once.
    return LayerNormSecondPlan(rows, cdiv(num_rows, block_rows), 1, False)


@planned(sum_candidates)
def plan_layer_norm_second_columns(
    num_segments: int,
    num_rows: int,
    num_cols: int,
    itemsize: int,
    device: torch.device | Chip,
    is_aligned: bool = True,
) -> LayerNormColumnPlan:
    """Plan of the kernel that sums the second-order derivatives of long rows over the `num_rows` rows of a segment.

    Args:
        num_segments: Segments of rows.
        num_rows: Rows of a segment.
        num_cols: Columns of a row.
        itemsize: Bytes of an element of x.
        device: Where the kernel runs.
        is_aligned: As for `plan_layer_norm_second`.
    """
    chip = chip_of(device)
    # 8 values of each of up to four tensors and three accumulators in each of four warps, from whole cache lines.
    block_cols = limits_of(chip).layer_norm_param_cols
    block_rows = tile_rows(register_values(1024, itemsize, chip), block_cols, num_rows)
    num_values = block_rows * block_cols
    num_warps = _second_warps(num_values, itemsize, chip)
    programs = cdiv(resident_programs(num_warps, chip), cdiv(num_cols, block_cols))
    num_splits = sum_splits(num_segments, num_rows, block_rows, programs, chip)
    # A step loads up to four tensors.
    stages = loop_stages(4 * num_values * itemsize, num_cols * itemsize, is_aligned, chip)
    return LayerNormColumnPlan(block_rows, block_cols, num_warps, num_splits, stages)
