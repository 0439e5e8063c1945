"""Log-softmax."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from perf.ops._row_maps import RowMapOperands, row_map
from perf.ops.samples import make_options
from perf.ops.workload import FIRST_ORDER, Workload, unnamed


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


_GPU = (
    Workload("ImageNet head", (8192, 1000)),
    Workload("attention rows", (32768, 1024)),
    Workload("attention rows", (8192, 4096), whole=True),
    Workload("odd", (8192, 4097), whole=True),
    Workload("odd", (8192, 5124), modes=FIRST_ORDER),
    Workload("Llama 2 vocabulary", (4096, 32000), whole=True),
    Workload("GPT-2 vocabulary", (4096, 50257), whole=True),
    Workload("GPT-2 vocabulary", (4096, 50257), dtype="float32", modes=FIRST_ORDER),
    Workload("long rows", (2048, 65536)),
    Workload("Llama 3 vocabulary", (2048, 128256), quick=True),
    Workload("long rows", (1024, 131072), dtype="float16", modes=FIRST_ORDER),
    Workload("Gemma vocabulary", (1024, 262144)),
    Workload("segmentation", (16, 21, 512, 512), dim=1, modes=FIRST_ORDER),
)
OF_CURVATURE = ("backward_of_jvp", "x_only", "gradient_backward")
_OTHER = (
    unnamed((65536, 24), modes=FIRST_ORDER),
    unnamed((512, 512), "float64"),
    unnamed((8192, 4096), modes=OF_CURVATURE),
    unnamed((2048, 128256), modes=OF_CURVATURE),
    unnamed((16, 5000, 96), "float32", dim=1),
)
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
    rounds_between=True,
    gpu_workloads=_GPU,
    cpu_workloads=(
        Workload("ImageNet head", (2048, 1000), dtype="float32", quick=True),
        Workload("GPT-2 vocabulary", (64, 50257), dtype="float32"),
    ),
    other_workloads=_OTHER,
)
