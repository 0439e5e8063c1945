"""Softmax, with a scale and a mask, on the plans and kernels of log-softmax."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from perf.calls import random
from perf.ops._row_maps import RowMapOperands, row_map
from perf.ops.log_softmax import OF_CURVATURE
from perf.ops.samples import Sample, make_options, make_samples
from perf.ops.workload import FIRST_ORDER, Workload, unnamed


def _call(
    functional: Any, x: Tensor, mask: Any = None, dim: int = -1, scale: float = 1.0, dtype: torch.dtype | None = None
) -> Tensor:
    # Torch's has neither.
    own = {} if mask is None and scale == 1.0 else {"scale": scale, "mask": mask}
    return functional.softmax(x, dim, dtype=dtype, **own)


def _torch_softmax(x: Tensor, mask: Any = None, dim: int = -1, scale: float = 1.0) -> Tensor:
    return torch.softmax(scale * x if mask is None else scale * x + mask, dim)


def _true_softmax(
    x: Tensor, mask: Any = None, dim: int = -1, scale: float = 1.0, dtype: torch.dtype | None = None
) -> Tensor:
    # dtype= means a cast before the operation: a narrower one rounds x.
    x = scale * (x if dtype is None else x.to(dtype).double())
    weights = (x if mask is None else x + mask).exp()
    return weights / weights.sum(dim, keepdim=True)


class Softmax(RowMapOperands):
    """Operands of softmax."""

    MODULES: ClassVar = ("softmax.softmax",)

    DEFAULTS: ClassVar = {"output_dtype": None, "mask": None, "scale": 1.0}

    @classmethod
    def of(cls, workload: Workload) -> Any:
        """With a mask and a scale where the workload is masked."""
        operands = super().of(workload)
        return operands.change(mask=random(*workload.shape) > 0, scale=0.7) if workload.masked else operands


SOFTMAX = row_map(
    "softmax",
    Softmax,
    call=_call,
    torch_function=_torch_softmax,
    truth=_true_softmax,
    arguments=("x", "mask"),
    parameter_shape=lambda sample, name: sample.shape[1:],
    samples=make_samples(
        shapes=[
            ((13, 31), make_options(dim=0)),
            ((0, 5), make_options(dim=1)),
            ((5, 0), make_options(dim=0)),
            ((1, 1), make_options(dim=-1)),
            ((3, 257), make_options(dim=1, scale=0.3)),
            ((2, 5, 3, 4), make_options(dim=1, scale=-1.5)),
            ((2, 7), make_options(dim=-1, dtype=torch.float32)),
            ((7, 2), make_options(dim=0, dtype=torch.float16)),
            ((4, 3), make_options(dim=0, dtype=torch.float64, scale=0.0)),
            ((9,), make_options(dim=0)),
        ],
        absent=[(), ("mask",)],
    ),
    small=Sample((2, 3, 2), make_options(dim=1, scale=0.7)),
    tiny=Sample((1, 3), make_options(dim=1, scale=0.7)),
    large=(
        Sample((3, 8195), make_options(dim=1), absent=("mask",)),
        Sample((3, 66_000), make_options(dim=1, scale=0.7)),
        Sample((8200, 17), make_options(dim=0)),
    ),
    not_kept=("x", "mask"),
    small_workloads=(
        Workload("rows", (6, 20), dtype="float32"),
        Workload("masked rows", (6, 20), dtype="float32", masked=True),
        Workload("inner", (4, 20, 5), dtype="float32", dim=1),
        Workload("masked inner", (4, 20, 5), dtype="float32", dim=1, masked=True),
    ),
    gpu_workloads=(
        Workload("attention rows", (32768, 1024), quick=True),
        Workload("attention rows", (8192, 4096), dtype="float32", modes=FIRST_ORDER),
        Workload("long rows", (1024, 131072)),
        Workload("segmentation", (16, 21, 512, 512), dim=1, modes=FIRST_ORDER),
    ),
    cpu_workloads=(Workload("attention rows", (2048, 1024), dtype="float32"),),
    other_workloads=(
        unnamed((32768, 1024), masked=True, modes=FIRST_ORDER),
        unnamed((8192, 4096), modes=OF_CURVATURE),
        unnamed((8192, 4097), masked=True),
        unnamed((2048, 65536), masked=True, modes=FIRST_ORDER),
        unnamed((512, 512), "float64", masked=True),
        # Not its jvp: beside two tensors along rows, bytes of a mask are loaded eight to a thread, so that maxima leave
        # it (three reductions a step).
        unnamed((16, 5000, 96), "float32", dim=1, masked=True, modes=("forward", "backward", "hvp")),
    ),
    resized=(
        (unnamed((4096, 4096)), (4095, 1008)),
        (unnamed((1024, 131072)), (1023, 400)),
        (unnamed((64, 131072), masked=True), (63, 80)),
        (unnamed((16, 21, 64, 64), dim=1, masked=True), (15, 32)),
    ),
    rounds_between=True,
)
