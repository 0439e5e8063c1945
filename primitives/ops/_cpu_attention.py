"""Attention on the CPU by ATen's flash kernel and its backward, where they serve; None where they do not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from primitives.ops._attention import as_row_major

if TYPE_CHECKING:
    from torch import Tensor

    from primitives.ops._attention import Problem

__all__ = ["flash", "flash_bwd"]

BATCH_HEADS_ROWS_WIDTH = 4


def _serves(problem: Problem) -> bool:
    """Whether ATen's kernel takes the problem: it divides by the number of rows, and knows no noise."""
    q, k, v = problem.q, problem.k, problem.v
    if q.dim() != BATCH_HEADS_ROWS_WIDTH or problem.seed is not None or v.shape[-1] != q.shape[-1]:
        return False
    if problem.causal and (problem.bias is not None or problem.mask is not None):
        return False
    return q.numel() > 0 and k.numel() > 0


def _hidden(problem: Problem) -> Tensor | None:
    """Bias and mask as one bias, as ATen takes it."""
    bias, mask = problem.bias, problem.mask
    if mask is not None:
        bias = problem.q.new_zeros(()) if bias is None else bias
        bias = torch.where(mask, bias, -math.inf)
    return None if bias is None else bias.to(problem.q.dtype)


def _adjacent(x: Tensor) -> Tensor:
    """`x` with adjacent columns, which ATen takes for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


def flash(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """O and lse."""
    if not _serves(problem):
        return None
    bias = _hidden(problem)
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *map(_adjacent, problem[:3]), 0.0, problem.causal, attn_mask=bias, scale=problem.scale
    )
    lse = lse.contiguous()
    if bias is not None:
        # ATen says 0 for a row that sees no key.
        lse.masked_fill_((bias == -math.inf).all(-1).expand(lse.shape), -math.inf)
    return as_row_major(o), lse


def flash_bwd(problem: Problem) -> tuple[Tensor, Tensor, Tensor] | None:
    """q_bar, k_bar and v_bar."""
    if problem.o_bar is None or problem.lse_bar is not None or not _serves(problem) or problem.groups > 1:
        return None
    o: Any = problem.o
    lse: Any = problem.lse
    bias = _hidden(problem)
    if bias is not None:
        lse = lse.masked_fill(lse == -math.inf, 0.0)
    bars = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *map(_adjacent, (problem.o_bar, *problem[:3], o)),
        lse,
        0.0,
        problem.causal,
        attn_mask=bias,
        scale=problem.scale,
    )
    q_bar, k_bar, v_bar = map(as_row_major, bars)
    return q_bar, k_bar, v_bar
