"""Common parts of launchers: dtype rules, row and group views, and the guard around a launch."""

from __future__ import annotations

import contextlib
import inspect
import math
import struct
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from triton_kernels._kernel import Kernel, is_tracing
from triton_kernels.launch._arithmetic import CACHE_LINE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

# Elements of a cache line, of 4 bytes.
LINE_ELEMENTS = CACHE_LINE_BYTES // 4

TL_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums and statistics: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Integers that follow the batch size: specializing on them would compile anew for another one. The alignment
# of strides reaches the kernels as a compile-time constant.
BATCH_DEPENDENT = {
    "num_rows",
    "segment_rows",
    "num_samples",
    "num_spatial",
    "num_splits",
    "num_parts",
    "num_blocks",
    "num_resident",
    "part_tiles",
    "count",
    "momentum_low",
    "momentum_high",
    "num_stream_rows",
    "last_dropped",
    "scale_low",
    "scale_high",
}


def batch_independent_jit(function: Callable) -> Kernel:
    """Decorator for a kernel that is never compiled anew for integer arguments which change with the batch."""
    return _free_of(function, lambda name: name in BATCH_DEPENDENT or name.endswith(("_segment_stride", "_row_stride")))


def stride_independent_jit(function: Callable) -> Kernel:
    """`batch_independent_jit` that never specializes any stride either.

    The compiler's facts on strides, for wide loads, reach such a kernel as compile-time constants.
    """
    return _free_of(function, lambda name: name in BATCH_DEPENDENT or name.endswith("_stride"))


def unspecialized_jit(function: Callable) -> Kernel:
    """Decorator for a kernel that is never compiled anew for another value of an integer argument."""
    return _free_of(function, lambda name: name.islower() and not name.endswith("_ptr"))


def _free_of(function: Callable, is_free: Callable[[str], bool]) -> Kernel:
    return Kernel(function, unspecialized=[*filter(is_free, inspect.signature(function).parameters)])


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


def device_guard(x: Tensor) -> contextlib.AbstractContextManager:
    """Context in which Triton launches on the device of `x`; a launch in a graph knows its device from its tensors."""
    return torch.cuda.device(x.device) if x.is_cuda and not is_tracing() else contextlib.nullcontext()


def split_scratch(like: Tensor, *shapes: int | Sequence[int], dtype: torch.dtype | None = None) -> Sequence[Tensor]:
    """Uninitialized tensors out of one allocation, on the device of `like` and, by default, in its dtype.

    Each begins on a cache line, so that what Triton compiles for does not depend on the sizes of the others. In a graph
    they are allocated one by one: memory is planned there, and a kernel that writes into parts of a tensor would have
    all of it copied.

    A shape may be a number of elements of a flat tensor.
    """
    if is_tracing():
        return tuple(like.new_empty(shape, dtype=dtype) for shape in shapes)
    sizes = [shape if isinstance(shape, int) else math.prod(shape) for shape in shapes]
    # Each part, and what is left of its last line.
    cuts = [length for size in sizes for length in (size, -size % LINE_ELEMENTS)]
    parts = like.new_empty(sum(cuts), dtype=dtype).split(cuts)[::2]
    return [part if isinstance(shape, int) else part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def collapsed_stride(sizes: Sequence[int], strides: Sequence[int], single: int = 0) -> int | None:
    """The one stride that walks these adjacent dims in row-major order, or None where none does.

    Expanded dims (stride 0) collapse with each other; `single` is the answer where the dims hold at most one element.
    """
    stride = span = None
    for size, dim_stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if stride is None:
            stride = dim_stride
        elif dim_stride != span:
            return None
        span = dim_stride * size
    return single if stride is None else stride


def collapse(tensor: Tensor, cuts: Sequence[int], single: int = 0) -> tuple[int, ...] | None:
    """Strides of `tensor` viewed with its dims merged between `cuts`, or None where that needs a copy.

    Cuts are increasing dim numbers: `(1, 3)` merges dims `[0:1]`, `[1:3]` and `[3:]`. An empty range of dims counts as
    one dim of size 1, and a merged dim of at most one element has the stride `single`.
    """
    sizes, strides = tensor.shape, tensor.stride()
    merged = []
    for start, stop in zip((0, *cuts), (*cuts, tensor.dim()), strict=True):
        stride = collapsed_stride(sizes[start:stop], strides[start:stop], single)
        if stride is None:
            return None
        merged.append(stride)
    return tuple(merged)


def param_view(param: Tensor | None, batch_ndim: int) -> tuple[Tensor | None, int]:
    """A parameter as `[num_segments, num_cols]` with adjacent columns, and its segment stride."""
    if param is None:
        return None, 0
    merged = collapse(param, (batch_ndim,))
    num_cols = math.prod(param.shape[batch_ndim:])
    if merged is not None and (merged[1] == 1 or num_cols == 1):
        return param, merged[0]
    num_segments = math.prod(param.shape[:batch_ndim])
    return param.contiguous(), num_cols if num_segments > 1 else 0


def per_stream(values: Tensor | None) -> tuple[Tensor | None, int]:
    """Seeds or offsets `[*batch]` as one axis, and its stride."""
    if values is None:
        return None, 0
    stride = collapsed_stride(values.shape, values.stride())
    return (values.contiguous(), 1) if stride is None else (values, stride)
