"""Log-softmax."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from perf.ops._row_maps import RowMapOperands, row_map
from perf.ops.samples import make_options


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
    shapes=[
        ((5, 0), make_options(dim=0)),
        ((), make_options(dim=0)),
        ((2, 7), make_options(dim=-1, dtype=torch.float32)),
        ((7, 2), make_options(dim=0, dtype=torch.float16)),
        ((4, 3), make_options(dim=0, dtype=torch.float64)),
    ],
    rounds_twice=("fwd_jvp",),
)
