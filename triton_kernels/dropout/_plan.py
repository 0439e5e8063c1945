"""Plans of dropout, and of the Philox words that are stored for other random numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..runtime.arithmetic import CACHE_LINE_BYTES, PHILOX_WORDS, next_power_of_2, row_warps
from ..runtime.candidates import philox_candidates
from ..runtime.chips import Chip, chip_of, limits_of
from ..runtime.planned import planned


@dataclass(frozen=True)
class DropoutPlan:
    """Tile of a program, and the warps that share it."""

    block_rows: int
    block_cols: int
    num_warps: int


@planned(philox_candidates)
def plan_dropout(
    num_rows: int, num_cols: int, rows_adjacent: bool, itemsize: int, device: torch.device | Chip
) -> DropoutPlan:
    """Plan of dropout over `[outer, inner, rows, columns]`; loads run along rows that are adjacent in memory."""
    chip = chip_of(device)
    limits = limits_of(chip)
    tile = limits.philox_tile // max(itemsize // 4, 1)
    # A tile is at least as wide as a Philox block, so that one thread uses all of its words.
    whole_rows, whole_cols = next_power_of_2(num_rows), max(next_power_of_2(num_cols), PHILOX_WORDS)
    if rows_adjacent:
        # Loads run along a whole cache line of rows; words are drawn along the columns, four at a time.
        block_rows = min(CACHE_LINE_BYTES // itemsize, whole_rows)
        block_cols = min(max(tile // block_rows, PHILOX_WORDS), whole_cols)
    else:
        block_cols = min(tile, whole_cols)
        block_rows = min(tile // block_cols, whole_rows)
    num_warps = row_warps(block_rows * block_cols, limits.philox_threads, chip)
    return DropoutPlan(block_rows, block_cols, num_warps)


@planned(philox_candidates)
def plan_philox(num_words: int, device: torch.device | Chip) -> DropoutPlan:
    """Plan of the kernel that stores `num_words` words of each stream."""
    chip = chip_of(device)
    limits = limits_of(chip)
    block = min(limits.philox_tile // 2, max(next_power_of_2(num_words), PHILOX_WORDS))
    return DropoutPlan(1, block, row_warps(block, limits.philox_threads, chip))
