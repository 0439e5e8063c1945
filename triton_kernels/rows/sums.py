"""The scaffold of kernels that sum over rows: programs that own every n-th block of rows and carry sums of columns.

The sums are kept in registers, in one fixed order, and leave as partial rows, which `add_partial_rows_kernel` adds up.
Tensors, and the functions of an op, are as in `rows`; one more function says what is summed over the rows:

    COLUMNS(x, p, r, s, mask, num_cols)         the tiles of which the columns are summed
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.kernel import batch_independent_jit
from ..runtime.numbers import cast, store_cast
from ..runtime.philox_steps import begin_stream
from .tiles import (
    add_tiles,
    in_places,
    load_params,
    load_statistics,
    load_tiles,
    out_offsets,
    rows_there,
    selected,
    store_tiles,
    sums_of,
)


@triton.jit
def row_sums_op(  # noqa: C901 - its branches are settled when it is compiled
    x_ptrs, x_strides, p_ptrs, p_strides, r_ptrs, NUM_R: tl.constexpr, out_ptrs, out_strides, sum_ptrs,
    NUM_SUMS: tl.constexpr, num_splits, num_rows, num_cols: tl.constexpr, DTYPE: tl.constexpr, AXES: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr, NUM: tl.constexpr,
    SUM_MASK: tl.constexpr, WRITES: tl.constexpr, EMIT: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr = None,
    STATS: tl.constexpr = None, MIX: tl.constexpr = None, noise=None,
):  # fmt: skip
    """Write this program's rows, and the sums over them.

    A program that writes rows, or takes sums of a row, owns all columns. Where neither is wanted, programs share the
    columns too, BLOCK_COLS each.

    The arguments are those of `rows.row_op`, but for `num_splits`, programs that share the rows of a segment,
    `sum_ptrs`, partial rows `[segments * num_splits, num_cols]` of each of `NUM_SUMS` tiles of `COLUMNS`, None for what
    is not wanted, and `WRITES`, whether there is any output of rows, or a sum over them that takes sums of a row.
    """
    ALL: tl.constexpr = 65535
    NUM_COL_BLOCKS: tl.constexpr = tl.cdiv(num_cols, BLOCK_COLS)
    part = tl.program_id(0) // NUM_COL_BLOCKS
    segment = (part // num_splits).to(tl.int64)
    stream = () if MIX is None else begin_stream(noise, segment)
    first_col = (tl.program_id(0) % NUM_COL_BLOCKS) * BLOCK_COLS
    # Of several rows that are long, the tile has the second halves behind the first ones: Triton gives all warps a part
    # of each row of a tile that is as long as they are wide, and each thread would sum two rows over the warps.
    IS_LONG: tl.constexpr = BLOCK_ROWS > 1 and BLOCK_COLS >= 512
    HAS_NOISE: tl.constexpr = False if MIX is None else noise[0] is not None
    HALVES: tl.constexpr = 2 if WRITES and IS_LONG and NUM == 2 and not HAS_NOISE else 1
    WIDTH: tl.constexpr = BLOCK_COLS // HALVES
    cols = (first_col + tl.arange(0, WIDTH)).to(tl.int64)
    lines = tl.arange(0, HALVES * BLOCK_ROWS)
    start = (lines // BLOCK_ROWS * WIDTH).to(tl.int64)[:, None] if HALVES > 1 else 0
    col_mask = start + cols[None, :] < num_cols
    # For each row, in the layout of the operands: Triton loaded one row in another layout, in which it did the work of
    # the loop again (465 instructions for 220 of rows of 24 columns).
    everywhere = tl.broadcast_to(col_mask, (HALVES * BLOCK_ROWS, WIDTH))
    weights = load_params(p_ptrs, p_strides, segment, cols, everywhere, ALL, None, ALIGN, behind=start)
    sums = ()
    for i in tl.static_range(NUM_SUMS):
        if sum_ptrs[i] is not None:
            sums = sums + (tl.zeros((HALVES * BLOCK_ROWS, WIDTH), DTYPE),)
    for block in tl.range(part % num_splits, tl.cdiv(num_rows, BLOCK_ROWS), num_splits, num_stages=STAGES):
        row = block * BLOCK_ROWS + (lines % BLOCK_ROWS).to(tl.int64)
        row_mask = rows_there(row, num_rows, BLOCK_ROWS)
        mask = row_mask & col_mask
        flat_row = (segment * num_rows + row)[:, None]
        x = load_tiles(
            x_ptrs, x_strides, segment, row, cols, row_mask, col_mask, "", ALL, 0.0, None, DTYPE, AXES, ALIGN,
            start=start,
        )  # fmt: skip
        if MIX is not None:
            x = MIX(x, stream, out_ptrs, flat_row, first_col, num_cols, BLOCK_COLS, DTYPE)
        r = load_statistics(r_ptrs, NUM_R, flat_row, row_mask)
        p = ()
        for i in tl.static_range(len(weights)):
            p = p + (cast(weights[i], DTYPE) if weights[i].type.is_block() else weights[i],)
        s = ()
        if WRITES:
            if not SUM_MASK:
                s = in_places((), NUM, 0)
            elif STATS is not None:
                s = STATS(x, p, r, mask, num_cols, 0.0)
            else:
                s = in_places(sums_of(selected(TERMS(x, p, r, mask), SUM_MASK), HALVES=HALVES), NUM, SUM_MASK)
            AXIS: tl.constexpr = (AXES >> (2 * len(x_strides))) & 3
            offsets = out_offsets(segment, row, cols, num_rows, out_strides, num_cols, AXIS, ALIGN, start=start)
            store_tiles(out_ptrs, EMIT(x, p, r, s, mask, num_cols), offsets, mask)
        columns = COLUMNS(x, p, r, s, mask, num_cols)
        found = ()
        for i in tl.static_range(NUM_SUMS):
            if sum_ptrs[i] is not None:
                found = found + (columns[i],)
        sums = add_tiles(sums, found)
    done = ()
    for i in tl.static_range(NUM_SUMS):
        if sum_ptrs[i] is not None:
            halves = tl.reshape(sums[len(done)], (HALVES, BLOCK_ROWS, WIDTH))
            every_col = (tl.arange(0, HALVES) * WIDTH)[:, None] + cols[None, :]
            ptrs = sum_ptrs[i] + part.to(tl.int64) * num_cols + every_col
            store_cast(ptrs, tl.sum(halves, axis=1), every_col < num_cols)
            done = done + (0,)


@batch_independent_jit
def add_partial_rows_kernel(
    part_0_ptr, part_1_ptr, part_2_ptr, sum_0_ptr, sum_1_ptr, sum_2_ptr, num_parts,
    num_cols: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Sum BLOCK_COLS columns of one group over its `num_parts` partial rows, and cast to the dtype of the result.

    The partial rows are `[groups * num_parts, num_cols]` in the dtype of the arithmetic, the sums `[groups, num_cols]`;
    None for what is not there.
    """
    NUM_COL_BLOCKS: tl.constexpr = tl.cdiv(num_cols, BLOCK_COLS)
    group = (tl.program_id(0) // NUM_COL_BLOCKS).to(tl.int64)
    cols = (tl.program_id(0) % NUM_COL_BLOCKS) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    part_ptrs, sum_ptrs = (part_0_ptr, part_1_ptr, part_2_ptr), (sum_0_ptr, sum_1_ptr, sum_2_ptr)
    sums = ()
    for i in tl.static_range(3):
        if part_ptrs[i] is not None:
            sums = sums + (tl.zeros((BLOCK_PARTS, BLOCK_COLS), part_ptrs[i].dtype.element_ty),)
    for start in range(0, num_parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        mask = (part < num_parts)[:, None] & (cols < num_cols)[None, :]
        offsets = ((group * num_parts + part) * num_cols)[:, None] + cols[None, :]
        tiles = ()
        for i in tl.static_range(3):
            if part_ptrs[i] is not None:
                tiles = tiles + (tl.load(part_ptrs[i] + offsets, mask=mask, other=0.0),)
        sums = add_tiles(sums, tiles)
    done = ()
    for i in tl.static_range(3):
        if part_ptrs[i] is not None:
            store_cast(sum_ptrs[i] + group * num_cols + cols, tl.sum(sums[len(done)], axis=0), cols < num_cols)
            done = done + (0,)
