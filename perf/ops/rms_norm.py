"""RMS norm, on the primitives and kernels of layer norm."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from perf.calls import EPS
from perf.ops.layer_norm import LAYER_NORM, row_norm_calls, true_row_norm
from perf.ops.workload import FIRST_ORDER, Workload, unnamed


def _rms_norm(functional: Any, x: Tensor, weight: Any = None, norm_ndim: int = 1) -> Tensor:
    return functional.rms_norm(x, x.shape[x.dim() - norm_ndim :], weight, EPS)


RMS_NORM = LAYER_NORM.sibling(
    "rms_norm",
    ("x", "weight"),
    call=_rms_norm,
    truth=functools.partial(true_row_norm, centered=False),
    gpu_workloads=(
        Workload("Llama 8B", (8192, 4096), quick=True),
        Workload("Llama 405B", (4096, 16384)),
        Workload("long rows", (512, 131072), modes=FIRST_ORDER),
    ),
    # The heads of queries and keys.
    other_workloads=(unnamed((1 << 18, 128), modes=FIRST_ORDER),),
    calls=functools.partial(row_norm_calls, centered=False),
    num_params=1,
)
