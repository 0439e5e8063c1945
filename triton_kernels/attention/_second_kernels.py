"""The two sweeps that serve the backward of attention and every derivative of second order.

Both compute tiles of R and T, of which `primitives.ops.attention.attention` has the formulas, with G, H, g and w.
Absent operands take no part: R alone gives the backward. `attention_rows_kernel` also writes g, and w where there is a
T, which `attention_keys_kernel` reads, so it runs first. Nothing is added atomically: a program of the second kernel
owns keys, and sweeps the rows of every head that shares them. `_tiles` says what the arguments are; tangents have the
strides of what they are tangents of, and o_bar, o_bar_dot, o, o_dot lie like o.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..runtime.kernel import unspecialized_jit
from ..runtime.numbers import cast
from ._tiles import (
    add_pairs,
    head_offset,
    last_key,
    less,
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
    seen_pairs,
    statistic_of,
    store_tile,
    tile_of,
)


@triton.jit
def _products_of_rows(a, b, c, d, DTYPE: tl.constexpr):
    """<a, b> + <c, d> of each row, either 0 without one of its factors.

    Both are added up before threads exchange them: a product that each fused into the sum would leave copies of the sum
    a rounding apart.
    """
    has_first: tl.constexpr = a is not None and b is not None
    has_second: tl.constexpr = c is not None and d is not None
    first = cast(a, DTYPE) * cast(b, DTYPE) if has_first else 0.0
    second = cast(c, DTYPE) * cast(d, DTYPE) if has_second else 0.0
    return tl.sum(first + second, 1) if has_first or has_second else 0.0


@triton.jit
def _turned(o_bar, v, noise, g, KEYS_FIRST: tl.constexpr, DTYPE: tl.constexpr):
    """G - g of a tile."""
    return less(noisy(add_pairs(None, o_bar, v, KEYS_FIRST, DTYPE), noise), g)


@triton.jit
def _moved(o_bar, o_bar_dot, v, v_dot, noise, w, KEYS_FIRST: tl.constexpr, DTYPE: tl.constexpr):
    """H - w of a tile."""
    moved = add_pairs(None, o_bar, v_dot, KEYS_FIRST, DTYPE)
    return less(noisy(add_pairs(moved, o_bar_dot, v, KEYS_FIRST, DTYPE), noise), w)


@unspecialized_jit
def attention_rows_kernel(  # noqa: C901 - its branches are settled when it is compiled
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, seed_ptr, offset_ptr,
    o_ptr, lse_ptr, q_dot_ptr, k_dot_ptr, v_dot_ptr, bias_dot_ptr, o_dot_ptr, lse_dot_ptr,
    o_bar_ptr, lse_bar_ptr, o_bar_dot_ptr, lse_bar_dot_ptr,
    q_bar_ptr, bias_bar_ptr, q_dot_bar_ptr, bias_dot_bar_ptr, g_ptr, w_ptr,
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
    """Writes g, w, `q_bar = SCALE (T k + R k_dot)`, `bias_bar = T`, `q_dot_bar = SCALE R k`, `bias_dot_bar = R`.

    The cotangents of biases are contiguous, [batch, heads, rows, keys], and zero where a row sees no key.
    """
    batch, head, start = rows_program(num_heads, num_rows, BLOCK_ROWS)
    batch_head = batch * num_heads + head
    row = start + tl.arange(0, BLOCK_ROWS)
    inside = row < num_rows
    statistic = batch_head * num_rows
    o_bar = made_tile(o_bar_ptr, batch, head, row, num_rows, num_heads, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
    o_bar_dot = made_tile(o_bar_dot_ptr, batch, head, row, num_rows, num_heads, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
    o = made_tile(o_ptr, batch, head, row, num_rows, num_heads, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
    g = tl.zeros([BLOCK_ROWS], DTYPE) + _products_of_rows(o_bar, o, None, None, DTYPE)
    if lse_bar_ptr is not None:
        g -= tl.load(lse_bar_ptr + statistic + row, mask=inside, other=0.0)
    tl.store(g_ptr + statistic + row, g, mask=inside)
    g = g[:, None]
    w = None
    if w_ptr is not None:
        o_dot = made_tile(o_dot_ptr, batch, head, row, num_rows, num_heads, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
        w = tl.zeros([BLOCK_ROWS], DTYPE) + _products_of_rows(o_bar, o_dot, o_bar_dot, o, DTYPE)
        if lse_bar_dot_ptr is not None:
            w -= tl.load(lse_bar_dot_ptr + statistic + row, mask=inside, other=0.0)
        tl.store(w_ptr + statistic + row, w, mask=inside)
        w = w[:, None]

    if not (q_bar_ptr is None and bias_bar_ptr is None and q_dot_bar_ptr is None and bias_dot_bar_ptr is None):
        q_offset = head_offset(batch, head, q_batch_stride, q_head_stride, ALIGN)
        k_offset = head_offset(batch, head // GROUP, k_batch_stride, k_head_stride, ALIGN)
        v_offset = head_offset(batch, head // GROUP, v_batch_stride, v_head_stride, ALIGN)
        bias_offset = head_offset(batch, head, bias_batch_stride, bias_head_stride, PAIR_ALIGN)
        mask_offset = head_offset(batch, head, mask_batch_stride, mask_head_stride, PAIR_ALIGN)
        lse = lse_of(lse_ptr, statistic, row, num_rows, False)
        lse_dot = statistic_of(lse_dot_ptr, statistic, row, num_rows, False)
        q = tile_of(q_ptr, q_offset, row, num_rows, q_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
        q_dot = tile_of(q_dot_ptr, q_offset, row, num_rows, q_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
        seed = sample_number(seed_ptr, batch_head, noise_heads, seed_stride)
        offset = sample_number(offset_ptr, batch_head, noise_heads, offset_stride)
        acc = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], DTYPE)
        acc_dot = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], DTYPE)
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
            noise = noise_of(
                seed, offset, batch_head, noise_heads, row, first, num_rows, num_keys,
                NUM_DROPPED, NOISE_SCALE, BLOCK_KEYS, False, DTYPE,
            )  # fmt: skip
            pairs = (statistic + row)[:, None] * num_keys + key[None, :]
            both = inside[:, None] & (key < num_keys)[None, :]
            p = probabilities(q, k, bias, seen, lse, False, SCALE, DTYPE)
            r = p * _turned(o_bar, v, noise, g, False, DTYPE)
            if bias_dot_bar_ptr is not None:
                tl.store(bias_dot_bar_ptr + pairs, cast(r, bias_dot_bar_ptr.dtype.element_ty), mask=both)
            if q_dot_bar_ptr is not None:
                acc_dot = product(cast(r, k.dtype), k, acc_dot, DTYPE)
            if w_ptr is not None:
                if q_bar_ptr is not None:
                    acc = product(cast(r, k.dtype), k_dot, acc, DTYPE)
                t = p * _moved(o_bar, o_bar_dot, v, v_dot, noise, w, False, DTYPE)
                scores_dot = scores_dot_of(q, q_dot, k, k_dot, bias_dot, False, SCALE, DTYPE)
                if scores_dot is not None:
                    t += r * (scores_dot - lse_dot)
                if bias_bar_ptr is not None:
                    tl.store(bias_bar_ptr + pairs, cast(t, bias_bar_ptr.dtype.element_ty), mask=both)
                if q_bar_ptr is not None:
                    acc = product(cast(t, k.dtype), k, acc, DTYPE)
        store_tile(q_bar_ptr, batch, head, row, num_rows, num_heads, acc * SCALE, WIDTH, BLOCK_WIDTH)
        store_tile(q_dot_bar_ptr, batch, head, row, num_rows, num_heads, acc_dot * SCALE, WIDTH, BLOCK_WIDTH)


@unspecialized_jit
def attention_keys_kernel(  # noqa: C901 - as above
    q_ptr, k_ptr, v_ptr, bias_ptr, mask_ptr, seed_ptr, offset_ptr,
    lse_ptr, q_dot_ptr, k_dot_ptr, v_dot_ptr, bias_dot_ptr, lse_dot_ptr,
    o_bar_ptr, o_bar_dot_ptr, g_ptr, w_ptr,
    k_bar_ptr, v_bar_ptr, k_dot_bar_ptr, v_dot_bar_ptr,
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
    """Writes k_bar, v_bar, k_dot_bar and v_dot_bar.

    k_bar = SCALE (T^T q + R^T q_dot),   v_bar = (P_dot.Z)^T o_bar + (P.Z)^T o_bar_dot,
    k_dot_bar = SCALE R^T q,             v_dot_bar = (P.Z)^T o_bar
    """
    num_blocks = tl.cdiv(num_keys, BLOCK_KEYS)
    num_key_heads = num_heads // GROUP
    batch = (tl.program_id(0) // num_blocks // num_key_heads).to(tl.int64)
    key_head = (tl.program_id(0) // num_blocks % num_key_heads).to(tl.int64)
    first = tl.program_id(0) % num_blocks * BLOCK_KEYS
    key = first + tl.arange(0, BLOCK_KEYS)
    k_offset = head_offset(batch, key_head, k_batch_stride, k_head_stride, ALIGN)
    v_offset = head_offset(batch, key_head, v_batch_stride, v_head_stride, ALIGN)
    k = tile_of(k_ptr, k_offset, key, num_keys, k_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
    k_dot = tile_of(k_dot_ptr, k_offset, key, num_keys, k_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
    v = tile_of(v_ptr, v_offset, key, num_keys, v_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN)
    v_dot = tile_of(v_dot_ptr, v_offset, key, num_keys, v_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN)

    k_acc = tl.zeros([BLOCK_KEYS, BLOCK_WIDTH], DTYPE)
    k_dot_acc = tl.zeros([BLOCK_KEYS, BLOCK_WIDTH], DTYPE)
    v_acc = tl.zeros([BLOCK_KEYS, BLOCK_VALUE_WIDTH], DTYPE)
    v_dot_acc = tl.zeros([BLOCK_KEYS, BLOCK_VALUE_WIDTH], DTYPE)
    start_row = 0
    if CAUSAL:
        start_row = first // BLOCK_ROWS * BLOCK_ROWS
    # One loop over the rows of all heads: the first rows of a head are copied during the last steps of the one before.
    end = num_rows
    if GROUP > 1:
        span = tl.cdiv(num_rows - start_row, BLOCK_ROWS) * BLOCK_ROWS
        end = start_row + GROUP * span
    for at in range(start_row, end, BLOCK_ROWS):
        head, start = key_head, at
        if GROUP > 1:
            head = key_head * GROUP + (at - start_row) // span
            start = start_row + (at - start_row) % span
        batch_head = batch * num_heads + head
        statistic = batch_head * num_rows
        q_offset = head_offset(batch, head, q_batch_stride, q_head_stride, ALIGN)
        bias_offset = head_offset(batch, head, bias_batch_stride, bias_head_stride, PAIR_ALIGN)
        mask_offset = head_offset(batch, head, mask_batch_stride, mask_head_stride, PAIR_ALIGN)
        seed = sample_number(seed_ptr, batch_head, noise_heads, seed_stride)
        offset = sample_number(offset_ptr, batch_head, noise_heads, offset_stride)
        row = start + tl.arange(0, BLOCK_ROWS)
        q = tile_of(q_ptr, q_offset, row, num_rows, q_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
        q_dot = tile_of(q_dot_ptr, q_offset, row, num_rows, q_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
        o_bar = made_tile(o_bar_ptr, batch, head, row, num_rows, num_heads, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
        o_bar_dot = made_tile(o_bar_dot_ptr, batch, head, row, num_rows, num_heads, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
        bias = pairs_at(
            bias_ptr, bias_offset, row, key, num_rows, num_keys, bias_row_stride, BIAS_STEP, PAIR_ALIGN, True
        )
        bias_dot = pairs_at(
            bias_dot_ptr, bias_offset, row, key, num_rows, num_keys, bias_row_stride, BIAS_STEP, PAIR_ALIGN, True
        )
        mask = pairs_at(
            mask_ptr, mask_offset, row, key, num_rows, num_keys, mask_row_stride, MASK_STEP, PAIR_ALIGN, True
        )
        seen = seen_pairs(mask, row, key, num_keys, CAUSAL, True)
        noise = noise_of(
            seed, offset, batch_head, noise_heads, row, first, num_rows, num_keys,
            NUM_DROPPED, NOISE_SCALE, BLOCK_KEYS, True, DTYPE,
        )  # fmt: skip
        # In an order, and with loads, that keep few tiles at a time.
        lse = lse_of(lse_ptr, statistic, row, num_rows, True)
        p = probabilities(q, k, bias, seen, lse, True, SCALE, DTYPE)
        if v_dot_bar_ptr is not None:
            v_dot_acc = product(cast(noisy(p, noise), q.dtype), o_bar, v_dot_acc, DTYPE)
        if v_bar_ptr is not None:
            v_acc = product(cast(noisy(p, noise), q.dtype), o_bar_dot, v_acc, DTYPE)
        if v_bar_ptr is not None or k_bar_ptr is not None:
            scores_dot = scores_dot_of(q, q_dot, k, k_dot, bias_dot, True, SCALE, DTYPE)
            if scores_dot is not None:
                scores_dot -= statistic_of(lse_dot_ptr, statistic, row, num_rows, True)
                if v_bar_ptr is not None:
                    v_acc = product(cast(noisy(p * scores_dot, noise), q.dtype), o_bar, v_acc, DTYPE)
        g = statistic_of(g_ptr, statistic, row, num_rows, True)
        r = p * _turned(o_bar, v, noise, g, True, DTYPE)
        if k_dot_bar_ptr is not None:
            k_dot_acc = product(cast(r, q.dtype), q, k_dot_acc, DTYPE)
        if k_bar_ptr is not None:
            k_acc = product(cast(r, q.dtype), q_dot, k_acc, DTYPE)
            w = statistic_of(w_ptr, statistic, row, num_rows, True)
            t = p * _moved(o_bar, o_bar_dot, v, v_dot, noise, w, True, DTYPE)
            if scores_dot is not None:
                t += r * scores_dot
            k_acc = product(cast(t, q.dtype), q, k_acc, DTYPE)
    store_tile(k_bar_ptr, batch, key_head, key, num_keys, num_key_heads, k_acc * SCALE, WIDTH, BLOCK_WIDTH)
    store_tile(k_dot_bar_ptr, batch, key_head, key, num_keys, num_key_heads, k_dot_acc * SCALE, WIDTH, BLOCK_WIDTH)
    store_tile(v_bar_ptr, batch, key_head, key, num_keys, num_key_heads, v_acc, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
    store_tile(v_dot_bar_ptr, batch, key_head, key, num_keys, num_key_heads, v_dot_acc, VALUE_WIDTH, BLOCK_VALUE_WIDTH)
