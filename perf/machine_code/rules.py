"""What every row of the table must satisfy."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from triton_kernels.launch.chips import CHIPS

if TYPE_CHECKING:
    from perf.machine_code.table import Row

# On NVIDIA, float64 division and square root are subroutines, around whose calls a few registers go to the stack.
FLOAT64_SPILLS = 64

# Spilled bytes, by chip, kernel and case, and why they stay.
KNOWN_SPILLS = {
    # The longest rows of which a program holds two, for value and tangent: these bytes stay in a cache, and a sweep
    # would read 64 KiB again. Of half as many columns, two programs fit for these bytes, and each waits half as long.
    ("sm_90", "layer_norm_fwd_kernel", "layer_norm 4096x16384 bfloat16"): 8,
    ("sm_100", "layer_norm_fwd_kernel", "layer_norm 4096x16384 bfloat16"): 8,
    ("sm_100", "layer_norm_fwd_kernel", "layer_norm 8192x8192 bfloat16"): 8,
    ("sm_100", "layer_norm_fwd_kernel", "layer_norm 8192x4097 bfloat16"): 8,
    # Rows of 8,192 columns, or of 5,120 in tiles of as many, with all sums over them: `layer_norm_second_long_tiles` in
    # `launch/tables` says what two kernels would read instead.
    ("sm_80", "layer_norm_second_sums_kernel", "layer_norm 8192x8192 bfloat16"): 296,
    ("sm_80", "layer_norm_second_sums_kernel", "layer_norm 8192x5120 bfloat16"): 168,
    ("sm_90", "layer_norm_second_sums_kernel", "layer_norm 8192x8192 bfloat16"): 344,
    ("sm_90", "layer_norm_second_sums_kernel", "layer_norm 8192x5120 bfloat16"): 224,
    ("sm_100", "layer_norm_second_sums_kernel", "layer_norm 8192x8192 bfloat16"): 336,
    ("sm_100", "layer_norm_second_sums_kernel", "layer_norm 8192x5120 bfloat16"): 224,
    ("sm_80", "layer_norm_second_sums_kernel", "layer_norm 8192x5124 bfloat16"): 192,
    ("sm_80", "layer_norm_second_sums_kernel", "layer_norm 8192x8192 float32"): 208,
    ("sm_90", "layer_norm_second_sums_kernel", "layer_norm 8192x5124 bfloat16"): 232,
    ("sm_90", "layer_norm_second_sums_kernel", "layer_norm 8192x8192 float32"): 200,
    ("sm_100", "layer_norm_second_sums_kernel", "layer_norm 8192x5124 bfloat16"): 232,
    ("sm_100", "layer_norm_second_sums_kernel", "layer_norm 8192x8192 float32"): 240,
    # Two rows to a program, of which two fit a processor for these bytes: each waits half as long.
    ("sm_90", "layer_norm_x_bar_kernel", "layer_norm 8192x8192 float32"): 8,
    ("sm_100", "layer_norm_fwd_kernel", "layer_norm 8192x8192 float32"): 8,
    ("sm_100", "layer_norm_fwd_kernel", "layer_norm 8192x8192 float16"): 16,
    # Two registers of a thread, which stay in a cache; no other plan was looked for.
    ("sm_80", "layer_norm_x_bar_kernel", "group_norm_silu 2x320x64x64 bfloat16"): 8,
    ("sm_80", "layer_norm_x_bar_kernel", "group_norm_silu 2x320x64x64 bfloat16 channels_last"): 8,
    ("sm_100", "batch_norm_transform_kernel", "batch_norm_relu 64x256x56x56 float32"): 8,
    # Scalar registers, which wait in lanes of a vector register: keys and constants of Philox.
    ("gfx942", "add_layer_norm_bwd_kernel", "add_layer_norm 8192x768 bfloat16 masked"): 4,
}

# Likewise of attention: by chip, problem and kernel, of first or of second order. Head width 64 spills nothing in
# half precision, wider ones on sm_90 only in second order, where a sweep holds up to eight tiles and four sums; each
# bound is that of the best tile found, with a step copied ahead. "masked" has tiles of bias, mask and noise beside
# these. Products of float32 are not work for tensor cores of NVIDIA: each thread holds rows of both factors. On
# gfx942 they are scalar registers, which wait in lanes of a vector register.
ATTENTION_SPILLS: dict[tuple[str, str], dict[str, int]] = {
    ("sm_80", "masked"): {"rows": 224, "keys": 360, "second keys": 144},
    ("sm_80", "float32"): {"jvp": 184, "second rows": 3896, "second keys": 8},
    ("sm_90", "wide"): {"second rows": 144, "second keys": 112},
    ("sm_90", "masked"): {"jvp": 32, "second rows": 24, "second keys": 208},
    ("sm_90", "float32"): {"jvp": 208, "second rows": 1000, "second keys": 24},
    ("sm_100", "wide"): {"second rows": 24, "second keys": 112},
    ("sm_100", "float32"): {"jvp": 208, "second rows": 1000, "second keys": 16},
    ("gfx942", "narrow"): {"fwd": 5, "jvp": 6},
    ("gfx942", "masked"): {"fwd": 12, "jvp": 16, "second keys": 6},
}

# Products of half types lie four to a thread on gfx942, and are stored so; so is a part of a turned mask read.
ATTENTION_NARROW = {"gfx942": 32}
MASKED_NARROW = 1

# Beside a label, the elements of x and of its tangent in its class are read by themselves, for up to two rows a thread.
KNOWN_NARROW = {"cross_entropy_sums_kernel": 4}
# Loads of a parameter of 2 bytes, a step ahead: of a group norm each row has its own, and AMD's loop hides whose it is.
KNOWN_UNTRACED = {("gfx942", "group_norm"): 2, ("gfx942", "group_norm_silu"): 2}

# Loops that sum and copy nothing ahead on NVIDIA, by kernel and case, and why.
KNOWN_UNSTAGED = (
    (
        r"\S+ \S+ \S*x(50257|1001x14x14|2048x7x7) bfloat16 ",
        "elements begin anywhere, and a copy takes four bytes at least",
    ),
    (
        r"layer_norm_second_sums_kernel layer_norm \S*x((4097|5124) |(4096 float32|5120 bfloat16|8192 \w+) hvp)",
        "a step is larger than `sweep_staged_bytes`, or its rows begin anywhere",
    ),
)

# Reductions across the warps of a block, one after another, in a step of a loop, or in a kernel without loops that
# reads large tensors: a mean, then the squares about it, or all sums of a derivative at once.
MAX_REDUCTIONS = 2


def broken_rules(chip_name: str, row: Row) -> list[str]:
    """What is wrong with a row of a chip of `CHIPS`, in words; empty if nothing is."""
    shape, _, _ = row.case.rpartition(" ")
    spills = FLOAT64_SPILLS if " float64 " in row.case else KNOWN_SPILLS.get((chip_name, row.kernel, shape), 0)
    narrow = KNOWN_NARROW.get(row.kernel, KNOWN_UNTRACED.get((chip_name, row.case.partition(" ")[0]), 0))
    if row.kernel.startswith("attention_"):
        spills, narrow = _attention_bounds(chip_name, row)
    regions, shared_bytes = row.parsed_regions(), CHIPS[chip_name].shared_bytes
    per_row = regions[1:] if len(regions) > 1 or not row.loads else regions
    reductions = max((region.reductions for region in per_row), default=0)
    problems = {
        f"spills {row.spills}, allowed are {spills}": row.spills > spills,
        f"{row.local_bytes} bytes of local memory": row.local_bytes > 0,
        f"{row.registers} registers, the plan counts on {row.register_budget}": row.registers > row.register_budget,
        f"{row.shared_bytes} bytes of shared memory, the chip has {shared_bytes}": row.shared_bytes > shared_bytes,
        f"{row.narrow} narrow accesses among loads {row.loads or 'none'} and stores {row.stores or 'none'}": row.narrow
        > narrow,
        f"{reductions} reductions of a block one after another": reductions > MAX_REDUCTIONS,
        "a loop that sums copies nothing ahead": chip_name.startswith("sm_") and _copies_nothing(row),
        "a step waits for all that is copied ahead": any(region.ahead == 0 for region in regions),
        "a loop copies over what other warps may be reading": any(region.unguarded for region in regions),
    }
    return [f"{chip_name} {row.kernel} ({row.case}): {text}" for text, is_broken in problems.items() if is_broken]


def _copies_nothing(row: Row) -> bool:
    """Whether a loop over rows with sums, or each of two sweeps, of which the first one sums, copies nothing ahead."""
    if row.kernel.startswith("attention_") or any(
        re.match(pattern, f"{row.kernel} {row.case}") for pattern, _ in KNOWN_UNSTAGED
    ):
        return False
    loops = [region for region in row.parsed_regions()[1:] if region.loaded]
    sums = [loop for loop in loops if loop.trips.endswith(":num_splits") or row.kernel == "batch_norm_sums_kernel"]
    sweeps_twice = len(loops) > 1 and all(loop.ahead is None for loop in loops)
    return sweeps_twice or any(loop.ahead is None for loop in sums)


def _attention_bounds(chip_name: str, row: Row) -> tuple[int, int]:
    """Spills, and narrow accesses, that a kernel of attention may have."""
    _, sizes, *words, mode = row.case.split()
    kind = next((word for word in ("masked", "float32") if word in words), "")
    kind = kind or ("wide" if int(sizes.rpartition("x")[2]) > 64 else "narrow")
    name = row.kernel.removeprefix("attention_").removesuffix("_kernel")
    name = name if mode in {"forward", "backward", "jvp"} else f"second {name}"
    spills = ATTENTION_SPILLS.get((chip_name, kind), {}).get(name, 0)
    return spills, ATTENTION_NARROW.get(chip_name, 0) + MASKED_NARROW * (kind == "masked")
