"""Plain eager code on the CPU, where functions of this package call torch's own kernel, which checks the arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import _C
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch.autograd import forward_ad

from primitives._core import backend
from primitives._core.fast_path import PLAIN_TYPES

__all__ = ["is_plain_on_cpu"]

# Looked up once: this is asked at every call.
_is_dynamo_tracing, _is_jit_tracing = torch.compiler.is_dynamo_compiling, torch._C._is_tracing
_peek, _num_dispatch_modes = _functorch.peek_interpreter_stack, _C._len_torch_dispatch_stack
_DTYPES, _STRIDED = (torch.float32, torch.float64), torch.strided


def is_plain_on_cpu(x: Any, *others: Any) -> bool:
    """Whether nothing but eager reverse mode takes part in a call of tensors on the CPU, in float32 or float64.

    `x` and `others` may be anything; `None` among `others` stands for an absent argument. Torch's kernels for half
    precision on the CPU round more than this package's. Modes that see functions see those of torch.
    """
    if type(x) not in PLAIN_TYPES or not (x.is_cpu and x.dtype in _DTYPES and x.layout is _STRIDED) or x.is_nested:
        return False
    for other in others:
        if other is not None and not (type(other) in PLAIN_TYPES and other.is_cpu):
            return False
    if _is_dynamo_tracing() or _is_jit_tracing():
        return False
    is_eager = forward_ad._current_level < 0 and _peek() is None and not _num_dispatch_modes()
    return is_eager and backend.selected == "auto"
