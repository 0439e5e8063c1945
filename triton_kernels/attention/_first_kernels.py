"""Attention kernels: forward, and the tangent of its results.

A program owns BLOCK_ROWS rows of one head, and sweeps the keys that they see, BLOCK_KEYS at a time. `_tiles`
says what the arguments are.
"""

from __future__ import annotations

import triton.language as tl

from ..rows.tiles import rounded
from ..runtime.kernel import unspecialized_jit
from ..runtime.numbers import cast
from ._tiles import (
    LOG2_E,
    head_offset,
    last_key,
    lse_of,
    made_tile,
    noise_of,
    noisy,
    pairs_at,
    probabilities,
    product,
    rows_program,
    sample_number,
    scores_dot_of,
    scores_of,
    seen_pairs,
    store_tile,
    tile_of,
)


@unspecialized_jit
def attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, seed_ptr, offset_ptr,
    o_ptr, lse_ptr,
    num_heads, num_rows, num_keys, noise_heads, seed_stride, offset_stride,
    q_batch_stride, q_head_stride, q_row_stride,
    k_batch_stride, k_head_stride, k_row_stride,
    v_batch_stride, v_head_stride, v_row_stride,
    bias_batch_stride, bias_head_stride, bias_row_stride,
    mask_batch_stride, mask_head_stride, mask_row_stride,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, BLOCK_VALUE_WIDTH: tl.constexpr,
    ALIGN: tl.constexpr, PAIR_ALIGN: tl.constexpr, BIAS_STEP: tl.constexpr, MASK_STEP: tl.constexpr,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, NUM_DROPPED: tl.constexpr, NOISE_SCALE: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Writes o and lse: two products of matrices for each tile of pairs."""
    batch, head, start = rows_program(num_heads, num_rows, BLOCK_ROWS)
    batch_head = batch * num_heads + head
    row = start + tl.arange(0, BLOCK_ROWS)
    k_offset = head_offset(batch, head // GROUP, k_batch_stride, k_head_stride, ALIGN)
    v_offset = head_offset(batch, head // GROUP, v_batch_stride, v_head_stride, ALIGN)
    bias_offset = head_offset(batch, head, bias_batch_stride, bias_head_stride, PAIR_ALIGN)
    mask_offset = head_offset(batch, head, mask_batch_stride, mask_head_stride, PAIR_ALIGN)
    q_offset = head_offset(batch, head, q_batch_stride, q_head_stride, ALIGN)
    q = tile_of(q_ptr, q_offset, row, num_rows, q_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
    seed = sample_number(seed_ptr, batch_head, noise_heads, seed_stride)
    offset = sample_number(offset_ptr, batch_head, noise_heads, offset_stride)

    top = tl.full([BLOCK_ROWS], -float("inf"), DTYPE)
    total = tl.zeros([BLOCK_ROWS], DTYPE)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_VALUE_WIDTH], DTYPE)
    for first in range(0, last_key(start, num_keys, BLOCK_ROWS, CAUSAL), BLOCK_KEYS):
        key = first + tl.arange(0, BLOCK_KEYS)
        k = tile_of(k_ptr, k_offset, key, num_keys, k_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
        v = tile_of(v_ptr, v_offset, key, num_keys, v_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN)
        bias = pairs_at(
            bias_ptr, bias_offset, row, key, num_rows, num_keys, bias_row_stride, BIAS_STEP, PAIR_ALIGN, False
        )
        mask = pairs_at(
            mask_ptr, mask_offset, row, key, num_rows, num_keys, mask_row_stride, MASK_STEP, PAIR_ALIGN, False
        )
        seen = seen_pairs(mask, row, key, num_keys, CAUSAL, False)
        scores = tl.where(seen, scores_of(q, k, bias, False, SCALE, DTYPE), -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet has no maximum to subtract.
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        shrink = tl.exp2(top - shift)
        p = tl.exp2(scores - shift[:, None])
        total = total * shrink + tl.sum(p, 1)
        noise = noise_of(
            seed, offset, batch_head, noise_heads, row, first, num_rows, num_keys,
            NUM_DROPPED, NOISE_SCALE, BLOCK_KEYS, False, DTYPE,
        )  # fmt: skip
        acc = product(cast(noisy(p, noise), v.dtype), v, acc * shrink[:, None], DTYPE)
        top = higher
    sees_none = total == 0.0
    total = tl.where(sees_none, 1.0, total)
    lse = tl.where(sees_none, -float("inf"), (top + tl.log2(total)) / LOG2_E)
    tl.store(lse_ptr + batch_head * num_rows + row, lse, mask=row < num_rows)
    store_tile(o_ptr, batch, head, row, num_rows, num_heads, acc / total[:, None], VALUE_WIDTH, BLOCK_VALUE_WIDTH)


@unspecialized_jit
def attention_jvp_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, seed_ptr, offset_ptr,
    o_ptr, lse_ptr, q_dot_ptr, k_dot_ptr, v_dot_ptr, bias_dot_ptr, o_dot_ptr, lse_dot_ptr,
    num_heads, num_rows, num_keys, noise_heads, seed_stride, offset_stride,
    q_batch_stride, q_head_stride, q_row_stride,
    k_batch_stride, k_head_stride, k_row_stride,
    v_batch_stride, v_head_stride, v_row_stride,
    bias_batch_stride, bias_head_stride, bias_row_stride,
    mask_batch_stride, mask_head_stride, mask_row_stride,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr, BLOCK_VALUE_WIDTH: tl.constexpr,
    ALIGN: tl.constexpr, PAIR_ALIGN: tl.constexpr, BIAS_STEP: tl.constexpr, MASK_STEP: tl.constexpr,
    SCALE: tl.constexpr, CAUSAL: tl.constexpr, NUM_DROPPED: tl.constexpr, NOISE_SCALE: tl.constexpr,
    DTYPE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Writes o_dot and lse_dot, given o and lse: five products of matrices for each tile of pairs.

    Tangents have the strides of what they are tangents of; o has those of o_dot. A row's mean of S_dot, in the first
    tile where the row sees a key, is taken away before rounding, so that a part that all keys share costs no digits.
    """
    batch, head, start = rows_program(num_heads, num_rows, BLOCK_ROWS)
    batch_head = batch * num_heads + head
    row = start + tl.arange(0, BLOCK_ROWS)
    q_offset = head_offset(batch, head, q_batch_stride, q_head_stride, ALIGN)
    k_offset = head_offset(batch, head // GROUP, k_batch_stride, k_head_stride, ALIGN)
    v_offset = head_offset(batch, head // GROUP, v_batch_stride, v_head_stride, ALIGN)
    bias_offset = head_offset(batch, head, bias_batch_stride, bias_head_stride, PAIR_ALIGN)
    mask_offset = head_offset(batch, head, mask_batch_stride, mask_head_stride, PAIR_ALIGN)
    lse = lse_of(lse_ptr, batch_head * num_rows, row, num_rows, False)
    q = tile_of(q_ptr, q_offset, row, num_rows, q_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
    q_dot = tile_of(q_dot_ptr, q_offset, row, num_rows, q_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
    seed = sample_number(seed_ptr, batch_head, noise_heads, seed_stride)
    offset = sample_number(offset_ptr, batch_head, noise_heads, offset_stride)

    shared = tl.zeros([BLOCK_ROWS], DTYPE)
    sees = tl.zeros([BLOCK_ROWS], tl.int1)
    total = tl.zeros([BLOCK_ROWS], DTYPE)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_VALUE_WIDTH], DTYPE)
    for first in range(0, last_key(start, num_keys, BLOCK_ROWS, CAUSAL), BLOCK_KEYS):
        key = first + tl.arange(0, BLOCK_KEYS)
        k = tile_of(k_ptr, k_offset, key, num_keys, k_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
        k_dot = tile_of(k_dot_ptr, k_offset, key, num_keys, k_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
        v = tile_of(v_ptr, v_offset, key, num_keys, v_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN)
        v_dot = tile_of(v_dot_ptr, v_offset, key, num_keys, v_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN)
        bias = pairs_at(
            bias_ptr, bias_offset, row, key, num_rows, num_keys, bias_row_stride, BIAS_STEP, PAIR_ALIGN, False
        )
        bias_dot = pairs_at(
            bias_dot_ptr, bias_offset, row, key, num_rows, num_keys, bias_row_stride, BIAS_STEP, PAIR_ALIGN, False
        )
        mask = pairs_at(
            mask_ptr, mask_offset, row, key, num_rows, num_keys, mask_row_stride, MASK_STEP, PAIR_ALIGN, False
        )
        seen = seen_pairs(mask, row, key, num_keys, CAUSAL, False)
        p = probabilities(q, k, bias, seen, lse, False, SCALE, DTYPE)
        noise = noise_of(
            seed, offset, batch_head, noise_heads, row, first, num_rows, num_keys,
            NUM_DROPPED, NOISE_SCALE, BLOCK_KEYS, False, DTYPE,
        )  # fmt: skip
        scores_dot = scores_dot_of(q, q_dot, k, k_dot, bias_dot, False, SCALE, DTYPE)
        if scores_dot is not None:
            # The keys of a first tile may all be hidden from a row, as padding is: its first tile with one counts.
            if bias is not None or mask is not None:
                weight = tl.sum(p, 1)
                mean = tl.sum(rounded(p * scores_dot), 1) / tl.where(weight > 0.0, weight, 1.0)
                shared = tl.where(sees, shared, mean)
                sees = sees | (weight > 0.0)
            elif first == 0:
                weight = tl.sum(p, 1)
                shared = tl.sum(rounded(p * scores_dot), 1) / tl.where(weight > 0.0, weight, 1.0)
            p_dot = rounded(p * (scores_dot - shared[:, None]))
            total += tl.sum(p_dot, 1)
            acc = product(cast(noisy(p_dot, noise), v.dtype), v, acc, DTYPE)
        if v_dot is not None:
            acc = product(cast(noisy(p, noise), v_dot.dtype), v_dot, acc, DTYPE)
    # Of what P sums to: a row that sees no key has no mean to add.
    tl.store(lse_dot_ptr + batch_head * num_rows + row, total + shared, mask=row < num_rows)
    o = made_tile(o_ptr, batch, head, row, num_rows, num_heads, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
    acc -= total[:, None] * cast(o, DTYPE)
    store_tile(o_dot_ptr, batch, head, row, num_rows, num_heads, acc, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
