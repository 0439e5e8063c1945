"""Attention: launchers of the forward, its tangent, its backward, and the derivatives of both.

    S = scale * q k^T + bias,      lse = log(sum(exp(S))),      P = exp(S - lse),      o = (P.Z) v

The kernels are in `_attention_kernels` and `_attention_second_kernels`. P is never stored, and nothing is added
atomically: results are the same from run to run.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from triton_kernels import launch
from triton_kernels._attention_kernels import attention_fwd_kernel, attention_jvp_kernel
from triton_kernels._attention_second_kernels import attention_keys_kernel, attention_rows_kernel
from triton_kernels._runtime import TL_DTYPES, accumulation_dtype, collapse, device_guard
from triton_kernels.launch import MIN_MATMUL, cdiv, next_power_of_2
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["attention_bwd", "attention_fwd", "attention_jvp", "attention_pairing"]

MAX_ALIGN = 16


class _Problem:
    """What every kernel is told of q, k, v, bias, mask and noise.

    Attributes:
        tensors: q, k, v, bias, mask, seed and offset, as kernels take them.
        numbers: Sizes and strides, in the order of the kernels.
        constants: Constants of the kernels, without the plan.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        seed: Tensor | None,
        offset: Tensor | None,
        scale: float,
        causal: bool,
        dropout_p: float,
    ) -> None:
        self.lead = q.shape[:-2]
        self.batch, self.heads, self.key_heads = math.prod(q.shape[:-3]), q.shape[-3], k.shape[-3]
        self.rows, self.keys, self.width, self.value_width = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
        self.q, self.k, self.v = (_with_adjacent_width(x) for x in (q, k, v))
        # Bytes, because Triton has no pointers to bool of its own.
        mask = None if mask is None else mask.view(torch.uint8)
        self.bias, self.mask = (None if x is None else self._pairs(x) for x in (bias, mask))
        num_dropped = 0 if seed is None else math.ceil(dropout_p * 2**32)
        if num_dropped == 0:
            seed = offset = None
        self.seed, self.offset = (None if x is None else x.reshape(-1) for x in (seed, offset))
        noise_heads = 1 if seed is None else math.prod(self.lead[seed.dim() :])
        strides = [_strides(x) for x in (self.q, self.k, self.v)]
        pair_strides = [(0, 0, 0, 0) if x is None else _pair_strides(x) for x in (self.bias, self.mask)]
        noise_strides = [0 if x is None else x.stride(0) for x in (self.seed, self.offset)]
        flat = [*sum(strides, ()), *sum(pair_strides, ())]
        self.tensors = (self.q, self.k, self.v, self.bias, self.mask, self.seed, self.offset)
        self.numbers = (self.heads, self.rows, self.keys, noise_heads, *noise_strides, *flat)
        self.dtype = accumulation_dtype(q.dtype)
        self.constants: dict[str, Any] = {
            "GROUP": self.heads // self.key_heads,
            "WIDTH": self.width,
            "VALUE_WIDTH": self.value_width,
            "BLOCK_WIDTH": max(next_power_of_2(self.width), MIN_MATMUL),
            "BLOCK_VALUE_WIDTH": max(next_power_of_2(self.value_width), MIN_MATMUL),
            "ALIGN": math.gcd(MAX_ALIGN, self.width, self.value_width, *sum(strides, ())),
            "SCALE": scale,
            "CAUSAL": causal,
            "NUM_DROPPED": num_dropped,
            "NOISE_SCALE": 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0,
            "DTYPE": TL_DTYPES[self.dtype],
        }

    def _pairs(self, x: Tensor) -> Tensor:
        """Bias or mask, expanded to [*batch, heads, rows, keys], with one stride for the batch."""
        x = x.expand(*self.lead, self.rows, self.keys)
        return x if collapse(x, _CUTS(x)) is not None else x.contiguous()

    def rows_like(self, width: int) -> Tensor:
        """Memory for rows [*batch, heads, rows, width], as o lies."""
        return _row_major(self.q, (*self.lead, self.rows, width))

    def keys_like(self, x: Tensor) -> Tensor:
        """Memory for the cotangent of keys or values."""
        return _row_major(self.q, x.shape)

    def statistic(self) -> Tensor:
        """Memory for a number of each row."""
        return self.q.new_empty((*self.lead, self.rows), dtype=self.dtype)

    def like(self, x: Tensor | None, model: Tensor | None) -> Tensor | None:
        """A tangent with the strides of what it is a tangent of."""
        if x is None or model is None or x.stride() == model.stride():
            return x
        return torch.empty_strided(model.shape, model.stride(), dtype=x.dtype, device=x.device).copy_(x)

    def as_rows(self, x: Tensor | None) -> Tensor | None:
        """`x` [*batch, heads, rows, width], as o lies."""
        if x is None or x.transpose(-2, -3).is_contiguous():
            return x
        return _row_major(x, x.shape).copy_(x)

    def launch(self, kernel: Any, name: str, *tensors: Tensor | None) -> None:
        """Launch a kernel for which `tensors` follow, or replace, those of the problem."""
        sizes = (self.rows, self.keys, max(self.width, self.value_width))
        plan = launch.plan_attention(name, *sizes, self.q.element_size(), self.q.device)
        by_rows, by_keys = cdiv(self.rows, plan.block_rows), cdiv(self.keys, plan.block_keys)
        count = self.key_heads * by_keys if name == "keys" else self.heads * by_rows
        with device_guard(self.q):
            kernel[(self.batch * count,)](*self.tensors, *tensors, *self.numbers, **self.constants, **plan.options())


def _CUTS(x: Tensor) -> tuple[int, ...]:
    return (x.dim() - 3, x.dim() - 2, x.dim() - 1)


def _with_adjacent_width(x: Tensor) -> Tensor:
    strides = collapse(x, _CUTS(x), single=1)
    return x if strides is not None and (strides[-1] == 1 or x.shape[-1] == 1) else x.contiguous()


def _strides(x: Tensor) -> tuple[int, ...]:
    strides: Any = collapse(x, _CUTS(x))
    return strides[:3]


def _pair_strides(x: Tensor) -> tuple[int, ...]:
    strides: Any = collapse(x, _CUTS(x))
    return strides


def _row_major(like: Tensor, shape: Sequence[int]) -> Tensor:
    *lead, heads, rows, width = shape
    return like.new_empty((*lead, rows, heads, width)).transpose(-2, -3)


@tunable
def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    offset: Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """O and lse.

    Args:
        q: Queries `[*batch, H, N, D]`.
        k: Keys `[*batch, K, M, D]`, H a multiple of K.
        v: Values `[*batch, K, M, E]`.
        bias: Added to the scores, broadcast to `[*batch, H, N, M]`; or None.
        mask: True where a row sees a key, likewise.
        seed: Keys of the noise, int64, over the first axes of the batch; None for no dropout.
        offset: Blocks to begin at, like `seed`; None for 0.
        scale: Factor of the products.
        causal: Whether row i sees the keys up to i alone.
        dropout_p: Probability that a pair is dropped.

    Returns:
        `o` `[*batch, H, N, E]` in the dtype of q, in memory `[*batch, N, H, E]`, and `lse` `[*batch, H, N]`.
    """
    problem = _Problem(q, k, v, bias, mask, seed, offset, scale, causal, dropout_p)
    o, lse = problem.rows_like(problem.value_width), problem.statistic()
    if problem.keys == 0:
        return o.zero_(), lse.fill_(-math.inf)
    if lse.numel():
        problem.launch(attention_fwd_kernel, "fwd", o, lse)
    return o, lse


@tunable
def attention_jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    o: Tensor,
    lse: Tensor,
    q_dot: Tensor | None,
    k_dot: Tensor | None,
    v_dot: Tensor | None,
    bias_dot: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    offset: Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """Tangents of o and lse along q_dot, k_dot, v_dot and bias_dot, any of which may be None.

    Args:
        q, k, v, bias, mask, seed, offset, scale, causal, dropout_p: As for `attention_fwd`.
        o: Its output.
        lse: Its other output.
        q_dot, k_dot, v_dot, bias_dot: Tangents, with the shapes of what they are tangents of.

    Returns:
        `o_dot` and `lse_dot`, like o and lse.
    """
    if bias_dot is not None and bias is not None:
        bias, bias_dot = _together(bias, bias_dot)
    problem = _Problem(q, k, v, bias, mask, seed, offset, scale, causal, dropout_p)
    return _jvp(problem, o, lse, _dots(problem, q_dot, k_dot, v_dot, bias_dot))


def _together(bias: Tensor, bias_dot: Tensor) -> tuple[Tensor, Tensor]:
    """A bias and its tangent with the same strides."""
    if bias.stride() == bias_dot.stride():
        return bias, bias_dot
    return bias.contiguous(), bias_dot.contiguous()


def _dots(problem: _Problem, *dots: Tensor | None) -> list[Tensor | None]:
    q_dot, k_dot, v_dot, bias_dot = dots
    primals = (problem.q, problem.k, problem.v)
    moved = [problem.like(x, model) for x, model in zip((q_dot, k_dot, v_dot), primals, strict=True)]
    return [*moved, None if bias_dot is None else problem._pairs(bias_dot)]


def _jvp(problem: _Problem, o: Tensor, lse: Tensor, dots: list[Tensor | None]) -> tuple[Tensor, Tensor]:
    o_dot, lse_dot = problem.rows_like(problem.value_width), problem.statistic()
    if problem.keys == 0:
        return o_dot.zero_(), lse_dot.zero_()
    if lse_dot.numel():
        problem.launch(attention_jvp_kernel, "jvp", problem.as_rows(o), lse.contiguous(), *dots, o_dot, lse_dot)
    return o_dot, lse_dot


@tunable
def attention_bwd(
    o_bar: Tensor | None,
    lse_bar: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    o: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    offset: Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...] | None:
    """Cotangents of q, k and v; None where that of the bias is wanted, which no kernel computes.

    Args:
        o_bar: Cotangent of o, or None.
        lse_bar: Cotangent of lse, or None.
        q, k, v, bias, mask, seed, offset, scale, causal, dropout_p: As for `attention_fwd`.
        o: Its output.
        lse: Its other output.
        wanted: Which of the cotangents of q, k, v and bias are asked for.

    Returns:
        The cotangents; those that are not wanted have no elements.
    """
    if wanted[3]:
        return None
    problem = _Problem(q, k, v, bias, mask, seed, offset, scale, causal, dropout_p)
    flags = (False, False, False, *wanted[:3])
    return *_sweeps(problem, (o_bar, lse_bar, None, None), o, lse, [None] * 4, None, None, flags)[3:], q.new_empty(0)


def _sweeps(
    problem: _Problem,
    bars: Sequence[Tensor | None],
    o: Tensor,
    lse: Tensor,
    dots: list[Tensor | None],
    o_dot: Tensor | None,
    lse_dot: Tensor | None,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Both sweeps: cotangents of q, k, v, and of their tangents, those that are wanted."""
    models = (problem.q, problem.k, problem.v)
    made = [
        (problem.rows_like(problem.width) if x is problem.q else problem.keys_like(x)) if want else None
        for x, want in zip((*models, *models), wanted, strict=True)
    ]
    q_bar, k_bar, v_bar, q_dot_bar, k_dot_bar, v_dot_bar = made
    o_bar, lse_bar, o_bar_dot, lse_bar_dot = bars
    o_bar, o_bar_dot, o, o_dot = (problem.as_rows(x) for x in (o_bar, o_bar_dot, o, o_dot))
    lse, lse_dot, lse_bar, lse_bar_dot = (
        None if x is None else x.contiguous() for x in (lse, lse_dot, lse_bar, lse_bar_dot)
    )
    if problem.keys == 0 or problem.rows == 0 or problem.batch * problem.heads == 0:
        for x in made:
            if x is not None:
                x.zero_()
    else:
        g, w = problem.statistic(), problem.statistic()
        tail = (o_bar, lse_bar, o_bar_dot, lse_bar_dot, q_bar, q_dot_bar, g, w)
        problem.launch(attention_rows_kernel, "rows", o, lse, *dots, o_dot, lse_dot, *tail)
        if any(x is not None for x in (k_bar, v_bar, k_dot_bar, v_dot_bar)):
            outputs = (k_bar, v_bar, k_dot_bar, v_dot_bar)
            problem.launch(attention_keys_kernel, "keys", lse, *dots, lse_dot, o_bar, o_bar_dot, g, w, *outputs)
    return [problem.q.new_empty(0) if x is None else x for x in made]


@tunable
def attention_pairing(
    o_bar: Tensor | None,
    lse_bar: Tensor | None,
    o_bar_dot: Tensor | None,
    lse_bar_dot: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    o: Tensor,
    lse: Tensor,
    q_dot: Tensor | None,
    k_dot: Tensor | None,
    v_dot: Tensor | None,
    bias_dot: Tensor | None,
    o_dot: Tensor | None,
    lse_dot: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    offset: Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...] | None:
    """Derivatives of `<o_bar, o_dot> + <lse_bar, lse_dot> + <o_bar_dot, o> + <lse_bar_dot, lse>`.

    Args:
        o_bar, lse_bar, o_bar_dot, lse_bar_dot: The weights of the sum, any of which may be None.
        q, k, v, bias, mask, seed, offset, scale, causal, dropout_p: As for `attention_fwd`.
        o, lse: Its outputs.
        q_dot, k_dot, v_dot, bias_dot: Tangents, any of which may be None.
        o_dot, lse_dot: Those of the outputs along them; None where they are to be computed.
        wanted: Which derivatives are asked for: in o_bar, lse_bar, q, k, v, bias, q_dot, k_dot, v_dot, bias_dot.

    Returns:
        The derivatives, those that are not wanted without elements; None where one in bias or bias_dot is wanted.
    """
    if wanted[5] or wanted[9]:
        return None
    if bias_dot is not None and bias is not None:
        bias, bias_dot = _together(bias, bias_dot)
    problem = _Problem(q, k, v, bias, mask, seed, offset, scale, causal, dropout_p)
    dots = _dots(problem, q_dot, k_dot, v_dot, bias_dot)
    flags = (*wanted[2:5], *wanted[6:9])
    if wanted[0] or wanted[1] or ((o_dot is None or lse_dot is None) and any(flags)):
        o_dot, lse_dot = _jvp(problem, o, lse, dots)
    none = q.new_empty(0)
    bars = _sweeps(problem, (o_bar, lse_bar, o_bar_dot, lse_bar_dot), o, lse, dots, o_dot, lse_dot, flags)
    first = [x if want and x is not None else none for x, want in zip((o_dot, lse_dot), wanted, strict=False)]
    return *first, *bars[:3], none, *bars[3:], none
