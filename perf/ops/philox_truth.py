"""Philox4x32-10 by its definition, in Python's integers: what every implementation has to draw."""

from __future__ import annotations

import functools

import torch

LOW = 2**32 - 1


def rounds(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """The four words for a counter of four words and a key of two (Salmon et al., 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & LOW, (a >> 32) ^ c3 ^ k1, a & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3


@functools.cache
def block(seed: int, number: int) -> tuple[int, ...]:
    """The words of block `number` of the stream `seed`."""
    return rounds((number & LOW, (number >> 32) & LOW, 0, 0), (seed & LOW, (seed >> 32) & LOW))


def true_words(seed: int, offset: int, count: int) -> list[int]:
    """The first `count` words of the stream `seed` from block `offset` on."""
    return [block(seed, offset + i // 4)[i % 4] for i in range(count)]


@functools.lru_cache(maxsize=4)
def _kept(count: int, seed: int, offset: int, p: float) -> list[bool]:
    """Whether dropout keeps each of so many elements."""
    return [word >= p * 2**32 for word in true_words(seed, offset, count)]


def true_noise(shape: tuple[int, ...], seed: int, offset: int, p: float) -> torch.Tensor:
    """The factors of dropout for a tensor of this shape, in float64."""
    size = torch.Size(shape)
    kept = _kept(size.numel(), seed, offset, p)
    return torch.tensor(kept, dtype=torch.float64).reshape(size) * (1 / (1 - p) if p < 1 else 0.0)
