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
# would read another 16 KiB of each of three operands, and with 1024 threads other variants spill up to 64 bytes. On
# gfx942, planes of 7 * 7 elements of 4 bytes, which are loaded one by one: 15 scalar registers with masks wait in lanes
# of a vector register, and nothing goes to memory. One stage would need none of it, and wait for every tile.
KNOWN_SPILLS = {
    ("sm_100", "layer_norm_second_kernel", "layer_norm 8192x8192 bfloat16"): 8,
    ("gfx942", "batch_norm_statistics_kernel", "batch_norm 64x2048x7x7 float32"): 15,
}

# Loads of one element where 16 bytes could be had, by kernel: statistics are taken relative to one element per channel.
KNOWN_NARROW = {"batch_norm_statistics_kernel": 1}


def broken_rules(chip_name: str, row: Row) -> list[str]:
    """What is wrong with a row of a chip of `CHIPS`, in words; empty if nothing is."""
    shape, _, _ = row.case.rpartition(" ")
    spills = FLOAT64_SPILLS if " float64 " in row.case else KNOWN_SPILLS.get((chip_name, row.kernel, shape), 0)
    shared_bytes = CHIPS[chip_name].shared_bytes
    problems = {
        f"spills {row.spills}, allowed are {spills}": row.spills > spills,
        f"{row.local_bytes} bytes of local memory": row.local_bytes > 0,
        f"{row.registers} registers, the plan counts on {row.register_budget}": row.registers > row.register_budget,
        f"{row.shared_bytes} bytes of shared memory, the chip has {shared_bytes}": row.shared_bytes > shared_bytes,
        f"{row.narrow} narrow accesses among loads {row.loads or 'none'} and stores {row.stores or 'none'}": row.narrow
        > KNOWN_NARROW.get(row.kernel, 0),
    }
    return [f"{chip_name} {row.kernel} ({row.case}): {text}" for text, is_broken in problems.items() if is_broken]
