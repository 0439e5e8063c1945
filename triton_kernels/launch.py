"""The launch planner: every block size, number of warps, stage and split in this package is decided here.

A plan is a frozen dataclass; the function that fills it states the reason for each number next to it. Numbers of
columns (a model constant) may be compile-time constants of a kernel; numbers of rows never are, so that a new batch
size compiles nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

# A CPU run (the interpreter) plans as if for this many processors: enough to exercise splits and persistent loops,
# few enough to stay fast.
INTERPRETER_PROCESSORS = 4

# Triton refuses tensors of more elements than this per block.
MAX_BLOCK_ELEMENTS = 1 << 20


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n` (1 for `n <= 1`)."""
    return 1 << max(n - 1, 0).bit_length()


def cdiv(a: int, b: int) -> int:
    """Quotient `a / b` rounded up."""
    return -(-a // b)


@functools.cache
def _cuda_processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units on ROCm) of `device`; a small stand-in for the interpreter."""
    if device.type == "cuda":
        return _cuda_processors(device.index if device.index is not None else torch.cuda.current_device())
    return INTERPRETER_PROCESSORS


# Bytes in one tile of a channel kernel, counted in the accumulation dtype: four 16-byte registers per thread at eight
# warps, few enough for two inputs and two accumulators of this size.
CHANNEL_TILE_BYTES = 16384

# One cache line; a tile narrower than this along adjacent channels wastes memory bandwidth.
CACHE_LINE_BYTES = 128

# Partial sums of one channel are merged by one program that holds all of them at once.
MAX_CHANNEL_SPLITS = 1024

# The second axis of a CUDA grid cannot be longer.
MAX_GRID_Y = 65535


@dataclass(frozen=True)
class ChannelPlan:
    """How a kernel over channels is cut: its tile, the programs that share a channel tile, and its warps."""

    block_samples: int
    block_spatial: int
    block_channels: int
    num_splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class ChannelMergePlan:
    """Channels per program, and the power of two that holds all partial results of a channel."""

    block_channels: int
    block_splits: int
    num_warps: int


def _block_spatial(num_samples: int, num_spatial: int, rows: int) -> int:
    """Positions of one sample that a tile of `rows` rows covers."""
    whole = next_power_of_2(num_spatial)
    # Runs shorter than a sixteenth of a tile are taken only where the plane itself is that short, and there must be
    # enough samples to fill the rest of the tile.
    smallest = rows // min(16, next_power_of_2(num_samples))
    if whole <= smallest:
        return whole
    candidates = []
    block = min(rows, whole)
    while block >= smallest:
        candidates.append((cdiv(num_spatial, block) * block, block))
        block //= 2
    for padded, block in candidates:
        # Long runs are preferred until more than a tenth of the lanes would be idle (56 * 56 in runs of 1024: 23 %).
        if num_spatial >= 0.9 * padded:
            return block
    least = min(padded for padded, _ in candidates)
    return next(block for padded, block in candidates if padded == least)


@functools.lru_cache(maxsize=4096)
def _plan_channels(
    sizes: tuple[int, int, int, int],
    spatial_inner: bool,
    itemsize: int,
    tile: int,
    num_programs: int,
    max_splits: int,
    num_stages: int,
) -> ChannelPlan:
    num_groups, num_samples, num_channels, num_spatial = sizes
    block_channels = 1 if spatial_inner else min(next_power_of_2(num_channels), CACHE_LINE_BYTES // itemsize)
    rows = tile // block_channels
    block_spatial = _block_spatial(num_samples, num_spatial, rows)
    block_samples = min(rows // block_spatial, next_power_of_2(num_samples))
    num_tiles = cdiv(num_samples, block_samples) * cdiv(num_spatial, block_spatial)
    channel_programs = num_groups * cdiv(num_channels, block_channels)
    num_splits = cdiv(num_programs, channel_programs)
    return ChannelPlan(
        block_samples=block_samples,
        block_spatial=block_spatial,
        block_channels=block_channels,
        num_splits=min(num_splits, num_tiles, max_splits),
        # Eight warps share a full tile; smaller ones keep the elements per thread.
        num_warps=max(block_samples * block_spatial * block_channels * 8 // tile, 1),
        num_stages=num_stages,
    )


def plan_channel_reduction(
    sizes: tuple[int, int, int, int], spatial_inner: bool, align: int, itemsize: int, device: torch.device
) -> ChannelPlan:
    """Plan for a kernel that reduces `[groups, samples, channels, spatial]` over samples and spatial positions."""
    tile = CHANNEL_TILE_BYTES // max(itemsize, 4)
    # Elements that are loaded one by one take an address and a mask each, which spills scalar registers on gfx942.
    if align * itemsize < 16:
        tile //= 2
    # Four programs of eight warps fill half the warp slots of a processor, which its memory queues need; more would
    # only add partial results to merge. With two stages one tile is fetched while another is reduced; a third would
    # not fit the 64 KiB of gfx942.
    programs = 4 * num_processors(device)
    return _plan_channels(sizes, spatial_inner, itemsize, tile, programs, MAX_CHANNEL_SPLITS, num_stages=2)


def plan_channel_transform(
    sizes: tuple[int, int, int, int], spatial_inner: bool, itemsize: int, device: torch.device
) -> ChannelPlan:
    """Plan for an elementwise kernel over `[groups, samples, channels, spatial]` with coefficients per channel."""
    # Coefficients of eight channels and two inputs fit without spills when a tile is half as large as in a reduction.
    tile = CHANNEL_TILE_BYTES // max(itemsize, 4) // 2
    # Two full waves of eight resident programs, so that a late program does not leave a processor idle for long;
    # each still loads its coefficients for many tiles. They hide each other's loads without stages.
    programs = 16 * num_processors(device)
    return _plan_channels(sizes, spatial_inner, itemsize, tile, programs, MAX_GRID_Y, num_stages=1)


def plan_channel_merge(num_channels: int, num_splits: int) -> ChannelMergePlan:
    """Plan for merging `num_splits` partial results for each of `num_channels` channels."""
    block_splits = next_power_of_2(num_splits)
    # 2048 partial results are 16 per thread at four warps; at most 32 channels, so that several processors take part.
    block_channels = min(max(2048 // block_splits, 1), 32, next_power_of_2(num_channels))
    num_warps = min(max(block_splits * block_channels // 512, 1), 4)
    return ChannelMergePlan(block_channels, block_splits, num_warps)


@dataclass(frozen=True)
class LayerNormPlan:
    """Tile of a kernel that owns whole rows; `looped` means that a row is swept tile by tile."""

    block_rows: int
    block_cols: int
    num_warps: int
    looped: bool


@dataclass(frozen=True)
class LayerNormParamPlan:
    """Tile, loop and partial sums of a kernel that also (or only) sums over rows.

    `looped` here means that x_bar and the parameter sums come from two kernels, because a row and both of its
    accumulators do not fit in registers; the tile is then that of the kernel of the sums.
    """

    block_rows: int
    block_cols: int
    num_warps: int
    num_splits: int
    loop_stages: int
    looped: bool


@dataclass(frozen=True)
class ParamReducePlan:
    """Tile of the kernel that adds the partial rows up."""

    block_parts: int
    block_cols: int
    num_warps: int


# A row of this many bytes fits the registers of the 1024 threads that a block can have, 64 to each: ptxas reports no
# spills up to it, and 8 bytes (float32) to 280 bytes (bfloat16) at the next power of two (sm_90).
LAYER_NORM_FWD_BYTES = 65536
# Two rows at a time (x and y_bar or x_dot) take 64 registers of 1024 threads at this many columns.
LAYER_NORM_TWO_ROW_COLS = 16384
# Two rows and two accumulators take up to 128 registers at 16 columns per thread, so no more than 512 threads: ptxas
# reports no spills at this many columns and over 180 bytes at twice as many with every number of warps (sm_90).
LAYER_NORM_ACCUMULATED_COLS = 8192
# The tile of the kernels that sweep long rows: 16 float32 values in each of 512 threads.
LAYER_NORM_SWEEP_COLS = 8192
# A float64 value takes two registers, and so do the temporaries of its division and square root: at half the columns
# of float32 ptxas still reports up to 208 bytes of spills.
LAYER_NORM_DOUBLE_DIVISOR = 4
# Columns of one tile of the parameter sums of long rows: 1 KiB of a row of 2-byte elements, so whole cache lines.
LAYER_NORM_PARAM_COLS = 512
# Segments of a backward pass without batch dims cost a partial row each; beyond this a copy is cheaper.
LAYER_NORM_MAX_SEGMENTS = 64


def threads_per_warp() -> int:
    """Threads of a warp (a wavefront on ROCm, where the accelerators have 64)."""
    return 64 if torch.version.hip else 32


def _row_warps(num_values: int, max_threads: int) -> int:
    # 16 values per thread: 16 bytes per load and two loads in flight for 2-byte elements, and registers to spare.
    threads = min(max(num_values // 16, threads_per_warp()), max_threads)
    return threads // threads_per_warp()


def _register_values(limit: int, itemsize: int) -> int:
    return max(limit // LAYER_NORM_DOUBLE_DIVISOR, 1) if itemsize == 8 else limit


def plan_layer_norm_rows(num_rows: int, num_cols: int, itemsize: int, two_rows: bool) -> LayerNormPlan:
    """Plan of a kernel whose programs own whole rows and sum nothing over rows: forward, JVP, x_bar alone.

    Args:
        num_rows: Rows of which a program may take several.
        num_cols: Columns of a row.
        itemsize: Bytes of an element of x.
        two_rows: Whether two full-size tensors are read (JVP, x_bar) instead of one.
    """
    limit = _register_values(LAYER_NORM_TWO_ROW_COLS, itemsize) if two_rows else LAYER_NORM_FWD_BYTES // itemsize
    block_cols = next_power_of_2(num_cols)
    if block_cols > limit:
        block_cols = _register_values(LAYER_NORM_SWEEP_COLS, itemsize)
        return LayerNormPlan(1, block_cols, _row_warps(block_cols, 512), True)
    # Short rows share a program, so that one warp has 1024 values (512 of each of two rows) and no barrier; more than
    # 32 rows would serialize the row reductions of very short rows.
    tile = _register_values(512 if two_rows else 1024, itemsize)
    block_rows = min(max(tile // block_cols, 1), 32, next_power_of_2(num_rows))
    # Up to 16 warps, then more values per thread; 32 warps only for the longest rows, where registers run out.
    num_warps = 1 if block_cols <= tile else _row_warps(block_cols, 1024 if block_cols == limit else 512)
    return LayerNormPlan(block_rows, block_cols, num_warps, False)


def plan_layer_norm_params(
    num_segments: int, num_rows: int, num_cols: int, itemsize: int, device: torch.device
) -> LayerNormParamPlan:
    """Plan of a backward pass that sums weight_bar or bias_bar over the `num_rows` rows of each segment."""
    limit = _register_values(LAYER_NORM_ACCUMULATED_COLS, itemsize)
    looped = next_power_of_2(num_cols) > limit
    block_cols = LAYER_NORM_PARAM_COLS if looped else next_power_of_2(num_cols)
    # 16 values per thread and accumulator: one warp has a tile of 512, four warps a tile of the looped kernel.
    tile = _register_values(2048 if looped else 512, itemsize)
    block_rows = min(max(tile // block_cols, 1), 32, next_power_of_2(num_rows))
    num_warps = _row_warps(block_rows * block_cols * 2048 // _register_values(2048, itemsize), 512)
    # About 128 registers per thread: 512 threads fill the register file of a processor.
    programs = num_processors(device) * max(512 // (num_warps * threads_per_warp()), 1)
    if looped:
        programs = cdiv(programs, cdiv(num_cols, block_cols))
    # A partial row costs as much traffic as two or three rows of 2-byte tensors, so eight rows at least pay for one,
    # unless processors would idle.
    programs = min(programs, max(num_processors(device), num_segments * num_rows // 8))
    num_splits = max(min(programs // num_segments, cdiv(num_rows, block_rows)), 1)
    # Two stages load the next rows while the sums of this one are reduced; the shared memory that takes (both tensors)
    # stays within what every supported GPU has.
    fits = 2 * block_rows * block_cols * itemsize <= 32768
    return LayerNormParamPlan(block_rows, block_cols, num_warps, num_splits, 2 if fits else 1, looped)


def plan_param_reduce(num_parts: int, itemsize: int) -> ParamReducePlan:
    """Plan of the column sums over `num_parts` partial rows with elements of `itemsize` bytes."""
    # A cache line of every partial row, and enough programs for wide rows; 64 rows of them are 16 float32 values in
    # each thread of four warps.
    return ParamReducePlan(min(next_power_of_2(num_parts), 64), CACHE_LINE_BYTES // itemsize, 4)


@dataclass(frozen=True)
class LogSoftmaxPlan:
    """Tile of a log-softmax kernel; `looped` means that the reduced dim is swept tile by tile."""

    block_rows: int
    block_cols: int
    num_warps: int
    looped: bool


# One row (the forward) takes 32 values in each of the 1024 threads that a block can have, two rows (x_dot or y_bar,
# and y) 16 of each. Up to here ptxas reports no spills, at the next power of two 176 and 32 bytes (sm_90, float32).
LOG_SOFTMAX_ROW_COLS = 32768
LOG_SOFTMAX_TWO_ROW_COLS = 16384
# Two is also what most second-order kernels hold of their three or four inputs: one that is only summed is let go
# first. All three results of the pairing hold three rows: up to 82 of 128 registers of 512 threads at this many
# columns, 16 to 72 bytes of spills at the next power of two (sm_90, sm_100).
LOG_SOFTMAX_THREE_ROW_COLS = 8192
# A tile whose rows, not columns, are adjacent in memory: 16 values (8 of each of two tensors) in each of 512 threads.
# Its offsets take registers too, because they differ along both axes; four tensors take up to 86 of 128 (sm_90).
LOG_SOFTMAX_TILE = 8192
LOG_SOFTMAX_TWO_TILE = 4096
# Memory is read in sectors of this many bytes; shorter runs waste bandwidth.
SECTOR_BYTES = 32


def _log_softmax_row_cols(num_inputs: int, num_outputs: int) -> int:
    if num_inputs == 1:
        return LOG_SOFTMAX_ROW_COLS
    return LOG_SOFTMAX_THREE_ROW_COLS if num_outputs == 3 else LOG_SOFTMAX_TWO_ROW_COLS


def plan_log_softmax(
    sizes: tuple[int, int, int],
    rows_adjacent: bool,
    itemsize: int,
    compute_itemsize: int,
    num_inputs: int,
    device: torch.device,
    num_outputs: int = 1,
) -> LogSoftmaxPlan:
    """Plan of a kernel that reduces `[segments, rows, columns]` over the columns.

    Args:
        sizes: Numbers of segments, rows and columns; a tile lies within one segment.
        rows_adjacent: Whether it is the rows that are adjacent in memory, so that loads must run along them.
        itemsize: Bytes of an element of the input.
        compute_itemsize: Bytes of the dtype of the arithmetic.
        num_inputs: Full-size tensors that are read: 1 for the forward, 2 for its derivatives, 2 to 4 for theirs.
        device: Where the kernel runs.
        num_outputs: Full-size tensors that are written: up to 3 by the second-order kernels.
    """
    num_segments, num_rows, num_cols = sizes
    block_cols = next_power_of_2(num_cols)
    if rows_adjacent:
        tile = _register_values(LOG_SOFTMAX_TILE if num_inputs == 1 else LOG_SOFTMAX_TWO_TILE, compute_itemsize)
        block_rows = min(CACHE_LINE_BYTES // itemsize, next_power_of_2(num_rows))
        looped = block_rows * block_cols > tile
        # Rather half a cache line per load than idle processors.
        processors = num_processors(device)
        while block_rows * itemsize > SECTOR_BYTES and num_segments * cdiv(num_rows, block_rows) < processors:
            block_rows //= 2
        if looped:
            block_cols = max(tile // block_rows, 1)
        else:
            # Few columns: more rows, so that four warps have 16 values per thread.
            block_rows = max(block_rows, _register_values(2048, compute_itemsize) // block_cols)
            block_rows = min(block_rows, next_power_of_2(num_rows))
        return LogSoftmaxPlan(block_rows, block_cols, _row_warps(block_rows * block_cols, 512), looped)

    limit = _register_values(_log_softmax_row_cols(num_inputs, num_outputs), compute_itemsize)
    if block_cols > limit:
        # 16 values of the tile and 16 sums in each of 512 threads. The second-order kernels, with two sums and up to
        # three tensors at a time, take 88 of the 128 registers that this leaves to each (sm_90).
        block_cols = min(_register_values(8192, compute_itemsize), limit)
        return LogSoftmaxPlan(1, block_cols, _row_warps(block_cols, 512), True)
    # Short rows share a program, so that one warp has 1024 values (512 of each of two tensors, 256 of each of three or
    # four) and no barrier; more than 32 rows would serialize the row reductions of very short rows.
    tile = _register_values(1024 // next_power_of_2(num_inputs), compute_itemsize)
    block_rows = min(max(tile // block_cols, 1), 32, next_power_of_2(num_rows))
    num_warps = 1 if block_cols <= tile else _row_warps(block_cols, 1024 if block_cols == limit else 512)
    return LogSoftmaxPlan(block_rows, block_cols, num_warps, False)
