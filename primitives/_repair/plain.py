"""Plain eager code on the CPU, where functions of this package call torch's own kernel and mark its node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from primitives._core import backend
from primitives._core.fast_path import are_plain

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["is_left_to_torch", "is_plain_on_cpu"]

# Looked up once: this is asked at every call.
_is_dynamo_tracing, _is_jit_tracing = torch.compiler.is_dynamo_compiling, torch._C._is_tracing
_DTYPES = (torch.float32, torch.float64)


def is_plain_on_cpu(x: Any, *others: Tensor | None) -> bool:
    """Whether nothing but eager reverse mode takes part in a call of tensors on the CPU, in float32 or float64.

    Torch's kernels for half precision on the CPU round more than this package's.
    """
    if not (x.is_cpu and x.dtype in _DTYPES and backend.selected == "auto" and forward_ad._current_level < 0):
        return False
    if _is_dynamo_tracing() or _is_jit_tracing():
        return False
    return are_plain((x, *[other for other in others if other is not None]) if others else (x,))


def is_left_to_torch(x: Any, *others: Tensor | None) -> bool:
    """Whether torch's own kernel computes a function of `x`, which gives a result of the same layout then."""
    return is_plain_on_cpu(x, *others) and x.is_contiguous()
