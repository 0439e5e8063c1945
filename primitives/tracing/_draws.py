"""What torch's random operations draw, made of Philox words: one function for each distribution.

A source is a function `(size) -> words`: random integers in `[0, 2**32)`, int64, of the size asked for. Every
operation takes a fixed number of words per element of its result:

| distribution | words | how |
|---|---|---|
| uniform in float32, float16, bfloat16 | 1 | the 24, 11 or 8 high bits, as in torch, so that 1 is never reached |
| uniform in float64 | 2 | 53 bits |
| normal | 2 (4 in float64) | Box-Muller: `sqrt(-2 log u) cos(2 pi v)` in float32 (float64), u in (0, 1] |
| integers | 2 | 63 bits, modulo the width of the range: a bias of at most width / 2**63 |
| bernoulli, dropout | 1 | word < p * 2**32 |
| exponential, geometric, Cauchy | 1 | the inverse of the distribution function in float64, at u in (0, 1) |
| log-normal | as normal | `exp` |

References:
    Box, Muller, "A note on the generation of random normal deviates", Ann. Math. Statist. 29, 1958.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Source = Callable[[Sequence[Any]], Tensor]

__all__ = [
    "bernoulli",
    "cauchy",
    "exponential",
    "geometric",
    "integers",
    "log_normal",
    "normal",
    "random",
    "require",
    "standard_normal",
    "standard_uniform",
    "uniform",
]

WORD = 2**32
# Largest number of bits of which every integer, and every multiple of 2**-bits below 1, is a number of the dtype.
MANTISSA_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}
REAL_DTYPES = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
INT64_VALUES = 2**63


def require(op: str, holds: Any, requirement: str, got: Any) -> None:
    """Raise what torch raises for a parameter out of range, unless the requirement holds."""
    if not holds:
        raise RuntimeError(f"{op}: {requirement}, got {got}.")


def standard_uniform(source: Source, size: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Uniform numbers in [0, 1); of complex ones both parts."""
    if dtype in REAL_DTYPES:
        return torch.view_as_complex(standard_uniform(source, (*size, 2), REAL_DTYPES[dtype]))
    bits = MANTISSA_BITS[dtype]
    if bits > 32:
        words = source((*size, 2))
        integer = words[..., 0] * 2 ** (bits - 32) + (words[..., 1] >> (64 - bits))
    else:
        integer = source(size) >> (32 - bits)
    return integer.to(dtype) * 2.0**-bits


def _inner_uniform(source: Source, size: Sequence[Any]) -> Tensor:
    """Uniform float64 numbers in (0, 1): where distribution functions have an inverse."""
    return (source(size).to(torch.float64) + 0.5) / WORD


def standard_normal(source: Source, size: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Normal numbers of mean 0 and variance 1; a complex one has half of it in either part."""
    if dtype in REAL_DTYPES:
        parts = standard_normal(source, (*size, 2), REAL_DTYPES[dtype])
        return torch.view_as_complex(parts * math.sqrt(0.5))
    if dtype == torch.float64:
        u, v = (standard_uniform(source, (*size, 2), dtype)).unbind(-1)
        u = 1.0 - u
    else:
        words = source((*size, 2))
        u, v = (words[..., 0] + 1).to(torch.float32) / WORD, words[..., 1].to(torch.float32) / WORD
    return ((-2.0 * u.log()).sqrt() * (v * (2.0 * math.pi)).cos()).to(dtype)


def integers(source: Source, size: Sequence[Any], low: Any, high: Any) -> Tensor:
    """Integers in [low, high), int64."""
    if not isinstance(high, torch.Tensor):
        require("randint", low < high, "the range must not be empty", f"[{low}, {high})")
        require("randint", high - low <= INT64_VALUES, "the range must have at most 2**63 values", f"[{low}, {high})")
    words = source((*size, 2))
    # 32 bits of one word and 31 of the other, so that the sign stays out of it.
    bits = (words[..., 0] << 31) + (words[..., 1] >> 1)
    if isinstance(high, int) and high - low == INT64_VALUES:
        return bits + low
    bits = bits % (high - low)
    return bits if isinstance(low, int) and low == 0 else bits + low


def bernoulli(source: Source, size: Sequence[Any], p: Any) -> Tensor:
    """True with probability `p`, a number or a tensor that broadcasts to `size`."""
    if isinstance(p, torch.Tensor):
        return source(size) < p.to(torch.float64) * WORD
    require("bernoulli", 0.0 <= p <= 1.0, "p must be in [0, 1]", p)
    return source(size) < math.ceil(p * WORD)


def _moved(values: Tensor, scale: float, shift: float) -> Tensor:
    """`values * scale + shift`, without what does nothing."""
    values = values if scale == 1.0 else values * scale
    return values if shift == 0.0 else values + shift


def uniform(source: Source, like: Tensor, low: float, high: float) -> Tensor:
    """Uniform in [low, high)."""
    require("uniform", low <= high, "the lower bound must not exceed the upper one", f"[{low}, {high})")
    return _moved(standard_uniform(source, like.shape, like.dtype), high - low, low)


def normal(source: Source, like: Tensor, mean: float, std: float) -> Tensor:
    """Normal, with the given mean and standard deviation."""
    require("normal", std >= 0.0, "the standard deviation must not be negative", std)
    return _moved(standard_normal(source, like.shape, like.dtype), std, mean)


def log_normal(source: Source, like: Tensor, mean: float, std: float) -> Tensor:
    """The exponential of a normal number."""
    require("log_normal", std > 0.0, "the standard deviation must be positive", std)
    return _moved(standard_normal(source, like.shape, like.dtype), std, mean).exp()


def exponential(source: Source, like: Tensor, lambd: float) -> Tensor:
    """Exponential of rate `lambd`; never 0, so that its logarithm is finite."""
    require("exponential", lambd > 0.0, "lambd must be positive", lambd)
    values = (-_inner_uniform(source, like.shape).log() / lambd).to(like.dtype)
    return values.clamp_min(torch.finfo(like.dtype).tiny)


def geometric(source: Source, like: Tensor, p: float) -> Tensor:
    """Number of trials up to the first success, at least 1."""
    require("geometric", 0.0 < p <= 1.0, "p must be in (0, 1]", p)
    if p == 1.0:
        return torch.ones_like(like)
    return (_inner_uniform(source, like.shape).log() / math.log1p(-p)).ceil()


def cauchy(source: Source, like: Tensor, median: float, sigma: float) -> Tensor:
    """Cauchy, around `median`."""
    require("cauchy", sigma > 0.0, "sigma must be positive", sigma)
    return (math.pi * (_inner_uniform(source, like.shape) - 0.5)).tan() * sigma + median


def random(source: Source, like: Tensor, low: int, high: int | None) -> Tensor:
    """Integers in [low, high); up to the largest that the dtype of `like` counts to exactly, if `high` is None."""
    if high is None:
        is_floating = like.dtype.is_floating_point
        if is_floating:
            high = 2 ** MANTISSA_BITS[like.dtype] + 1
        else:
            high = 2 if like.dtype == torch.bool else torch.iinfo(like.dtype).max + 1
    return integers(source, like.shape, low, high)
