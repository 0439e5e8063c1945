"""Softmax, with a scale and a mask, on the plans and kernels of log-softmax."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from perf.calls import random
from perf.ops._row_maps import RowMapOperands, row_map
from perf.ops.samples import make_samples, sample, shaped
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
        [
            *(*shaped((13, 31), (5, 0), (9,), dim=0), sample((0, 5), dim=1), sample((1, 1), dim=-1)),
            *(sample((3, 257), dim=1, scale=0.3), sample((2, 5, 3, 4), dim=1, scale=-1.5)),
            *(sample((2, 7), dim=-1, dtype=torch.float32), sample((7, 2), dim=0, dtype=torch.float16)),
            sample((4, 3), dim=0, dtype=torch.float64, scale=0.0),
        ],
        absent=[(), ("mask",)],
    ),
    small=sample((2, 3, 2), dim=1, scale=0.7),
    tiny=sample((1, 3), dim=1, scale=0.7),
    large=(*(sample((3, 8195), ("mask",), dim=1), sample((3, 66_000), dim=1, scale=0.7), sample((8200, 17), dim=0)),),
    not_kept=("x", "mask"),
    rounds_twice=("fwd_jvp",),
)
