"""What every row of the table must satisfy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_kernels.launch.chips import CHIPS

if TYPE_CHECKING:
    from perf.machine_code.table import Row

# On NVIDIA, float64 division and square root are subroutines, around whose calls a few registers go to the stack.
FLOAT64_SPILLS = 64

# Loads of one element where 16 bytes could be had, by kernel: statistics are taken relative to one element per channel.
KNOWN_NARROW = {"batch_norm_statistics_kernel": 1}


def broken_rules(chip_name: str, row: Row) -> list[str]:
    """What is wrong with a row, in words; empty if nothing is."""
    allowed = FLOAT64_SPILLS if " float64 " in row.case else 0
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
