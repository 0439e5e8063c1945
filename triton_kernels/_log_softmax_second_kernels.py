"""Second-order log-softmax kernels, for rows that fit in registers and for longer ones.

Tensors are addressed as in `_log_softmax_kernels`, whose shared arguments these kernels take too. A tensor that no
wanted result needs is neither read nor written, and its pointer may be None. All outputs have the strides of OUT.
"""

# Pyright does not know that branches on constexpr flags are settled at compile time.
# Triton declares constexpr parameters and tl.load as Python types, which the values that kernels pass are not.
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from triton_kernels._log_softmax_kernels import _aligned, _block_rows, _tile_offsets
from triton_kernels._runtime import cast, store_cast, stride_independent_jit
from triton_kernels._split_rows import merged_sum, opposite_tile, row_slice, store_part


@triton.jit
def _load_tile(
    tensor_ptr,
    tile,
    strides,
    eviction_policy: tl.constexpr,
    ADJACENT: tl.constexpr,
    ALIGN: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Elements of a tensor in `DTYPE`, zero outside the mask; `tile` is the segment, rows, columns and mask."""
    offsets = _tile_offsets(tile[0], tile[1], tile[2], strides[0], strides[1], strides[2], ADJACENT, ALIGN)
    return cast(tl.load(tensor_ptr + offsets, mask=tile[3], other=0.0, eviction_policy=eviction_policy), DTYPE)


@triton.jit
def _store_tile(out_ptr, tile, strides, value, ADJACENT: tl.constexpr, ALIGN: tl.constexpr):
    """Writes a tile of an output in the dtype of that output."""
    offsets = _tile_offsets(tile[0], tile[1], tile[2], strides[0], strides[1], strides[2], ADJACENT, ALIGN)
    store_cast(out_ptr + offsets, value, tile[3])


@stride_independent_jit
def log_softmax_pairing_kernel(
    y_bar_ptr,
    y_ptr,
    x_dot_ptr,
    y_bar_bar_ptr,
    output_bar_ptr,
    x_dot_bar_ptr,
    num_rows,
    y_bar_segment_stride,
    y_bar_row_stride,
    y_bar_col_stride,
    y_segment_stride,
    y_row_stride,
    y_col_stride,
    x_dot_segment_stride,
    x_dot_row_stride,
    x_dot_col_stride,
    out_segment_stride,
    out_row_stride,
    out_col_stride,
    num_cols: tl.constexpr,
    WANT_Y_BAR_BAR: tl.constexpr,
    WANT_OUTPUT_BAR: tl.constexpr,
    WANT_X_DOT_BAR: tl.constexpr,
    DTYPE: tl.constexpr,
    Y_BAR_ADJACENT: tl.constexpr,
    Y_ADJACENT: tl.constexpr,
    X_DOT_ADJACENT: tl.constexpr,
    OUT_ADJACENT: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Writes the wanted derivatives of the pairing for BLOCK_ROWS whole rows, reading y_bar, y and x_dot once.

    With p = exp(y): `y_bar_bar = x_dot - sum(p * x_dot)`, `output_bar = -p * x_dot * sum(y_bar)` and
    `x_dot_bar = y_bar - p * sum(y_bar)`.
    """
    segment, row = _block_rows(tl.program_id(0), num_rows, BLOCK_ROWS)
    col_offsets = tl.arange(0, BLOCK_COLS)
    mask = (row < _aligned(num_rows, ROW_ALIGN))[:, None] & (col_offsets < num_cols)[None, :]
    tile = (segment, row, col_offsets, mask)
    y_bar_strides = (y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride)
    y_strides = (y_segment_stride, y_row_stride, y_col_stride)
    x_dot_strides = (x_dot_segment_stride, x_dot_row_stride, x_dot_col_stride)
    out_strides = (out_segment_stride, out_row_stride, out_col_stride)

    if WANT_OUTPUT_BAR or WANT_X_DOT_BAR:
        y_bar = _load_tile(y_bar_ptr, tile, y_bar_strides, "", Y_BAR_ADJACENT, ALIGN, DTYPE)
        y_bar_sum = tl.sum(y_bar, axis=1)[:, None]
    p = tl.exp(_load_tile(y_ptr, tile, y_strides, "", Y_ADJACENT, ALIGN, DTYPE))
    if WANT_Y_BAR_BAR or WANT_OUTPUT_BAR:
        x_dot = _load_tile(x_dot_ptr, tile, x_dot_strides, "", X_DOT_ADJACENT, ALIGN, DTYPE)
        weighted = p * x_dot
    if WANT_Y_BAR_BAR:
        y_bar_bar = x_dot - tl.sum(weighted, axis=1)[:, None]
        _store_tile(y_bar_bar_ptr, tile, out_strides, y_bar_bar, OUT_ADJACENT, ALIGN)
    if WANT_OUTPUT_BAR:
        _store_tile(output_bar_ptr, tile, out_strides, -weighted * y_bar_sum, OUT_ADJACENT, ALIGN)
    if WANT_X_DOT_BAR:
        _store_tile(x_dot_bar_ptr, tile, out_strides, y_bar - p * y_bar_sum, OUT_ADJACENT, ALIGN)


@stride_independent_jit
def log_softmax_pairing_looped_kernel(  # noqa: C901 - its branches are settled when it is compiled
    y_bar_ptr,
    y_ptr,
    x_dot_ptr,
    y_bar_bar_ptr,
    output_bar_ptr,
    x_dot_bar_ptr,
    parts_ptr,
    num_splits,
    num_rows,
    y_bar_segment_stride,
    y_bar_row_stride,
    y_bar_col_stride,
    y_segment_stride,
    y_row_stride,
    y_col_stride,
    x_dot_segment_stride,
    x_dot_row_stride,
    x_dot_col_stride,
    out_segment_stride,
    out_row_stride,
    out_col_stride,
    num_cols: tl.constexpr,
    WANT_Y_BAR_BAR: tl.constexpr,
    WANT_OUTPUT_BAR: tl.constexpr,
    WANT_X_DOT_BAR: tl.constexpr,
    DTYPE: tl.constexpr,
    Y_BAR_ADJACENT: tl.constexpr,
    Y_ADJACENT: tl.constexpr,
    X_DOT_ADJACENT: tl.constexpr,
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
    """Does what `log_softmax_pairing_kernel` does to BLOCK_ROWS long rows: one sweep for the sums, one that writes.

    Each sweep reads only what its sums or the wanted outputs take.
    """
    block, split, first_col, stop_col = row_slice(num_splits, num_cols, BLOCK_COLS, SUMS, WRITES)
    segment, row = _block_rows(block, num_rows, BLOCK_ROWS)
    row_mask = (row < _aligned(num_rows, ROW_ALIGN))[:, None]
    y_bar_strides = (y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride)
    y_strides = (y_segment_stride, y_row_stride, y_col_stride)
    x_dot_strides = (x_dot_segment_stride, x_dot_row_stride, x_dot_col_stride)
    out_strides = (out_segment_stride, out_row_stride, out_col_stride)

    if SUMS:
        y_bar_sums = tl.zeros((BLOCK_ROWS, BLOCK_COLS), DTYPE)
        weighted_sums = tl.zeros((BLOCK_ROWS, BLOCK_COLS), DTYPE)
        for start in range(first_col, stop_col, BLOCK_COLS):
            col_offsets = start + tl.arange(0, BLOCK_COLS)
            tile = (segment, row, col_offsets, row_mask & (col_offsets < num_cols)[None, :])
            if WANT_OUTPUT_BAR or WANT_X_DOT_BAR:
                y_bar_sums += _load_tile(
                    y_bar_ptr, tile, y_bar_strides, "evict_last" if WANT_X_DOT_BAR else "", Y_BAR_ADJACENT, ALIGN, DTYPE
                )
            if WANT_Y_BAR_BAR:
                p = tl.exp(_load_tile(y_ptr, tile, y_strides, "", Y_ADJACENT, ALIGN, DTYPE))
                x_dot = _load_tile(x_dot_ptr, tile, x_dot_strides, "evict_last", X_DOT_ADJACENT, ALIGN, DTYPE)
                weighted_sums += p * x_dot
        y_bar_sum = tl.sum(y_bar_sums, axis=1)
        weighted_sum = tl.sum(weighted_sums, axis=1)
    if not WRITES:
        if WANT_OUTPUT_BAR or WANT_X_DOT_BAR:
            store_part(parts_ptr, block, split, num_splits, y_bar_sum, 0, NUM_SLOTS)
        if WANT_Y_BAR_BAR:
            store_part(parts_ptr, block, split, num_splits, weighted_sum, 1, NUM_SLOTS)
    if not SUMS:
        if WANT_OUTPUT_BAR or WANT_X_DOT_BAR:
            y_bar_sum = merged_sum(parts_ptr, block, num_splits, 0, NUM_SLOTS, BLOCK_ROWS, BLOCK_SPLITS)
        if WANT_Y_BAR_BAR:
            weighted_sum = merged_sum(parts_ptr, block, num_splits, 1, NUM_SLOTS, BLOCK_ROWS, BLOCK_SPLITS)

    if WRITES:
        for step in range(first_col, stop_col, BLOCK_COLS):
            start = opposite_tile(step, first_col, stop_col, BLOCK_COLS)
            col_offsets = start + tl.arange(0, BLOCK_COLS)
            tile = (segment, row, col_offsets, row_mask & (col_offsets < num_cols)[None, :])
            if WANT_OUTPUT_BAR or WANT_X_DOT_BAR:
                p = tl.exp(_load_tile(y_ptr, tile, y_strides, "", Y_ADJACENT, ALIGN, DTYPE))
            if WANT_Y_BAR_BAR or WANT_OUTPUT_BAR:
                x_dot = _load_tile(x_dot_ptr, tile, x_dot_strides, "evict_first", X_DOT_ADJACENT, ALIGN, DTYPE)
            if WANT_Y_BAR_BAR:
                _store_tile(y_bar_bar_ptr, tile, out_strides, x_dot - weighted_sum[:, None], OUT_ADJACENT, ALIGN)
            if WANT_OUTPUT_BAR:
                _store_tile(output_bar_ptr, tile, out_strides, -p * x_dot * y_bar_sum[:, None], OUT_ADJACENT, ALIGN)
            if WANT_X_DOT_BAR:
                y_bar = _load_tile(y_bar_ptr, tile, y_bar_strides, "evict_first", Y_BAR_ADJACENT, ALIGN, DTYPE)
                _store_tile(x_dot_bar_ptr, tile, out_strides, y_bar - p * y_bar_sum[:, None], OUT_ADJACENT, ALIGN)


@stride_independent_jit
def log_softmax_bwd_jvp_kernel(
    y_bar_ptr,
    y_ptr,
    y_bar_dot_ptr,
    y_dot_ptr,
    x_bar_dot_ptr,
    num_rows,
    y_bar_segment_stride,
    y_bar_row_stride,
    y_bar_col_stride,
    y_segment_stride,
    y_row_stride,
    y_col_stride,
    y_bar_dot_segment_stride,
    y_bar_dot_row_stride,
    y_bar_dot_col_stride,
    y_dot_segment_stride,
    y_dot_row_stride,
    y_dot_col_stride,
    out_segment_stride,
    out_row_stride,
    out_col_stride,
    num_cols: tl.constexpr,
    HAS_Y_BAR_DOT: tl.constexpr,
    HAS_Y_DOT: tl.constexpr,
    DTYPE: tl.constexpr,
    Y_BAR_ADJACENT: tl.constexpr,
    Y_ADJACENT: tl.constexpr,
    Y_BAR_DOT_ADJACENT: tl.constexpr,
    Y_DOT_ADJACENT: tl.constexpr,
    OUT_ADJACENT: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """Writes the tangent of x_bar for BLOCK_ROWS whole rows, reading y_bar, y, y_bar_dot and y_dot once.

    With p = exp(y): `x_bar_dot = y_bar_dot - p * (y_dot * sum(y_bar) + sum(y_bar_dot))`, without the terms of a tangent
    that is absent.
    """
    segment, row = _block_rows(tl.program_id(0), num_rows, BLOCK_ROWS)
    col_offsets = tl.arange(0, BLOCK_COLS)
    mask = (row < _aligned(num_rows, ROW_ALIGN))[:, None] & (col_offsets < num_cols)[None, :]
    tile = (segment, row, col_offsets, mask)
    y_bar_strides = (y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride)
    y_strides = (y_segment_stride, y_row_stride, y_col_stride)
    y_bar_dot_strides = (y_bar_dot_segment_stride, y_bar_dot_row_stride, y_bar_dot_col_stride)
    y_dot_strides = (y_dot_segment_stride, y_dot_row_stride, y_dot_col_stride)
    out_strides = (out_segment_stride, out_row_stride, out_col_stride)

    if HAS_Y_DOT:
        y_bar = _load_tile(y_bar_ptr, tile, y_bar_strides, "", Y_BAR_ADJACENT, ALIGN, DTYPE)
        y_bar_sum = tl.sum(y_bar, axis=1)[:, None]
    p = tl.exp(_load_tile(y_ptr, tile, y_strides, "", Y_ADJACENT, ALIGN, DTYPE))
    if HAS_Y_BAR_DOT:
        y_bar_dot = _load_tile(y_bar_dot_ptr, tile, y_bar_dot_strides, "", Y_BAR_DOT_ADJACENT, ALIGN, DTYPE)
        y_bar_dot_sum = tl.sum(y_bar_dot, axis=1)[:, None]
    if HAS_Y_DOT:
        y_dot = _load_tile(y_dot_ptr, tile, y_dot_strides, "", Y_DOT_ADJACENT, ALIGN, DTYPE)
        change = p * (y_dot * y_bar_sum + y_bar_dot_sum) if HAS_Y_BAR_DOT else p * y_dot * y_bar_sum
    else:
        change = p * y_bar_dot_sum
    _store_tile(x_bar_dot_ptr, tile, out_strides, y_bar_dot - change if HAS_Y_BAR_DOT else -change, OUT_ADJACENT, ALIGN)


@stride_independent_jit
def log_softmax_bwd_jvp_looped_kernel(  # noqa: C901 - its branches are settled when it is compiled
    y_bar_ptr,
    y_ptr,
    y_bar_dot_ptr,
    y_dot_ptr,
    x_bar_dot_ptr,
    parts_ptr,
    num_splits,
    num_rows,
    y_bar_segment_stride,
    y_bar_row_stride,
    y_bar_col_stride,
    y_segment_stride,
    y_row_stride,
    y_col_stride,
    y_bar_dot_segment_stride,
    y_bar_dot_row_stride,
    y_bar_dot_col_stride,
    y_dot_segment_stride,
    y_dot_row_stride,
    y_dot_col_stride,
    out_segment_stride,
    out_row_stride,
    out_col_stride,
    num_cols: tl.constexpr,
    HAS_Y_BAR_DOT: tl.constexpr,
    HAS_Y_DOT: tl.constexpr,
    DTYPE: tl.constexpr,
    Y_BAR_ADJACENT: tl.constexpr,
    Y_ADJACENT: tl.constexpr,
    Y_BAR_DOT_ADJACENT: tl.constexpr,
    Y_DOT_ADJACENT: tl.constexpr,
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
    """Does what `log_softmax_bwd_jvp_kernel` does to BLOCK_ROWS long rows: one sweep for the sums, one that writes.

    Only y_bar_dot is read by both.
    """
    block, split, first_col, stop_col = row_slice(num_splits, num_cols, BLOCK_COLS, SUMS, WRITES)
    segment, row = _block_rows(block, num_rows, BLOCK_ROWS)
    row_mask = (row < _aligned(num_rows, ROW_ALIGN))[:, None]
    y_bar_strides = (y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride)
    y_strides = (y_segment_stride, y_row_stride, y_col_stride)
    y_bar_dot_strides = (y_bar_dot_segment_stride, y_bar_dot_row_stride, y_bar_dot_col_stride)
    y_dot_strides = (y_dot_segment_stride, y_dot_row_stride, y_dot_col_stride)
    out_strides = (out_segment_stride, out_row_stride, out_col_stride)

    if SUMS:
        y_bar_sums = tl.zeros((BLOCK_ROWS, BLOCK_COLS), DTYPE)
        y_bar_dot_sums = tl.zeros((BLOCK_ROWS, BLOCK_COLS), DTYPE)
        for start in range(first_col, stop_col, BLOCK_COLS):
            col_offsets = start + tl.arange(0, BLOCK_COLS)
            tile = (segment, row, col_offsets, row_mask & (col_offsets < num_cols)[None, :])
            if HAS_Y_DOT:
                y_bar_sums += _load_tile(y_bar_ptr, tile, y_bar_strides, "", Y_BAR_ADJACENT, ALIGN, DTYPE)
            if HAS_Y_BAR_DOT:
                y_bar_dot_sums += _load_tile(
                    y_bar_dot_ptr, tile, y_bar_dot_strides, "evict_last", Y_BAR_DOT_ADJACENT, ALIGN, DTYPE
                )
        y_bar_sum = tl.sum(y_bar_sums, axis=1)
        y_bar_dot_sum = tl.sum(y_bar_dot_sums, axis=1)
    if not WRITES:
        if HAS_Y_DOT:
            store_part(parts_ptr, block, split, num_splits, y_bar_sum, 0, NUM_SLOTS)
        if HAS_Y_BAR_DOT:
            store_part(parts_ptr, block, split, num_splits, y_bar_dot_sum, 1, NUM_SLOTS)
    if not SUMS:
        if HAS_Y_DOT:
            y_bar_sum = merged_sum(parts_ptr, block, num_splits, 0, NUM_SLOTS, BLOCK_ROWS, BLOCK_SPLITS)
        if HAS_Y_BAR_DOT:
            y_bar_dot_sum = merged_sum(parts_ptr, block, num_splits, 1, NUM_SLOTS, BLOCK_ROWS, BLOCK_SPLITS)

    if WRITES:
        for step in range(first_col, stop_col, BLOCK_COLS):
            start = opposite_tile(step, first_col, stop_col, BLOCK_COLS)
            col_offsets = start + tl.arange(0, BLOCK_COLS)
            tile = (segment, row, col_offsets, row_mask & (col_offsets < num_cols)[None, :])
            p = tl.exp(_load_tile(y_ptr, tile, y_strides, "", Y_ADJACENT, ALIGN, DTYPE))
            if HAS_Y_BAR_DOT:
                y_bar_dot = _load_tile(
                    y_bar_dot_ptr, tile, y_bar_dot_strides, "evict_first", Y_BAR_DOT_ADJACENT, ALIGN, DTYPE
                )
            if HAS_Y_DOT:
                y_dot = _load_tile(y_dot_ptr, tile, y_dot_strides, "", Y_DOT_ADJACENT, ALIGN, DTYPE)
                change = (
                    p * (y_dot * y_bar_sum[:, None] + y_bar_dot_sum[:, None])
                    if HAS_Y_BAR_DOT
                    else p * y_dot * y_bar_sum[:, None]
                )
            else:
                change = p * y_bar_dot_sum[:, None]
            _store_tile(
                x_bar_dot_ptr, tile, out_strides, y_bar_dot - change if HAS_Y_BAR_DOT else -change, OUT_ADJACENT, ALIGN
            )
