"""What fits on each architecture: the numbers of the plans that depend on the chip, each with its reason.

There is one table per architecture. They are alike where the compiler reports the same for all, because the register
file of every supported NVIDIA chip is 256 KiB per processor; a number that differs says why.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from triton_kernels.launch._planned import forget_plans
from triton_kernels.launch.chips import CHIPS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from triton_kernels.launch.chips import Chip


@dataclass(frozen=True)
class Limits:
    """Numbers of the plans that depend on the architecture.

    Numbers of values are those of float32 arithmetic; `double_divisor` turns them into those of float64.

    Attributes:
        row_threads: Threads of a program that holds the longest rows that fit.
        tile_threads: Threads of every other program, at most.
        resident_threads: Threads per processor, and of one program at most, in loops that keep sums in registers.
        double_divisor: By how much less fits where arithmetic is in float64.
        staged_bytes: Bytes of one step of a loop, of all its tensors, up to which later steps are loaded ahead.
        unaligned_staged_bytes: The same where elements are loaded one by one.
        sweep_staged_bytes: As `staged_bytes`, of a program that has a processor for itself.
        prefetch_stages: Stages of a loop that has one step under way while it reduces another one.
        layer_norm_fwd_bytes: Longest row, in bytes, of which a program holds one.
        layer_norm_two_row_cols: Longest rows of which a program holds two.
        layer_norm_accumulated_cols: Longest rows of which a program holds two, and two rows of sums.
        layer_norm_sweep_cols: Tile of the kernels that sweep longer rows.
        layer_norm_param_cols: Columns of a program that sums the parameters' cotangents of long rows.
        layer_norm_second_cols: Longest rows of which a second-order program holds three or four.
        layer_norm_second_summed_cols: The same with up to three rows of sums; twice as many with four rows in all.
        layer_norm_second_few_tiles: Tiles of operands, sums and parameters of which a thread may hold 16 values.
        layer_norm_second_sweep_cols: Tile of the second-order kernels that sweep longer rows.
        log_softmax_row_cols: Longest row of which a program holds one.
        log_softmax_two_row_bytes: Longest rows, in bytes, of which a program holds two.
        log_softmax_three_row_cols: Longest rows of which a program holds three.
        log_softmax_sweep_cols: Tile of the kernels that sweep longer rows.
        log_softmax_second_sweep_cols: The same with more than two tensors read or one written.
        log_softmax_tile: Tile of one tensor whose rows, not columns, are adjacent in memory.
        log_softmax_two_tile: The same with two to four tensors.
        min_row_programs: Programs per processor below which long rows are split among several.
        split_row_programs: Programs per processor that splitting aims at.
        max_row_splits: Programs that share a row, at most.
        channel_tile_bytes: Tile of a kernel over channels, in the accumulation dtype.
        channel_warps: Warps that share such a tile.
        channel_reduction_programs: Programs per processor of a reduction over channels, at most.
        channel_transform_programs: Programs per processor of an elementwise kernel over channels.
        philox_tile: Values of a tile of dropout, and words of a program that stores Philox numbers.
        philox_threads: Threads that share such a tile.
        attention_tile: Rows, and keys, of a tile of attention at most.
    """

    row_threads: int
    tile_threads: int
    resident_threads: int
    double_divisor: int
    staged_bytes: int
    unaligned_staged_bytes: int
    sweep_staged_bytes: int
    prefetch_stages: int
    layer_norm_fwd_bytes: int
    layer_norm_two_row_cols: int
    layer_norm_accumulated_cols: int
    layer_norm_sweep_cols: int
    layer_norm_param_cols: int
    layer_norm_second_cols: int
    layer_norm_second_summed_cols: int
    layer_norm_second_few_tiles: int
    layer_norm_second_sweep_cols: int
    log_softmax_row_cols: int
    log_softmax_two_row_bytes: int
    log_softmax_three_row_cols: int
    log_softmax_sweep_cols: int
    log_softmax_second_sweep_cols: int
    log_softmax_tile: int
    log_softmax_two_tile: int
    min_row_programs: int
    split_row_programs: int
    max_row_splits: int
    channel_tile_bytes: int
    channel_warps: int
    channel_reduction_programs: int
    channel_transform_programs: int
    philox_tile: int
    philox_threads: int
    attention_tile: int


SM_90 = Limits(
    # All that a block can have, 64 registers to each: only for rows that fit no other way, because one such block
    # leaves half the warp slots of a processor empty while it waits at a barrier.
    row_threads=1024,
    # 16 warps: four blocks of them fill the warp slots of a processor.
    tile_threads=512,
    # About 128 registers per thread: 512 threads fill the register file of a processor.
    resident_threads=512,
    # A float64 value takes two registers, and so do the temporaries of its division and square root: at half the
    # columns of float32 ptxas still reports up to 208 bytes of spills.
    double_divisor=4,
    # Two steps in flight stay within 64 KiB of shared memory, the least that a supported chip has.
    staged_bytes=32768,
    unaligned_staged_bytes=32768,
    # Two of them are less than the shared memory of a processor of every chip here but the smallest.
    sweep_staged_bytes=49152,
    # The copies of a step are issued behind its reductions, and the top of the loop waits for all but the newest.
    prefetch_stages=3,
    # A row of this many bytes fits the registers of 1024 threads: ptxas reports no spills up to it, and 8 bytes
    # (float32) to 280 bytes (bfloat16) at the next power of two.
    layer_norm_fwd_bytes=65536,
    # Two rows at a time (x and y_bar or x_dot) take 64 registers of 1024 threads at this many columns.
    layer_norm_two_row_cols=16384,
    # Two rows and two accumulators take up to 128 registers at 16 columns per thread, so no more than 512 threads:
    # ptxas reports no spills at this many columns and over 180 bytes at twice as many with every number of warps.
    layer_norm_accumulated_cols=8192,
    # 16 float32 values in each of 512 threads.
    layer_norm_sweep_cols=8192,
    # 1 KiB of a row of 2-byte elements, so whole cache lines.
    layer_norm_param_cols=512,
    # Three or four rows at a time (x, y_bar, x_dot and y_bar_dot) and their parameters take up to 128 registers at 16
    # columns per thread, so no more than 512 threads: at this many columns ptxas reports no spills.
    layer_norm_second_cols=8192,
    # With up to three sums they take up to 128 registers at 8 columns per thread; three rows and one sum (a double
    # backward) at 16. With more at 16, ptxas reports up to 254, and at twice the columns 168 to 344 bytes of spills.
    # Where sums do not fit, and why, stands in `layer_norm_second_order`.
    layer_norm_second_summed_cols=4096,
    # Those of a double backward take up to 128 registers, so that two programs of eight warps fit.
    layer_norm_second_few_tiles=5,
    # 8 values of each operand, parameter and lane of a sum in each of 512 threads.
    layer_norm_second_sweep_cols=4096,
    # One row (the forward) takes 32 values in each of 1024 threads, two rows (x_dot or y_bar, and y) 16 of each. Up to
    # here ptxas reports no spills, at the next power of two 176 and 32 bytes (float32).
    log_softmax_row_cols=32768,
    log_softmax_two_row_bytes=65536,
    # Two is also what most second-order kernels hold of their three or four inputs: one that is only summed is let go
    # first. All three results of the pairing hold three rows: up to 82 of 128 registers of 512 threads at this many
    # columns, 16 to 72 bytes of spills at the next power of two.
    log_softmax_three_row_cols=8192,
    # 16 values of the tile and 16 sums in each of 512 threads.
    log_softmax_sweep_cols=8192,
    # 8 values and 8 of each of two sums in each of 512 threads. At 16, rows of odd length, whose elements are loaded
    # one by one, take all of the 128 registers that this leaves to each, and spill up to 160 bytes.
    log_softmax_second_sweep_cols=4096,
    # 16 values (8 of each of two tensors) in each of 512 threads. The offsets of such a tile take registers too,
    # because they differ along both axes; four tensors take up to 86 of 128.
    log_softmax_tile=8192,
    log_softmax_two_tile=4096,
    # With less than two programs per processor, one of which waits for its loads while the other one reduces, the
    # memory queues of a processor run dry at every barrier.
    min_row_programs=2,
    # Four programs of 16 warps fill the warp slots of a processor. More would only add partial results to merge.
    split_row_programs=4,
    # Every program of the second launch merges the partial results of all splits of its row: at 32 they are one value
    # for each thread of a warp.
    max_row_splits=32,
    # Four 16-byte registers per thread at eight warps, few enough for two inputs and two accumulators of this size.
    channel_tile_bytes=16384,
    # Four programs of eight warps fill half the warp slots of a processor, which its memory queues need, and leave each
    # thread the 64 registers that the simplest reductions take (see `channels.channel_reduction_programs`); more would
    # only add partial results to merge.
    channel_warps=8,
    channel_reduction_programs=4,
    # Two full waves of the eight programs that fill the warp slots of a processor, and more waves of what takes more
    # than 32 registers, so that a late program does not leave a processor idle for long.
    channel_transform_programs=16,
    # 16 values for each of 128 threads: 16 bytes per load, two loads and four independent chains of Philox rounds in
    # flight for 2-byte elements, and four programs' worth of registers to spare, so that loads of one program hide
    # behind the arithmetic of others.
    philox_tile=2048,
    philox_threads=128,
    # The plans of the kernels say how much less each of them takes, and why.
    attention_tile=128,
)

# The registers, threads and warp slots of a processor are those of sm_90, and ptxas reports the same fits.
SM_80 = SM_90

SM_100 = replace(
    SM_90,
    # A double backward takes 140 registers there.
    layer_norm_second_few_tiles=4,
)

GFX942 = replace(
    SM_90,
    # With two stages, those of a jvp of the backward take 182 registers of 168.
    layer_norm_second_few_tiles=4,
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
    """The limits for a chip that is not the one of its table (see `chips.chip_from_properties`)."""
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
