"""The two sweeps that serve the backward of attention and every derivative of second order.

Both compute tiles of R = P.(G - g) and T = P.((S_dot - lse_dot).(G - g) + H - w), with

    G = Z.(o_bar v^T),   H = Z.(o_bar v_dot^T + o_bar_dot v^T)
    g = <o_bar, o> - lse_bar,   w = <o_bar, o_dot> + <o_bar_dot, o> - lse_bar_dot

What is absent takes no part: without tangents there is no T, and R alone gives the backward. `attention_rows_kernel`
also writes g and w, which `attention_keys_kernel` reads, so it runs first. There are no atomic additions: a program of
the second kernel owns keys, and sweeps the rows of every head that shares them. `_attention_tiles` says what the
arguments are; tangents have the strides of what they are tangents of, and o_bar, o_bar_dot, o, o_dot lie like o.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
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


@triton.jit
def _pair_tiles(
    q,
    q_dot,
    k,
    k_dot,
    v,
    v_dot,
    o_bar,
    o_bar_dot,
    bias,
    bias_dot,
    seen,
    noise,
    lse,
    lse_dot,
    g,
    w,
    HAS_BIAS: tl.constexpr,
    HAS_Q_DOT: tl.constexpr,
    HAS_K_DOT: tl.constexpr,
    HAS_V_DOT: tl.constexpr,
    HAS_BIAS_DOT: tl.constexpr,
    HAS_O_BAR: tl.constexpr,
    HAS_O_BAR_DOT: tl.constexpr,
    NOISY: tl.constexpr,
    WANT_T: tl.constexpr,
    SCALE: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip - the arguments in groups
    """P.Z, P_dot.Z, R and T of a tile; each of them where its operands are there."""
    MOVES: tl.constexpr = HAS_Q_DOT or HAS_K_DOT or HAS_BIAS_DOT
    scores = scores_product(q, k, DTYPE) * SCALE
    if HAS_BIAS:
        scores += cast(bias, DTYPE)
    p = tl.where(seen, tl.exp(scores - lse[:, None]), 0.0)
    turned = tl.zeros(p.shape, DTYPE)
    if HAS_O_BAR:
        turned = product(o_bar, tl.trans(v), turned, DTYPE)
        if NOISY:
            turned *= noise
    turned -= g[:, None]
    r = p * turned
    p_dot = p
    t = r
    if WANT_T:
        moved = tl.zeros(p.shape, DTYPE)
        if HAS_O_BAR and HAS_V_DOT:
            moved = product(o_bar, tl.trans(v_dot), moved, DTYPE)
        if HAS_O_BAR_DOT:
            moved = product(o_bar_dot, tl.trans(v), moved, DTYPE)
        if NOISY:
            moved *= noise
        t = p * (moved - w[:, None])
    if MOVES:
        scores_dot = tl.zeros(p.shape, DTYPE)
        if HAS_Q_DOT:
            scores_dot = product(q_dot, tl.trans(k), scores_dot, DTYPE)
        if HAS_K_DOT:
            scores_dot = product(q, tl.trans(k_dot), scores_dot, DTYPE)
        scores_dot *= SCALE
        if HAS_BIAS_DOT:
            scores_dot += cast(bias_dot, DTYPE)
        p_dot = p * (scores_dot - lse_dot[:, None])
        if WANT_T:
            t += p_dot * turned
    if NOISY:
        p *= noise
        p_dot *= noise
    return p, p_dot, r, t


@unspecialized_jit
def attention_rows_kernel(
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
    o_bar_ptr,
    lse_bar_ptr,
    o_bar_dot_ptr,
    lse_bar_dot_ptr,
    q_bar_ptr,
    q_dot_bar_ptr,
    g_ptr,
    w_ptr,
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
    """Writes g, w, `q_bar = SCALE (T k + R k_dot)` and `q_dot_bar = SCALE R k`."""
    num_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    batch_head = tl.program_id(0) // num_blocks
    start = (num_blocks - 1 - tl.program_id(0) % num_blocks) * BLOCK_ROWS
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    row = start + tl.arange(0, BLOCK_ROWS)
    inside = row < num_rows
    q_offset = batch * q_batch_stride + head * q_head_stride
    k_offset = batch * k_batch_stride + head // GROUP * k_head_stride
    v_offset = batch * v_batch_stride + head // GROUP * v_head_stride
    bias_offset = batch * bias_batch_stride + head * bias_head_stride
    if mask_ptr is not None:
        mask_ptr += batch * mask_batch_stride + head * mask_head_stride
    statistic = batch_head.to(tl.int64) * num_rows + row
    o_offset = (batch * num_rows * num_heads + head) * VALUE_WIDTH
    o_row_stride = num_heads * VALUE_WIDTH

    g = tl.zeros([BLOCK_ROWS], DTYPE)
    w = tl.zeros([BLOCK_ROWS], DTYPE)
    o_bar = g
    o_bar_dot = g
    o = g
    if o_bar_ptr is not None or o_bar_dot_ptr is not None:
        o = tile_of(o_ptr + o_offset, row, num_rows, o_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN)
        o = cast(o, DTYPE)
    if o_bar_ptr is not None:
        o_bar = tile_of(o_bar_ptr + o_offset, row, num_rows, o_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN)
        g += tl.sum(cast(o_bar, DTYPE) * o, 1)
        if o_dot_ptr is not None:
            o_dot = tile_of(o_dot_ptr + o_offset, row, num_rows, o_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN)
            w += tl.sum(cast(o_bar, DTYPE) * cast(o_dot, DTYPE), 1)
    if o_bar_dot_ptr is not None:
        o_bar_dot = tile_of(
            o_bar_dot_ptr + o_offset, row, num_rows, o_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN
        )
        w += tl.sum(cast(o_bar_dot, DTYPE) * o, 1)
    if lse_bar_ptr is not None:
        g -= tl.load(lse_bar_ptr + statistic, mask=inside, other=0.0)
    if lse_bar_dot_ptr is not None:
        w -= tl.load(lse_bar_dot_ptr + statistic, mask=inside, other=0.0)
    tl.store(g_ptr + statistic, g, mask=inside)
    tl.store(w_ptr + statistic, w, mask=inside)

    if q_bar_ptr is not None or q_dot_bar_ptr is not None:
        lse = tl.load(lse_ptr + statistic, mask=inside, other=0.0)
        lse = tl.where(lse == -float("inf"), 0.0, lse)
        lse_dot = g
        if lse_dot_ptr is not None:
            lse_dot = tl.load(lse_dot_ptr + statistic, mask=inside, other=0.0)
        q = tile_of(q_ptr + q_offset, row, num_rows, q_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
        q_dot = q
        if q_dot_ptr is not None:
            q_dot = tile_of(q_dot_ptr + q_offset, row, num_rows, q_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
        acc = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], DTYPE)
        acc_dot = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], DTYPE)
        for first in range(0, last_key(start, num_keys, BLOCK_ROWS, CAUSAL), BLOCK_KEYS):
            key = first + tl.arange(0, BLOCK_KEYS)
            k = tile_of(k_ptr + k_offset, key, num_keys, k_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
            v = tile_of(v_ptr + v_offset, key, num_keys, v_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN)
            k_dot = k
            v_dot = v
            if k_dot_ptr is not None:
                k_dot = tile_of(k_dot_ptr + k_offset, key, num_keys, k_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
            if v_dot_ptr is not None:
                v_dot = tile_of(
                    v_dot_ptr + v_offset, key, num_keys, v_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN
                )
            bias = g
            bias_dot = g
            noise = g
            if bias_ptr is not None:
                bias = pairs_at(bias_ptr + bias_offset, row, key, num_rows, num_keys, bias_row_stride, bias_key_stride)
            if bias_dot_ptr is not None:
                bias_dot = pairs_at(
                    bias_dot_ptr + bias_offset, row, key, num_rows, num_keys, bias_row_stride, bias_key_stride
                )
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
            seen = seen_pairs(mask_ptr, row, key, num_rows, num_keys, mask_row_stride, mask_key_stride, CAUSAL)
            _p, _p_dot, r, t = _pair_tiles(
                q,
                q_dot,
                k,
                k_dot,
                v,
                v_dot,
                o_bar,
                o_bar_dot,
                bias,
                bias_dot,
                seen,
                noise,
                lse,
                lse_dot,
                g,
                w,
                bias_ptr is not None,
                q_dot_ptr is not None,
                k_dot_ptr is not None,
                v_dot_ptr is not None,
                bias_dot_ptr is not None,
                o_bar_ptr is not None,
                o_bar_dot_ptr is not None,
                NUM_DROPPED > 0,
                q_bar_ptr is not None,
                SCALE,
                DTYPE,
            )  # fmt: skip - as above
            r = cast(r, k.dtype)
            if q_bar_ptr is not None:
                acc = product(cast(t, k.dtype), k, acc, DTYPE)
                if k_dot_ptr is not None:
                    acc = product(r, k_dot, acc, DTYPE)
            if q_dot_bar_ptr is not None:
                acc_dot = product(r, k, acc_dot, DTYPE)
        bar_offset = (batch * num_rows * num_heads + head) * WIDTH
        bar_stride = num_heads * WIDTH
        if q_bar_ptr is not None:
            store_tile(q_bar_ptr + bar_offset, row, num_rows, bar_stride, acc * SCALE, WIDTH, BLOCK_WIDTH, ALIGN)
        if q_dot_bar_ptr is not None:
            store_tile(
                q_dot_bar_ptr + bar_offset, row, num_rows, bar_stride, acc_dot * SCALE, WIDTH, BLOCK_WIDTH, ALIGN
            )


@unspecialized_jit
def attention_keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    mask_ptr,
    seed_ptr,
    offset_ptr,
    lse_ptr,
    q_dot_ptr,
    k_dot_ptr,
    v_dot_ptr,
    bias_dot_ptr,
    lse_dot_ptr,
    o_bar_ptr,
    o_bar_dot_ptr,
    g_ptr,
    w_ptr,
    k_bar_ptr,
    v_bar_ptr,
    k_dot_bar_ptr,
    v_dot_bar_ptr,
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
    """Writes `k_bar = SCALE (T^T q + R^T q_dot)`, `v_bar = (P_dot.Z)^T o_bar + (P.Z)^T o_bar_dot`,
    `k_dot_bar = SCALE R^T q` and `v_dot_bar = (P.Z)^T o_bar`.
    """
    num_blocks = tl.cdiv(num_keys, BLOCK_KEYS)
    num_key_heads = num_heads // GROUP
    batch_head = tl.program_id(0) // num_blocks
    first = tl.program_id(0) % num_blocks * BLOCK_KEYS
    batch = (batch_head // num_key_heads).to(tl.int64)
    key_head = (batch_head % num_key_heads).to(tl.int64)
    key = first + tl.arange(0, BLOCK_KEYS)
    k_offset = batch * k_batch_stride + key_head * k_head_stride
    v_offset = batch * v_batch_stride + key_head * v_head_stride
    k = tile_of(k_ptr + k_offset, key, num_keys, k_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
    v = tile_of(v_ptr + v_offset, key, num_keys, v_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN)
    k_dot = k
    v_dot = v
    if k_dot_ptr is not None:
        k_dot = tile_of(k_dot_ptr + k_offset, key, num_keys, k_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
    if v_dot_ptr is not None:
        v_dot = tile_of(v_dot_ptr + v_offset, key, num_keys, v_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN)
    MOVES: tl.constexpr = q_dot_ptr is not None or k_dot_ptr is not None or bias_dot_ptr is not None

    k_acc = tl.zeros([BLOCK_KEYS, BLOCK_WIDTH], DTYPE)
    k_dot_acc = tl.zeros([BLOCK_KEYS, BLOCK_WIDTH], DTYPE)
    v_acc = tl.zeros([BLOCK_KEYS, BLOCK_VALUE_WIDTH], DTYPE)
    v_dot_acc = tl.zeros([BLOCK_KEYS, BLOCK_VALUE_WIDTH], DTYPE)
    start_row = 0
    if CAUSAL:
        start_row = first // BLOCK_ROWS * BLOCK_ROWS
    o_row_stride = num_heads * VALUE_WIDTH
    for member in range(0, GROUP):
        head = key_head * GROUP + member
        flat_head = batch * num_heads + head
        q_offset = batch * q_batch_stride + head * q_head_stride
        o_offset = (batch * num_rows * num_heads + head) * VALUE_WIDTH
        bias_offset = batch * bias_batch_stride + head * bias_head_stride
        mask_offset = batch * mask_batch_stride + head * mask_head_stride
        for start in range(start_row, num_rows, BLOCK_ROWS):
            row = start + tl.arange(0, BLOCK_ROWS)
            inside = row < num_rows
            statistic = flat_head * num_rows + row
            lse = tl.load(lse_ptr + statistic, mask=inside, other=0.0)
            lse = tl.where(lse == -float("inf"), 0.0, lse)
            g = tl.load(g_ptr + statistic, mask=inside, other=0.0)
            w = tl.load(w_ptr + statistic, mask=inside, other=0.0)
            lse_dot = g
            if lse_dot_ptr is not None:
                lse_dot = tl.load(lse_dot_ptr + statistic, mask=inside, other=0.0)
            q = tile_of(q_ptr + q_offset, row, num_rows, q_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
            q_dot = q
            o_bar = g
            o_bar_dot = g
            if q_dot_ptr is not None:
                q_dot = tile_of(q_dot_ptr + q_offset, row, num_rows, q_row_stride, WIDTH, BLOCK_WIDTH, ALIGN)
            if o_bar_ptr is not None:
                o_bar = tile_of(
                    o_bar_ptr + o_offset, row, num_rows, o_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN
                )
            if o_bar_dot_ptr is not None:
                o_bar_dot = tile_of(
                    o_bar_dot_ptr + o_offset, row, num_rows, o_row_stride, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN
                )
            bias = g
            bias_dot = g
            noise = g
            if bias_ptr is not None:
                bias = pairs_at(bias_ptr + bias_offset, row, key, num_rows, num_keys, bias_row_stride, bias_key_stride)
            if bias_dot_ptr is not None:
                bias_dot = pairs_at(
                    bias_dot_ptr + bias_offset, row, key, num_rows, num_keys, bias_row_stride, bias_key_stride
                )
            if NUM_DROPPED > 0:
                noise = noise_of(
                    seed_ptr,
                    offset_ptr,
                    seed_stride,
                    offset_stride,
                    flat_head,
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
            seen = seen_pairs(
                None if mask_ptr is None else mask_ptr + mask_offset,
                row,
                key,
                num_rows,
                num_keys,
                mask_row_stride,
                mask_key_stride,
                CAUSAL,
            )  # fmt: skip - as above
            p, p_dot, r, t = _pair_tiles(
                q,
                q_dot,
                k,
                k_dot,
                v,
                v_dot,
                o_bar,
                o_bar_dot,
                bias,
                bias_dot,
                seen,
                noise,
                lse,
                lse_dot,
                g,
                w,
                bias_ptr is not None,
                q_dot_ptr is not None,
                k_dot_ptr is not None,
                v_dot_ptr is not None,
                bias_dot_ptr is not None,
                o_bar_ptr is not None,
                o_bar_dot_ptr is not None,
                NUM_DROPPED > 0,
                k_bar_ptr is not None,
                SCALE,
                DTYPE,
            )  # fmt: skip - as above
            r = tl.trans(cast(r, q.dtype))
            p = tl.trans(cast(p, q.dtype))
            if k_bar_ptr is not None:
                k_acc = product(tl.trans(cast(t, q.dtype)), q, k_acc, DTYPE)
                if q_dot_ptr is not None:
                    k_acc = product(r, q_dot, k_acc, DTYPE)
            if k_dot_bar_ptr is not None:
                k_dot_acc = product(r, q, k_dot_acc, DTYPE)
            if v_bar_ptr is not None:
                if o_bar_ptr is not None and MOVES:
                    v_acc = product(tl.trans(cast(p_dot, q.dtype)), o_bar, v_acc, DTYPE)
                if o_bar_dot_ptr is not None:
                    v_acc = product(p, o_bar_dot, v_acc, DTYPE)
            if v_dot_bar_ptr is not None and o_bar_ptr is not None:
                v_dot_acc = product(p, o_bar, v_dot_acc, DTYPE)
    k_bar_offset = (batch * num_keys * num_key_heads + key_head) * WIDTH
    k_bar_stride = num_key_heads * WIDTH
    v_bar_offset = (batch * num_keys * num_key_heads + key_head) * VALUE_WIDTH
    v_bar_stride = num_key_heads * VALUE_WIDTH
    if k_bar_ptr is not None:
        store_tile(k_bar_ptr + k_bar_offset, key, num_keys, k_bar_stride, k_acc * SCALE, WIDTH, BLOCK_WIDTH, ALIGN)
    if k_dot_bar_ptr is not None:
        store_tile(
            k_dot_bar_ptr + k_bar_offset, key, num_keys, k_bar_stride, k_dot_acc * SCALE, WIDTH, BLOCK_WIDTH, ALIGN
        )
    if v_bar_ptr is not None:
        store_tile(v_bar_ptr + v_bar_offset, key, num_keys, v_bar_stride, v_acc, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN)
    if v_dot_bar_ptr is not None:
        store_tile(
            v_dot_bar_ptr + v_bar_offset, key, num_keys, v_bar_stride, v_dot_acc, VALUE_WIDTH, BLOCK_VALUE_WIDTH, ALIGN
        )
