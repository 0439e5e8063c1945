"""Plans of dropout, and of the Philox words that are stored for other random numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triton_kernels.launch._arithmetic import CACHE_LINE_BYTES, next_power_of_2, row_warps
from triton_kernels.launch._planned import planned
from triton_kernels.launch.chips import Chip, chip_of

if TYPE_CHECKING:
    import torch

# 16 values for each of 128 threads: 16 bytes per load, two loads and four independent chains of Philox rounds in
# flight for 2-byte elements, and four programs' worth of registers to spare, so that loads of one program hide behind
# the arithmetic of others.
TILE_VALUES = 2048
TILE_THREADS = 128

# A Philox block has four words; a tile is at least as wide, so that one thread uses all of them.
MIN_COLS = 4


@dataclass(frozen=True)
class DropoutPlan:
    """Tile of a program, and the warps that share it."""

    block_rows: int
    block_cols: int
    num_warps: int


@planned()
def plan_dropout(
    num_rows: int, num_cols: int, rows_adjacent: bool, itemsize: int, device: torch.device | Chip
) -> DropoutPlan:
    """Plan of dropout over `[outer, inner, rows, columns]`.

    Args:
        num_rows: Rows of a segment; a tile lies within one.
        num_cols: Columns.
        rows_adjacent: Whether it is the rows that are adjacent in memory, so that loads must run along them.
        itemsize: Bytes of an element.
        device: Where the kernel runs.
    """
    whole_rows, whole_cols = next_power_of_2(num_rows), max(next_power_of_2(num_cols), MIN_COLS)
    if rows_adjacent:
        # Loads run along a whole cache line of rows; words are drawn along the columns, four at a time.
        block_rows = min(CACHE_LINE_BYTES // itemsize, whole_rows)
        block_cols = min(max(TILE_VALUES // block_rows, MIN_COLS), whole_cols)
    else:
        block_cols = min(TILE_VALUES, whole_cols)
        block_rows = min(TILE_VALUES // block_cols, whole_rows)
    num_warps = row_warps(block_rows * block_cols, TILE_THREADS, chip_of(device))
    return DropoutPlan(block_rows, block_cols, num_warps)


@planned()
def plan_philox(num_words: int, device: torch.device | Chip) -> DropoutPlan:
    """Plan of the kernel that stores `num_words` words of each stream.

    Args:
        num_words: Words of a stream.
        device: Where the kernel runs.
    """
    block = min(TILE_VALUES, max(next_power_of_2(num_words), MIN_COLS))
    return DropoutPlan(1, block, row_warps(block, TILE_THREADS, chip_of(device)))
