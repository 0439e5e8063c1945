"""Kernels of log-softmax and its derivatives of first and second order, on the scaffold of `rows`.

With `p = exp(y)` and sums over the reduced dim:

    forward     y = x - log(sum(exp(x))),   y_dot = x_dot - sum(p * x_dot)
    pairing     y_bar_bar = x_dot - sum(p * x_dot),   output_bar = -p * x_dot * sum(y_bar),
                x_dot_bar = y_bar - p * sum(y_bar)
    bwd_jvp     x_bar_dot = y_bar_dot - p * (y_dot * sum(y_bar) + sum(y_bar_dot))

The jvp is the first result of the pairing by itself, the vjp its last.
"""

# Pyright takes device functions for Python: it knows neither tuples of tiles nor what is settled at compile time.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from triton_kernels._runtime import stride_independent_jit
from triton_kernels.rows import row_op
from triton_kernels.tiles import nothing, sums_of

_LOWEST = tl.constexpr(float("-inf"))

# Forward: x, and for the tangent of y as well x_dot. The sums are the maximum, the logarithm of the sum of exponentials
# relative to it, and the mean of x_dot weighted with them.


@triton.jit
def _fwd_stats(x, p, r, mask, num_cols: tl.constexpr, EPS: tl.constexpr):
    top = tl.max(x[0], axis=1)[:, None]
    weights = tl.exp(x[0] - top)
    if x[1].type.is_block():
        sums = sums_of((weights, weights * x[1]), 2)
        s = top, tl.log(sums[0]), sums[1] / sums[0]
    else:
        s = top, tl.log(sums_of((weights,))[0])
    return s


@triton.jit
def _finite(top):
    """The maximum to subtract before the exponential: 0 until an element is finite, because -inf - -inf is NaN."""
    return tl.where(top == _LOWEST, 0.0, top)


@triton.jit
def _fwd_fold(state, x, p, r, anchor, mask):
    # The maximum is that of the whole row, so that each element takes one exponential and each tile one reduction.
    top = tl.maximum(state[0], tl.max(x[0], axis=1)[:, None])
    shift = _finite(top)
    scale = tl.exp(state[0] - shift)
    weights = tl.exp(x[0] - shift)
    if x[1].type.is_block():
        found = top, state[1] * scale + weights, state[2] * scale + weights * x[1]
    else:
        found = top, state[1] * scale + weights
    return found


@triton.jit
def _fwd_merge(
    state, anchor, sizes, num_cols: tl.constexpr, EPS: tl.constexpr, LEVEL: tl.constexpr, LAST: tl.constexpr
):
    HAS_X_DOT: tl.constexpr = len(state) == 3
    # A row of nothing but -inf becomes NaN where its slices are merged, which it would when it is written.
    top = state[0] if LEVEL == 1 else tl.max(state[0], axis=1)[:, None]
    scale = 1.0 if LEVEL == 1 else tl.exp(state[0] - top)
    if HAS_X_DOT:
        sums = sums_of((state[1] * scale, state[2] * scale), 2)
    else:
        sums = sums_of((state[1] * scale,))
    if HAS_X_DOT:
        found = (top, tl.log(sums[0]), sums[1] / sums[0]) if LAST else (top, sums[0], sums[1])
    else:
        found = (top, tl.log(sums[0])) if LAST else (top, sums[0])
    return found


@triton.jit
def _fwd_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    y_dot = nothing()
    if x[1].type.is_block():
        y_dot = x[1] - s[2]
    return x[0] - s[0] - s[1], y_dot


@stride_independent_jit
def log_softmax_fwd_kernel(
    x_ptr, x_segment_stride, x_row_stride, x_col_stride,
    x_dot_ptr, x_dot_segment_stride, x_dot_row_stride, x_dot_col_stride,
    y_ptr, y_dot_ptr, out_segment_stride, out_row_stride, out_col_stride, parts_ptr, num_splits, num_rows,
    num_cols: tl.constexpr, DTYPE: tl.constexpr, AXES: tl.constexpr, TWO_LEVEL: tl.constexpr, ALIGN: tl.constexpr,
    ROW_ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, MODE: tl.constexpr,
    SUM_READS: tl.constexpr, EMIT_READS: tl.constexpr, STAGES: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """y, of x in its dtype as in torch; and the tangent of y where there is one of x."""
    row_op(
        (x_ptr, x_dot_ptr),
        ((x_segment_stride, x_row_stride, x_col_stride), (x_dot_segment_stride, x_dot_row_stride, x_dot_col_stride)),
        (), (), (), 0, (y_ptr, y_dot_ptr),
        (out_segment_stride, out_row_stride, out_col_stride), (None, None, None), parts_ptr, num_splits, num_rows,
        _fwd_emit, (_LOWEST, 0.0) if x_dot_ptr is None else (_LOWEST, 0.0, 0.0), num_cols, DTYPE, AXES, TWO_LEVEL,
        ALIGN, ROW_ALIGN, BLOCK_ROWS, BLOCK_COLS, MODE, SUM_READS, EMIT_READS, STAGES, BLOCK_SPLITS,
        STATS=_fwd_stats, FOLD=_fwd_fold, MERGE=_fwd_merge, OTHER=_LOWEST, ROUNDED=y_ptr.dtype.element_ty, ROW_STATES=1,
    )  # fmt: skip


# Pairing: y_bar, y and x_dot; the sums of y_bar and of p * x_dot.


@triton.jit
def _pairing_terms(x, p, r, mask):
    weighted = nothing()
    if x[2].type.is_block():
        weighted = tl.exp(x[1]) * x[2]
    return x[0], weighted


@triton.jit
def _pairing_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    y_bar_bar, output_bar, x_dot_bar = nothing(), nothing(), nothing()
    if s[1].type.is_block():
        y_bar_bar = x[2] - s[1]
    if s[0].type.is_block():
        share = tl.exp(x[1]) * s[0]
        if x[2].type.is_block():
            output_bar = -share * x[2]
        if x[0].type.is_block():
            x_dot_bar = x[0] - share
    return y_bar_bar, output_bar, x_dot_bar


@stride_independent_jit
def log_softmax_pairing_kernel(
    y_bar_ptr, y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride,
    y_ptr, y_segment_stride, y_row_stride, y_col_stride,
    x_dot_ptr, x_dot_segment_stride, x_dot_row_stride, x_dot_col_stride,
    y_bar_bar_ptr, output_bar_ptr, x_dot_bar_ptr, out_segment_stride, out_row_stride, out_col_stride,
    parts_ptr, num_splits, num_rows,
    num_cols: tl.constexpr, DTYPE: tl.constexpr, AXES: tl.constexpr, TWO_LEVEL: tl.constexpr, ALIGN: tl.constexpr,
    ROW_ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, MODE: tl.constexpr,
    SUM_READS: tl.constexpr, EMIT_READS: tl.constexpr, STAGES: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """The derivatives of the pairing for which there is memory; the others' operands may be absent."""
    row_op(
        (y_bar_ptr, y_ptr, x_dot_ptr),
        ((y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride), (y_segment_stride, y_row_stride, y_col_stride),
         (x_dot_segment_stride, x_dot_row_stride, x_dot_col_stride)),
        (), (), (), 0, (y_bar_bar_ptr, output_bar_ptr, x_dot_bar_ptr),
        (out_segment_stride, out_row_stride, out_col_stride), (None, None), parts_ptr, num_splits, num_rows,
        _pairing_emit, (0.0, 0.0), num_cols, DTYPE, AXES, TWO_LEVEL, ALIGN, ROW_ALIGN,
        BLOCK_ROWS, BLOCK_COLS, MODE, SUM_READS, EMIT_READS, STAGES, BLOCK_SPLITS, TERMS=_pairing_terms,
        WANTED=(0 if y_bar_ptr is None else 1) + (0 if y_bar_bar_ptr is None else 2),
    )  # fmt: skip


# JVP of the vjp: y_bar, y, y_bar_dot and y_dot; the sums of y_bar and of y_bar_dot.


@triton.jit
def _bwd_jvp_terms(x, p, r, mask):
    return x[0], x[2]


@triton.jit
def _bwd_jvp_emit(x, p, r, s, mask, num_cols: tl.constexpr):
    if not s[0].type.is_block():
        change = s[1]
    elif s[1].type.is_block():
        change = x[3] * s[0] + s[1]
    else:
        change = x[3] * s[0]
    change = -tl.exp(x[1]) * change
    return (x[2] + change if x[2].type.is_block() else change,)


@stride_independent_jit
def log_softmax_bwd_jvp_kernel(
    y_bar_ptr, y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride,
    y_ptr, y_segment_stride, y_row_stride, y_col_stride,
    y_bar_dot_ptr, y_bar_dot_segment_stride, y_bar_dot_row_stride, y_bar_dot_col_stride,
    y_dot_ptr, y_dot_segment_stride, y_dot_row_stride, y_dot_col_stride,
    x_bar_dot_ptr, out_segment_stride, out_row_stride, out_col_stride, parts_ptr, num_splits, num_rows,
    num_cols: tl.constexpr, DTYPE: tl.constexpr, AXES: tl.constexpr, TWO_LEVEL: tl.constexpr, ALIGN: tl.constexpr,
    ROW_ALIGN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, MODE: tl.constexpr,
    SUM_READS: tl.constexpr, EMIT_READS: tl.constexpr, STAGES: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """Tangent of x_bar; y_bar is absent where y_dot is."""
    row_op(
        (y_bar_ptr, y_ptr, y_bar_dot_ptr, y_dot_ptr),
        ((y_bar_segment_stride, y_bar_row_stride, y_bar_col_stride), (y_segment_stride, y_row_stride, y_col_stride),
         (y_bar_dot_segment_stride, y_bar_dot_row_stride, y_bar_dot_col_stride),
         (y_dot_segment_stride, y_dot_row_stride, y_dot_col_stride)),
        (), (), (), 0, (x_bar_dot_ptr,), (out_segment_stride, out_row_stride, out_col_stride), (None, None),
        parts_ptr, num_splits, num_rows,
        _bwd_jvp_emit, (0.0, 0.0), num_cols, DTYPE, AXES, TWO_LEVEL, ALIGN, ROW_ALIGN,
        BLOCK_ROWS, BLOCK_COLS, MODE, SUM_READS, EMIT_READS, STAGES, BLOCK_SPLITS, TERMS=_bwd_jvp_terms,
        WANTED=(0 if y_bar_ptr is None else 1) + (0 if y_bar_dot_ptr is None else 2),
    )  # fmt: skip
