"""Plans of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from triton_kernels.launch._arithmetic import MIN_MATMUL, next_power_of_2
from triton_kernels.launch._candidates import attention_candidates
from triton_kernels.launch._planned import planned
from triton_kernels.launch.chips import chip_of
from triton_kernels.launch.tables import limits_of

if TYPE_CHECKING:
    import torch

    from triton_kernels.launch.chips import Chip


@dataclass(frozen=True)
class AttentionPlan:
    """Tile of pairs of rows and keys of an attention kernel."""

    block_rows: int
    block_keys: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """What a launch says of the plan."""
        blocks = {"BLOCK_ROWS": self.block_rows, "BLOCK_KEYS": self.block_keys}
        return {**blocks, "num_warps": self.num_warps, "num_stages": self.num_stages}


@planned(attention_candidates)
def plan_attention(
    kernel: str, num_rows: int, num_keys: int, width: int, itemsize: int, device: torch.device | Chip
) -> AttentionPlan:
    """Plan of an attention kernel.

    Args:
        kernel: `"fwd"`, `"jvp"`, or a sweep that owns rows or keys, of first order, which serves the backward alone, or
            of second: `"first_rows"`, `"first_keys"`, `"second_rows"`, `"second_keys"`.
        num_rows: Rows of a head.
        num_keys: Keys of a head.
        width: The wider of keys and values.
        itemsize: Bytes of an element.
        device: Where the kernel runs.
    """
    chip = chip_of(device)
    plan, most = _largest_plan(kernel, width, itemsize, chip), limits_of(chip).attention_tile
    blocks = ((plan.block_rows, num_rows), (plan.block_keys, num_keys))
    block_rows, block_keys = (min(block, most, max(next_power_of_2(size), MIN_MATMUL)) for block, size in blocks)
    return replace(plan, block_rows=block_rows, block_keys=block_keys)


# Plans of half types by the largest width that they serve. A warp multiplies 16 of the rows or keys that a program
# owns: with fewer of them, warps would repeat each other's products. Tiles are the largest that ptxas fits into the
# registers of sm_90 without spills, causal or not; at width 128 the second sweep of rows spills a few bytes, and that
# of keys, with its four sums, has no more than 32 keys.
_HALF = {
    64: {
        "fwd": AttentionPlan(128, 64, 8, 3),
        "jvp": AttentionPlan(128, 64, 8, 2),
        "first_rows": AttentionPlan(128, 64, 8, 2),
        "first_keys": AttentionPlan(64, 128, 8, 2),
        "second_rows": AttentionPlan(128, 32, 8, 2),
        "second_keys": AttentionPlan(32, 128, 8, 2),
    },
    128: {
        "fwd": AttentionPlan(128, 64, 8, 2),
        "jvp": AttentionPlan(128, 32, 8, 2),
        "first_rows": AttentionPlan(128, 32, 8, 2),
        "first_keys": AttentionPlan(32, 128, 8, 2),
        "second_rows": AttentionPlan(128, 32, 8, 2),
        "second_keys": AttentionPlan(64, 32, 8, 2),
    },
    256: {
        "fwd": AttentionPlan(128, 32, 8, 1),
        "jvp": AttentionPlan(64, 32, 4, 1),
        **dict.fromkeys(("first_rows", "first_keys", "second_rows", "second_keys"), AttentionPlan(32, 32, 8, 1)),
    },
}

# Rows of a tile at most, at widths above 64, of chips that have operands in registers too or little shared memory.
_MOST_ROWS = {("sm_80", "second_rows"): 64, ("gfx942", "second_rows"): 64, ("gfx942", "second_keys"): 32}

# Bytes of a row of float32 or float64 up to which tiles have more than the fewest rows and keys.
_MAX_WIDE_BYTES = 512
_WIDE = {
    "fwd": AttentionPlan(64, 32, 8, 2),
    **dict.fromkeys(("jvp", "first_rows", "first_keys"), AttentionPlan(32, 32, 8, 1)),
    **dict.fromkeys(("second_rows", "second_keys"), AttentionPlan(16, 16, 4, 1)),
}


def _largest_plan(kernel: str, width: int, itemsize: int, chip: Chip) -> AttentionPlan:
    if itemsize == 2:
        plans = next((plans for largest, plans in _HALF.items() if width <= largest), _HALF[256])
        most = _MOST_ROWS.get((chip.name, kernel), 128) if width > 64 else 128
        return replace(plans[kernel], block_rows=min(plans[kernel].block_rows, most))
    if next_power_of_2(width) * itemsize <= _MAX_WIDE_BYTES:
        return _WIDE[kernel]
    return AttentionPlan(MIN_MATMUL, MIN_MATMUL, 4, 1)
