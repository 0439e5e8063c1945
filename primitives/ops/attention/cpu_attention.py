"""Attention on the CPU by ATen's flash kernel and its backward, where they serve; None where they do not."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from primitives.ops.attention.rows import Problem, as_row_major

# Of lse, relative to the precision of its dtype: P = exp(S - lse) is off by half as much.
LARGEST_LSE = 2.0**-11


def _serves(problem: Problem) -> bool:
    """Whether ATen's kernel takes the problem: it divides by the number of rows, and knows no noise."""
    q, k, v = problem.q, problem.k, problem.v
    if problem.seed is not None or v.shape[-1] != q.shape[-1]:
        return False
    # It multiplies the -inf of what causal attention hides by the scale.
    if problem.causal and (problem.bias is not None or problem.mask is not None or problem.scale <= 0.0):
        return False
    return q.numel() > 0 and k.numel() > 0


def _hidden(problem: Problem) -> Tensor | None:
    """Bias and mask as one bias, in the dtype of q or in float32, as ATen takes it."""
    bias, mask = problem.bias, problem.mask
    if mask is not None:
        bias = problem.q.new_zeros(()) if bias is None else bias
        bias = torch.where(mask, bias, -math.inf)
    if bias is None:
        return None
    if math.prod(bias.shape[:-3]) != 1:
        bias = bias.expand(*problem.q.shape[:-3], *bias.shape[-3:])
    return _folded(bias)


def _folded(x: Any) -> Tensor:
    """`x` with one axis before that of heads, and adjacent columns, as ATen takes it."""
    x = x.reshape(-1, *x.shape[-3:])
    return x if x.stride(-1) == 1 else x.contiguous()


def _unfolded(x: Tensor, like: Tensor) -> Tensor:
    """A result of ATen's with the axes of `like`, and our layout; not a view, which could not be written in place."""
    return as_row_major(torch.ops.aten._unsafe_view(x, (*like.shape[:-1], x.shape[-1])))


def _has_finite_scores(problem: Problem, bias: Tensor | None) -> bool:
    """Whether the sizes of q, k and bias leave no score that is NaN or infinite."""
    largest = problem.q.shape[-1] * abs(problem.scale)
    for x in (problem.q, problem.k):
        largest *= x.abs().amax().item()
    most = torch.finfo(problem.dtype).max
    return largest < most and (bias is None or bias.amax().item() < most - largest)


def sees_no_key(bias: Tensor, lse: Tensor) -> Tensor:
    """Whether a row of `lse` sees no key, by a bias or a boolean mask."""
    hidden = ~bias if bias.dtype == torch.bool else bias == -math.inf
    return hidden.all(-1).expand(lse.shape)


def has_lost_sums(lse: Tensor) -> bool:
    """Whether a row's scores are so large that lse cannot hold the logarithm of their number beside them.

    That is so where a model hides all keys of a row by the least number of its dtype in place of `-inf`. ATen's
    backward then takes 1 for each probability.
    """
    largest = lse.masked_fill(lse == -math.inf, 0.0).abs().amax() if lse.numel() else 0.0
    return bool(largest > LARGEST_LSE / torch.finfo(lse.dtype).eps)


def flash(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """O and lse."""
    if not _serves(problem):
        return None
    bias = _hidden(problem)
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *map(_folded, problem[:3]), 0.0, problem.causal, attn_mask=bias, scale=problem.scale
    )
    lse = lse.contiguous()
    # ATen says 0 for a row that sees no key, and for one in which it finds no largest score, as among NaN; others have
    # it by chance.
    if not lse.all():
        if bias is not None:
            lse.masked_fill_(sees_no_key(bias, lse), -math.inf)
        if not lse.all() and not _has_finite_scores(problem, bias):
            return None
    # For other rows with an infinite score it says 0 or NaN, by where the score lies.
    if not lse.amax().item() < math.inf:
        o = o.masked_fill((lse == math.inf).unsqueeze(-1), math.nan)
    return _unfolded(o, problem.q), torch.ops.aten._unsafe_view(lse, problem.q.shape[:-1])


def flash_bwd(problem: Problem) -> tuple[Tensor, Tensor, Tensor] | None:
    """q_bar, k_bar and v_bar."""
    groups = problem.groups
    # Of half precision ATen rounds P and the gradients of scores, takes a rounded o, and is slower than blocks are.
    if problem.o_bar is None or problem.lse_bar is not None or problem.dtype != problem.q.dtype or not _serves(problem):
        return None
    bias, lse = _hidden(problem), _folded(problem.lse.unsqueeze(-1)).squeeze(-1)  # type: ignore[union-attr] - one of a kernel's call
    if has_lost_sums(lse):
        return None
    if bias is not None:
        lse = lse.masked_fill(lse == -math.inf, 0.0)
    # ATen returns a cotangent for each head of q.
    q, k, v, o, o_bar = map(_folded, (problem.q, problem.k, problem.v, problem.o, problem.o_bar))
    if groups > 1:
        k, v = (x.repeat_interleave(groups, -3) for x in (k, v))
    q_bar, k_bar, v_bar = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        o_bar, q, k, v, o, lse, 0.0, problem.causal, attn_mask=bias, scale=problem.scale
    )
    if groups > 1:
        k_bar, v_bar = (x.unflatten(-3, (-1, groups)).sum(-3) for x in (k_bar, v_bar))
    return _unfolded(q_bar, problem.q), _unfolded(k_bar, problem.k), _unfolded(v_bar, problem.v)
