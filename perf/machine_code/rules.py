"""The rules that every row of the table must satisfy."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from perf.machine_code.table import Row
from primitives.kernels.runtime.chips import CHIPS

# On NVIDIA, float64 division and square root are subroutines, around whose calls a few registers go to the stack.
FLOAT64_SPILLS = 64

# Tests hold every exception to be needed. Spilled bytes, by chip, kernel and case, and why they stay.
KNOWN_SPILLS = {
    # The longest rows of which a program holds two, for value and tangent: these bytes stay in a cache, and a sweep
    # would read 64 KiB again. Of half as many columns, two programs fit for these bytes, and each waits half as long.
    ("sm_90", "layer_norm_fwd_kernel", "layer_norm 4096x16384 bfloat16"): 16,
    ("sm_90", "layer_norm_fwd_kernel", "layer_norm 8192x5120 bfloat16"): 8,
    # Rows of 8,192 columns, or of 5,120 in tiles of as many, with all sums over them: `layer_norm_second_long_tiles` in
    # `runtime/limits` says what two kernels would read instead.
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
    ("sm_80", "layer_norm_fwd_kernel", "layer_norm 8192x8192 float32"): 16,
    ("sm_100", "layer_norm_fwd_kernel", "layer_norm 8192x8192 float32"): 16,
    # ptxas stops at 64 registers, with which two programs would fit; their steps under way leave room for one.
    ("sm_80", "cross_entropy_gradient_kernel", "cross_entropy 1024x262144 bfloat16"): 8,
    # It stops there, and two fit. Told so (`maxnreg`), it spills nothing here, but 24 and 32
    # bytes of the same launches without SiLU.
    ("sm_80", "layer_norm_x_bar_kernel", "group_norm_silu 2x320x64x64 bfloat16"): 8,
    ("sm_80", "layer_norm_x_bar_kernel", "group_norm_silu 2x320x64x64 bfloat16 channels_last"): 8,
    # It stops at 48, with which five programs fit. Bound to 64, it takes 56 and spills nothing, and four fit.
    ("sm_100", "batch_norm_transform_kernel", "batch_norm_relu 64x256x56x56 float32"): 8,
    # Scalar registers, which wait in lanes of a vector register: keys and constants of Philox.
    ("gfx942", "add_layer_norm_bwd_kernel", "add_layer_norm 8192x768 bfloat16 masked"): 4,
}

# Likewise of attention: by chip, problem and kernel, of first or of second order. Head width 64 spills nothing in
# half precision, wider ones on sm_90 only in second order, where a sweep holds up to eight tiles and four sums; each
# bound is that of the best tile found, with a step copied ahead. "masked" has tiles of bias, mask and noise beside
# these. Products of float32 are not work for tensor cores of NVIDIA: each thread holds rows of both factors. On
# gfx942 they are scalar registers, which wait in lanes of a vector register.
KNOWN_ATTENTION_SPILLS = {
    ("sm_80", "masked", "rows"): 224,
    ("sm_80", "masked", "keys"): 360,
    ("sm_80", "masked", "second keys"): 144,
    ("sm_80", "float32", "jvp"): 184,
    ("sm_80", "float32", "second rows"): 3896,
    ("sm_80", "float32", "second keys"): 8,
    ("sm_90", "wide", "second rows"): 144,
    ("sm_90", "wide", "second keys"): 112,
    ("sm_90", "masked", "jvp"): 16,
    ("sm_90", "masked", "second rows"): 24,
    ("sm_90", "masked", "second keys"): 208,
    ("sm_90", "float32", "jvp"): 208,
    ("sm_90", "float32", "second rows"): 1000,
    ("sm_90", "float32", "second keys"): 24,
    ("sm_100", "wide", "second keys"): 112,
    ("sm_100", "float32", "jvp"): 208,
    ("sm_100", "float32", "second rows"): 1000,
    ("sm_100", "float32", "second keys"): 16,
    ("gfx942", "narrow", "fwd"): 5,
    ("gfx942", "narrow", "jvp"): 6,
    ("gfx942", "masked", "fwd"): 12,
    ("gfx942", "masked", "jvp"): 16,
    ("gfx942", "masked", "second keys"): 6,
}

# Products of half types lie four to a thread on gfx942, and are stored so; so is a part of a turned mask read.
ATTENTION_NARROW = {"gfx942": 32}
MASKED_NARROW = 1

# Beside a label, the elements of x and of its tangent in its class are read by themselves, for up to two rows a thread.
KNOWN_NARROW = {"cross_entropy_sums_kernel": 4}
# Loads of a parameter of 2 bytes, a step ahead: of a group norm each row has its own, and AMD's loop hides whose it is.
KNOWN_UNTRACED = {("gfx942", "group_norm"): 2, ("gfx942", "group_norm_silu"): 2}

_BY_ADDRESS = "elements that are loaded by ones and twos take an address each: `unaligned_staged_bytes`"

# Loops that sum and copy nothing ahead on NVIDIA, by kernel and case, and why.
KNOWN_UNSTAGED = (
    (
        r"\S+ \S+ \S*x(50257 bfloat16|1001x14x14 bfloat16|2048x7x7 bfloat16 (?!channels_last))",
        "elements begin anywhere, and a copy takes four bytes at least",
    ),
    (
        r"layer_norm_second_sums_kernel layer_norm \S*x((4097|5124) |(4096 float32|5120 bfloat16|8192 \w+) hvp)",
        "a step is larger than `sweep_staged_bytes`, or its rows begin anywhere",
    ),
    (
        r"(softmax_bwd_jvp_kernel |log_softmax_double_backward_kernel log_)softmax 16x5000x96 float32 (mask|dou)",
        "a step of rows that are adjacent, of three tensors or with a mask, is larger than `staged_bytes`",
    ),
    (r"layer_norm_x_bar_kernel group_norm 2x320x64x64 bfloat16 channels_last ", _BY_ADDRESS),
    (r"add_partial_rows_kernel (?!layer_norm 256x262144 )", "loads of a step go together, from the cache"),
)

# Kernels that copy ahead on NVIDIA in a case, and load nothing ahead on AMD in any variant, and why.
KNOWN_UNSTAGED_AMD = (
    (r"\S+ \S*(layer_norm \S*x(4097|5124)|softmax \S*x50257 float32) ", _BY_ADDRESS),
    (r"layer_norm_\w+ group_norm(_silu)? 2x320x64x64 bfloat16 channels_last ", _BY_ADDRESS),
    (
        r"layer_norm_second_sums_kernel layer_norm \S*x(4096 float32|5120 bfloat16|8192 bfloat16) ",
        "a step is larger than half of its shared memory, to which `sweep_staged_bytes` is fitted",
    ),
)

# Kernels that sum in a lone loop, whatever it writes; a lone sweep of another that writes loads as it goes.
_SUMS = re.compile(r"\w+_(sums|norm_bwd)_kernel")


def staged(rows: Iterable[Row]) -> set[tuple[str, str]]:
    """Kernels and cases of a table that load or copy ahead, but for attention, which has no memory for it on AMD."""
    found = (row for row in rows if row.ahead.strip("- "))
    return {(row.kernel, row.case) for row in found if not row.kernel.startswith("attention_")}


def broken_rules(chip_name: str, row: Row, unstaged: Collection[tuple[str, str]] = ()) -> list[str]:
    """The faults of a row of a chip of `CHIPS`, in words; empty if nothing is.

    Args:
        chip_name: The chip.
        row: The row.
        unstaged: Kernels and cases that are `staged` on another chip alone.
    """
    shape, _, _ = row.case.rpartition(" ")
    spills = FLOAT64_SPILLS if " float64 " in row.case else KNOWN_SPILLS.get((chip_name, row.kernel, shape), 0)
    narrow = KNOWN_NARROW.get(row.kernel, KNOWN_UNTRACED.get((chip_name, row.case.partition(" ")[0]), 0))
    if row.kernel.startswith("attention_"):
        spills, narrow = _attention_bounds(chip_name, row)
    shared_bytes, name = CHIPS[chip_name].shared_bytes, f"{row.kernel} {row.case}"
    problems = {
        f"spills {row.spills}, allowed are {spills}": row.spills > spills,
        f"{row.local_bytes} bytes of local memory": row.local_bytes > 0,
        f"{row.registers} registers, the plan counts on {row.register_budget}": row.registers > row.register_budget,
        f"{row.shared_bytes} bytes of shared memory, the chip has {shared_bytes}": row.shared_bytes > shared_bytes,
        f"{row.narrow} narrow accesses among loads {row.loads or 'none'} and stores {row.stores or 'none'}": row.narrow
        > narrow,
        "a loop that sums copies nothing ahead": chip_name.startswith("sm_") and _copies_nothing(row),
        "nothing is loaded ahead": (row.kernel, row.case) in unstaged
        and not any(re.match(pattern, name) for pattern, _ in KNOWN_UNSTAGED_AMD),
        "a step waits for all that is copied ahead": "0" in row.ahead.split(),
    }
    return [f"{chip_name} {row.kernel} ({row.case}): {text}" for text, is_broken in problems.items() if is_broken]


def _copies_nothing(row: Row) -> bool:
    """Whether a loop that sums copies nothing ahead: the first sweep of two, one that writes nothing, or over rows."""
    first, *others = row.ahead.split() or [""]
    is_known = any(re.match(pattern, f"{row.kernel} {row.case}") for pattern, _ in KNOWN_UNSTAGED)
    sums = others or not row.stores or _SUMS.fullmatch(row.kernel)
    return first == "-" and bool(sums) and not is_known and not row.kernel.startswith("attention_")


def _attention_bounds(chip_name: str, row: Row) -> tuple[int, int]:
    """Spills, and narrow accesses, that a kernel of attention may have."""
    _, sizes, *words, mode = row.case.split()
    kind = next((word for word in ("masked", "float32") if word in words), "")
    kind = kind or ("wide" if int(sizes.rpartition("x")[2]) > 64 else "narrow")
    name = row.kernel.removeprefix("attention_").removesuffix("_kernel")
    name = name if mode in {"forward", "backward", "jvp"} else f"second {name}"
    spills = KNOWN_ATTENTION_SPILLS.get((chip_name, kind, name), 0)
    return spills, ATTENTION_NARROW.get(chip_name, 0) + MASKED_NARROW * (kind == "masked")


def all_broken(tables: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """The faults of the tables of all chips."""
    ahead = {chip: staged(rows) for chip, rows in tables.items()}
    for chip_name, rows in tables.items():
        unstaged = ahead["sm_90"] - ahead[chip_name] if chip_name.startswith("gfx") else set()
        for row in rows:
            yield from broken_rules(chip_name, row, unstaged)
