"""Device functions that draw Philox words for tiles, and the kernel that stores them.

Word i of a stream is word `i % 4` of block `offset + i // 4` (see `tl.randint4x`).

Kernels over rows that draw noise take `(seed_ptr, seed_segment_stride, num_stream_rows, last_dropped, scale_low,
scale_high)`: the seeds of the segments, or one, and None for no noise; the rows of a segment, or 0 where one stream
goes through all; bits of the largest word that drops its element; and those of what the others are multiplied by.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernel import unspecialized_jit
from .numbers import cast, float64_of_bits


@triton.jit
def grouped_words(seed, block):
    """Four words of each block number `[..., n]`, one after another: `[..., 4 * n]`, uint32."""
    w0, w1, w2, w3 = tl.randint4x(seed, block)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def single_words(seed, offset, index):
    """Word `index` of the stream for each element of `index`, uint32: four are computed for one that is taken."""
    w0, w1, w2, w3 = tl.randint4x(seed, offset + (index >> 2))
    lane = index & 3
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def begin_stream(noise, segment):
    """The arguments of `noise_of` for the rows of a segment; nothing without noise."""
    stream = ()
    if noise[0] is not None:
        seed = tl.load(noise[0] + segment * noise[1])
        stream = (seed, segment * noise[2], noise[3], noise[4], noise[5])
    return stream


@triton.jit
def noise_of(stream, row, start, num_cols: tl.constexpr, BLOCK_COLS: tl.constexpr, DTYPE: tl.constexpr):
    """The factors of dropout for a tile, whose rows have the numbers `row` among all, from column `start` on."""
    row = row - stream[1]
    if num_cols % 4 == 0:
        block = start // 4 + tl.arange(0, BLOCK_COLS // 4)
        words = grouped_words(stream[0], row * (num_cols // 4) + block[None, :])
    else:
        words = single_words(stream[0], 0, row * num_cols + (start + tl.arange(0, BLOCK_COLS))[None, :])
    kept = words > stream[2].to(tl.int32).to(tl.uint32, bitcast=True)
    return tl.where(kept, cast(float64_of_bits(stream[3], stream[4]), DTYPE), 0.0)


@unspecialized_jit
def philox_kernel(
    words_ptr, seed_ptr, offset_ptr, num_words, seed_stride, offset_stride, BLOCK: tl.constexpr, ALIGN: tl.constexpr
):
    """Writes BLOCK words of one stream, of `[num_streams, num_words]`."""
    num_blocks = tl.cdiv(num_words, BLOCK)
    stream = (tl.program_id(0) // num_blocks).to(tl.int64)
    start = (tl.program_id(0) % num_blocks).to(tl.int64) * BLOCK
    seed = tl.load(seed_ptr + stream * seed_stride)
    block = tl.load(offset_ptr + stream * offset_stride) + start // 4 + tl.arange(0, BLOCK // 4)
    index = start + tl.arange(0, BLOCK)
    num_words = (num_words // ALIGN) * ALIGN
    words = grouped_words(seed, block)
    tl.store(words_ptr + stream * num_words + index, words.to(tl.int64), mask=index < num_words)
