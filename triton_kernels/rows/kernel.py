"""The scaffold of every kernel over rows: one device function for rows that are held, swept, or shared by programs.

Tensors of full size are seen as `[segments, num_rows, num_cols]`, each with three strides of its own; a program owns
BLOCK_ROWS rows of one segment. An op says in small device functions what it sums over a row and what it writes, and
its kernel is a flat signature around one call of `row_op`. `MODE` says how a row is walked:

    "whole"     it is held in registers, and read once
    "swept"     one program sweeps it twice, tile by tile: for the sums, and to write
    "sums"      the first of two launches in which `num_splits` programs share a row: each leaves the sums of its slice
    "writes"    the second: each merges the sums of all slices of its row, and writes its own

Sums of a sweep are kept lane by lane, so that a row takes one reduction and not one per tile. Slices are merged in one
fixed order, so no result depends on which program ran first. The sweep that writes runs against the one that sums: of
rows that exceed the cache it finds there what was read last.

The functions of an op take tuples of tiles: `x` of the full-size operands `[BLOCK_ROWS, cols]`, `p` of the parameters
`[1, cols]`, `r` of the statistics `[BLOCK_ROWS, 1]`, `s` of the sums `[BLOCK_ROWS, 1]`. In the place of one that is
absent, or not read by a sweep, is `nothing()`, of which `.type.is_block()` is false.

    MIX(x, stream, out_ptrs, row, start, num_cols, BLOCK_COLS, DTYPE)
                                            what all others get for the tiles that were loaded, where that is not
                                            these; from noise too, if the op draws any (see `_philox_steps`)
    EMIT(x, p, r, s, mask, num_cols)        the tiles that are written; may be absent
    ROWS(s, r, num_cols)                    the numbers of a row that are written, if not the sums

The sums of a row come from one function where plain sums of tiles are enough:

    TERMS(x, p, r, mask)                    the tiles, each of which is summed over a row

or else from these, the first for rows that are held, the others for rows that are swept:

    STATS(x, p, r, mask, num_cols, EPS)     the sums of a whole row
    ANCHOR(x, mask, count)                  what a sweep subtracts from its tiles, found from the first tile of the
                                            first operand, which is then read twice; may be absent
    FOLD(state, x, p, r, anchor, mask)      the state with one more tile
    MERGE(state, anchor, sizes, num_cols, EPS, LEVEL, LAST)
                                            the sums from the lanes of a sweep (LEVEL 1) or from all slices of a row
                                            (LEVEL 2), which have `sizes` columns; LAST if nothing follows
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.numbers import float64_of_bits
from ..runtime.philox_steps import begin_stream
from .tiles import (
    add_tiles,
    aligned,
    as_tiles,
    either,
    grouped,
    in_places,
    load_column,
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
def slice_cols(num_splits, num_cols: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Columns of a slice: whole tiles, as many for each; the last one has what remains."""
    return tl.cdiv(tl.cdiv(num_cols, BLOCK_COLS), num_splits) * BLOCK_COLS


@triton.jit
def row_slice(num_splits, num_cols: tl.constexpr, BLOCK_COLS: tl.constexpr, MODE: tl.constexpr):
    """Number of this program's block of rows and of its slice, the slice's first column and the one past its last."""
    program = tl.program_id(0)
    if MODE == "writes":
        program = tl.num_programs(0) - 1 - program
    # One split: the number of steps is not a constant to the compiler, which would write up to 32 of them out.
    block, split, first, stop = program, 0, 0, num_cols * num_splits
    if MODE == "sums" or MODE == "writes":
        size = slice_cols(num_splits, num_cols, BLOCK_COLS)
        block = program // num_splits
        split = program % num_splits
        first = split * size
        stop = tl.minimum(first + size, num_cols)
    return block, split, first, stop


@triton.jit
def opposite_tile(start, first, stop, BLOCK_COLS: tl.constexpr):
    """First column of the tile as far from a slice's last one as the tile at `start` is from its first one."""
    return first + (tl.cdiv(stop - first, BLOCK_COLS) - 1) * BLOCK_COLS - (start - first)


@triton.jit
def load_parts(
    parts_ptr, block, num_splits, NUM: tl.constexpr, FIRST: tl.constexpr, SUM_MASK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """The wanted partial results of all slices of a block of rows, `[BLOCK_ROWS, BLOCK_SPLITS]` each."""
    splits = tl.arange(0, BLOCK_SPLITS)
    state = ()
    for i in tl.static_range(NUM):
        if (SUM_MASK >> i) & 1:
            offset = (block.to(tl.int64) * NUM + i) * num_splits * BLOCK_ROWS
            offsets = tl.arange(0, BLOCK_ROWS)[:, None] + (splits * BLOCK_ROWS)[None, :]
            mask = (splits < num_splits)[None, :]
            state = state + (tl.load(parts_ptr + offset + offsets, mask=mask, other=FIRST if i == 0 else 0.0),)
    return state


@triton.jit
def row_op(  # noqa: C901 - its branches are settled when it is compiled
    x_ptrs, x_strides, p_ptrs, p_strides, r_ptrs, NUM_R: tl.constexpr, out_ptrs, out_strides, s_ptrs, parts_ptr,
    num_splits, num_rows, num_cols: tl.constexpr, DTYPE: tl.constexpr, AXES: tl.constexpr, TWO_LEVEL: tl.constexpr,
    ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
    MODE: tl.constexpr, SUM_READS: tl.constexpr, EMIT_READS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, NUM: tl.constexpr, SUM_MASK: tl.constexpr, EMIT: tl.constexpr = None,
    TERMS: tl.constexpr = None, STATS: tl.constexpr = None, ANCHOR: tl.constexpr = None, FOLD: tl.constexpr = None,
    MERGE: tl.constexpr = None, ROWS: tl.constexpr = None, MIX: tl.constexpr = None, FIRST: tl.constexpr = 0.0,
    OTHER: tl.constexpr = 0.0, EPS: tl.constexpr = 0.0, ROUNDED: tl.constexpr = None, GROUP: tl.constexpr = 1,
    NUMBERS: tl.constexpr = None, PICKS: tl.constexpr = None, scale_low=None, scale_high=None,
    ANCHOR_READS: tl.constexpr = 1, noise=None, GROUPS: tl.constexpr = 1, LAYOUT: tl.constexpr = 0,
    RUN: tl.constexpr = 1, PLANES: tl.constexpr = 1,
):  # fmt: skip
    """Do an op to this program's rows, or to its slice of them.

    Any of the pointers may be None, and so may the op's functions, from `EMIT` to `MIX`, which the module's docstring
    describes.

    x_ptrs, x_strides          operands of full size, each with its strides (segment, row, col)
    p_ptrs, p_strides          parameters, `[segments, num_cols]` with adjacent columns, and their segment strides
    r_ptrs, NUM_R              statistics, `[segments * num_rows]`, and how many
    out_ptrs, out_strides      outputs of full size, in the order of `EMIT`, all with the same strides
    s_ptrs                     outputs `[segments * num_rows]`, one for each of the sums of a row, or of `ROWS`
    parts_ptr                  partial results `[blocks, NUM, num_splits, BLOCK_ROWS]` of rows that programs share
    num_splits, BLOCK_SPLITS   programs that share a row, and a power of two of at least as many
    num_rows, num_cols         rows of a segment, columns of a row
    DTYPE                      dtype of the arithmetic
    AXES                       adjacent axis of each operand, and behind them of the outputs, two bits each (see
                               `tiles.tile_offsets`)
    TWO_LEVEL                  whether there is more than one segment
    ALIGN, ROW_ALIGN           powers of two that divide the strides (see `tile_offsets`), and `num_rows` if tiles run
                               along the rows
    BLOCK_ROWS, BLOCK_COLS     rows of a program, columns of a tile
    MODE, STAGES               how a row is walked (see the module's docstring), stages of the loop that sums
    SUM_READS, EMIT_READS,     bits of the operands, and behind them of the parameters, that the sums take, that a sweep
    ANCHOR_READS               reads again to write, and that `ANCHOR` takes
    NUM, SUM_MASK              places for sums of a row, and bits of those that are taken
    FIRST, OTHER               first value of the first sum, and value of the first operand past the end of a row, where
                               the others have 0
    EPS                        handed to `STATS` and `MERGE`
    ROUNDED                    dtype to which the first operand is rounded before anything else, if any
    GROUP                      if not 1, columns of each lane of a state (see `tiles.grouped`): `FOLD` takes tiles
                               `[BLOCK_ROWS, group, lanes]`, and a mask `[1, 1, lanes]` of whole groups or `[1, group,
                               lanes]`
    NUMBERS                    if given, the statistics end with these, or `nothing()` for zeros, and the parameters
                               with the numbers of the columns
    PICKS                      bits of the operands of which each row's element in one column, that of its first
                               statistic, is read, and comes behind the statistics
    scale_low, scale_high      if given, the statistics end with a factor, of which these are the bits
    noise                      the arguments of `begin_stream`
    GROUPS, LAYOUT, RUN        rows, one after another, with parameters of their own where columns share them; one of
                               `ParamLayout`, and columns of a run there
    PLANES                     rows that share a statistic
    """
    ALL: tl.constexpr = 65535
    NUM_X: tl.constexpr = len(x_strides)
    SUM_PARAMS: tl.constexpr = SUM_READS >> NUM_X
    LANES: tl.constexpr = BLOCK_COLS // (GROUP if GROUP > 0 else -GROUP)
    block, split, first_col, stop_col = row_slice(num_splits, num_cols, BLOCK_COLS, MODE)
    segment, first_row = 0, block * BLOCK_ROWS
    if TWO_LEVEL:
        num_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
        segment = (block // num_blocks).to(tl.int64)
        first_row = (block % num_blocks) * BLOCK_ROWS
    row = first_row + tl.arange(0, BLOCK_ROWS).to(tl.int64)
    # Where a row is swept element by element, loads without this test wait longer for each other (by ptxas' order).
    row_mask = rows_there(row, aligned(num_rows, ROW_ALIGN), BLOCK_ROWS if MODE == "whole" else 0)
    flat_row = (segment * aligned(num_rows, ROW_ALIGN) + row)[:, None]
    lanes = tl.arange(0, BLOCK_COLS)
    stream = () if MIX is None else begin_stream(noise, segment)
    # Of rows past the end too there are parameters.
    PERIOD: tl.constexpr = RUN if LAYOUT == 2 else 0
    p_row = ((row % GROUPS) * (num_cols // RUN if LAYOUT == 1 else PERIOD))[:, None] if LAYOUT else 0
    r = load_statistics(r_ptrs, NUM_R, flat_row if PLANES == 1 else flat_row // PLANES, row_mask)
    if PICKS is not None:
        r = r + load_column(x_ptrs, x_strides, segment, row, r[0], row_mask, 0 if MODE == "sums" else PICKS, DTYPE)
    if NUMBERS is not None:
        r = r + as_tiles(NUMBERS, DTYPE)
    if scale_low is not None:
        r = r + (tl.full((1, 1), float64_of_bits(scale_low, scale_high), DTYPE),)

    if MODE == "whole":
        cols = lanes.to(tl.int64)
        col_mask = (lanes < num_cols)[None, :]
        mask = row_mask & col_mask
        x = load_tiles(
            x_ptrs, x_strides, segment, row, cols, row_mask, col_mask, "", ALL, OTHER, ROUNDED, DTYPE, AXES, ALIGN,
            PERIOD,
        )  # fmt: skip
        if MIX is not None:
            x = MIX(x, stream, out_ptrs, flat_row, 0, num_cols, BLOCK_COLS, DTYPE)
        p = load_params(
            p_ptrs, p_strides, segment, cols, col_mask, SUM_PARAMS, DTYPE, ALIGN, p_row, LAYOUT, RUN, 0, num_cols
        )
        c = () if NUMBERS is None else (cols[None, :],)
        if not SUM_MASK:
            s = in_places((), NUM, 0)
        elif STATS is not None:
            s = STATS(x, p + c, r, mask, num_cols, EPS)
        else:
            s = in_places(sums_of(selected(TERMS(x, p + c, r, mask), SUM_MASK)), NUM, SUM_MASK)
        # Behind the sums, so that no register holds such a parameter while they are reduced.
        LATE: tl.constexpr = ALL - SUM_PARAMS
        late = load_params(
            p_ptrs, p_strides, segment, cols, col_mask, LATE, DTYPE, ALIGN, p_row, LAYOUT, RUN, 0, num_cols
        )
        p = either(p, late)
        if EMIT is not None:
            offsets = out_offsets(
                segment, row, cols, num_rows, out_strides, num_cols, (AXES >> (2 * NUM_X)) & 3, ALIGN, PERIOD
            )
            store_tiles(out_ptrs, EMIT(x, p + c, r, s, mask, num_cols), offsets, mask)
        store_tiles(s_ptrs, s if ROWS is None else ROWS(s, r, num_cols), flat_row, row_mask)
    else:
        if MODE == "writes":
            state = load_parts(parts_ptr, block, num_splits, NUM, FIRST, SUM_MASK, BLOCK_ROWS, BLOCK_SPLITS)
            if MERGE is not None:
                size = slice_cols(num_splits, num_cols, BLOCK_COLS)
                # In int64: past the last slice, their product can exceed what the row's own columns fit in.
                firsts = tl.arange(0, BLOCK_SPLITS).to(tl.int64) * size
                sizes = tl.minimum(tl.maximum(num_cols - firsts, 0), size)[None, :].to(DTYPE)
                s = MERGE(state, (), sizes, num_cols, EPS, 2, True)
            else:
                s = in_places(sums_of(state), NUM, SUM_MASK)
        else:
            anchor = ()
            if ANCHOR is not None:
                cols = (first_col + lanes).to(tl.int64)
                col_mask = (cols < num_cols)[None, :]
                # Another name than in the loop, which would carry it around.
                first = load_tiles(
                    x_ptrs, x_strides, segment, row, cols, row_mask, col_mask, "evict_last", ANCHOR_READS, OTHER,
                    ROUNDED, DTYPE, AXES, ALIGN, PERIOD,
                )  # fmt: skip
                if MIX is not None:
                    first = MIX(first, stream, out_ptrs, flat_row, first_col, num_cols, BLOCK_COLS, DTYPE)
                anchor = ANCHOR(first, row_mask & col_mask, tl.minimum(num_cols - first_col, BLOCK_COLS))
            state = ()
            for i in tl.static_range(NUM):
                if (SUM_MASK >> i) & 1:
                    state = state + (tl.full((BLOCK_ROWS, LANES), FIRST if i == 0 else 0.0, DTYPE),)
            for start in tl.range(first_col, stop_col, BLOCK_COLS, num_stages=STAGES):
                cols = (start + lanes).to(tl.int64)
                col_mask = (cols < num_cols)[None, :]
                x = load_tiles(
                    x_ptrs, x_strides, segment, row, cols, row_mask, col_mask, "evict_last", SUM_READS,
                    0.0 if GROUP != 1 else OTHER, ROUNDED, DTYPE, AXES, ALIGN, PERIOD,
                )  # fmt: skip
                if MIX is not None:
                    x = MIX(x, stream, out_ptrs, flat_row, start, num_cols, BLOCK_COLS, DTYPE)
                p = load_params(
                    p_ptrs, p_strides, segment, cols, col_mask, SUM_PARAMS, DTYPE, ALIGN, p_row, LAYOUT, RUN, start,
                    num_cols,
                )  # fmt: skip
                c = () if NUMBERS is None else (cols[None, :],)
                if GROUP != 1:
                    # Of columns alone: rows past the end are zero, and are not stored.
                    if GROUP > 1:
                        mask = (start + tl.arange(0, LANES) * GROUP < num_cols)[None, None, :]
                    else:
                        mask = grouped((col_mask,), GROUP)[0]
                    state = FOLD(state, grouped(x, GROUP), p + c, r, anchor, mask)
                elif FOLD is not None:
                    state = FOLD(state, x, p + c, r, anchor, row_mask & col_mask)
                else:
                    state = add_tiles(state, selected(TERMS(x, p + c, r, row_mask & col_mask), SUM_MASK))
            if MERGE is not None:
                size = num_cols if MODE == "swept" else (stop_col - first_col).to(DTYPE)
                s = MERGE(state, anchor, size, num_cols, EPS, 1, MODE == "swept")
            else:
                s = in_places(sums_of(state), NUM, SUM_MASK)
        if MODE == "sums":
            for i in tl.static_range(NUM):
                if (SUM_MASK >> i) & 1:
                    offset = ((block.to(tl.int64) * NUM + i) * num_splits + split) * BLOCK_ROWS
                    tl.store(parts_ptr + offset + tl.arange(0, BLOCK_ROWS)[:, None], s[i])
        else:
            if split == 0:
                store_tiles(s_ptrs, s if ROWS is None else ROWS(s, r, num_cols), flat_row, row_mask)
            if EMIT is not None:
                # Not staged: nothing is reduced here, so that other warps load while one waits.
                for step in range(first_col, stop_col, BLOCK_COLS):
                    start = opposite_tile(step, first_col, stop_col, BLOCK_COLS)
                    cols = (start + lanes).to(tl.int64)
                    col_mask = (cols < num_cols)[None, :]
                    mask = row_mask & col_mask
                    x = load_tiles(
                        x_ptrs, x_strides, segment, row, cols, row_mask, col_mask, "evict_first", EMIT_READS, OTHER,
                        ROUNDED, DTYPE, AXES, ALIGN, PERIOD,
                    )  # fmt: skip
                    if MIX is not None:
                        x = MIX(x, stream, out_ptrs, flat_row, start, num_cols, BLOCK_COLS, DTYPE)
                    p = load_params(
                        p_ptrs, p_strides, segment, cols, col_mask, ALL, DTYPE, ALIGN, p_row, LAYOUT, RUN, start,
                        num_cols,
                    )  # fmt: skip
                    c = () if NUMBERS is None else (cols[None, :],)
                    offsets = out_offsets(
                        segment, row, cols, num_rows, out_strides, num_cols, (AXES >> (2 * NUM_X)) & 3, ALIGN, PERIOD
                    )
                    store_tiles(out_ptrs, EMIT(x, p + c, r, s, mask, num_cols), offsets, mask)
