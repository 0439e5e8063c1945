"""Attention: launchers of the forward, its tangent, its backward, and the derivatives of both.

Arguments and formulas are those of `primitives.ops.attention.attention`. P is never stored, and nothing is added
atomically: results are the same from run to run. o lies in memory as `[*batch, N, H, E]`; tangents and cotangents that
are None are zero. All launchers return None for widths above 256, of float64 above 128: no tile of them fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.arithmetic import MAX_ALIGN, MIN_MATMUL, cdiv, next_power_of_2
from ..runtime.numbers import TL_DTYPES, accumulation_dtype
from ..runtime.views import collapse, device_guard, split_scratch
from ..tuning import tunable
from ._first_kernels import attention_fwd_kernel, attention_jvp_kernel
from ._plan import plan_attention
from ._second_kernels import attention_keys_kernel, attention_rows_kernel

# Widths whose tiles fit into the shared memory of a processor: 256, of float64 128.
MAX_WIDTH, MAX_WIDTH_BYTES = 256, 1024


class _Problem:
    """The description for every kernel of q, k, v, bias, mask and noise.

    Attributes:
        tensors: q, k, v, bias, mask, seed and offset, as kernels take them.
        dots: Tangents of q, k, v and bias, with the strides of what they are tangents of.
        numbers: Sizes and strides, in the order of the kernels.
        constants: Constants of the kernels, without the plan.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
        mask: Tensor | None, seed: Tensor | None, offset: Tensor | None, scale: float, causal: bool, dropout_p: float,
        dots: Sequence[Tensor | None] = (None, None, None, None),
    ) -> None:  # fmt: skip
        self.lead = q.shape[:-2]
        self.batch, self.heads, self.key_heads = math.prod(q.shape[:-3]), q.shape[-3], k.shape[-3]
        self.rows, self.keys, self.width, self.value_width = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
        self.dtype = accumulation_dtype(q.dtype)
        matrices = [tuple(map(_adjacent, _alike(*pair))) for pair in zip((q, k, v), dots, strict=False)]
        # Bytes, because Triton has no pointers to bool of its own.
        mask = None if mask is None else mask.view(torch.uint8)
        bias, bias_dot, mask = (self._pairs(x) for x in (*_alike(bias, dots[3]), mask))
        num_dropped = 0 if seed is None else math.ceil(dropout_p * 2**32)
        if num_dropped == 0:
            seed = offset = None
        noise_heads = 1 if seed is None else math.prod(self.lead[seed.dim() :])
        seed, offset = (None if x is None else x.reshape(-1) for x in (seed, offset))
        strides = [_strides(x) for x, _ in matrices]
        pair_strides = [_strides(x) for x in (bias, mask)]
        aligned, pairs_aligned = ([n for each in views for n in each[:3]] for views in (strides, pair_strides))
        self.q: Tensor = matrices[0][0]
        self.tensors = (*(x for x, _ in matrices), bias, mask, seed, offset)
        self.dots = (*(x_dot for _, x_dot in matrices), bias_dot)
        noise_strides = [0 if x is None else x.stride(0) for x in (seed, offset)]
        self.numbers = (self.heads, self.rows, self.keys, noise_heads, *noise_strides, *aligned, *pairs_aligned)
        self.constants: dict[str, Any] = {
            "GROUP": self.heads // self.key_heads if self.key_heads else 1,
            "WIDTH": self.width,
            "VALUE_WIDTH": self.value_width,
            "BLOCK_WIDTH": max(next_power_of_2(self.width), MIN_MATMUL),
            "BLOCK_VALUE_WIDTH": max(next_power_of_2(self.value_width), MIN_MATMUL),
            "ALIGN": math.gcd(MAX_ALIGN, self.width, self.value_width, *aligned),
            "PAIR_ALIGN": 1 if bias is None and mask is None else math.gcd(MAX_ALIGN, self.keys, *pairs_aligned),
            "BIAS_STEP": pair_strides[0][3],
            "MASK_STEP": pair_strides[1][3],
            "SCALE": scale,
            "CAUSAL": causal,
            "NUM_DROPPED": num_dropped,
            "NOISE_SCALE": 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0,
            "DTYPE": TL_DTYPES[self.dtype],
        }

    def _pairs(self, x: Tensor | None) -> Tensor | None:
        """Bias or mask, expanded to [*batch, heads, rows, keys], with one stride for the batch and keys adjacent."""
        if x is None:
            return None
        x = x.expand(*self.lead[:-1], *x.shape[-3:])
        strides = collapse(x, _cuts(x))
        # A copy keeps the axes along which it is broadcast within a sample.
        x = x if strides is not None and strides[3] in (0, 1) else x.contiguous()
        return x.expand(*self.lead, self.rows, self.keys)

    @property
    def is_empty(self) -> bool:
        """Whether pairs are missing."""
        return self.batch * self.heads * self.rows * self.keys == 0

    def rows_like(self, width: int) -> Tensor:
        """Memory for rows [*batch, heads, rows, width], as o lies."""
        return _row_major(self.q, (*self.lead, self.rows, width))

    def statistic(self) -> Tensor:
        """Memory for a number of each row."""
        return self.q.new_empty((*self.lead, self.rows), dtype=self.dtype)

    def scratch(self, **parts: bool) -> dict[str, Tensor]:
        """Memory between kernels, in one allocation: a number of each row, and `o_dot`, in the dtype of sums."""
        *batch, heads, rows, _ = self.q.shape
        shapes = {name: (*batch, heads, rows) for name, is_there in parts.items() if is_there}
        if "o_dot" in shapes:
            shapes["o_dot"] = (*batch, rows, heads, self.value_width)
        found = dict(zip(shapes, split_scratch(self.q, *shapes.values(), dtype=self.dtype), strict=True))
        return {name: x.transpose(-2, -3) if name == "o_dot" else x for name, x in found.items()}

    def launch(self, kernel: Any, name: str, *tensors: Tensor | None) -> None:
        """Launch a kernel, for which `tensors` follow those of the problem."""
        sizes = (self.rows, self.keys, max(self.width, self.value_width))
        plan = plan_attention(name, *sizes, self.q.element_size(), self.q.device)
        by_rows, by_keys = cdiv(self.rows, plan.block_rows), cdiv(self.keys, plan.block_keys)
        count = self.key_heads * by_keys if kernel is attention_keys_kernel else self.heads * by_rows
        # A second stage of several tiles of pairs would take more shared memory than there is.
        is_full = sum(x is not None for x in (*self.tensors[3:5], self.dots[3])) > 1
        options = {**plan.options(), **({"num_stages": 1} if is_full else {})}
        with device_guard(self.q):
            kernel[(self.batch * count,)](*self.tensors, *tensors, *self.numbers, **self.constants, **options)


def _cuts(x: Tensor) -> tuple[int, ...]:
    return (x.dim() - 3, x.dim() - 2, x.dim() - 1)


def _strides(x: Tensor | None) -> Any:
    """Of the whole batch, of heads, and of the last two axes."""
    return (0, 0, 0, 0) if x is None else collapse(x, _cuts(x))


def _alike(x: Any, x_dot: Tensor | None) -> tuple[Any, Tensor | None]:
    """The same two with the same strides: those of x, if it has neither gaps nor elements that are one in memory."""
    if x_dot is None or x.stride() == x_dot.stride():
        return x, x_dot
    moved = torch.empty_like(x).copy_(x_dot)
    return (x if x.stride() == moved.stride() else x.clone()), moved


def _adjacent(x: Any) -> Any:
    """Rows [*batch, heads, rows, width] whose elements are adjacent, with one stride for the batch."""
    strides = None if x is None else collapse(x, _cuts(x), single=1)
    return x if x is None or (strides is not None and strides[-1] == 1) else x.contiguous()


def _row_major(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory that is not a view: what an operator returns may be written in place."""
    *batch, heads, rows, width = range(len(shape))
    return torch.empty_permuted(shape, (*batch, rows, heads, width), dtype=like.dtype, device=like.device)


def _as_made(x: Tensor | None) -> Tensor | None:
    """`x` [*batch, heads, rows, width], as o lies."""
    return x if x is None or x.transpose(-2, -3).is_contiguous() else _row_major(x, x.shape).copy_(x)


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _is_served(q: Tensor, v: Tensor) -> bool:
    width = next_power_of_2(max(q.shape[-1], v.shape[-1]))
    return width <= min(MAX_WIDTH, MAX_WIDTH_BYTES // q.element_size())


@tunable
def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
    mask: Tensor | None, seed: Tensor | None, offset: Tensor | None, scale: float, causal: bool, dropout_p: float,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """O and lse."""
    if not _is_served(q, v):
        return None
    problem = _Problem(q, k, v, bias, mask, seed, offset, scale, causal, dropout_p)
    o, lse = problem.rows_like(problem.value_width), problem.statistic()
    if problem.is_empty:
        return o.zero_(), lse.fill_(-math.inf)
    problem.launch(attention_fwd_kernel, "fwd", o, lse)
    return o, lse


@tunable
def attention_jvp(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, o: Tensor, lse: Tensor,
    q_dot: Tensor | None, k_dot: Tensor | None, v_dot: Tensor | None, bias_dot: Tensor | None,
    mask: Tensor | None, seed: Tensor | None, offset: Tensor | None, scale: float, causal: bool, dropout_p: float,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Tangents of o and lse along q_dot, k_dot, v_dot and bias_dot."""
    if not _is_served(q, v):
        return None
    dots = (q_dot, k_dot, v_dot, bias_dot)
    return _jvp(_Problem(q, k, v, bias, mask, seed, offset, scale, causal, dropout_p, dots), o, lse)


def _jvp(
    problem: _Problem, o: Tensor, lse: Tensor, o_dot: Tensor | None = None, lse_dot: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """o_dot and lse_dot, in new memory where none is given."""
    o_dot = problem.rows_like(problem.value_width) if o_dot is None else o_dot
    lse_dot = problem.statistic() if lse_dot is None else lse_dot
    if problem.is_empty:
        return o_dot.zero_(), lse_dot.zero_()
    problem.launch(attention_jvp_kernel, "jvp", _as_made(o), lse.contiguous(), *problem.dots, o_dot, lse_dot)
    return o_dot, lse_dot


@tunable
def attention_bwd(
    o_bar: Tensor | None, lse_bar: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, o: Tensor, lse: Tensor,
    mask: Tensor | None, seed: Tensor | None, offset: Tensor | None, scale: float, causal: bool, dropout_p: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """Cotangents of q, k, v and bias.

    None where that of a bias is wanted which is broadcast, since no kernel sums over pairs.
    """
    if not _is_served(q, v) or (output_mask[3] and not _is_full(bias, q, k)):
        return None
    problem = _Problem(q, k, v, bias, mask, seed, offset, scale, causal, dropout_p)
    flags = (False, False, False, False, *output_mask)
    scratch = problem.scratch(g=any(output_mask))
    return _sweeps(problem, (o_bar, lse_bar, None, None), o, lse, None, None, bias, flags, scratch)[4:]


def _is_full(bias: Any, q: Tensor, k: Tensor) -> bool:
    """Whether no pair shares its bias with another one."""
    return bias.shape == (*q.shape[:-1], k.shape[-2])


def _sweeps(
    problem: _Problem, bars: Sequence[Tensor | None], o: Tensor, lse: Tensor, o_dot: Tensor | None,
    lse_dot: Tensor | None, bias: Tensor | None, output_mask: Sequence[bool], scratch: Mapping[str, Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Both sweeps: cotangents of q, k, v and bias, and of their tangents, those that are wanted."""
    q, k, v = problem.tensors[:3]

    def new(x: Any) -> Tensor:
        if x is not bias:
            return _row_major(x, x.shape)
        # Tiles that a causal problem passes over stay unwritten.
        return (x.new_zeros if problem.constants["CAUSAL"] else x.new_empty)(x.shape)

    made: list[Any] = [new(x) if want else None for x, want in zip([q, k, v, bias] * 2, output_mask, strict=True)]
    q_bar, k_bar, v_bar, bias_bar, q_dot_bar, k_dot_bar, v_dot_bar, bias_dot_bar = made
    of_keys = [k_bar, v_bar, k_dot_bar, v_dot_bar]
    if problem.is_empty:
        for x in made:
            _ = x if x is None else x.zero_()
    elif any(output_mask):
        o_bar, o_bar_dot, of_o, of_o_dot = (_as_made(x) for x in (bars[0], bars[2], o, o_dot))
        lse_bar, lse_bar_dot, of_lse, of_lse_dot = (_dense(x) for x in (bars[1], bars[3], lse, lse_dot))
        has_w = any(x is not None for x in (q_bar, k_bar, bias_bar))
        g, w = scratch["g"], scratch["w"] if has_w else None
        order = "second" if has_w or v_bar is not None else "first"
        of_w = (of_o_dot, lse_bar_dot) if has_w else (None, None)  # A kernel is told of what it reads, and no more.
        given = (of_o, of_lse, *problem.dots, of_w[0], of_lse_dot, o_bar, lse_bar, o_bar_dot, of_w[1])
        problem.launch(attention_rows_kernel, f"{order}_rows", *given, q_bar, bias_bar, q_dot_bar, bias_dot_bar, g, w)
        if any(x is not None for x in of_keys):
            given = (of_lse, *problem.dots, of_lse_dot, o_bar, o_bar_dot, g, None if k_bar is None else w)
            problem.launch(attention_keys_kernel, f"{order}_keys", *given, *of_keys)
    return tuple(problem.q.new_empty(0) if x is None else x for x in made)


@tunable
def attention_double_backward(
    o_bar: Tensor | None, lse_bar: Tensor | None, o_bar_dot: Tensor | None, lse_bar_dot: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, o: Tensor, lse: Tensor,
    q_dot: Tensor | None, k_dot: Tensor | None, v_dot: Tensor | None, bias_dot: Tensor | None,
    o_dot: Tensor | None, lse_dot: Tensor | None,
    mask: Tensor | None, seed: Tensor | None, offset: Tensor | None, scale: float, causal: bool, dropout_p: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor, ...] | None:  # fmt: skip
    """Derivatives of `<o_bar, o_dot> + <lse_bar, lse_dot> + <o_bar_dot, o> + <lse_bar_dot, lse>`; or None, as above.

    O_dot and lse_dot, which belong to the tangents, are None where they are to be computed. `output_mask` names the
    derivatives in o_bar, lse_bar, q, k, v, bias, q_dot, k_dot, v_dot and bias_dot.
    """
    if not _is_served(q, v) or ((output_mask[5] or output_mask[9]) and not _is_full(bias, q, k)):
        return None
    dots = (q_dot, k_dot, v_dot, bias_dot)
    problem = _Problem(q, k, v, bias, mask, seed, offset, scale, causal, dropout_p, dots)
    is_missing = (o_dot is None or lse_dot is None) and any(x is not None for x in dots)
    finds, sweeps = output_mask[0] or output_mask[1] or (is_missing and any(output_mask)), any(output_mask[2:])
    hidden = {"lse_dot": finds and not output_mask[1], "o_dot": finds and not output_mask[0]}
    scratch = problem.scratch(g=sweeps, w=sweeps, **hidden)
    if finds:
        o_dot, lse_dot = _jvp(problem, o, lse, scratch.get("o_dot"), scratch.get("lse_dot"))
    bars = (o_bar, lse_bar, o_bar_dot, lse_bar_dot)
    derivatives = _sweeps(problem, bars, o, lse, o_dot, lse_dot, bias, output_mask[2:], scratch)
    made = zip((o_dot, lse_dot), output_mask, strict=False)
    first = (x if want and x is not None else q.new_empty(0) for x, want in made)
    return *first, *derivatives
