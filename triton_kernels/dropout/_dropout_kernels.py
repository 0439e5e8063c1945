"""The dropout kernel, which is also the kernel of all its derivatives.

Tensors are seen as `[num_outer, num_inner, num_rows, num_cols]`, in logical order; a program owns a tile of
BLOCK_ROWS rows and BLOCK_COLS columns. An element's random word is given by its place in logical order, whatever the
strides and the tile.
"""

from __future__ import annotations

import triton.language as tl

from ..rows.tiles import aligned, tile_offsets
from ..runtime.kernel import unspecialized_jit
from ..runtime.numbers import cast, float64_of_bits, store_cast
from ..runtime.philox_steps import grouped_words, single_words


@unspecialized_jit
def dropout_kernel(
    x_ptr, y_ptr, seed_ptr, offset_ptr, num_inner, num_rows, num_cols, x_outer_stride, x_inner_stride,
    x_row_stride, x_col_stride, y_outer_stride, y_inner_stride, y_row_stride, y_col_stride, seed_stride, offset_stride,
    last_dropped, scale_low, scale_high, DTYPE: tl.constexpr, SAMPLE_AXES: tl.constexpr, GROUPED: tl.constexpr,
    X_ADJACENT: tl.constexpr, Y_ADJACENT: tl.constexpr, ALIGN: tl.constexpr, ROW_ALIGN: tl.constexpr,
    COL_ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Writes `y = x * noise` for one tile; noise is zero where a random word is at most `last_dropped`, else the scale.

    x, y                      [num_outer, num_inner, num_rows, num_cols], each with its four strides, in elements
    seed, offset              [num_samples], or one; offset counts Philox blocks, and None stands for 0
    last_dropped              bits of the largest word that drops its element
    scale_low, scale_high     bits of the scale, a float64
    DTYPE                     dtype of the product
    SAMPLE_AXES               how many of the axes, from the last on, are those of a sample, which has its own seed
    GROUPED                   whether every row begins with the first word of a Philox block
    X_ADJACENT, Y_ADJACENT    which axis has stride 1: 1 for columns, 2 for rows, or 0
    ALIGN                     power of two that divides the other strides of tensors with such an axis
    ROW_ALIGN, COL_ALIGN      power of two that divides the number of rows or columns that loads run along
    BLOCK_ROWS, BLOCK_COLS    size of a tile; at least 4 columns
    """
    num_row_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    num_col_blocks = tl.cdiv(num_cols, BLOCK_COLS)
    # Division of numbers without a sign takes half of the instructions.
    program, num_inner = tl.program_id(0).to(tl.uint32), tl.cast(num_inner, tl.uint32)
    above = program // num_col_blocks.to(tl.uint32)
    start_col = (program - above * num_col_blocks.to(tl.uint32)).to(tl.int64) * BLOCK_COLS
    segment = above // num_row_blocks.to(tl.uint32)
    row = (above - segment * num_row_blocks.to(tl.uint32)).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outer = (segment // num_inner).to(tl.int64)
    inner = (segment % num_inner).to(tl.int64)
    col = start_col + tl.arange(0, BLOCK_COLS)

    # Rows past the end get numbers of other rows, which are not stored.
    segment = segment.to(tl.int64)
    if SAMPLE_AXES == 4:
        sample, row_number = 0, segment * num_rows + row
    elif SAMPLE_AXES == 3:
        sample, row_number = outer, inner * num_rows + row
    elif SAMPLE_AXES == 2:
        sample, row_number = segment, row
    else:
        sample, row_number = segment * num_rows + tl.minimum(row, num_rows - 1)[:, None], row * 0
    seed = tl.load(seed_ptr + sample * seed_stride)
    offset = 0 if offset_ptr is None else tl.load(offset_ptr + sample * offset_stride)

    if GROUPED:
        block_in_row = start_col // 4 + tl.arange(0, BLOCK_COLS // 4)
        words = grouped_words(seed, offset + (row_number * num_cols // 4)[:, None] + block_in_row[None, :])
    else:
        words = single_words(seed, offset, (row_number * num_cols)[:, None] + col[None, :])
    kept = words > last_dropped.to(tl.int32).to(tl.uint32, bitcast=True)
    noise = tl.where(kept, cast(float64_of_bits(scale_low, scale_high), DTYPE), 0.0)

    x_start = x_ptr + outer * aligned(x_outer_stride, ALIGN if X_ADJACENT else 1)
    y_start = y_ptr + outer * aligned(y_outer_stride, ALIGN if Y_ADJACENT else 1)
    x_offsets = tile_offsets(inner, row, col, (x_inner_stride, x_row_stride, x_col_stride), X_ADJACENT, ALIGN)
    y_offsets = tile_offsets(inner, row, col, (y_inner_stride, y_row_stride, y_col_stride), Y_ADJACENT, ALIGN)
    mask = (row < aligned(num_rows, ROW_ALIGN))[:, None] & (col < aligned(num_cols, COL_ALIGN))[None, :]
    x = cast(tl.load(x_start + x_offsets, mask=mask, other=0.0), DTYPE)
    store_cast(y_start + y_offsets, x * noise, mask)
