"""What every launcher shares: dtype rules, row and group views, and the guard around a launch."""

from __future__ import annotations

import contextlib
import math
import struct
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from triton_kernels._kernel import Kernel, is_tracing
from triton_kernels.launch._arithmetic import ACCESS_BYTES, CACHE_LINE_BYTES

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


# Integers that follow the batch size: specializing on them would compile anew for another one. What the kernels need to
# know of the strides' alignment reaches them as a compile-time constant.
BATCH_DEPENDENT = {
    "num_rows",
    "segment_rows",
    "num_samples",
    "num_spatial",
    "num_splits",
    "num_parts",
    "num_blocks",
    "num_resident",
    "count",
    "momentum_low",
    "momentum_high",
    "x_segment_stride",
    "x_row_stride",
    "x_dot_segment_stride",
    "x_dot_row_stride",
    "y_bar_segment_stride",
    "y_bar_row_stride",
    "y_bar_dot_segment_stride",
    "y_bar_dot_row_stride",
}


def batch_independent_jit(function: Callable) -> Kernel:
    """Decorator for a kernel that is never compiled anew for integer arguments which change with the batch."""
    return Kernel(function, unspecialized=BATCH_DEPENDENT)


def stride_independent_jit(function: Callable) -> Kernel:
    """`batch_independent_jit` that never specializes any stride either.

    What the compiler has to know of the strides for wide loads reaches such a kernel as compile-time constants.
    """
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    strides = {name for name in arguments if name.endswith("_stride")}
    return Kernel(function, unspecialized=BATCH_DEPENDENT | strides)


def float64_bits(value: float) -> tuple[int, int]:
    """The bits of a float64 as two 32-bit integers, the low ones first, for a kernel with `float64_of_bits`.

    Graphs make a float32 of a number that a kernel takes, whatever its annotation.
    """
    low, high = struct.unpack("<ii", struct.pack("<d", value))
    return low, high


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

    Args:
        like: Any tensor.
        *shapes: A shape, or a number of elements of a flat tensor.
        dtype: Dtype of all of them.
    """
    if is_tracing():
        return tuple(like.new_empty(shape, dtype=dtype) for shape in shapes)
    sizes = [shape if isinstance(shape, int) else math.prod(shape) for shape in shapes]
    # Each part, and what is left of its last line.
    cuts = [length for size in sizes for length in (size, -size % LINE_ELEMENTS)]
    parts = like.new_empty(sum(cuts), dtype=dtype).split(cuts)[::2]
    return [part if isinstance(shape, int) else part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def collapsed_stride(sizes: Sequence[int], strides: Sequence[int], single: int = 0) -> int | None:
    """The one stride that walks these dims in row-major order, or None where there is no such stride.

    Args:
        sizes: Sizes of adjacent dims.
        strides: Their strides; expanded dims (stride 0) collapse with each other.
        single: Answer where the dims hold at most one element, so that any stride would do.
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

    Args:
        tensor: Any tensor.
        cuts: Increasing dim numbers in `[0, tensor.dim()]`; `(1, 3)` merges dims `[0:1]`, `[1:3]` and `[3:]`. An empty
            range of dims counts as one dim of size 1.
        single: Stride reported for a merged dim of at most one element.
    """
    sizes, strides = tensor.shape, tensor.stride()
    merged = []
    for start, stop in zip((0, *cuts), (*cuts, tensor.dim()), strict=True):
        stride = collapsed_stride(sizes[start:stop], strides[start:stop], single)
        if stride is None:
            return None
        merged.append(stride)
    return tuple(merged)


class RowView(NamedTuple):
    """Tensors of one shape seen as `[num_segments, num_rows, num_cols]`, each with its own three strides.

    Row `r` of segment `s` is row `s * num_rows + r` of the whole. Two levels are what it takes to address the rows of
    an expanded or padded tensor without a copy.
    """

    num_segments: int
    num_rows: int
    num_cols: int
    tensors: tuple[Tensor | None, ...]
    strides: tuple[tuple[int, int, int], ...]

    def alignment(self, *more: int) -> int:
        """Power of two, at most 16, that divides every segment and row stride, `num_cols` and the integers `more`."""
        divisor = math.gcd(16, self.num_cols, *more)
        for segment_stride, row_stride, _ in self.strides:
            divisor = math.gcd(divisor, segment_stride, row_stride)
        return divisor

    def is_aligned(self, itemsize: int, *more: int) -> bool:
        """Whether rows with elements of `itemsize` bytes can be loaded 16 bytes at a time; `more` as in `alignment`."""
        are_adjacent = all(col_stride == 1 for _, _, col_stride in self.strides)
        return are_adjacent and self.alignment(*more) * itemsize % ACCESS_BYTES == 0


_ABSENT_STRIDES = (0, 0, 1)


def row_view(
    tensors: Sequence[Tensor | None], norm_ndim: int, batch_ndim: int | None, max_segments: int | None = None
) -> RowView:
    """View of tensors of one shape as rows over their last `norm_ndim` dims.

    Args:
        tensors: Tensors of one non-empty shape; None entries stay None. At least one is a tensor.
        norm_ndim: Number of trailing dims that form a row.
        batch_ndim: Number of leading dims that form the segments; None leaves the choice to the strides.
        max_segments: Copy rather than use more segments than this, where the strides have the choice.
    """
    first = next(tensor for tensor in tensors if tensor is not None)
    row_ndim = first.dim() - norm_ndim
    shape = first.shape
    num_cols = math.prod(shape[row_ndim:])
    contiguous = all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    cut = batch_ndim or 0
    if batch_ndim is None and not contiguous:
        cut = segment_cut([tensor for tensor in tensors if tensor is not None], row_ndim, max_segments)
    viewed, strides = zip(*(_as_rows(tensor, cut, row_ndim) for tensor in tensors), strict=True)
    num_segments = math.prod(shape[:cut])
    return RowView(num_segments, math.prod(shape[cut:row_ndim]), num_cols, viewed, strides)


def _as_rows(tensor: Tensor | None, cut: int, row_ndim: int) -> tuple[Tensor | None, tuple[int, int, int]]:
    if tensor is None:
        return None, _ABSENT_STRIDES
    strides = _row_strides(tensor, cut, row_ndim)
    if strides is not None:
        return tensor, strides
    num_cols = math.prod(tensor.shape[row_ndim:])
    num_rows = math.prod(tensor.shape[cut:row_ndim])
    return tensor.contiguous(), (num_rows * num_cols, num_cols, 1)


def _row_strides(tensor: Tensor, cut: int, row_ndim: int) -> tuple[int, int, int] | None:
    sizes, strides = tensor.shape, tensor.stride()
    segment_stride = collapsed_stride(sizes[:cut], strides[:cut])
    row_stride = collapsed_stride(sizes[cut:row_ndim], strides[cut:row_ndim])
    # A stride of 1 is what Triton specializes on, so rows of one column report it too.
    col_stride = collapsed_stride(sizes[row_ndim:], strides[row_ndim:], single=1)
    if segment_stride is None or row_stride is None or col_stride is None:
        return None
    return segment_stride, row_stride, col_stride


def segment_cut(tensors: Sequence[Tensor], row_ndim: int, max_segments: int | None) -> int:
    """Fewest leading dims to take as segments so that no tensor needs a copy; 0 where every choice needs one.

    Args:
        tensors: Of one shape.
        row_ndim: Number of leading dims that number the rows.
        max_segments: No dims that make more segments than this are taken.
    """
    num_segments = 1
    for cut in range(row_ndim):
        if max_segments is not None and num_segments > max_segments:
            break
        if all(_row_strides(tensor, cut, row_ndim) is not None for tensor in tensors):
            return cut
        num_segments *= tensors[0].shape[cut]
    return 0


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
