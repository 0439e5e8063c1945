"""Common parts of the kernels for CPU tensors: when they may run, and blocks that stay in the cache.

A kernel here gives values alone: it runs below autograd, so it may write in place. It returns `None` for a call that
it does not serve, and the reference serves that call.

Much of the time of a plain-torch operation on the CPU goes into writing fresh memory. So what ATen has no fused kernel
for is computed block by block: each operation of a block finds its operands where the one before it left them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from primitives.ops.rules import accumulation_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


# Elements per thread and operation: an operand of float32 is half a megabyte, which stays in the caches of a processor
# and takes so long that the calls themselves hardly count.
BLOCK_ELEMENTS = 2**17
# ATen multiplies x by 1 / std and subtracts mean / std afterwards, which loses |mean| / std units in the last place:
# this many are as many as the tests allow (`tests/support.py`).
LARGEST_OFFSET = 64.0
_SUMMED_IN_FLOAT32 = frozenset([torch.float16, torch.bfloat16, torch.float32])


def block_elements() -> int:
    """Elements of a block that all threads together work on."""
    return BLOCK_ELEMENTS * torch.get_num_threads()


def row_blocks(rows: int, cols: int, most: int | None = None) -> Iterator[slice]:
    """Slices of `rows` rows of `cols` elements, one block each, of at most `most` rows."""
    step = max(1, block_elements() // cols)
    step = step if most is None else min(step, most)
    return (slice(start, start + step) for start in range(0, rows, step))


def served(x: Tensor, *params: Tensor | None) -> bool:
    """Whether `x` has elements and every parameter has its dtype, or that of its sums."""
    dtype = x.dtype
    for p in params:
        if p is not None and p.dtype != dtype and p.dtype != accumulation_dtype(dtype):
            return False
    return x.numel() > 0 and x.is_floating_point()


def in_accumulation_dtype(*params: Tensor | None) -> Sequence[Any]:
    """Parameters, contiguous and in the dtype of sums, in which ATen keeps statistics in float32 at least."""
    for p in params:
        if p is not None and not (p.dtype == torch.float32 and p.is_contiguous()):
            return [p if p is None else p.contiguous().to(accumulation_dtype(p.dtype)) for p in params]
    return params


def ready(x: Tensor, *params: Tensor | None) -> Sequence[Any] | None:
    """The result of `in_accumulation_dtype`, or `None` if the call is not `served`; float32 parameters cost least."""
    if x.dtype in _SUMMED_IN_FLOAT32 and x.numel():
        for p in params:
            if p is not None and not (p.dtype == torch.float32 and p.is_contiguous()):
                break
        else:
            return params
    return in_accumulation_dtype(*params) if served(x, *params) else None


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t` in `dtype`: to ask costs less than a conversion that converts nothing."""
    return t if t.dtype == dtype else t.to(dtype)


def is_well_conditioned(mean: Tensor, rstd: Tensor, limit: float = LARGEST_OFFSET) -> bool:
    """Whether no mean is so far from 0, in standard deviations, that ATen's formulas lose accuracy; false for NaN."""
    offset = mean * rstd
    # Squared, by the code that has just run: the absolute value would have to be fetched into the cache first.
    return offset.mul_(offset).max().item() <= limit * limit
