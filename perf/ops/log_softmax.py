"""Log-softmax."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from perf.ops._row_maps import RowMapOperands, row_map
from perf.ops.samples import sample, shaped


def _call(functional: Any, x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    return functional.log_softmax(x, dim, dtype=dtype)


def _true_log_softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    # dtype= means a cast before the operation: a narrower one rounds x.
    x = x if dtype is None else x.to(dtype).double()
    return x - x.exp().sum(dim, keepdim=True).log()


class LogSoftmax(RowMapOperands):
    """Operands of log-softmax."""

    MODULES: ClassVar = ("softmax.log_softmax",)

    DEFAULTS: ClassVar = {"output_dtype": None}


LOG_SOFTMAX = row_map(
    "log_softmax",
    LogSoftmax,
    call=_call,
    truth=_true_log_softmax,
    more=[
        *(*shaped((5, 0), (), dim=0), sample((2, 7), dim=-1, dtype=torch.float32)),
        *(sample((7, 2), dim=0, dtype=torch.float16), sample((4, 3), dim=0, dtype=torch.float64)),
    ],
    rounds_twice=("fwd_jvp",),
)
