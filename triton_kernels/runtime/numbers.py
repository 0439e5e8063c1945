"""Numbers on both sides of a launch: dtypes, floats as integers, and conversions."""

from __future__ import annotations

import math
import struct

import torch
import triton
import triton.language as tl

TL_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums and statistics: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def float64_bits(value: float) -> tuple[int, int]:
    """The bits of a float64 as two 32-bit integers, the low ones first, for a kernel with `float64_of_bits`.

    Graphs make a float32 of a number that a kernel takes, whatever its annotation.
    """
    low, high = struct.unpack("<ii", struct.pack("<d", value))
    return low, high


def noise_numbers(p: float) -> tuple[int, int, int]:
    """Numbers of a dropout with probability `p` above 0: its last word, as a signed number, and the factor's bits."""
    last_dropped = math.ceil(p * 2**32) - 1
    return last_dropped - (last_dropped >> 31 << 32), *float64_bits(1.0 / (1.0 - p) if p < 1.0 else 0.0)


@triton.jit
def float64_of_bits(low, high):
    """The float64 whose bits are those of two integers (see `float64_bits`)."""
    return ((tl.cast(high, tl.int64) << 32) | (tl.cast(low, tl.int64) & 0xFFFFFFFF)).to(tl.float64, bitcast=True)


@triton.jit
def cast(value, DTYPE: tl.constexpr):
    """`value` in another dtype, rounded to nearest.

    bfloat16 and float64 meet in float32, as in torch; the interpreter takes the bits of one for the other. Anything
    else is a plain conversion.
    """
    if value.dtype == tl.bfloat16 or tl.bfloat16 == DTYPE:
        value = value.to(tl.float32)
    return value.to(DTYPE)


@triton.jit
def store_cast(ptrs, value, mask):
    """Store `value` in the dtype of the memory (see `cast`)."""
    tl.store(ptrs, cast(value, ptrs.dtype.element_ty), mask=mask)
