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
        kernel: `"fwd"`, `"jvp"`, `"rows"` or `"keys"`: the first two hold one row of sums, the others up to four.
        num_rows: Rows of a head.
        num_keys: Keys of a head.
        width: The wider of keys and values.
        itemsize: Bytes of an element.
        device: Where the kernel runs.
    """
    plan, most = _largest_plan(kernel, width, itemsize), limits_of(chip_of(device)).attention_tile
    blocks = ((plan.block_rows, num_rows), (plan.block_keys, num_keys))
    block_rows, block_keys = (min(block, most, max(next_power_of_2(size), MIN_MATMUL)) for block, size in blocks)
    return replace(plan, block_rows=block_rows, block_keys=block_keys)


def _largest_plan(kernel: str, width: int, itemsize: int) -> AttentionPlan:
    block_width = max(next_power_of_2(width), MIN_MATMUL)
    wide = block_width * itemsize > 128
    if kernel == "fwd":
        return AttentionPlan(128, 32, 8 if wide else 4, 2)
    if kernel == "jvp":
        return AttentionPlan(64, 32, 4, 2)
    num_warps = 8 if wide else 4
    return AttentionPlan(64, 32, num_warps, 2) if kernel.endswith("rows") else AttentionPlan(32, 64, 8, 2)
