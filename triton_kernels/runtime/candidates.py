"""Plans that tuning tries in place of the default ones: one number changed at a time, within the limits of the chip."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from .arithmetic import MAX_BLOCK_ELEMENTS, MAX_TILE_ROWS, MIN_MATMUL, PHILOX_WORDS, cdiv, next_power_of_2
from .chips import Chip, chip_of, limits_of

# While a step of a loop is reduced, n stages have n - 2 whole steps under way on NVIDIA, whose loops issue their copies
# behind the reductions and wait at the top for all but the newest: two stages fetch nothing ahead. On AMD it is n - 1.
MAX_STAGES, MAX_STAGES_AMD = 4, 3


def _near(value: int, largest: int) -> list[int]:
    """Half of `value` and twice as much, as far as they are between 1 and `largest`."""
    return [v for v in (value // 2, value * 2) if 1 <= v <= largest]


def _varied(plan: Any, chip: Chip, **choices: Iterable[int]) -> list[Any]:
    """Plans with half and twice as many warps, and with each of these choices."""
    choices = {"num_warps": _near(plan.num_warps, chip.max_warps), **choices}
    return [replace(plan, **{name: value}) for name, values in choices.items() for value in values]


def _stages(stages: int, chip: Chip) -> list[int]:
    most = MAX_STAGES_AMD if chip.name.startswith("gfx") else MAX_STAGES
    return [n for n in range(1, most + 1) if n != stages]


def _rows_of_tile(plan: Any) -> list[int]:
    return _near(plan.block_rows, min(MAX_TILE_ROWS, MAX_BLOCK_ELEMENTS // plan.block_cols))


def row_candidates(plan: Any, device: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """Other plans of a kernel whose programs own rows: warps, rows or columns of a tile, splits."""
    chip = chip_of(device)
    num_cols = arguments["sizes"][2] if "sizes" in arguments else arguments["num_cols"]
    if not plan.looped:
        return _varied(plan, chip, block_rows=_rows_of_tile(plan))
    if plan.block_rows > 1:
        return _varied(plan, chip)
    most = min(cdiv(num_cols, plan.block_cols), limits_of(chip).max_row_splits)
    found = _varied(plan, chip, col_splits={1, *_near(plan.col_splits, most)} - {plan.col_splits})
    if 2 * plan.num_warps <= chip.max_warps and 2 * plan.block_cols <= MAX_BLOCK_ELEMENTS:
        # Half as many rows at once: more of each is in the cache when it is swept again.
        sizes = {"block_cols": 2 * plan.block_cols, "num_warps": 2 * plan.num_warps}
        found.append(replace(plan, **sizes, loop_stages=min(plan.loop_stages, limits_of(chip).prefetch_stages)))
    return found


def sum_candidates(plan: Any, device: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """Other plans of a kernel that loops over rows and sums them: warps, rows of a tile, programs, stages."""
    chip = chip_of(device)
    most = cdiv(arguments["num_rows"], plan.block_rows)
    return _varied(
        plan,
        chip,
        block_rows=[n for n in _rows_of_tile(plan) if cdiv(arguments["num_rows"], n) >= plan.num_splits],
        num_splits=_near(plan.num_splits, most),
        loop_stages=_stages(plan.loop_stages, chip),
    )


def warp_candidates(plan: Any, device: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """The same plan with half and twice as many warps."""
    del arguments
    return _varied(plan, chip_of(device))


def philox_candidates(plan: Any, device: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """Other plans of a kernel that draws random words: warps and columns of a tile."""
    del arguments
    cols = _near(plan.block_cols, MAX_BLOCK_ELEMENTS // plan.block_rows)
    return _varied(plan, chip_of(device), block_cols=[n for n in cols if n >= PHILOX_WORDS])


def attention_candidates(plan: Any, device: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """Other plans of an attention kernel: warps, rows or keys of a tile, stages."""
    chip = chip_of(device)
    sizes = ((plan.block_rows, arguments["num_rows"]), (plan.block_keys, arguments["num_keys"]))
    rows, keys = (
        [n for n in _near(block, max(next_power_of_2(size), MIN_MATMUL)) if n >= MIN_MATMUL] for block, size in sizes
    )
    return _varied(plan, chip, block_rows=rows, block_keys=keys, num_stages=_stages(plan.num_stages, chip))


def channel_candidates(plan: Any, device: Any, arguments: Mapping[str, Any]) -> list[Any]:
    """Other plans of a kernel over channels: warps, programs per channel tile, stages."""
    chip = chip_of(device)
    _, num_samples, _, num_spatial = arguments["sizes"]
    num_tiles = cdiv(num_samples, plan.block_samples) * cdiv(num_spatial, plan.block_spatial)
    return _varied(
        plan,
        chip,
        num_splits=_near(plan.num_splits, min(num_tiles, plan.most_splits)),
        num_stages=_stages(plan.num_stages, chip),
    )
