"""Tensors as kernels take them: scratch memory, views of fewer dims, and the guard around a launch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .arithmetic import CACHE_LINE_BYTES
from .kernel import is_tracing

# Elements of a cache line, of 4 bytes.
LINE_ELEMENTS = CACHE_LINE_BYTES // 4


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
