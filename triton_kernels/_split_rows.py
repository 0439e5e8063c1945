"""Sweeps over rows that do not fit in registers, each by one program or, where rows are few, by several.

A long row is swept twice, tile by tile: the first sweep finds the row's sums, the second one writes. With fewer rows
than processors can run programs, `num_splits` programs share each row, every one a slice of whole tiles, and the two
sweeps are two launches of the same kernel:

    SUMS and WRITES     one launch, one program per block of rows makes both sweeps
    SUMS                first of two launches: a program stores the sums of its slice as partial results
    WRITES              second of two: a program merges the partial results of its rows and writes its slice

Partial results are merged in one fixed order, so a result never depends on which program ran first. They are kept as
`[row blocks, NUM_SLOTS, num_splits, BLOCK_ROWS]` in the dtype of the arithmetic.

The second sweep runs against the first, from the last tile to the first one and, in a launch of its own, from the last
program to the first one: of rows that exceed the cache, it holds what was read last, and a sweep in the same direction
would evict every tile just before its turn.
"""

# Pyright takes device functions for Python, and does not know that a branch on constexpr flags is settled at compile
# time.
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from triton_kernels.launch import block_row_splits, chip_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def num_partial_results(num_blocks: int, block_rows: int, num_splits: int, num_slots: int) -> int:
    """Partial results of a call of `launch_sweeps`; none where one program has a whole row."""
    return num_blocks * num_slots * num_splits * block_rows if num_splits > 1 else 0


def launch_sweeps(
    kernel: Any,
    num_blocks: int,
    block_rows: int,
    num_splits: int,
    num_slots: int,
    dtype: torch.dtype,
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
    parts: Tensor | None = None,
    **flags: Any,
) -> None:
    """Launch a kernel that sweeps rows: once, or once per sweep where several programs share a row.

    Args:
        kernel: Takes `tensors`, the partial results, the number of splits, `numbers`, `flags`, and what is set here.
        num_blocks: Blocks of rows.
        block_rows: Rows of a block.
        num_splits: Programs that share a block.
        num_slots: Partial results per row; 0 where nothing is summed, so that there is no first sweep.
        dtype: Dtype of the arithmetic.
        tensors: Arguments before the partial results.
        numbers: Arguments after the number of splits.
        parts: Memory for `num_partial_results`; None if the call has no other scratch, so that it is allocated here.
        **flags: Compile-time constants and launch options.
    """
    if num_splits == 1:
        kernel[(num_blocks,)](
            *tensors, None, 1, *numbers, SUMS=True, WRITES=True, NUM_SLOTS=num_slots, BLOCK_SPLITS=1, **flags
        )
        return
    device = next(tensor.device for tensor in tensors if tensor is not None)
    block_splits = block_row_splits(num_splits, chip_of(device))
    if parts is None and num_slots > 0:
        size = num_partial_results(num_blocks, block_rows, num_splits, num_slots)
        parts = torch.empty(size, dtype=dtype, device=device)
    for writes in (False, True) if num_slots > 0 else (True,):
        kernel[(num_blocks * num_splits,)](
            *tensors,
            parts,
            num_splits,
            *numbers,
            SUMS=not writes,
            WRITES=writes,
            NUM_SLOTS=num_slots,
            BLOCK_SPLITS=block_splits,
            **flags,
        )


@triton.jit
def _slice_cols(num_splits, num_cols: tl.constexpr, BLOCK_COLS: tl.constexpr):
    return tl.cdiv(tl.cdiv(num_cols, BLOCK_COLS), num_splits) * BLOCK_COLS


@triton.jit
def row_slice(num_splits, num_cols: tl.constexpr, BLOCK_COLS: tl.constexpr, SUMS: tl.constexpr, WRITES: tl.constexpr):
    """Number of this program's block of rows, of its slice, and the slice's first column and the one past its last.

    A slice that begins past the end of the row is empty.
    """
    program = tl.program_id(0)
    if SUMS and WRITES:
        return program, 0, 0, num_cols
    if WRITES:
        program = tl.num_programs(0) - 1 - program
    split = program % num_splits
    first_col = split * _slice_cols(num_splits, num_cols, BLOCK_COLS)
    stop_col = tl.minimum(first_col + _slice_cols(num_splits, num_cols, BLOCK_COLS), num_cols)
    return program // num_splits, split, first_col, stop_col


@triton.jit
def opposite_tile(start, first_col, stop_col, BLOCK_COLS: tl.constexpr):
    """First column of the tile as far from a slice's last one as the tile at `start` is from its first one."""
    return first_col + (tl.cdiv(stop_col - first_col, BLOCK_COLS) - 1) * BLOCK_COLS - (start - first_col)


@triton.jit
def store_part(parts_ptr, block, split, num_splits, values, SLOT: tl.constexpr, NUM_SLOTS: tl.constexpr):
    """Keep partial result number `SLOT`, `[BLOCK_ROWS]`, of the rows of a block."""
    BLOCK_ROWS: tl.constexpr = values.shape[0]
    offset = ((block.to(tl.int64) * NUM_SLOTS + SLOT) * num_splits + split) * BLOCK_ROWS
    tl.store(parts_ptr + offset + tl.arange(0, BLOCK_ROWS), values)


@triton.jit
def load_parts(
    parts_ptr,
    block,
    num_splits,
    OTHER: tl.constexpr,
    SLOT: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Partial results number `SLOT` of all slices, `[BLOCK_ROWS, BLOCK_SPLITS]`; `OTHER` past the last slice."""
    splits = tl.arange(0, BLOCK_SPLITS)
    offset = (block.to(tl.int64) * NUM_SLOTS + SLOT) * num_splits * BLOCK_ROWS
    offsets = tl.arange(0, BLOCK_ROWS)[:, None] + (splits * BLOCK_ROWS)[None, :]
    return tl.load(parts_ptr + offset + offsets, mask=(splits < num_splits)[None, :], other=OTHER)


@triton.jit
def merged_sum(
    parts_ptr,
    block,
    num_splits,
    SLOT: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Sum `[BLOCK_ROWS]` of partial results number `SLOT`."""
    return tl.sum(load_parts(parts_ptr, block, num_splits, 0.0, SLOT, NUM_SLOTS, BLOCK_ROWS, BLOCK_SPLITS), axis=1)


@triton.jit
def slice_sizes(num_splits, num_cols: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_SPLITS: tl.constexpr):
    """Columns of every slice, `[1, BLOCK_SPLITS]`; 0 for empty slices and past the last one."""
    slice_cols = _slice_cols(num_splits, num_cols, BLOCK_COLS)
    # In int64: past the last slice, their product can exceed what the row's own columns fit in.
    first_cols = tl.arange(0, BLOCK_SPLITS).to(tl.int64) * slice_cols
    return tl.minimum(tl.maximum(num_cols - first_cols, 0), slice_cols)[None, :]
