"""Plans of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triton_kernels.launch._arithmetic import next_power_of_2
from triton_kernels.launch._planned import planned

if TYPE_CHECKING:
    import torch

    from triton_kernels.launch.chips import Chip

# Products of matrices have at least this many rows, columns and terms.
MIN_BLOCK = 16


@dataclass(frozen=True)
class AttentionPlan:
    """Tile of pairs of rows and keys of an attention kernel."""

    block_rows: int
    block_keys: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """What Triton is told besides the arguments of the kernel."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@planned()
def plan_attention(kernel: str, width: int, itemsize: int, device: torch.device | Chip) -> AttentionPlan:
    """Plan of an attention kernel.

    Args:
        kernel: `"fwd"`, `"jvp"`, `"rows"` or `"keys"`: the first two hold one row of sums, the others up to four.
        width: The wider of keys and values.
        itemsize: Bytes of an element.
        device: Where the kernel runs.
    """
    block_width = max(next_power_of_2(width), MIN_BLOCK)
    wide = block_width * itemsize > 128
    if kernel == "fwd":
        return AttentionPlan(128, 32, 8 if wide else 4, 2)
    if kernel == "jvp":
        return AttentionPlan(64, 32, 4, 2)
    num_warps = 8 if wide else 4
    return AttentionPlan(64, 32, num_warps, 2) if kernel == "rows" else AttentionPlan(32, 64, 8, 2)
