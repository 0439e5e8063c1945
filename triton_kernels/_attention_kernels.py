"""Attention kernels: forward, and the tangent of its results.

A program owns BLOCK_ROWS rows of one head, and sweeps the keys that they see, BLOCK_KEYS at a time. `_attention_tiles`
says what the arguments are.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton.language as tl

from triton_kernels._attention_tiles import (
    last_key,
    noise_of,
    pairs_at,
    product,
    scores_product,
    seen_pairs,
    store_tile,
    tile_of,
)
from triton_kernels._philox_steps import unspecialized_jit
from triton_kernels._runtime import cast


@unspecialized_jit
def attention_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    mask_ptr,
    seed_ptr,
    offset_ptr,
    o_ptr,
    lse_ptr,
    num_heads,
    num_rows,
    num_keys,
    noise_heads,
    seed_stride,
    offset_stride,
    q_batch_stride,
    q_head_stride,
    q_row_stride,
    k_batch_stride,
    k_head_stride,
    k_row_stride,
    v_batch_stride,
    v_head_stride,
    v_row_stride,
    bias_batch_stride,
    bias_head_stride,
    bias_row_stride,
    bias_key_stride,
    mask_batch_stride,
    mask_head_stride,
    mask_row_stride,
    mask_key_stride,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE_WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    NUM_DROPPED: tl.constexpr,
    NOISE_SCALE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):  # fmt: skip - the arguments in groups
    """Writes o and lse: two products of matrices for each tile of pairs."""
    num_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    batch_head = tl.program_id(0) // num_blocks
    # The last rows of a causal problem see most, and begin first.
    start = (num_blocks - 1 - tl.program_id(0) % num_blocks) * BLOCK_ROWS
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    row = start + tl.arange(0, BLOCK_ROWS)
    k_ptr += batch * k_batch_stride + head // GROUP * k_head_stride
    v_ptr += batch * v_batch_stride + head // GROUP * v_head_stride
    if bias_ptr is not None:
        bias_ptr += batch * bias_batch_stride + head * bias_head_stride
    if mask_ptr is not None:
        mask_ptr += batch * mask_batch_stride + head * mask_head_stride
    q_ptr += batch * q_batch_stride + head * q_head_stride
    q = tile_of(q_ptr, row, num_rows, q_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)

    top = tl.full([BLOCK_ROWS], -float("inf"), DTYPE)
    total = tl.zeros([BLOCK_ROWS], DTYPE)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_VALUE_WIDTH], DTYPE)
    for first in range(0, last_key(start, num_keys, BLOCK_ROWS, CAUSAL), BLOCK_KEYS):
        key = first + tl.arange(0, BLOCK_KEYS)
        k = tile_of(k_ptr, key, num_keys, k_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
        scores = scores_product(q, k, DTYPE) * SCALE
        if bias_ptr is not None:
            bias = pairs_at(bias_ptr, row, key, num_rows, num_keys, bias_row_stride, bias_key_stride)
            scores += cast(bias, DTYPE)
        seen = seen_pairs(mask_ptr, row, key, num_rows, num_keys, mask_row_stride, mask_key_stride, CAUSAL)
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet has no maximum to subtract.
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        shrink = tl.exp(top - shift)
        p = tl.exp(scores - shift[:, None])
        total = total * shrink + tl.sum(p, 1)
        if NUM_DROPPED > 0:
            p *= noise_of(
                seed_ptr,
                offset_ptr,
                seed_stride,
                offset_stride,
                batch_head,
                noise_heads,
                row,
                first,
                num_rows,
                num_keys,
                NUM_DROPPED,
                NOISE_SCALE,
                BLOCK_KEYS,
                DTYPE,
            )  # fmt: skip - as above
        v = tile_of(v_ptr, key, num_keys, v_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN)
        acc = product(cast(p, v.dtype), v, acc * shrink[:, None], DTYPE)
        top = higher
    sees_none = total == 0.0
    total = tl.where(sees_none, 1.0, total)
    lse = tl.where(sees_none, -float("inf"), top + tl.log(total))
    tl.store(lse_ptr + batch_head.to(tl.int64) * num_rows + row, lse, mask=row < num_rows)
    o_ptr += (batch * num_rows * num_heads + head) * VALUE_WIDTH
    o_row_stride = num_heads * VALUE_WIDTH
    store_tile(o_ptr, row, num_rows, o_row_stride, acc / total[:, None], VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN)


@unspecialized_jit
def attention_jvp_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    mask_ptr,
    seed_ptr,
    offset_ptr,
    o_ptr,
    lse_ptr,
    q_dot_ptr,
    k_dot_ptr,
    v_dot_ptr,
    bias_dot_ptr,
    o_dot_ptr,
    lse_dot_ptr,
    num_heads,
    num_rows,
    num_keys,
    noise_heads,
    seed_stride,
    offset_stride,
    q_batch_stride,
    q_head_stride,
    q_row_stride,
    k_batch_stride,
    k_head_stride,
    k_row_stride,
    v_batch_stride,
    v_head_stride,
    v_row_stride,
    bias_batch_stride,
    bias_head_stride,
    bias_row_stride,
    bias_key_stride,
    mask_batch_stride,
    mask_head_stride,
    mask_row_stride,
    mask_key_stride,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_VALUE_WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    NUM_DROPPED: tl.constexpr,
    NOISE_SCALE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):  # fmt: skip - the arguments in groups
    """Writes o_dot and lse_dot, given o and lse: five products of matrices for each tile of pairs.

    Tangents have the strides of what they are tangents of; o has those of o_dot. From S_dot the mean in the first tile
    is taken away before it is rounded, so that a part that all keys share costs no digits.
    """
    num_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    batch_head = tl.program_id(0) // num_blocks
    start = (num_blocks - 1 - tl.program_id(0) % num_blocks) * BLOCK_ROWS
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    row = start + tl.arange(0, BLOCK_ROWS)
    q_offset = batch * q_batch_stride + head * q_head_stride
    k_offset = batch * k_batch_stride + head // GROUP * k_head_stride
    v_offset = batch * v_batch_stride + head // GROUP * v_head_stride
    bias_offset = batch * bias_batch_stride + head * bias_head_stride
    if mask_ptr is not None:
        mask_ptr += batch * mask_batch_stride + head * mask_head_stride
    statistic = batch_head.to(tl.int64) * num_rows + row
    lse = tl.load(lse_ptr + statistic, mask=row < num_rows, other=0.0)
    lse = tl.where(lse == -float("inf"), 0.0, lse)
    q = tile_of(q_ptr + q_offset, row, num_rows, q_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
    if q_dot_ptr is not None:
        q_dot = tile_of(q_dot_ptr + q_offset, row, num_rows, q_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)

    shared = tl.zeros([BLOCK_ROWS], DTYPE)
    total = tl.zeros([BLOCK_ROWS], DTYPE)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_VALUE_WIDTH], DTYPE)
    for first in range(0, last_key(start, num_keys, BLOCK_ROWS, CAUSAL), BLOCK_KEYS):
        key = first + tl.arange(0, BLOCK_KEYS)
        k = tile_of(k_ptr + k_offset, key, num_keys, k_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
        scores = scores_product(q, k, DTYPE) * SCALE
        if bias_ptr is not None:
            bias = pairs_at(bias_ptr + bias_offset, row, key, num_rows, num_keys, bias_row_stride, bias_key_stride)
            scores += cast(bias, DTYPE)
        seen = seen_pairs(mask_ptr, row, key, num_rows, num_keys, mask_row_stride, mask_key_stride, CAUSAL)
        p = tl.where(seen, tl.exp(scores - lse[:, None]), 0.0)
        scores_dot = tl.zeros([BLOCK_ROWS, BLOCK_KEYS], DTYPE)
        if q_dot_ptr is not None:
            scores_dot = product(q_dot, tl.trans(k), scores_dot, DTYPE)
        if k_dot_ptr is not None:
            k_dot = tile_of(k_dot_ptr + k_offset, key, num_keys, k_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
            scores_dot = product(q, tl.trans(k_dot), scores_dot, DTYPE)
        scores_dot *= SCALE
        if bias_dot_ptr is not None:
            bias_dot = pairs_at(
                bias_dot_ptr + bias_offset, row, key, num_rows, num_keys, bias_row_stride, bias_key_stride
            )
            scores_dot += cast(bias_dot, DTYPE)
        if first == 0:
            weight = tl.sum(p, 1)
            shared = tl.sum(p * scores_dot, 1) / tl.where(weight > 0.0, weight, 1.0)
        p_dot = p * (scores_dot - shared[:, None])
        total += tl.sum(p_dot, 1)
        if NUM_DROPPED > 0:
            noise = noise_of(
                seed_ptr,
                offset_ptr,
                seed_stride,
                offset_stride,
                batch_head,
                noise_heads,
                row,
                first,
                num_rows,
                num_keys,
                NUM_DROPPED,
                NOISE_SCALE,
                BLOCK_KEYS,
                DTYPE,
            )  # fmt: skip - as above
            p *= noise
            p_dot *= noise
        v = tile_of(v_ptr + v_offset, key, num_keys, v_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN)
        acc = product(cast(p_dot, v.dtype), v, acc, DTYPE)
        if v_dot_ptr is not None:
            v_dot = tile_of(v_dot_ptr + v_offset, key, num_keys, v_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN)
            acc = product(cast(p, v_dot.dtype), v_dot, acc, DTYPE)
    # Of what P sums to: a row that sees no key has no mean to add.
    tl.store(lse_dot_ptr + statistic, total + shared, mask=row < num_rows)
    o_offset = (batch * num_rows * num_heads + head) * VALUE_WIDTH
    o_row_stride = num_heads * VALUE_WIDTH
    o = tile_of(o_ptr + o_offset, row, num_rows, o_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN)
    acc -= total[:, None] * cast(o, DTYPE)
    store_tile(o_dot_ptr + o_offset, row, num_rows, o_row_stride, acc, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN)
