"""Decompositions of products, sums and largest numbers along an axis, and by groups of numbers along it; of norms.

Torch divides the product of all by one factor for the derivative by it, which is lost beside zeros, or takes what it
divided by for a constant. Here numbers are multiplied two by two, in as many steps as a binary tree has. It takes the
norm of a vector that it computed for a constant of some derivatives, and has no derivative of that of a distance. Where
a norm is zero, and by the size of an entry that is zero, all derivatives are 0, as torch has the first.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, _decomp
from torch._prims_common import get_computation_dtype

from primitives._core.decomposition import register_decomposition
from primitives.decompositions._norms import require
from primitives.decompositions._statistics import accumulated, constant_p, decomposes

aten = torch.ops.aten


def _scanned(x: Tensor, dim: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """All before it, and itself, combined at every place along an axis."""
    # The axis of no length that torch takes for one of a single number.
    flat = x.reshape(1) if x.dim() == 0 else x
    length, step = flat.shape[dim], 1
    while step < length:
        later = combine(flat.narrow(dim, step, length - step), flat.narrow(dim, 0, length - step))
        flat, step = torch.cat([flat.narrow(dim, 0, step), later], dim), 2 * step
    return flat.reshape(x.shape) if length > 1 else x.clone()


def _multiplied(self: Tensor, dtype: torch.dtype | None) -> Tensor:
    """In the dtype that torch multiplies in."""
    if dtype is None and not (self.is_floating_point() or self.is_complex()):
        dtype = torch.int64
    return self if dtype is None else self.to(dtype)


@register_decomposition(aten.cumprod.default)
def cumprod(self: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Products of all numbers up to each; the forward mode of torch's is wrong beside a zero."""
    return _scanned(_multiplied(self, dtype), dim, operator.mul)


@register_decomposition(aten.prod.dim_int)
def prod_along(self: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Product along an axis; torch's derivatives of third order are wrong beside several zeros."""
    x = _multiplied(self, dtype)
    flat = x.reshape(1) if x.dim() == 0 else x
    if flat.shape[dim] == 0:
        flat = torch.ones_like(flat.sum(dim, keepdim=True))
    while (length := flat.shape[dim]) > 1:
        half = length // 2
        pairs = flat.narrow(dim, 0, half) * flat.narrow(dim, half, half)
        flat = torch.cat([pairs, flat.narrow(dim, 2 * half, length % 2)], dim)
    return flat.reshape(()) if x.dim() == 0 else flat.clone() if keepdim else flat.squeeze(dim).clone()


@register_decomposition(aten.prod.default)
def prod(self: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Product of all numbers."""
    return prod_along(self.flatten(), 0, dtype=dtype)


@register_decomposition(aten.aminmax)
def aminmax(self: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The least and the largest number, each as it is alone; torch writes into a tangent of both that may be a zero."""
    axes = () if dim is None else dim
    return self.amin(axes, keepdim), self.amax(axes, keepdim)


def _log_sum(a: Tensor, b: Tensor) -> Tensor:
    """`log(exp(a) + exp(b))`, of complex numbers too."""
    both = torch.stack([a, b])
    if a.is_complex():
        return both.logsumexp(0)
    is_infinite = (a == torch.inf) != (b == torch.inf)
    return torch.where(is_infinite, torch.maximum(a, b), both.masked_fill(is_infinite, 0.0).logsumexp(0))


@register_decomposition(aten.logaddexp)
def logaddexp(self: Tensor, other: Tensor) -> Tensor:
    """As `logsumexp`, whose derivatives beside `-inf` torch has right; `inf` alone is its own sum."""
    if not self.is_floating_point() or not other.is_floating_point():
        return torch.logaddexp(self, other)
    a, b = torch.broadcast_tensors(self, other)
    dtype = torch.promote_types(a.dtype, b.dtype)
    return _log_sum(accumulated(a.to(dtype)), accumulated(b.to(dtype))).to(dtype)


@register_decomposition(aten.logcumsumexp)
def logcumsumexp(self: Tensor, dim: int) -> Tensor:
    """Logarithms of sums of exponentials up to each; torch's derivative reversed three times is wrong."""
    if not self.is_floating_point() and not self.is_complex():
        return torch.logcumsumexp(self, dim)
    sums = _scanned(accumulated(self), dim, _log_sum).to(self.dtype)
    if not self.is_complex():
        return sums
    # Of logarithms `2 pi i` apart, the one that torch takes.
    apart = constant_p(torch.logcumsumexp(constant_p(self), dim) - sums)
    return sums + torch.where(apart.isfinite(), apart, 0)


def _scattered_products(self: Tensor, dim: int, index: Tensor, src: Tensor, include_self: bool) -> Tensor:
    """Products of the numbers that go to each place."""
    shape = self.shape
    if self.dim() == 0:
        self, index, src = self.reshape(1), index.reshape(-1), src.reshape(-1)
    for axis, length in enumerate(index.shape):
        src = src.narrow(axis, 0, length)
    # The place of each number in the flattened result.
    strides = [self.shape[axis + 1 :].numel() for axis in range(self.dim())]
    axes = [
        torch.arange(length, device=index.device).reshape([-1, *[1] * (index.dim() - 1 - axis)]) * strides[axis]
        for axis, length in enumerate(index.shape)
    ]
    axes[dim] = index * strides[dim]
    places = sum(axes).flatten()  # type: ignore[union-attr] - of one axis at least
    base = self.flatten()
    if not include_self:
        base = torch.where(torch.zeros_like(base, dtype=torch.bool).index_fill(0, places, True), 1, base)
    places = torch.cat([torch.arange(base.shape[0], device=index.device), places])
    numbers = torch.cat([base, src.flatten()])
    order = places.argsort(stable=True)
    places, numbers, step = places[order], numbers[order], 1
    while step < places.shape[0]:
        alike = places[step:] == places[:-step]
        later = numbers[step:] * torch.where(alike, numbers[:-step], 1)
        numbers, step = torch.cat([numbers[:step], later]), 2 * step
    # The last number of a place has the product of all.
    last = torch.searchsorted(places, torch.arange(base.shape[0], device=index.device), right=True) - 1
    return numbers[last].reshape(shape)


@decomposes(aten.scatter_reduce.two)
def scatter_reduce(c: Any) -> Tensor:
    """Numbers reduced at the places that an index names; of products torch has no right derivative."""
    if c.reduce != "prod":
        return torch.scatter_reduce(c.self, c.dim, c.index, c.src, c.reduce, include_self=c.include_self)
    # Torch's own checks, of what they need.
    torch.scatter_reduce(c.self.detach(), c.dim, c.index, c.src.detach(), "prod")
    return _scattered_products(c.self, c.dim, c.index, c.src, c.include_self)


@decomposes(aten.index_reduce)
def index_reduce(c: Any) -> Tensor:
    """Slices reduced at the places that an index names, as numbers are by `scatter_reduce`."""
    require(c.reduce in ("prod", "mean", "amax", "amin"), f"index_reduce: reduce must be known, got {c.reduce!r}.")
    require(c.self.dtype == c.source.dtype, f"index_reduce: dtypes {c.self.dtype} and {c.source.dtype} differ.")
    require(c.index.dim() < 2, f"index_reduce: index must have one axis, got {[*c.index.shape]}.")
    length = c.source.shape[c.dim] if c.source.dim() else 1
    require(c.index.numel() == length, f"index_reduce: {c.index.numel()} places for {length} slices.")
    axis = range(max(c.source.dim(), 1))[c.dim]
    rest = [[*x.shape[:axis], *x.shape[axis + 1 :]] for x in (c.self, c.source)]
    require(rest[0] == rest[1], f"index_reduce: slices of shape {rest[0]} and {rest[1]}.")
    index = c.index
    if c.source.dim():
        index = index.reshape([-1 if n == axis else 1 for n in range(c.source.dim())]).expand_as(c.source)
    return scatter_reduce(c.self, c.dim, index, c.source, c.reduce, include_self=c.include_self)


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
