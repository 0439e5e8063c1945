"""The launch planner continued: the plans of the second-order kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triton_kernels import launch
from triton_kernels.launch import ChannelPlan, LayerNormPlan, cdiv, next_power_of_2

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LayerNormSecondPlan:
    """Tile, loop and partial sums of the kernel that owns whole rows; `looped` means that it sweeps them by tiles.

    Sums over rows, where they are wanted and not `fused`, come from a kernel of their own, because a row and its
    accumulators do not fit in registers; `rows` is then planned without sums, and `num_splits` is 1 per block of rows.
    """

    rows: LayerNormPlan
    num_splits: int
    loop_stages: int
    fused: bool


@dataclass(frozen=True)
class LayerNormColumnPlan:
    """Tile, loop and partial sums of the kernel that owns columns and sums over rows."""

    block_rows: int
    block_cols: int
    num_warps: int
    num_splits: int
    loop_stages: int


# Three or four rows at a time (x, y_bar, x_dot and y_bar_dot) and their parameters take up to 128 registers at 16
# columns per thread, so no more than 512 threads: at this many columns ptxas reports no spills for sm_80 and sm_90. For
# sm_100 it spills 8 bytes of the double backward of bfloat16 rows: 4 KiB of cache per row, written and read once, where
# a sweep by tiles would read another 16 KiB of each of three operands.
LAYER_NORM_SECOND_COLS = 8192
# With up to three accumulators they take up to 128 registers at 8 columns per thread. At 16, ptxas reports up to 239,
# so half as many warps, and at twice the columns 64 to 256 bytes of spills. Longer rows therefore take two passes over
# their operands where sums are wanted: one kernel holds whole rows for the row outputs, another one reads the operands
# again and owns columns, so that few accumulators stay in registers over many rows.
#
# One pass that adds to a scratch row per program would keep the accumulators in the L2 cache: by calculation, not
# measured, 8 bytes of cache traffic (a float32 read and written) per element of every row and sum. The second pass
# costs 2 to 4 bytes per element and operand:
#
#     bytes per element of a row      scratch row (L2)    second pass, 2-byte    second pass, 4-byte
#     double backward                 1 sum:   8          3 operands: 6          12
#     jvp of the backward             2 sums: 16          4 operands: 8          16
#     backward of the jvp             3 sums: 24          3 operands: 6          12
#
# So it pays for 2-byte operands nowhere, and for 4-byte ones only where a single sum is wanted; there each addition
# would also wait for the load of what the row before it has stored.
LAYER_NORM_SECOND_SUMMED_COLS = 4096
# The tile of the kernel that sweeps long rows: 8 values of each operand and parameter in each of 512 threads.
LAYER_NORM_SECOND_SWEEP_COLS = 4096


def _second_warps(num_values: int, itemsize: int) -> int:
    # 8 values per thread: 16 bytes per load of 2-byte elements; of float64, whose values take two registers and whose
    # division takes more, 2 as in first order.
    values = num_values * 2 * 1024 // launch._register_values(1024, itemsize)
    return launch._row_warps(values, 512)


def _num_splits(num_segments: int, num_rows: int, block_rows: int, programs: int, device: torch.device) -> int:
    # A partial row costs as much traffic as one or two rows of the full-size tensors, so eight rows at least pay for
    # one, unless processors would idle.
    programs = min(programs, max(launch.num_processors(device), num_segments * num_rows // 8))
    return max(min(programs // num_segments, cdiv(num_rows, block_rows)), 1)


def _resident_programs(num_warps: int, device: torch.device) -> int:
    # About 128 registers per thread: 512 threads fill the register file of a processor.
    return launch.num_processors(device) * max(512 // (num_warps * launch.threads_per_warp()), 1)


def _loop_stages(num_values: int, itemsize: int) -> int:
    # Two stages load the next rows while the sums of this one are reduced; the shared memory that takes (four tensors)
    # stays within what every supported GPU has.
    return 2 if 4 * num_values * itemsize <= 32768 else 1


def plan_layer_norm_second(
    num_segments: int, num_rows: int, num_cols: int, itemsize: int, has_sums: bool, device: torch.device
) -> LayerNormSecondPlan:
    """Plan of the kernel of the second-order derivatives of layer norm that owns rows.

    Args:
        num_segments: Segments of rows; a program stays within one.
        num_rows: Rows of a segment.
        num_cols: Columns of a row.
        itemsize: Bytes of an element of x.
        has_sums: Whether anything is summed over the rows of a segment.
        device: Where the kernel runs.
    """
    block_cols = next_power_of_2(num_cols)
    if block_cols > launch._register_values(LAYER_NORM_SECOND_COLS, itemsize):
        block_cols = launch._register_values(LAYER_NORM_SECOND_SWEEP_COLS, itemsize)
        rows = LayerNormPlan(1, block_cols, _second_warps(block_cols, itemsize), True)
        return LayerNormSecondPlan(rows, num_rows, 1, False)
    # Short rows share a program, so that one warp has 256 values of each tensor and no barrier; more than 32 rows
    # would serialize the row reductions of very short rows.
    tile = launch._register_values(256, itemsize)
    block_rows = min(max(tile // block_cols, 1), 32, next_power_of_2(num_rows))
    num_values = block_rows * block_cols
    rows = LayerNormPlan(block_rows, block_cols, _second_warps(num_values, itemsize), False)
    if has_sums and block_cols <= launch._register_values(LAYER_NORM_SECOND_SUMMED_COLS, itemsize):
        programs = _resident_programs(rows.num_warps, device)
        num_splits = _num_splits(num_segments, num_rows, block_rows, programs, device)
        return LayerNormSecondPlan(rows, num_splits, _loop_stages(num_values, itemsize), True)
    # One block of rows per program: the loop of the kernel runs once.
    return LayerNormSecondPlan(rows, cdiv(num_rows, block_rows), 1, False)


def plan_layer_norm_second_columns(
    num_segments: int, num_rows: int, num_cols: int, itemsize: int, device: torch.device
) -> LayerNormColumnPlan:
    """Plan of the kernel that sums the second-order derivatives of long rows over the `num_rows` rows of a segment."""
    # 8 values of each of up to four tensors and three accumulators in each of four warps, from whole cache lines.
    block_cols = launch.LAYER_NORM_PARAM_COLS
    block_rows = min(max(launch._register_values(1024, itemsize) // block_cols, 1), next_power_of_2(num_rows))
    num_values = block_rows * block_cols
    num_warps = _second_warps(num_values, itemsize)
    programs = cdiv(_resident_programs(num_warps, device), cdiv(num_cols, block_cols))
    num_splits = _num_splits(num_segments, num_rows, block_rows, programs, device)
    return LayerNormColumnPlan(block_rows, block_cols, num_warps, num_splits, _loop_stages(num_values, itemsize))


def plan_channel_second_reduction(
    sizes: tuple[int, int, int, int], spatial_inner: bool, itemsize: int, device: torch.device
) -> ChannelPlan:
    """Plan for a kernel that takes up to seven sums of `[groups, samples, channels, spatial]` per channel."""
    # Half of the values per thread that first order takes, because there are up to four operands and seven
    # accumulators instead of two and two: ptxas reports up to 126 registers and no spills (sm_90).
    tile = launch.CHANNEL_TILE_BYTES // max(itemsize, 4) // 2
    # Two waves of the two programs that fit the registers of a processor; one tile is fetched while another is summed.
    programs = 4 * launch.num_processors(device)
    return launch._plan_channels(
        sizes, spatial_inner, itemsize, tile, programs, launch.MAX_CHANNEL_SPLITS, num_stages=2
    )


def plan_channel_second_transform(
    sizes: tuple[int, int, int, int], spatial_inner: bool, itemsize: int, device: torch.device
) -> ChannelPlan:
    """Plan for an elementwise kernel of up to four operands and three results with coefficients per channel."""
    # As in first order: 8 values per thread, 16 bytes of 2-byte elements. ptxas reports up to 64 registers along the
    # spatial axis, and up to 128 across channels, with nine coefficients for each. At half the tile it aims at 64 there
    # and spills 16 bytes for sm_100; twice the threads with half the bytes each would have as much memory in flight.
    tile = launch.CHANNEL_TILE_BYTES // max(itemsize, 4) // 2
    # As in first order: at least two waves of resident programs, which hide each other's loads without stages.
    programs = 16 * launch.num_processors(device)
    return launch._plan_channels(sizes, spatial_inner, itemsize, tile, programs, launch.MAX_GRID_Y, num_stages=1)
