"""Torch's own decompositions of operators whose nested derivatives raise or are wrong otherwise."""

from __future__ import annotations

import itertools
import math
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import _decomp

from primitives._core.decomposition import register_decomposition
from primitives.decompositions._statistics import accumulated

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten

# Right in every nesting to order 3, by `perf.torch_derivatives`.
for _operator in (
    aten._safe_softmax.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.grid_sampler_2d.default,
    aten.multi_margin_loss.default,
    aten.multilabel_margin_loss_forward.default,
    aten.native_dropout_backward.default,
):
    register_decomposition(_operator)(_decomp.decomposition_table[_operator])


@register_decomposition(aten.glu)
def glu(x: Tensor, dim: int = -1) -> Tensor:
    """The first half times the sigmoid of the second; Dynamo does not trace torch's own decomposition."""
    a, b = x.chunk(2, dim)
    return a * b.sigmoid()


@register_decomposition(aten.hardsigmoid)
def hardsigmoid(x: Tensor) -> Tensor:
    """A sixth of x + 3, within 0 and 1; likewise."""
    return torch.where(x <= -3, 0.0, torch.where(x >= 3, 1.0, x / 6 + 0.5))


@register_decomposition(aten.cumprod.default)
def cumprod(self: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """One product after the other; the forward mode of torch's is wrong beside a zero."""
    x = self if dtype is None else self.to(dtype)
    if x.dim() == 0 or x.shape[dim] == 0 or not x.is_floating_point():
        return torch.cumprod(x, dim)
    return torch.stack([*itertools.accumulate(x.unbind(dim), operator.mul)], dim)


@register_decomposition(aten.sinc)
def sinc(self: Tensor) -> Tensor:
    """`sin(t) / t` of `t = pi x`, around zero by its series to 1e-21: torch takes derivatives there for constants."""
    if not self.is_floating_point():
        return torch.sinc(self)
    t = math.pi * accumulated(self)
    is_small = t.abs() < 0.1
    square, series = torch.where(is_small, t, 0).square(), 1.0
    for n in (11, 9, 7, 5, 3):
        series = 1 - square / (n * (n - 1)) * series
    away = torch.where(is_small, 1, t)
    return torch.where(is_small, series, away.sin() / away).to(self.dtype)


@register_decomposition(aten.logaddexp)
def logaddexp(self: Tensor, other: Tensor) -> Tensor:
    """As `logsumexp`, whose derivatives beside `-inf` torch has right."""
    if not (self.is_floating_point() and other.is_floating_point()):
        return torch.logaddexp(self, other)
    both = torch.stack(torch.broadcast_tensors(self, other))
    return accumulated(both).logsumexp(0).to(both.dtype)


_composed_norm = _decomp.decomposition_table[aten.linalg_vector_norm.default]


@register_decomposition(aten.linalg_vector_norm)
def linalg_vector_norm(x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    """Norm of vectors; its derivatives at zero are 0, as torch has them, where those of a root are infinite."""
    if ord in (0, 1) or not 0 < ord < float("inf"):
        return _composed_norm(x, ord, dim, keepdim, **kwargs)
    is_zero = _composed_norm(x.detach(), ord, dim, True, **kwargs) == 0
    norm = _composed_norm(torch.where(is_zero, 1.0, x), ord, dim, keepdim, **kwargs)
    return torch.where(is_zero.reshape(norm.shape), 0.0, norm)
