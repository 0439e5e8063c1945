"""What every row of the table must satisfy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triton_kernels.launch.chips import CHIPS

if TYPE_CHECKING:
    from collections.abc import Mapping

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


class ReleaseExceptions(NamedTuple):
    """What a release of Triton may do beyond what every release may.

    Attributes:
        spills: Bytes, on AMD registers, by chip, kernel and case.
        registers: Registers beyond the budget, likewise.
        narrow: Accesses by kernel.
    """

    spills: Mapping[tuple[str, str, str], int]
    registers: Mapping[tuple[str, str, str], int]
    narrow: Mapping[str, int]


# By major and minor number. 3.6 loads the one element of a channel once for each element that a thread holds of a tile,
# eight at most, instead of once: a few loads of one address per program. Its ptxas gives the backward of the longest
# rows 64 registers, of the 128 that there are, and spills the rest; that of 3.9 takes 50. On gfx942 it takes 174
# registers where 3.9 takes 144, so that one program of two waits for room on a processor, and a merge of batch norm,
# which takes microseconds whatever it does, keeps 58 values in other registers.
RELEASES = {
    "3.6": ReleaseExceptions(
        spills={
            ("sm_90", "log_softmax_linear_looped_kernel", "log_softmax 2048x65536 bfloat16 backward"): 8,
            ("gfx942", "batch_norm_second_merge_kernel", "batch_norm 64x1024x14x14 bfloat16 channels_last hvp"): 58,
        },
        registers={("gfx942", "layer_norm_bwd_kernel", "layer_norm 8192x4096 float32 backward"): 6},
        narrow={"batch_norm_statistics_kernel": 8},
    ),
}
_NOTHING = ReleaseExceptions({}, {}, {})


def broken_rules(chip_name: str, row: Row, version: str) -> list[str]:
    """What is wrong with a row, in words; empty if nothing is.

    Args:
        chip_name: A key of `CHIPS`.
        row: What came out.
        version: Release of Triton that compiled it.
    """
    shape, _, _ = row.case.rpartition(" ")
    release = RELEASES.get(".".join(version.split(".")[:2]), _NOTHING)
    spills = KNOWN_SPILLS.get((chip_name, row.kernel, shape), 0)
    spills = max(spills, release.spills.get((chip_name, row.kernel, row.case), 0))
    allowed = FLOAT64_SPILLS if " float64 " in row.case else spills
    found = []
    if row.spills > allowed:
        found.append(f"spills {row.spills}, allowed are {allowed}")
    if row.local_bytes:
        found.append(f"{row.local_bytes} bytes of local memory")
    extra_registers = release.registers.get((chip_name, row.kernel, row.case), 0)
    if row.registers > row.register_budget + extra_registers:
        found.append(f"{row.registers} registers, the plan counts on {row.register_budget}")
    if row.shared_bytes > CHIPS[chip_name].shared_bytes:
        found.append(f"{row.shared_bytes} bytes of shared memory, the chip has {CHIPS[chip_name].shared_bytes}")
    if row.narrow > max(KNOWN_NARROW.get(row.kernel, 0), release.narrow.get(row.kernel, 0)):
        found.append(
            f"{row.narrow} narrow accesses among loads {row.loads or 'none'} and stores {row.stores or 'none'}"
        )
    return [f"{chip_name} {row.kernel} ({row.case}): {problem}" for problem in found]
