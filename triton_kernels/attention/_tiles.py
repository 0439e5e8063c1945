"""Device functions of the attention kernels: tiles of rows, keys and pairs.

Names of what all kernels take:

    num_heads, GROUP                       heads of q; how many of them share a head of k and v
    num_rows, num_keys                     rows of q, rows of k
    <tensor>_{batch,head,row}_stride       in elements; the last axis of q, k, v and of all that is made is adjacent
    BIAS_STEP, MASK_STEP                   distance of the pairs of a row with two adjacent keys: 1, or 0 if all are one
    noise_heads, seed_stride, offset_stride  heads that share a seed and are counted within it
    WIDTH, VALUE_WIDTH                     of q and k, and of v and o
    BLOCK_WIDTH, BLOCK_VALUE_WIDTH         powers of two that hold them, at least 16, as products of matrices ask
    ALIGN, PAIR_ALIGN                      powers of two: the first divides widths and strides of q, k and v, the second
                                           num_keys and the strides of bias and mask
    SCALE                                  factor of the products
    NUM_DROPPED, NOISE_SCALE               words below this drop their pair; the others are multiplied by the scale
    DTYPE                                  of sums and statistics

The results of an operation, o and its like, lie in memory as [batch, rows, heads, width], and statistics as [batch,
heads, rows]. An operand that is absent is None, and takes no part. A tile of pairs is [rows, keys], or with KEYS_FIRST
its transpose: what a kernel multiplies with it later needs no transpose of its own then. Scores and lse are in units of
log(2) within a kernel: a power of two takes one instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..rows.tiles import aligned
from ..runtime.kernel import INTERPRETED
from ..runtime.numbers import cast
from ..runtime.philox_steps import grouped_words

# The interpreter multiplies the bits of bfloat16 numbers: they are widened there, which changes no result.
WIDENED = tl.constexpr(INTERPRETED)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def product(a, b, total, DTYPE: tl.constexpr):
    """`total + a b`, of operands in their own dtype, with no less precision than theirs."""
    if a is None or b is None:
        result = total
    else:
        if WIDENED and a.dtype == tl.bfloat16:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        result = tl.dot(a, b, total, input_precision="ieee", out_dtype=DTYPE)
    return result


@triton.jit
def add_pairs(total, of_rows, of_keys, KEYS_FIRST: tl.constexpr, DTYPE: tl.constexpr):
    """`total + of_rows of_keys^T`."""
    if of_rows is None or of_keys is None:
        result = total
    elif KEYS_FIRST:
        result = product(of_keys, tl.trans(of_rows), total, DTYPE)
    else:
        result = product(of_rows, tl.trans(of_keys), total, DTYPE)
    return result


@triton.jit
def rows_program(num_heads, num_rows, BLOCK_ROWS: tl.constexpr):
    """Batch, head and first row of a program that owns rows. Of a causal problem the last see most, and begin first."""
    num_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    batch_head = tl.program_id(0) // num_blocks
    start = (num_blocks - 1 - tl.program_id(0) % num_blocks) * BLOCK_ROWS
    return (batch_head // num_heads).to(tl.int64), (batch_head % num_heads).to(tl.int64), start


@triton.jit
def last_key(start_row, num_keys, BLOCK_ROWS: tl.constexpr, CAUSAL: tl.constexpr):
    """The end of the keys that a block of rows sees."""
    end = num_keys
    if CAUSAL:
        end = tl.minimum(num_keys, start_row + BLOCK_ROWS)
    return end


@triton.jit
def head_offset(batch, head, batch_stride, head_stride, ALIGN: tl.constexpr):
    """Where a head begins."""
    return batch * aligned(batch_stride, ALIGN) + head * aligned(head_stride, ALIGN)


@triton.jit
def tile_of(
    base_ptr, offset, row, num_rows, row_stride, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, ALIGN: tl.constexpr
):
    """Rows `row` of a matrix; zero past its end and width."""
    if base_ptr is None:
        tile = None
    else:
        col = tl.arange(0, BLOCK_WIDTH)[None, :]
        mask = (row < num_rows)[:, None]
        if WIDTH != BLOCK_WIDTH:
            mask = mask & (col < WIDTH)
        at = row.to(tl.int64)[:, None] * aligned(row_stride, ALIGN) + col
        tile = tl.load(base_ptr + offset + at, mask=mask, other=0.0)
    return tile


@triton.jit
def made_offsets(batch, head, row, num_rows, num_heads, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Where rows `row` of a head of [batch, rows, heads, width] are, and which of their elements there are."""
    col = tl.arange(0, BLOCK_WIDTH)[None, :]
    mask = (row < num_rows)[:, None]
    if WIDTH != BLOCK_WIDTH:
        mask = mask & (col < WIDTH)
    return ((batch * num_rows + row) * num_heads + head)[:, None] * WIDTH + col, mask


@triton.jit
def made_tile(base_ptr, batch, head, row, num_rows, num_heads, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Rows `row` of a head of [batch, rows, heads, width]; zero past its end and width."""
    if base_ptr is None:
        tile = None
    else:
        offsets, mask = made_offsets(batch, head, row, num_rows, num_heads, WIDTH, BLOCK_WIDTH)
        tile = tl.load(base_ptr + offsets, mask=mask, other=0.0)
    return tile


@triton.jit
def store_tile(base_ptr, batch, head, row, num_rows, num_heads, value, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Write rows `row` of a head of [batch, rows, heads, width], if there is such a tensor."""
    if base_ptr is not None:
        offsets, mask = made_offsets(batch, head, row, num_rows, num_heads, WIDTH, BLOCK_WIDTH)
        tl.store(base_ptr + offsets, cast(value, base_ptr.dtype.element_ty), mask=mask)


@triton.jit
def statistic_of(base_ptr, first, row, num_rows, KEYS_FIRST: tl.constexpr):
    """A statistic of each row, to be combined with pairs; zero past the end."""
    if base_ptr is None:
        spread = None
    else:
        value = tl.load(base_ptr + first + row, mask=row < num_rows, other=0.0)
        spread = value[None, :] if KEYS_FIRST else value[:, None]
    return spread


@triton.jit
def lse_of(lse_ptr, first, row, num_rows, KEYS_FIRST: tl.constexpr):
    """Lse of each row, likewise; zero for rows that see no key, whose P is zero all the same."""
    lse = statistic_of(lse_ptr, first, row, num_rows, KEYS_FIRST)
    return tl.where(lse == -float("inf"), 0.0, lse * LOG2_E)


@triton.jit
def pairs_at(
    base_ptr, offset, row, key, num_rows, num_keys, row_stride,
    STEP: tl.constexpr, ALIGN: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """A tile of bias or mask; zero past the end."""
    if base_ptr is None:
        tile = None
    else:
        row = row[None, :] if KEYS_FIRST else row[:, None]
        key = key[:, None] if KEYS_FIRST else key[None, :]
        inside = (row < num_rows) & (key < aligned(num_keys, ALIGN))
        at = row.to(tl.int64) * aligned(row_stride, ALIGN) + key * STEP
        tile = tl.load(base_ptr + offset + at, mask=inside, other=0)
    return tile


@triton.jit
def seen_pairs(mask, row, key, num_keys, CAUSAL: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Which rows see which keys; None for all.

    Rows past the end may see anything: what belongs to them is zero where it is summed. Keys past the end are seen by
    a program that owns them, and stores nothing of them.
    """
    row = row[None, :] if KEYS_FIRST else row[:, None]
    key = key[:, None] if KEYS_FIRST else key[None, :]
    seen = None if KEYS_FIRST else key < num_keys
    if CAUSAL:
        seen = key <= row if seen is None else seen & (key <= row)
    if mask is not None:
        seen = mask != 0 if seen is None else seen & (mask != 0)
    return seen


@triton.jit
def sample_number(base_ptr, batch_head, noise_heads, stride):
    """The seed or the offset of a head."""
    number = None
    if base_ptr is not None:
        number = tl.load(base_ptr + batch_head // noise_heads * stride)
    return number


@triton.jit
def noise_of(
    seed, offset, batch_head, noise_heads, row, first_key, num_rows, num_keys,
    NUM_DROPPED: tl.constexpr, NOISE_SCALE: tl.constexpr, BLOCK_KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Z of a tile: every row of every head begins with a block of words of its own."""
    if seed is None:
        noise = None
    else:
        block = (batch_head % noise_heads * num_rows + row) * tl.cdiv(num_keys, 4) + first_key // 4
        if offset is not None:
            block += offset
        words = grouped_words(seed, block[:, None] + tl.arange(0, BLOCK_KEYS // 4)[None, :])
        noise = tl.where(words.to(tl.int64) >= NUM_DROPPED, 1.0, 0.0).to(DTYPE) * NOISE_SCALE
        if KEYS_FIRST:
            noise = tl.trans(noise)
    return noise


@triton.jit
def noisy(value, noise):
    """`value`.Z."""
    return value if value is None or noise is None else value * noise


@triton.jit
def less(value, row_part):
    """`value - row_part`."""
    return -row_part if value is None else value - row_part


@triton.jit
def scores_of(q, k, bias, KEYS_FIRST: tl.constexpr, SCALE: tl.constexpr, DTYPE: tl.constexpr):
    """S of a tile."""
    scores = add_pairs(None, q, k, KEYS_FIRST, DTYPE) * (SCALE * LOG2_E)
    return scores if bias is None else scores + cast(bias, DTYPE) * LOG2_E


@triton.jit
def probabilities(q, k, bias, seen, lse, KEYS_FIRST: tl.constexpr, SCALE: tl.constexpr, DTYPE: tl.constexpr):
    """P of a tile."""
    p = tl.exp2(scores_of(q, k, bias, KEYS_FIRST, SCALE, DTYPE) - lse)
    return p if seen is None else tl.where(seen, p, 0.0)


@triton.jit
def scores_dot_of(q, q_dot, k, k_dot, bias_dot, KEYS_FIRST: tl.constexpr, SCALE: tl.constexpr, DTYPE: tl.constexpr):
    """S_dot of a tile; None where the scores do not move."""
    scores_dot = add_pairs(None, q_dot, k, KEYS_FIRST, DTYPE)
    scores_dot = add_pairs(scores_dot, q, k_dot, KEYS_FIRST, DTYPE)
    if scores_dot is not None:
        scores_dot *= SCALE
    if bias_dot is not None:
        bias_dot = cast(bias_dot, DTYPE)
        scores_dot = bias_dot if scores_dot is None else scores_dot + bias_dot
    return scores_dot
