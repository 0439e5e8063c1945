"""Tuples of tiles, and what the scaffolds of `rows` and `sums` do with them: addresses, loads, stores, and sums.

Tensors of full size are seen as `[segments, num_rows, num_cols]`, each with three strides of its own. Tuples of
tiles cannot have None in Triton: in the place of a tile that is absent is `nothing()`. Those of pointers can, but
Triton 3.6 cannot tell the length of such a tuple.
"""

from __future__ import annotations

import enum
import math

import triton
import triton.language as tl

from ..runtime.kernel import INTERPRETED
from ..runtime.numbers import cast, store_cast


class ParamLayout(enum.IntEnum):
    """How the numbers of a parameter lie along the columns of a row.

    Attributes:
        PER_COLUMN: Each column has its own, which all rows share.
        PER_CHANNEL: A run of columns shares one, and so many rows, one after another, have others.
        CHANNELS_LAST: A run of columns is adjacent in memory, and has the numbers that the next run has too.
    """

    PER_COLUMN = 0
    PER_CHANNEL = 1
    CHANNELS_LAST = 2


_PER_COLUMN, _CHANNELS_LAST = tl.constexpr(0), tl.constexpr(2)
# The interpreter takes a reduction of several tiles at once apart into calls per element.
_ONE_BY_ONE = tl.constexpr(INTERPRETED)
# Where products are fused with sums; in the interpreter, a tile that is not stored row by row would change its order.
_FUSES = tl.constexpr(not INTERPRETED)
_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def aligned(number, ALIGN: tl.constexpr):
    """`number`, which `ALIGN` divides, in a form that tells the compiler so.

    It sees the factor in the product, where `tl.multiple_of` would get lost on its way to AMD code.
    """
    return (number // ALIGN) * ALIGN


@triton.jit
def rows_there(row, num_rows, BLOCK_ROWS: tl.constexpr):
    """Mask `[BLOCK_ROWS, 1]` of the rows of a tile: a tile of one row has it, and needs no test in every load."""
    return (row < num_rows)[:, None] if BLOCK_ROWS != 1 else tl.full((1, 1), 1, tl.int1)


@triton.jit
def tile_offsets(
    segment, row, cols, strides, AXIS: tl.constexpr, ALIGN: tl.constexpr, PERIOD: tl.constexpr = 0, start=0
):
    """Element offsets `[BLOCK_ROWS, cols]` in int64; `AXIS` is 1 where columns are adjacent, 2 where rows are, or 0.

    It is 3 where every `PERIOD` columns are adjacent, and the column stride is the distance of two such runs. Columns
    begin at `start`, a number or `[BLOCK_ROWS, 1]`.

    `ALIGN` is a power of two that divides the other strides: Triton tests integers for a factor of 16 alone, and a
    factor of 8 is what 16-byte loads of 2-byte elements need.
    """
    if AXIS == 1:
        first = segment * aligned(strides[0], ALIGN)
        offsets = (first + row * aligned(strides[1], ALIGN))[:, None] + start + cols[None, :]
    elif AXIS == 2:
        first = segment * aligned(strides[0], ALIGN)
        offsets = (first + row)[:, None] + (start + cols[None, :]) * aligned(strides[2], ALIGN)
    elif AXIS == 3:
        first = segment * aligned(strides[0], ALIGN) + row * aligned(strides[1], ALIGN)
        cols = start + cols[None, :]
        inside = (cols // PERIOD) * aligned(strides[2], ALIGN) + cols % PERIOD
        offsets = first[:, None] + inside
    else:
        offsets = (segment * strides[0] + row * strides[1])[:, None] + (start + cols[None, :]) * strides[2]
    return offsets


@triton.jit
def nothing():
    """A number of a type that no tile has, in the place of a tile that is absent."""
    return tl.full((), 0, tl.int1)


@triton.jit
def out_offsets(
    segment, row, cols, num_rows, strides, num_cols: tl.constexpr, AXIS: tl.constexpr, ALIGN: tl.constexpr,
    PERIOD: tl.constexpr = 0, start=0,
):  # fmt: skip
    """As `tile_offsets`, of outputs: rows with adjacent columns lie one behind the other."""
    if AXIS == 1:
        offsets = ((segment * num_rows + row) * num_cols)[:, None] + start + cols[None, :]
    else:
        offsets = tile_offsets(segment, row, cols, strides, AXIS, ALIGN, PERIOD, start)
    return offsets


@triton.jit
def load_tiles(
    ptrs, strides, segment, row, cols, row_mask, col_mask, POLICY: tl.constexpr, READS: tl.constexpr,
    OTHER: tl.constexpr, ROUNDED: tl.constexpr, DTYPE: tl.constexpr, AXES: tl.constexpr, ALIGN: tl.constexpr,
    PERIOD: tl.constexpr = 0, start=0,
):  # fmt: skip
    """Tiles of full-size operands in `DTYPE`, those with a bit in `READS`; the first is rounded to `ROUNDED` before.

    Bytes are a boolean mask: 0 where they are true, else -inf.

    Columns past the end are zero, of the first operand `OTHER`. Rows past the end are zero, and are not stored.
    """
    mask = row_mask & col_mask
    tiles = ()
    for i in tl.static_range(len(strides)):
        if ptrs[i] is None or (READS >> i) & 1 == 0:
            tiles = tiles + (nothing(),)
        else:
            offsets = tile_offsets(segment, row, cols, strides[i], (AXES >> (2 * i)) & 3, ALIGN, PERIOD, start)
            addresses = ptrs[i] + offsets
            if OTHER == 0.0 or i > 0:
                tile = tl.load(addresses, mask=mask, other=0.0, eviction_policy=POLICY)
            else:
                padding = tl.where(col_mask, 0.0, OTHER).to(addresses.dtype.element_ty)
                padding = tl.broadcast_to(padding, mask.shape)
                tile = tl.load(addresses, mask=mask, other=padding, eviction_policy=POLICY)
            if ROUNDED is not None and i == 0:
                tile = cast(tile, ROUNDED)
            if addresses.dtype.element_ty == tl.uint8:
                tile = tl.where(tile == 0, float("-inf"), 0.0)
            tiles = tiles + (cast(tile, DTYPE),)
    return tiles


@triton.jit
def load_params(
    ptrs, strides, segment, cols, col_mask, READS: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr, first=None,
    LAYOUT: tl.constexpr = 0, RUN: tl.constexpr = 1, start=0, num_cols: tl.constexpr = 0, behind=0,
):  # fmt: skip
    """Parameters `[1, cols]` of a segment, zero past the end, loaded once for all rows of a tile.

    They are in their own dtypes if `DTYPE` is None. Per channel of `RUN` columns, and channels last, the numbers of a
    row begin at `first`, `[rows, 1]`: the tiles are `[rows, cols]`, or `[rows, 1]` of rows with one number each. The
    columns begin at `start`; where each has a number, those of a tile lie `behind` them, `[rows, 1]`.
    """
    BLOCK_COLS: tl.constexpr = cols.shape[0]
    # One load for columns that a thread has beside one another: four of 4-byte elements, and eight of half types.
    SERVED: tl.constexpr = 4 if RUN % 4 == 0 and BLOCK_COLS >= 4 else 1
    tiles = ()
    for i in tl.static_range(len(strides)):
        if ptrs[i] is None or (READS >> i) & 1 == 0:
            tiles = tiles + (nothing(),)
        else:
            addresses = ptrs[i] + segment * aligned(strides[i], ALIGN)
            if LAYOUT == _PER_COLUMN:
                addresses = tl.broadcast_to(addresses + behind + cols[None, :], col_mask.shape)
                tile = tl.load(addresses, mask=col_mask, other=0.0)
            elif LAYOUT == _CHANNELS_LAST:
                addresses = addresses + first + (cols % RUN)[None, :]
                tile = tl.load(addresses, mask=tl.broadcast_to(col_mask, addresses.shape), other=0.0)
            elif num_cols == RUN:
                tile = tl.load(addresses + first)
            else:
                steps = start + tl.arange(0, BLOCK_COLS // SERVED) * SERVED
                addresses = addresses + first + (steps // RUN)[None, :]
                tile = tl.load(addresses, mask=tl.broadcast_to((steps < num_cols)[None, :], addresses.shape), other=0.0)
                if SERVED > 1:
                    tile = tl.broadcast_to(tile[:, :, None], (tile.shape[0], BLOCK_COLS // SERVED, SERVED))
                    tile = tl.reshape(tile, (tile.shape[0], BLOCK_COLS))
            tiles = tiles + (tile if DTYPE is None else cast(tile, DTYPE),)
    return tiles


@triton.jit
def load_statistics(ptrs, NUM: tl.constexpr, row, row_mask):
    """Numbers `[BLOCK_ROWS, 1]`, one per row."""
    values = ()
    for i in tl.static_range(NUM):
        if ptrs[i] is None:
            values = values + (nothing(),)
        else:
            values = values + (tl.load(ptrs[i] + row, mask=row_mask, other=0.0),)
    return values


@triton.jit
def load_column(ptrs, strides, segment, row, col, row_mask, PICKS: tl.constexpr, DTYPE: tl.constexpr):
    """Elements `[BLOCK_ROWS, 1]` of the operands with a bit in `PICKS`, in column `col` of each row, or the first."""
    values = ()
    for i in tl.static_range(len(strides)):
        if (PICKS >> i) & 1 == 0:
            values = values + (nothing(),)
        else:
            offsets = (segment * strides[i][0] + row * strides[i][1])[:, None] + tl.maximum(col, 0) * strides[i][2]
            values = values + (cast(tl.load(ptrs[i] + offsets, mask=row_mask, other=0.0), DTYPE),)
    return values


@triton.jit
def grouped(tiles, GROUP: tl.constexpr):
    """The tiles as `[BLOCK_ROWS, group, lanes]`: `GROUP` adjacent columns to a lane, or `-GROUP` that lie far apart."""
    found = ()
    for i in tl.static_range(len(tiles)):
        if not tiles[i].type.is_block():
            found = found + (tiles[i],)
        elif GROUP > 0:
            parts = tl.reshape(tiles[i], (tiles[i].shape[0], tiles[i].shape[1] // GROUP, GROUP))
            found = found + (tl.trans(parts, (0, 2, 1)),)
        else:
            found = found + (tl.reshape(tiles[i], (tiles[i].shape[0], -GROUP, tiles[i].shape[1] // -GROUP)),)
    return found


@triton.jit
def exponential(x):
    """exp(x), of which numbers below the least normal one are zero: NVIDIA takes three instructions for six."""
    if x.dtype == tl.float64:
        y = tl.exp(x)
    else:
        y = tl.exp2(x * _LOG2_E)
    return y


@triton.jit
def as_tiles(numbers: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers that are known when a kernel is compiled, as tiles `[1, 1]`; `nothing()` for zeros."""
    tiles = ()
    for i in tl.static_range(len(numbers)):
        if numbers[i] == 0:
            tiles = tiles + (nothing(),)
        else:
            tiles = tiles + (tl.full((1, 1), numbers[i], DTYPE),)
    return tiles


@triton.jit
def store_tiles(ptrs, values, offsets, mask):
    """Store each value in the dtype of its memory; a pointer that is None wants nothing."""
    for i in tl.static_range(len(values)):
        if ptrs[i] is not None:
            store_cast(ptrs[i] + offsets, values[i], mask)


@triton.jit
def _add_2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add_3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _add_4(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _add_5(a, b, c, d, e, f, g, h, i, j):
    return a + f, b + g, c + h, d + i, e + j


@triton.jit
def _add_6(a, b, c, d, e, f, g, h, i, j, k, m):
    return a + g, b + h, c + i, d + j, e + k, f + m


@triton.jit
def _add_7(a, b, c, d, e, f, g, h, i, j, k, m, n, o):
    return a + h, b + i, c + j, d + k, e + m, f + n, g + o


@triton.jit
def rounded(product):
    """`product`, rounded before anything else takes it: this zero is fused with it, in the same instruction.

    Threads that give products to others, which add them up, would each fuse its own into the sum: copies of it would
    differ, and which one they store for all is undefined. This is for one product of a kernel that fuses others, and
    for all plans. Where it takes a narrow tile for threads to have no sum of their own, the launch is `UNFUSED`: in
    wide tiles the same products are fused, and an instruction each would be lost. -0 becomes 0.
    """
    return product + 0.0 if _FUSES else product


@triton.jit
def sums_of(tiles, LEAST: tl.constexpr = 3, HALVES: tl.constexpr = 1):  # noqa: C901 - settled when it is compiled
    """Sums `[BLOCK_ROWS, 1]` over the columns of up to seven tiles of one shape.

    `LEAST` tiles or more come from one reduction, so that warps wait for each other once, and not once per tile. Where
    the second halves of rows lie behind the first ones, each half has the sum of both: of less than `LEAST`, because
    one reduction of such tiles spills.
    """
    NUM: tl.constexpr = len(tiles)
    if HALVES > 1:
        parts = ()
        for i in tl.static_range(NUM):
            part = tl.reshape(tiles[i], (HALVES, tiles[i].shape[0] // HALVES, tiles[i].shape[1]))
            parts = parts + (tl.sum(part, axis=0),)
        tiles = parts
    if _ONE_BY_ONE or NUM < LEAST:
        flat = ()
        for i in tl.static_range(NUM):
            flat = flat + (tl.sum(tiles[i], axis=1),)
    elif NUM == 2:
        flat = tl.reduce(tiles, 1, _add_2)
    elif NUM == 3:
        flat = tl.reduce(tiles, 1, _add_3)
    elif NUM == 4:
        flat = tl.reduce(tiles, 1, _add_4)
    elif NUM == 5:
        flat = tl.reduce(tiles, 1, _add_5)
    elif NUM == 6:
        flat = tl.reduce(tiles, 1, _add_6)
    else:
        flat = tl.reduce(tiles, 1, _add_7)
    sums = ()
    for i in tl.static_range(NUM):
        part = flat[i][:, None]
        if HALVES > 1:
            both = tl.broadcast_to(part[None, :, :], (HALVES, part.shape[0], 1))
            part = tl.reshape(both, (HALVES * part.shape[0], 1))
        sums = sums + (part,)
    return sums


@triton.jit
def selected(tiles, SUM_MASK: tl.constexpr):
    """The tiles with a bit in `SUM_MASK`, whose sums somebody takes."""
    found = ()
    for i in tl.static_range(len(tiles)):
        if (SUM_MASK >> i) & 1:
            found = found + (tiles[i],)
    return found


@triton.jit
def in_places(sums, NUM: tl.constexpr, SUM_MASK: tl.constexpr):
    """The sums of `selected`, each in its place of `NUM`, where `nothing()` stands for the others."""
    found, taken = (), ()
    for i in tl.static_range(NUM):
        if (SUM_MASK >> i) & 1:
            found = found + (sums[len(taken)],)
            taken = taken + (0,)
        else:
            found = found + (nothing(),)
    return found


@triton.jit
def add_tiles(sums, tiles):
    """The sums with one more tile each."""
    found = ()
    for i in tl.static_range(len(sums)):
        found = found + (sums[i] + tiles[i],)
    return found


@triton.jit
def either(tiles, others):
    """Each tile, or where it is absent the other one."""
    found = ()
    for i in tl.static_range(len(tiles)):
        if not tiles[i].type.is_block():
            found = found + (others[i],)
        else:
            found = found + (tiles[i],)
    return found
