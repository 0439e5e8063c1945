"""What every row of the table must satisfy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_kernels.launch.chips import CHIPS

if TYPE_CHECKING:
    from perf.machine_code.table import Row

# On NVIDIA, float64 division and square root are subroutines, around whose calls a few registers go to the stack.
FLOAT64_SPILLS = 64

# Spilled bytes that are no mistake of a plan, by chip, kernel and case. All results, or all but one, of the pairing of
# rows of 8,192 columns of bfloat16: 8 bytes per thread, 4 KiB of cache per row, written and read once. A sweep by tiles
# would read another 16 KiB of each of three operands, and with 1024 threads other variants spill up to 64 bytes.
KNOWN_SPILLS = {("sm_100", "layer_norm_second_kernel", "layer_norm 8192x8192 bfloat16"): 8}

# Loads of one element where 16 bytes could be had, by kernel: statistics are taken relative to one element per channel.
KNOWN_NARROW = {"batch_norm_statistics_kernel": 1}


# A row is tight if it takes more than this share of its registers or of the chip's shared memory.
TIGHT_SHARE = 0.9


def is_tight(chip_name: str, row: Row) -> bool:
    """Whether a row is about to break a rule, so that a compiler that does a little worse would."""
    share = max(row.registers / row.register_budget, row.shared_bytes / CHIPS[chip_name].shared_bytes)
    return share > TIGHT_SHARE or row.spills > 0


def broken_rules(chip_name: str, row: Row) -> list[str]:
    """What is wrong with a row, in words; empty if nothing is."""
    shape, _, _ = row.case.rpartition(" ")
    allowed = FLOAT64_SPILLS if " float64 " in row.case else KNOWN_SPILLS.get((chip_name, row.kernel, shape), 0)
    found = []
    if row.spills > allowed:
        found.append(f"spills {row.spills}, allowed are {allowed}")
    if row.local_bytes:
        found.append(f"{row.local_bytes} bytes of local memory")
    if row.registers > row.register_budget:
        found.append(f"{row.registers} registers, the plan counts on {row.register_budget}")
    if row.shared_bytes > CHIPS[chip_name].shared_bytes:
        found.append(f"{row.shared_bytes} bytes of shared memory, the chip has {CHIPS[chip_name].shared_bytes}")
    if row.narrow > KNOWN_NARROW.get(row.kernel, 0):
        found.append(
            f"{row.narrow} narrow accesses among loads {row.loads or 'none'} and stores {row.stores or 'none'}"
        )
    return [f"{chip_name} {row.kernel} ({row.case}): {problem}" for problem in found]
