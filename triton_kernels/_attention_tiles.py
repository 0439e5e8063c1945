"""Device functions of the attention kernels: tiles of rows, keys and pairs.

Names of what all kernels take:

    num_heads, GROUP                       heads of q; how many of them share a head of k and v
    num_rows, num_keys                     rows of q, rows of k
    <tensor>_{batch,head,row}_stride       in elements; the last axis of every tensor is adjacent
    bias_*_stride, mask_*_stride           of [batch, heads, rows, keys], 0 where one serves all
    noise_heads, seed_stride, offset_stride  heads that share a seed and are counted within it
    WIDTH, VALUE_WIDTH                     of q and k, and of v and o
    BLOCK_WIDTH, BLOCK_VALUE_WIDTH         powers of two that hold them, at least 16, as products of matrices ask
    ALIGN                                  power of two that divides every stride and width
    SCALE                                  factor of the products
    NUM_DROPPED, NOISE_SCALE               words below this drop their pair; the others are multiplied by the scale
    DTYPE                                  of sums and statistics

What an operation makes, o and its like, lies in memory as [batch, rows, heads, width], and statistics as [batch, heads,
rows].
"""

# Triton declares constexpr parameters and tl.load as Python types, which the values that kernels pass are not.
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

from triton_kernels._kernel import INTERPRETED
from triton_kernels._philox_steps import grouped_words
from triton_kernels._runtime import cast

# The interpreter multiplies the bits of bfloat16 numbers: they are widened there, which changes no result.
WIDENED = tl.constexpr(INTERPRETED)


@triton.jit
def product(a, b, total, DTYPE: tl.constexpr):
    """`total + a b`, of operands in their own dtype, with no less precision than theirs."""
    if WIDENED and a.dtype == tl.bfloat16:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee", out_dtype=DTYPE)


@triton.jit
def scores_product(a, b, DTYPE: tl.constexpr):
    """`a b^T`."""
    return product(a, tl.trans(b), tl.zeros([a.shape[0], b.shape[0]], DTYPE), DTYPE)


@triton.jit
def aligned(number, ALIGN: tl.constexpr):
    """`number`, of which the compiler sees that ALIGN divides it."""
    return (number // ALIGN) * ALIGN


@triton.jit
def tile_of(base_ptr, row, num_rows, row_stride, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, ALIGN: tl.constexpr):
    """Rows `row` of a matrix; zero past its end and width."""
    col = tl.arange(0, BLOCK_WIDTH)
    mask = (row < num_rows)[:, None]
    if WIDTH != BLOCK_WIDTH:
        mask = mask & (col < WIDTH)[None, :]
    offsets = row.to(tl.int64)[:, None] * aligned(row_stride, ALIGN) + col[None, :]
    return tl.load(base_ptr + offsets, mask=mask, other=0.0)


@triton.jit
def store_tile(
    base_ptr, row, num_rows, row_stride, value, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, ALIGN: tl.constexpr
):
    """Write rows `row` of a matrix."""
    col = tl.arange(0, BLOCK_WIDTH)
    mask = (row < num_rows)[:, None]
    if WIDTH != BLOCK_WIDTH:
        mask = mask & (col < WIDTH)[None, :]
    offsets = row.to(tl.int64)[:, None] * aligned(row_stride, ALIGN) + col[None, :]
    tl.store(base_ptr + offsets, cast(value, base_ptr.dtype.element_ty), mask=mask)


@triton.jit
def pairs_at(base_ptr, row, key, num_rows, num_keys, row_stride, key_stride):
    """A tile of bias or mask; zero past the end."""
    inside = (row < num_rows)[:, None] & (key < num_keys)[None, :]
    offsets = row.to(tl.int64)[:, None] * row_stride + key.to(tl.int64)[None, :] * key_stride
    return tl.load(base_ptr + offsets, mask=inside, other=0)


@triton.jit
def seen_pairs(mask_ptr, row, key, num_rows, num_keys, row_stride, key_stride, CAUSAL: tl.constexpr):
    """Which rows see which keys."""
    seen = (row < num_rows)[:, None] & (key < num_keys)[None, :]
    if CAUSAL:
        seen = seen & (key[None, :] <= row[:, None])
    if mask_ptr is not None:
        seen = seen & (pairs_at(mask_ptr, row, key, num_rows, num_keys, row_stride, key_stride) != 0)
    return seen


@triton.jit
def noise_of(
    seed_ptr,
    offset_ptr,
    seed_stride,
    offset_stride,
    batch_head,
    noise_heads,
    row,
    first_key,
    num_rows,
    num_keys,
    NUM_DROPPED: tl.constexpr,
    NOISE_SCALE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Z of a tile: every row of every head begins with a block of words of its own."""
    sample = (batch_head // noise_heads).to(tl.int64)
    head = batch_head % noise_heads
    seed = tl.load(seed_ptr + sample * seed_stride)
    first = (head.to(tl.int64) * num_rows + row) * tl.cdiv(num_keys, 4)
    if offset_ptr is not None:
        first = first + tl.load(offset_ptr + sample * offset_stride)
    block = first[:, None] + (first_key // 4 + tl.arange(0, BLOCK_KEYS // 4))[None, :]
    kept = grouped_words(seed, block).to(tl.int64) >= NUM_DROPPED
    return tl.where(kept, 1.0, 0.0).to(DTYPE) * NOISE_SCALE


@triton.jit
def last_key(start_row, num_keys, BLOCK_ROWS: tl.constexpr, CAUSAL: tl.constexpr):
    """The end of the keys that a block of rows sees."""
    end = num_keys
    if CAUSAL:
        end = tl.minimum(num_keys, start_row + BLOCK_ROWS)
    return end
