"""Softmax, with a scale and a mask, on the plans and kernels of log-softmax."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from perf.calls import random
from perf.ops._row_maps import RowMapOperands, row_map
from perf.ops.samples import Sample, make_options, make_samples
from perf.ops.workload import Workload


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
    rounds_twice=("fwd_jvp",),
)
