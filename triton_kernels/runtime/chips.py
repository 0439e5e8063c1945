"""The planner's view of a chip: its limits, and the numbers of plans that depend on the architecture, with reasons.

There is one table of these per architecture. They are alike where the compiler reports the same for all, because the
register file of every supported NVIDIA chip is 256 KiB per processor; a number that differs says why.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from .planned import forget_plans


@dataclass(frozen=True)
class Chip:
    """Limits of a GPU.

    Attributes:
        name: Architecture whose plans it takes: `"sm_80"`, `"sm_90"`, `"sm_100"` or `"gfx942"`.
        warp_size: Threads of a warp (a wavefront on AMD).
        num_processors: Streaming multiprocessors (compute units on AMD).
        shared_bytes: Shared memory (LDS on AMD) that one block can have.
        processor_shared_bytes: Shared memory of a processor, for all of its blocks.
        registers: 32-bit registers of a processor.
        l2_bytes: Size of the last cache before memory; of the infinity cache on AMD, where that is known.
        max_warps: Warps of a block at most.
    """

    name: str
    warp_size: int
    num_processors: int
    shared_bytes: int
    processor_shared_bytes: int
    registers: int
    l2_bytes: int
    max_warps: int


# Data sheets of A100, H200, B200 and MI300X. AMD allows 16 wavefronts of 64 threads in a block. No data sheet names the
# H200's cache: the GH100 die has 60 MiB beside twelve memory controllers, and six stacks of memory use all twelve.
CHIPS = {
    "sm_80": Chip("sm_80", 32, 108, 166912, 167936, 65536, 40 << 20, 32),
    "sm_90": Chip("sm_90", 32, 132, 232448, 233472, 65536, 60 << 20, 32),
    "sm_100": Chip("sm_100", 32, 148, 232448, 233472, 65536, 126 << 20, 32),
    "gfx942": Chip("gfx942", 64, 304, 65536, 65536, 131072, 256 << 20, 16),
}

# Threads of a block at most, on every chip that Triton compiles for.
MAX_BLOCK_THREADS = 1024

# A CPU run (the interpreter) plans as if for this many processors: enough to exercise splits and persistent loops,
# few enough to stay fast.
INTERPRETER_PROCESSORS = 4
INTERPRETER = replace(CHIPS["sm_90"], num_processors=INTERPRETER_PROCESSORS)

_chosen: Chip | None = None


def chip_from_properties(properties: Any, is_amd: bool) -> Chip:
    """The chip that torch describes: the plans of the nearest table, and the limits of the device itself.

    A chip of NVIDIA takes the table of its compute capability's major number, or else of the nearest lower one that has
    a table (`sm_80` if there is none); all chips of AMD take that of gfx942. Where the device has less than the chip of
    the table, or warps of another size, the plans keep to what the device has (see `limits_of`).

    Args:
        properties: Those of `torch.cuda.get_device_properties`. A value that torch does not tell is taken as on
            the chip of the table; but of shared memory a block then has only what it can have unasked, and an AMD
            chip with warps of 32 threads only as many registers as one of NVIDIA.
        is_amd: Whether the chip is AMD's.
    """
    if is_amd:
        base = CHIPS["gfx942"]
    else:
        base = CHIPS["sm_80" if properties.major < 9 else "sm_90" if properties.major < 10 else "sm_100"]
    has_infinity_cache = is_amd and str(getattr(properties, "gcnArchName", "")).split(":")[0] == base.name

    def told(name: str, otherwise: int) -> int:
        return int(getattr(properties, name, 0) or otherwise)

    warp_size = told("warp_size", base.warp_size)
    registers = base.registers if warp_size == base.warp_size else min(chip.registers for chip in CHIPS.values())
    # AMD has no more for blocks that ask for it.
    shared_bytes = told("shared_memory_per_block_optin", told("shared_memory_per_block", base.shared_bytes))
    return Chip(
        name=base.name,
        warp_size=warp_size,
        num_processors=told("multi_processor_count", base.num_processors),
        shared_bytes=shared_bytes,
        processor_shared_bytes=told("shared_memory_per_multiprocessor", max(shared_bytes, base.processor_shared_bytes)),
        registers=told("regs_per_multiprocessor", registers),
        # ROCm calls L2 a smaller cache in front of the infinity cache, which it does not tell of.
        l2_bytes=base.l2_bytes if has_infinity_cache else told("L2_cache_size", base.l2_bytes),
        max_warps=told("max_threads_per_block", MAX_BLOCK_THREADS) // warp_size,
    )


@functools.cache
def _cuda_chip(index: int) -> Chip:
    return chip_from_properties(torch.cuda.get_device_properties(index), bool(torch.version.hip))


def chip_of(device: torch.device | Chip) -> Chip:
    """The chip behind `device`; a small stand-in where there is none, which is where the interpreter runs."""
    if _chosen is not None:
        return _chosen
    if isinstance(device, Chip):
        return device
    if device.type == "cuda":
        return _cuda_chip(device.index if device.index is not None else torch.cuda.current_device())
    return INTERPRETER


def device_name(device: torch.device | Chip) -> str:
    """The key that tells devices with different speeds apart that share a chip's plans."""
    if _chosen is None and not isinstance(device, Chip) and device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"stand-in of {chip_of(device).num_processors} processors"


@contextlib.contextmanager
def use_chip(chip: Chip) -> Iterator[None]:
    """Plan for `chip`, whatever the device: to compile for a chip that is not there."""
    global _chosen
    previous, _chosen = _chosen, chip
    forget_plans()
    try:
        yield
    finally:
        _chosen = previous
        forget_plans()


@dataclass(frozen=True)
class Limits:
    """Numbers of the plans that depend on the architecture; the defaults are those of sm_90.

    Numbers of values are those of float32 arithmetic; `double_divisor` turns them into those of float64.
    """

    # Threads of a program that holds the longest rows that fit: all that a block can have, 64 registers to each. Only
    # for rows that fit no other way, because one such block leaves half the warp slots of a processor empty while it
    # waits at a barrier.
    row_threads: int = 1024
    # Of every other program at most: 16 warps, and four blocks of them fill the warp slots of a processor.
    tile_threads: int = 512
    # Threads per processor, and of one program at most, in loops that keep sums in registers: about 128 registers per
    # thread, so that 512 threads fill the register file of a processor.
    resident_threads: int = 512
    # By how much less fits where arithmetic is in float64: a value takes two registers, and so do the temporaries of
    # its division and square root. At half the columns of float32 ptxas still reports up to 208 bytes of spills.
    double_divisor: int = 4
    # Bytes of one step of a loop, of all its tensors, up to which later steps are loaded ahead: two steps in flight
    # stay within 64 KiB of shared memory, the least that a supported chip has.
    staged_bytes: int = 32768
    # The same where elements are loaded one by one.
    unaligned_staged_bytes: int = 32768
    # The same of a program that has a processor for itself: two steps are less than the shared memory of a processor
    # of every chip here but the smallest.
    sweep_staged_bytes: int = 49152
    # Stages of a loop that has one step under way while it reduces another one: the copies of a step are issued behind
    # its reductions, and the top of the loop waits for all but the newest.
    prefetch_stages: int = 3
    # Longest row, in bytes, of which a program holds one: it fits the registers of 1024 threads. ptxas reports no
    # spills up to it, and 8 bytes (float32) to 280 bytes (bfloat16) at the next power of two.
    layer_norm_fwd_bytes: int = 65536
    # Longest rows of which a program holds two (x and y_bar or x_dot): 64 registers of 1024 threads.
    layer_norm_two_row_cols: int = 16384
    # Sums of a row from which two programs of `tile_threads` that hold two rows each are bound to 64 registers, so that
    # both fit a processor: left alone, ptxas takes 66 to 80 for value and tangent, and for the tangent loads one part
    # behind the other (its longest program waits for 103 microseconds, not 55, at 5,124 columns).
    layer_norm_paired_sums: int = 2
    # Longest rows of which a program holds two, and two rows of sums: up to 128 registers at 16 columns per thread, so
    # no more than 512 threads. At twice as many columns ptxas reports over 180 bytes with every number of warps.
    layer_norm_accumulated_cols: int = 8192
    # Tile of the kernels that sweep longer rows: 16 float32 values in each of 512 threads.
    layer_norm_sweep_cols: int = 8192
    # Columns of a program that sums the parameters' cotangents of long rows: 1 KiB of a row of 2-byte elements, so
    # whole cache lines.
    layer_norm_param_cols: int = 512
    # Longest rows of which a second-order program holds three or four (x, y_bar, x_dot and y_bar_dot), and their
    # parameters: up to 128 registers at 16 columns per thread, so no more than 512 threads; without sums over
    # rows none of these spill.
    layer_norm_second_cols: int = 8192
    # The same with up to three sums: at 16 columns per thread up to 254 registers, in half of `resident_threads`.
    # `layer_norm_second_order` says where sums do not fit, and why.
    layer_norm_second_summed_cols: int = 4096
    # Tiles of operands, sums and parameters of which threads with 16 values of each leave room for as many others:
    # those of a jvp of the backward fit 128 registers, so that two programs of eight warps fit a processor.
    layer_norm_second_few_tiles: int = 6
    # The same of rows of twice as many columns, which a program of 16 warps has a processor for: all there are, though
    # with more than six ptxas spills, up to 344 bytes. Of all results the loop moves 484 bytes per thread and row of
    # 8,192 between registers and the L1 cache, a quarter of the time of what is left to read (by calculation); in two
    # kernels all operands are read twice, which is 405 microseconds of memory time for 277 on an H100.
    layer_norm_second_long_tiles: int = 10
    # Tile of the second-order kernels that sweep longer rows: 8 values of each operand, parameter and lane of a sum in
    # each of 512 threads.
    layer_norm_second_sweep_cols: int = 4096
    # Longest row of which a program holds one (the forward): 32 values in each of 1024 threads. At the next power of
    # two ptxas reports 176 bytes of spills (float32), and 32 with the two rows of the next limit.
    log_softmax_row_cols: int = 32768
    # Longest rows, in bytes, of which a program holds two (x_dot or y_bar, and y), 16 values of each in each thread.
    log_softmax_two_row_bytes: int = 65536
    # Longest rows of which a program holds three, for all results of a double backward: up to 82 of 128 registers of
    # 512 threads, 16 to 72 bytes of spills at the next power of two. Most second-order kernels hold two of their three
    # or four inputs: one that is only summed is let go first.
    log_softmax_three_row_cols: int = 8192
    # Tile of the kernels that sweep longer rows: 16 values of the tile and 16 sums in each of 512 threads.
    log_softmax_sweep_cols: int = 8192
    # The same with more than two tensors read or one written: 8 values and 8 of each of two sums. At 16, rows of odd
    # length, whose elements are loaded one by one, take all of the 128 registers that this leaves to each thread, and
    # spill up to 160 bytes.
    log_softmax_second_sweep_cols: int = 4096
    # Tile of one tensor whose rows, not columns, are adjacent in memory: 16 values in each of 512 threads. The offsets
    # of such a tile take registers too, because they differ along both axes.
    log_softmax_tile: int = 8192
    # The same with two to four tensors, 8 values of each of two; four tensors take up to 86 of 128 registers.
    log_softmax_two_tile: int = 4096
    # Programs per processor below which long rows are split among several: with less than two, one of which waits for
    # its loads while the other one reduces, the memory queues of a processor run dry at every barrier.
    min_row_programs: int = 2
    # Programs per processor that splitting aims at: four of 16 warps fill the warp slots of a processor. More would
    # only add partial results to merge.
    split_row_programs: int = 4
    # Programs that share a row, at most. Every program of the second launch merges the partial results of all splits of
    # its row: at 32 they are one value for each thread of a warp.
    max_row_splits: int = 32
    # Tile of a kernel over channels, in the accumulation dtype: four 16-byte registers per thread at eight warps, few
    # enough for two inputs and two accumulators of this size.
    channel_tile_bytes: int = 16384
    # Warps that share such a tile.
    channel_warps: int = 8
    # Programs per processor of a reduction over channels, at most: four of eight warps fill half the warp slots, which
    # its memory queues need, and leave each thread the 64 registers that the simplest reductions take (see
    # `channel_programs`); more would only add partial results to merge.
    channel_reduction_programs: int = 4
    # Programs per processor of an elementwise kernel over channels: two waves of the four that fit with up to 64
    # registers. The coefficients of a program take twice as many instructions as a tile of wide loads.
    channel_transform_programs: int = 8
    # Values of a tile of dropout, and words of a program that stores Philox numbers, half as many of 8 bytes: 32 for
    # each of 128 threads. That is 16 bytes per load and four loads in flight for 2-byte elements, with 44 to 60
    # registers; with 16, a sixth more instructions for each element find where it is.
    philox_tile: int = 4096
    # Threads that share such a tile.
    philox_threads: int = 128
    # Rows, and keys, of a tile of attention at most. The plans of the kernels say how much less each of them takes, and
    # why.
    attention_tile: int = 128


SM_90 = Limits()

# The registers, threads and warp slots of a processor are those of sm_90, and so is what fits, but for one number.
SM_80 = replace(
    SM_90,
    # Of a jvp of the backward, ptxas spills 8 bytes where columns are masked, and 16 without a mean.
    layer_norm_second_few_tiles=5,
)

SM_100 = replace(
    SM_90,
    # Of a jvp of the backward, ptxas spills 16 bytes.
    layer_norm_second_few_tiles=5,
    # The tangent alone takes 58 registers, and spills 8 bytes if it is bound to 64.
    layer_norm_paired_sums=3,
)

GFX942 = replace(
    SM_90,
    # With two stages, those of a jvp of the backward take 182 registers of 168.
    layer_norm_second_few_tiles=5,
    # Of a jvp of the backward with tangents of all parameters, the compiler spills two registers.
    layer_norm_second_long_tiles=7,
    # A compute unit has 512 KiB of vector registers: 168 for each of 768 threads. The compiler takes up to 156 for the
    # kernels that carry sums, and spills where it is left 128.
    resident_threads=768,
    # The step ahead waits in registers there, and elements that are loaded one by one take an address each: with 16 KiB
    # of float32 the compiler takes 206 registers for a backward that carries sums, or spills 39.
    unaligned_staged_bytes=8192,
    # The loads of the next step are issued ahead of the work on this one.
    prefetch_stages=2,
    # As many threads as the eight warps of 32 threads elsewhere: 16 bytes of 2-byte elements for each.
    channel_warps=4,
)

LIMITS = {"sm_80": SM_80, "sm_90": SM_90, "sm_100": SM_100, "gfx942": GFX942}

# Tiles that one step of a reduction over channels loads: of two operands, or of four that are half as large.
CHANNEL_STEP_TILES = 2

_changes: dict[str, int] = {}


def limits_of(chip: Chip) -> Limits:
    """The limits that the plans for `chip` keep to: those of its table, and less where the chip has less."""
    limits = _fitted(LIMITS[chip.name], chip)
    return replace(limits, **_changes) if _changes else limits


def _fitted(limits: Limits, chip: Chip) -> Limits:
    """The limits for a chip that is not the one of its table (see `chip_from_properties`)."""
    base = CHIPS[chip.name]
    fitted = {
        "row_threads": min(limits.row_threads, chip.max_warps * chip.warp_size),
        "tile_threads": min(limits.tile_threads, chip.max_warps * chip.warp_size),
        # As many threads per tile, however many make a warp.
        "channel_warps": limits.channel_warps * base.warp_size // chip.warp_size,
    }
    if chip.registers < base.registers:
        # As many registers for each thread; warps come in powers of two.
        threads = limits.resident_threads * chip.registers // base.registers
        fitted["resident_threads"] = 1 << (threads.bit_length() - 1)
    for name in ("staged_bytes", "unaligned_staged_bytes", "sweep_staged_bytes"):
        # The other half is for a second step in flight, and for what warps exchange.
        fitted[name] = min(getattr(limits, name), chip.shared_bytes // 2)
    if chip.shared_bytes < 2 * CHANNEL_STEP_TILES * limits.channel_tile_bytes:
        tile_bytes = chip.shared_bytes // (2 * CHANNEL_STEP_TILES)
        fitted["channel_tile_bytes"] = 1 << (tile_bytes.bit_length() - 1)
    changed = {name: value for name, value in fitted.items() if getattr(limits, name) != value}
    return replace(limits, **changed) if changed else limits


@contextlib.contextmanager
def use_limits(**changes: int) -> Iterator[None]:
    """Plan with other limits, for every chip: so that small tensors reach the plans of large ones.

    Args:
        **changes: Fields of `Limits` and their values; the others stay as they are.
    """
    global _changes
    previous, _changes = _changes, {**_changes, **changes}
    forget_plans()
    try:
        yield
    finally:
        _changes = previous
        forget_plans()
