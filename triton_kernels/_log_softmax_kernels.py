"""Log-softmax kernels: forward, backward and JVP, for rows that fit in registers and for longer ones.

Every tensor is seen as `[segments, num_rows, num_cols]` and reduced over its columns. A program owns BLOCK_ROWS rows
of one segment, or a slice of their columns in each of two launches: `_split_rows` says which, and what `parts_ptr`,
`num_splits`, `NUM_SLOTS`, `BLOCK_SPLITS`, `SUMS` and `WRITES` of the looped kernels are. Other shared arguments:

    <tensor>_{segment,row,col}_stride   in elements
    <TENSOR>_ADJACENT                   which axis has stride 1: "cols", "rows" or "none"
    ALIGN                               power of two that divides the other strides of the tensors with such an axis
    ROW_ALIGN                           power of two that divides num_rows
    DTYPE                               dtype of all arithmetic
"""

# Pyright does not know that branches on constexpr flags are settled at compile time.
# Triton declares constexpr parameters and tl.load as Python types, which the values that kernels pass are not.
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from triton_kernels._runtime import cast, store_cast, stride_independent_jit
from triton_kernels._split_rows import load_parts, merged_sum, opposite_tile, row_slice, store_part


@triton.jit
def _block_rows(block, num_rows, BLOCK_ROWS: tl.constexpr):
    """Segment and rows (int64) of a block of rows; the last rows of the last block lie past `num_rows`."""
    num_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    segment = block // num_blocks
    first = (block - segment * num_blocks) * BLOCK_ROWS
    return segment.to(tl.int64), first + tl.arange(0, BLOCK_ROWS).to(tl.int64)


@triton.jit
def _aligned(number, ALIGN: tl.constexpr):
    # The compiler sees the factor in the product, where `tl.multiple_of` would get lost on its way to AMD code.
    return (number // ALIGN) * ALIGN


@triton.jit
def _tile_offsets(
    segment, row, col_offsets, segment_stride, row_stride, col_stride, ADJACENT: tl.constexpr, ALIGN: tl.constexpr
):
    """Element offsets `[BLOCK_ROWS, BLOCK_COLS]` of a tile, in int64."""
    cols = col_offsets.to(tl.int64)
    if ADJACENT == "cols":
        start = segment * _aligned(segment_stride, ALIGN)
        offsets = (start + row * _aligned(row_stride, ALIGN))[:, None] + cols[None, :]
    elif ADJACENT == "rows":
        start = segment * _aligned(segment_stride, ALIGN)
        offsets = (start + row)[:, None] + (cols * _aligned(col_stride, ALIGN))[None, :]
    else:
        offsets = (segment * segment_stride + row * row_stride)[:, None] + (cols * col_stride)[None, :]
    return offsets


@triton.jit
def _load_logits(x_ptrs, row_mask, col_mask, eviction_policy: tl.constexpr, ROUNDED: tl.constexpr, DTYPE: tl.constexpr):
    """A tile of x, rounded to the dtype `ROUNDED` on the way to `DTYPE`.

    Columns past the end are -inf, which adds nothing to a sum of exponentials. Rows past the end are zero: nobody
    stores them, but they would be NaN, and in the interpreter a warning.
    """
    padding = tl.where(col_mask, 0.0, float("-inf")).to(x_ptrs.dtype.element_ty)
    mask = row_mask & col_mask
    x = tl.load(x_ptrs, mask=mask, other=tl.broadcast_to(padding, mask.shape), eviction_policy=eviction_policy)
    return cast(cast(x, ROUNDED), DTYPE)


@stride_independent_jit
def log_softmax_fwd_kernel(
    x_ptr,
    y_ptr,
    num_rows,
    x_segment_stride,
    x_row_stride,
    x_col_stride,
    y_segment_stride,
    y_row_stride,
    y_col_stride,
    num_cols: tl.constexpr,
    DTYPE: tl.constexpr,
    X_ADJACENT: tl.constexpr,
    Y_ADJACENT: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Reads BLOCK_ROWS whole rows of x once and writes their y; x is rounded to the dtype of y first, as in torch."""
    segment, row = _block_rows(tl.program_id(0), num_rows, BLOCK_ROWS)
    col_offsets = tl.arange(0, BLOCK_COLS)
    row_mask = (row < _aligned(num_rows, ROW_ALIGN))[:, None]
    col_mask = (col_offsets < num_cols)[None, :]
    x_offsets = _tile_offsets(
        segment, row, col_offsets, x_segment_stride, x_row_stride, x_col_stride, X_ADJACENT, ALIGN
    )
    y_offsets = _tile_offsets(
        segment, row, col_offsets, y_segment_stride, y_row_stride, y_col_stride, Y_ADJACENT, ALIGN
    )

    x = _load_logits(x_ptr + x_offsets, row_mask, col_mask, "", y_ptr.dtype.element_ty, DTYPE)
    shifted = x - tl.max(x, axis=1)[:, None]
    log_sum = tl.log(tl.sum(tl.exp(shifted), axis=1))
    tl.store(y_ptr + y_offsets, shifted - log_sum[:, None], mask=row_mask & col_mask)


@stride_independent_jit
def log_softmax_fwd_looped_kernel(
    x_ptr,
    y_ptr,
    parts_ptr,
    num_splits,
    num_rows,
    x_segment_stride,
    x_row_stride,
    x_col_stride,
    y_segment_stride,
    y_row_stride,
    y_col_stride,
    num_cols: tl.constexpr,
    DTYPE: tl.constexpr,
    X_ADJACENT: tl.constexpr,
    Y_ADJACENT: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    SUMS: tl.constexpr,
    WRITES: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Sweeps BLOCK_ROWS long rows of x for their running maximum and sum, then again to write y.

    Every column of the tile has a sum of its own, relative to the running maximum of the whole row: one exponential
    per element, and one reduction, not two, per tile.
    """
    block, split, first_col, stop_col = row_slice(num_splits, num_cols, BLOCK_COLS, SUMS, WRITES)
    segment, row = _block_rows(block, num_rows, BLOCK_ROWS)
    row_mask = (row < _aligned(num_rows, ROW_ALIGN))[:, None]

    if SUMS:
        row_max = tl.full((BLOCK_ROWS,), float("-inf"), DTYPE)
        sums = tl.zeros((BLOCK_ROWS, BLOCK_COLS), DTYPE)
        for start in range(first_col, stop_col, BLOCK_COLS):
            col_offsets = start + tl.arange(0, BLOCK_COLS)
            x_offsets = _tile_offsets(
                segment, row, col_offsets, x_segment_stride, x_row_stride, x_col_stride, X_ADJACENT, ALIGN
            )
            col_mask = (col_offsets < num_cols)[None, :]
            x = _load_logits(x_ptr + x_offsets, row_mask, col_mask, "evict_last", y_ptr.dtype.element_ty, DTYPE)
            new_max = tl.maximum(row_max, tl.max(x, axis=1))
            # Until the first finite element, -inf - -inf would turn sums of zeros into NaN.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            sums = sums * tl.exp(row_max - shift)[:, None] + tl.exp(x - shift[:, None])
            row_max = new_max
        row_sum = tl.sum(sums, axis=1)
    if not WRITES:
        store_part(parts_ptr, block, split, num_splits, row_max, 0, NUM_SLOTS)
        store_part(parts_ptr, block, split, num_splits, row_sum, 1, NUM_SLOTS)
    if not SUMS:
        maxima = load_parts(parts_ptr, block, num_splits, float("-inf"), 0, NUM_SLOTS, BLOCK_ROWS, BLOCK_SPLITS)
        sums = load_parts(parts_ptr, block, num_splits, 0.0, 1, NUM_SLOTS, BLOCK_ROWS, BLOCK_SPLITS)
        row_max = tl.max(maxima, axis=1)
        # A row of nothing but -inf is NaN from here on, which it would become below; one slice of it adds nothing.
        row_sum = tl.sum(sums * tl.exp(maxima - row_max[:, None]), axis=1)

    if WRITES:
        log_sum = tl.log(row_sum)
        for step in range(first_col, stop_col, BLOCK_COLS):
            start = opposite_tile(step, first_col, stop_col, BLOCK_COLS)
            col_offsets = start + tl.arange(0, BLOCK_COLS)
            x_offsets = _tile_offsets(
                segment, row, col_offsets, x_segment_stride, x_row_stride, x_col_stride, X_ADJACENT, ALIGN
            )
            y_offsets = _tile_offsets(
                segment, row, col_offsets, y_segment_stride, y_row_stride, y_col_stride, Y_ADJACENT, ALIGN
            )
            col_mask = (col_offsets < num_cols)[None, :]
            x = _load_logits(x_ptr + x_offsets, row_mask, col_mask, "evict_first", y_ptr.dtype.element_ty, DTYPE)
            tl.store(y_ptr + y_offsets, x - row_max[:, None] - log_sum[:, None], mask=row_mask & col_mask)


@stride_independent_jit
def log_softmax_linear_kernel(
    v_ptr,
    y_ptr,
    out_ptr,
    num_rows,
    v_segment_stride,
    v_row_stride,
    v_col_stride,
    y_segment_stride,
    y_row_stride,
    y_col_stride,
    out_segment_stride,
    out_row_stride,
    out_col_stride,
    num_cols: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    DTYPE: tl.constexpr,
    V_ADJACENT: tl.constexpr,
    Y_ADJACENT: tl.constexpr,
    OUT_ADJACENT: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Applies the derivative of log-softmax to BLOCK_ROWS whole rows of v, reading v and y (of the forward) once.

    Of a tangent v = x_dot it writes `y_dot = v - sum(exp(y) * v)`; of a cotangent v = y_bar, if `TRANSPOSED`,
    `x_bar = v - exp(y) * sum(v)`.
    """
    segment, row = _block_rows(tl.program_id(0), num_rows, BLOCK_ROWS)
    col_offsets = tl.arange(0, BLOCK_COLS)
    mask = (row < _aligned(num_rows, ROW_ALIGN))[:, None] & (col_offsets < num_cols)[None, :]
    v_offsets = _tile_offsets(
        segment, row, col_offsets, v_segment_stride, v_row_stride, v_col_stride, V_ADJACENT, ALIGN
    )
    y_offsets = _tile_offsets(
        segment, row, col_offsets, y_segment_stride, y_row_stride, y_col_stride, Y_ADJACENT, ALIGN
    )
    out_offsets = _tile_offsets(
        segment, row, col_offsets, out_segment_stride, out_row_stride, out_col_stride, OUT_ADJACENT, ALIGN
    )

    v = cast(tl.load(v_ptr + v_offsets, mask=mask, other=0.0), DTYPE)
    probability = tl.exp(cast(tl.load(y_ptr + y_offsets, mask=mask, other=0.0), DTYPE))
    change = probability * tl.sum(v, axis=1)[:, None] if TRANSPOSED else tl.sum(probability * v, axis=1)[:, None]
    store_cast(out_ptr + out_offsets, v - change, mask)


@stride_independent_jit
def log_softmax_linear_looped_kernel(
    v_ptr,
    y_ptr,
    out_ptr,
    parts_ptr,
    num_splits,
    num_rows,
    v_segment_stride,
    v_row_stride,
    v_col_stride,
    y_segment_stride,
    y_row_stride,
    y_col_stride,
    out_segment_stride,
    out_row_stride,
    out_col_stride,
    num_cols: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    DTYPE: tl.constexpr,
    V_ADJACENT: tl.constexpr,
    Y_ADJACENT: tl.constexpr,
    OUT_ADJACENT: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    SUMS: tl.constexpr,
    WRITES: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Does what `log_softmax_linear_kernel` does to BLOCK_ROWS long rows: one sweep for the sum, one that writes.

    Of y each element is read once: by the sweep that needs it.
    """
    block, split, first_col, stop_col = row_slice(num_splits, num_cols, BLOCK_COLS, SUMS, WRITES)
    segment, row = _block_rows(block, num_rows, BLOCK_ROWS)
    row_mask = (row < _aligned(num_rows, ROW_ALIGN))[:, None]

    if SUMS:
        sums = tl.zeros((BLOCK_ROWS, BLOCK_COLS), DTYPE)
        for start in range(first_col, stop_col, BLOCK_COLS):
            col_offsets = start + tl.arange(0, BLOCK_COLS)
            mask = row_mask & (col_offsets < num_cols)[None, :]
            v_offsets = _tile_offsets(
                segment, row, col_offsets, v_segment_stride, v_row_stride, v_col_stride, V_ADJACENT, ALIGN
            )
            v = cast(tl.load(v_ptr + v_offsets, mask=mask, other=0.0, eviction_policy="evict_last"), DTYPE)
            if not TRANSPOSED:
                y_offsets = _tile_offsets(
                    segment, row, col_offsets, y_segment_stride, y_row_stride, y_col_stride, Y_ADJACENT, ALIGN
                )
                v *= tl.exp(cast(tl.load(y_ptr + y_offsets, mask=mask, other=0.0), DTYPE))
            sums += v
        row_sum = tl.sum(sums, axis=1)
    if not WRITES:
        store_part(parts_ptr, block, split, num_splits, row_sum, 0, NUM_SLOTS)
    if not SUMS:
        row_sum = merged_sum(parts_ptr, block, num_splits, 0, NUM_SLOTS, BLOCK_ROWS, BLOCK_SPLITS)

    if WRITES:
        for step in range(first_col, stop_col, BLOCK_COLS):
            start = opposite_tile(step, first_col, stop_col, BLOCK_COLS)
            col_offsets = start + tl.arange(0, BLOCK_COLS)
            mask = row_mask & (col_offsets < num_cols)[None, :]
            v_offsets = _tile_offsets(
                segment, row, col_offsets, v_segment_stride, v_row_stride, v_col_stride, V_ADJACENT, ALIGN
            )
            out_offsets = _tile_offsets(
                segment, row, col_offsets, out_segment_stride, out_row_stride, out_col_stride, OUT_ADJACENT, ALIGN
            )
            v = cast(tl.load(v_ptr + v_offsets, mask=mask, other=0.0, eviction_policy="evict_first"), DTYPE)
            if TRANSPOSED:
                y_offsets = _tile_offsets(
                    segment, row, col_offsets, y_segment_stride, y_row_stride, y_col_stride, Y_ADJACENT, ALIGN
                )
                out = v - tl.exp(cast(tl.load(y_ptr + y_offsets, mask=mask, other=0.0), DTYPE)) * row_sum[:, None]
            else:
                out = v - row_sum[:, None]
            store_cast(out_ptr + out_offsets, out, mask)
