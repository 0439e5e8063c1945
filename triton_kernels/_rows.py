"""Device functions shared by the row kernels: addressing, parameter loads, and the projection P of layer norm."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def aligned(stride, ALIGN: tl.constexpr):
    """`stride`, which `ALIGN` divides, in a form that tells the compiler so.

    It sees the factor in the product, where `tl.multiple_of` would get lost on its way to AMD code.
    """
    return (stride // ALIGN) * ALIGN


@triton.jit
def row_offset(row, segment_rows, segment_stride, row_stride, TWO_LEVEL: tl.constexpr, ALIGN: tl.constexpr):
    """Offset, in elements, of each row numbered `row` (int64) in a tensor seen as `[segments, segment_rows, cols]`.

    `ALIGN` is a power of two known to divide both strides: Triton only tests integers for a factor of 16, and a
    factor of 8 is what 16-byte loads of 2-byte elements need.
    """
    if TWO_LEVEL:
        segment = row // segment_rows
        offset = segment * aligned(segment_stride, ALIGN) + (row - segment * segment_rows) * aligned(row_stride, ALIGN)
    else:
        offset = row * aligned(row_stride, ALIGN)
    return offset


@triton.jit
def tile_offsets(offset, col_offsets, col_stride):
    """Element offsets `[BLOCK_ROWS, BLOCK_COLS]` of a tile, in int64: a transposed tensor has wide column strides."""
    return offset[:, None] + (col_offsets.to(tl.int64) * col_stride)[None, :]


@triton.jit
def load_param(
    param_ptr,
    row,
    segment_rows,
    segment_stride,
    col_offsets,
    mask,
    DTYPE: tl.constexpr,
    TWO_LEVEL: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Parameter values that belong to a tile of rows: `[BLOCK_ROWS or 1, BLOCK_COLS]`, zero outside `mask`.

    Args:
        param_ptr: `[segments, cols]`, adjacent columns.
        row: int64 row numbers, `[BLOCK_ROWS]`.
        segment_rows: Rows per segment.
        segment_stride: Distance of two segments of the parameter; 0 for a parameter shared by all of them.
        col_offsets: Column numbers, `[BLOCK_COLS]`.
        mask: The tile's mask; of shape `[1, BLOCK_COLS]` unless `TWO_LEVEL`.
        DTYPE: Dtype of the arithmetic.
        TWO_LEVEL: Whether there is more than one segment.
        ALIGN: Power of two that divides `segment_stride`.
    """
    if TWO_LEVEL:
        offset = (row // segment_rows) * aligned(segment_stride, ALIGN)
        return tl.load(param_ptr + tile_offsets(offset, col_offsets, 1), mask=mask, other=0.0).to(DTYPE)
    return tl.load(param_ptr + col_offsets[None, :], mask=mask, other=0.0).to(DTYPE)


@triton.jit
def apply_projection(v, x_hat, rstd, v_mean, v_x_hat_mean):
    """`P(v)` from the two row means that it needs; `rstd` and the means have shape `[BLOCK_ROWS]`."""
    return rstd[:, None] * (v - v_mean[:, None] - x_hat * v_x_hat_mean[:, None])


@triton.jit
def project(v, x_hat, rstd, num_cols: tl.constexpr):
    """`P(v) = rstd * (v - mean(v) - x_hat * mean(v * x_hat))`, means over the columns.

    Args:
        v: `[BLOCK_ROWS, BLOCK_COLS]`, zero outside the row.
        x_hat: Normalized input, like `v`, zero outside the row.
        rstd: `[BLOCK_ROWS]`.
        num_cols: Number of columns of a row.
    """
    v_mean = tl.sum(v, axis=1) / num_cols
    v_x_hat_mean = tl.sum(v * x_hat, axis=1) / num_cols
    return apply_projection(v, x_hat, rstd, v_mean, v_x_hat_mean)


@triton.jit
def normalize(x, mean, rstd, mask):
    """`x_hat = (x - mean) * rstd`, zero outside `mask`, where `-mean * rstd` could overflow and spoil a sum."""
    return tl.where(mask, x - mean[:, None], 0.0) * rstd[:, None]
