"""Decompositions of norms of vectors, and of the distances and limits that are made of them.

Torch takes the norm that it computed for a constant of some derivatives, and has no derivative of that of a distance.
Where a norm is zero, and by the size of an entry that is zero, all derivatives are 0, as torch has the first.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, _decomp
from torch._prims_common import get_computation_dtype

from primitives._core.decomposition import register_decomposition
from primitives.decompositions._norms import require

aten = torch.ops.aten

_composed_norm = _decomp.decomposition_table[aten.linalg_vector_norm.default]


def _powers(x: Tensor, exponent: float) -> Tensor:
    """`|x| ** exponent`, smooth at zero for even exponents."""
    if exponent > 0 and exponent % 2 == 0:
        square = (x * x.conj()).real if x.is_complex() else x.square()
        return square if exponent == 2 else square.pow(exponent // 2)
    is_zero = x == 0
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, x).abs().pow(exponent))


@register_decomposition(aten.linalg_vector_norm)
def linalg_vector_norm(x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    """The root of the sum of the powers of the entries' sizes, or the largest, the smallest or the number of them."""
    if ord in (0, math.inf, -math.inf):
        return _composed_norm(x, ord, dim, keepdim, **kwargs)
    # Torch's, which checks the arguments.
    value = _composed_norm(x.detach(), ord, dim, keepdim, **kwargs)
    total = _powers(x.to(get_computation_dtype(kwargs.get("dtype") or x.dtype)), ord).sum(dim, keepdim)
    # A power below 0 of an entry that is 0 is infinite.
    is_zero = total == 0 if ord > 0 else value == 0
    safe = torch.where(is_zero, 1.0, total)
    return torch.where(is_zero, 0.0, safe.sqrt() if ord == 2 else safe.pow(1 / ord)).to(value.dtype)


@register_decomposition([aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dtype])
@register_decomposition(aten.norm.ScalarOpt_dim_dtype)
def norm(self: Tensor, p: float | None = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    """Norm of vectors under its older name."""
    return linalg_vector_norm(self, 2 if p is None else p, dim, keepdim, **kwargs)


@register_decomposition(aten.dist)
def dist(self: Tensor, other: Tensor, p: float = 2) -> Tensor:
    """Norm of a difference."""
    return linalg_vector_norm(self - other, p)


@register_decomposition(aten.renorm)
def renorm(self: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """Slices along an axis, those of a norm above `maxnorm` scaled down to it."""
    require(self.dim() > 1 and p > 0 and maxnorm >= 0, "renorm: expected two axes, p > 0, maxnorm >= 0.")
    others = [axis for axis in range(self.dim()) if axis != range(self.dim())[dim]]
    wide = torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else None
    size = linalg_vector_norm(self, p, others, True, dtype=wide)
    # Beside the quotient torch adds the same.
    return self * torch.where(size > maxnorm, maxnorm / (size + 1e-7), 1.0).to(self.dtype)


def _distance(difference: Tensor, p: float) -> Tensor:
    if p == 0 or difference.shape[-1] == 0:
        # Has a derivative, which is zero.
        difference = torch.where(difference == 0, 0.0, torch.where(difference == 0, difference, 1.0))
        return difference.sum(-1)
    return linalg_vector_norm(difference, p, -1)


@register_decomposition(aten._cdist_forward)
def cdist_forward(x1: Tensor, x2: Tensor, p: float, compute_mode: int | None) -> Tensor:
    """Distances of the rows `[*, P, M]` to the rows `[*, R, M]`, `[*, P, R]`."""
    require(min(x1.dim(), x2.dim()) > 1 and p >= 0, "cdist: expected tensors of rows, and p >= 0.")
    require(x1.dtype == x2.dtype, f"cdist: expected one dtype, got {x1.dtype} and {x2.dtype}.")
    require(x1.shape[-1] == x2.shape[-1], f"cdist: rows of {x1.shape[-1]} and {x2.shape[-1]} numbers.")
    return _distance(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


@register_decomposition(aten._euclidean_dist)
def euclidean_dist(x1: Tensor, x2: Tensor) -> Tensor:
    """Euclidean distances, as `cdist` takes them of many rows."""
    return cdist_forward(x1, x2, 2.0, None)


@register_decomposition(aten._pdist_forward)
def pdist_forward(self: Tensor, p: float = 2) -> Tensor:
    """Distances between all pairs of rows, the first one's first."""
    if self.dim() != 2:
        raise IndexError(f"pdist: expected a matrix, got a tensor of {self.dim()} axes.")
    require(p >= 0, f"pdist: p must not be negative, got {p}.")
    first, second = torch.triu_indices(len(self), len(self), 1, device=self.device)
    return _distance(self[first] - self[second], p)
