"""Plans of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..runtime.arithmetic import MIN_MATMUL, next_power_of_2
from ..runtime.candidates import attention_candidates
from ..runtime.chips import Chip, chip_of, limits_of
from ..runtime.planned import planned


@dataclass(frozen=True)
class AttentionPlan:
    """Tile of pairs of rows and keys of an attention kernel."""

    block_rows: int
    block_keys: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """The arguments of a launch by the plan."""
        blocks = {"BLOCK_ROWS": self.block_rows, "BLOCK_KEYS": self.block_keys}
        return {**blocks, "num_warps": self.num_warps, "num_stages": self.num_stages}


@planned(attention_candidates)
def plan_attention(
    kernel: str, num_rows: int, num_keys: int, width: int, itemsize: int, device: torch.device | Chip
) -> AttentionPlan:
    """Plan of an attention kernel over the rows and keys of a head; `width` is the wider of keys and values.

    `kernel` is `"fwd"`, `"jvp"`, or a sweep that owns rows or keys, of first order, which serves the backward alone, or
    of second: `"first_rows"`, `"first_keys"`, `"second_rows"`, `"second_keys"`.
    """
    chip = chip_of(device)
    plan, most = _largest_plan(kernel, width, itemsize, chip), limits_of(chip).attention_tile
    # AMD's compiler loads a step ahead with two, and has less shared memory.
    plan = replace(plan, num_stages=min(plan.num_stages, 2)) if chip.name == "gfx942" else plan
    if plan.num_stages > 1 and _staged_bytes(plan, kernel, width, itemsize, chip) > chip.shared_bytes:
        # A chip with less memory than that of its table, which holds what a program owns too: one step, half as long.
        swept = "block_rows" if kernel.endswith("keys") else "block_keys"
        plan = replace(plan, num_stages=1, **{swept: max(getattr(plan, swept) // 2, MIN_MATMUL)})
    blocks = ((plan.block_rows, num_rows), (plan.block_keys, num_keys))
    block_rows, block_keys = (min(block, most, max(next_power_of_2(size), MIN_MATMUL)) for block, size in blocks)
    return replace(plan, block_rows=block_rows, block_keys=block_keys)


def _staged_bytes(plan: AttentionPlan, kernel: str, width: int, itemsize: int, chip: Chip) -> int:
    """Shared memory of the steps in flight, of two or, with tangents, four tensors, with room for what is owned."""
    owned, swept = plan.block_rows, plan.block_keys
    # The tensor cores of sm_80 read registers, so that a step leaves its memory while it is multiplied.
    steps = plan.num_stages - (chip.name == "sm_80")
    if kernel.endswith("keys"):
        owned, swept = swept, owned
    tensors = 2 if kernel == "fwd" or kernel.startswith("first") else 4
    return tensors * (swept * steps + owned) * next_power_of_2(width) * itemsize


# Plans of half types by the largest width that they serve. A warp multiplies 16 of the rows or keys that a program
# owns: with fewer of them, warps would repeat each other's products. Tiles are the largest that ptxas fits into the
# registers of sm_90 without spills, causal or not; at width 128 the second sweep of rows spills a few bytes, and that
# of keys, with its four sums, has no more than 32 keys. With three stages the copies of a whole step are under way
# during the products of another, at the registers of two, which wait for all that they have just copied.
_HALF = {
    64: {
        "fwd": AttentionPlan(128, 64, 8, 3),
        "jvp": AttentionPlan(128, 64, 8, 3),
        "first_rows": AttentionPlan(128, 64, 8, 3),
        "first_keys": AttentionPlan(64, 128, 8, 3),
        "second_rows": AttentionPlan(128, 32, 8, 3),
        "second_keys": AttentionPlan(32, 128, 8, 3),
    },
    128: {
        "fwd": AttentionPlan(128, 64, 8, 3),
        "jvp": AttentionPlan(128, 32, 8, 3),
        "first_rows": AttentionPlan(128, 32, 8, 3),
        "first_keys": AttentionPlan(32, 128, 8, 3),
        "second_rows": AttentionPlan(128, 32, 8, 3),
        "second_keys": AttentionPlan(64, 32, 8, 3),
    },
    256: {
        "fwd": AttentionPlan(128, 32, 8, 1),
        "jvp": AttentionPlan(64, 32, 4, 1),
        **dict.fromkeys(("first_rows", "first_keys", "second_rows", "second_keys"), AttentionPlan(32, 32, 8, 1)),
    },
}

# Bytes of a row of float32 or float64 up to which tiles have more than the fewest rows and keys.
_MAX_WIDE_BYTES = 512
_WIDE = {
    "fwd": AttentionPlan(64, 32, 8, 3),
    **dict.fromkeys(("jvp", "first_rows", "first_keys"), AttentionPlan(32, 32, 8, 1)),
    **dict.fromkeys(("second_rows", "second_keys"), AttentionPlan(16, 16, 4, 1)),
}

# Where these chips differ: operands take registers there too, and on gfx942 so does the step that is loaded ahead, so
# that there is none. On sm_100 the second sweep of rows waits for its operands by turns, and copies ahead with two
# stages; three of them do not fit.
_OF_CHIP = {
    "sm_80": {
        64: {
            "jvp": AttentionPlan(128, 32, 8, 3),
            "second_rows": AttentionPlan(64, 16, 4, 3),
            "second_keys": AttentionPlan(16, 64, 4, 3),
        },
        128: {
            "jvp": AttentionPlan(128, 16, 8, 3),
            "first_keys": AttentionPlan(64, 64, 8, 3),
            "second_rows": AttentionPlan(32, 32, 8, 3),
            "second_keys": AttentionPlan(32, 32, 8, 3),
        },
    },
    "sm_100": {128: {"second_rows": AttentionPlan(128, 32, 8, 2)}},
    "gfx942": {
        64: {
            "fwd": AttentionPlan(128, 64, 8, 1),
            **dict.fromkeys(("jvp", "first_rows", "second_rows"), AttentionPlan(64, 32, 4, 1)),
            **dict.fromkeys(("first_keys", "second_keys"), AttentionPlan(32, 64, 4, 1)),
        },
        128: {
            "fwd": AttentionPlan(128, 64, 8, 1),
            "first_rows": AttentionPlan(128, 32, 8, 1),
            "first_keys": AttentionPlan(32, 64, 4, 1),
            **dict.fromkeys(("jvp", "second_rows"), AttentionPlan(64, 16, 4, 1)),
            "second_keys": AttentionPlan(16, 64, 4, 1),
        },
    },
}


def _largest_plan(kernel: str, width: int, itemsize: int, chip: Chip) -> AttentionPlan:
    if itemsize == 2:
        largest = next((largest for largest in _HALF if width <= largest), max(_HALF))
        return _OF_CHIP.get(chip.name, {}).get(largest, {}).get(kernel, _HALF[largest][kernel])
    if next_power_of_2(width) * itemsize <= _MAX_WIDE_BYTES:
        return _WIDE[kernel]
    return AttentionPlan(MIN_MATMUL, MIN_MATMUL, 4, 1)
