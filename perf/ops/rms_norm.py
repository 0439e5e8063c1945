"""RMS norm, on the primitives and kernels of layer norm."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from perf.ops.layer_norm import LAYER_NORM, row_norm_calls
from perf.ops.samples import Sample, make_options, make_samples
from perf.ops.workload import EPS, FIRST_ORDER, Workload, unnamed

if TYPE_CHECKING:
    from torch import Tensor


def _rms_norm(functional: Any, x: Tensor, weight: Any = None, norm_ndim: int = 1) -> Tensor:
    return functional.rms_norm(x, x.shape[x.dim() - norm_ndim :], weight, EPS)


def _true_rms_norm(x: Tensor, weight: Any = None, norm_ndim: int = 1) -> Tensor:
    y = x / (x.square().mean(tuple(range(-norm_ndim, 0)), keepdim=True) + EPS).sqrt()
    return y if weight is None else y * weight


_ONE_AXIS = make_options(norm_ndim=1)
RMS_NORM = dataclasses.replace(
    LAYER_NORM,
    name="rms_norm",
    family="layer_norm",
    call=_rms_norm,
    function=None,
    torch_function=None,
    truth=_true_rms_norm,
    arguments=("x", "weight"),
    differentiable=("x", "weight"),
    samples=make_samples(
        [((13, 31), _ONE_AXIS), ((0, 5), _ONE_AXIS), ((2, 2, 5, 4), make_options(norm_ndim=2)), ((1, 1), _ONE_AXIS)],
        absent=[(), ("weight",)],
        layouts=["contiguous", "transposed", "sliced", "expanded"],
    ),
    large=(Sample((3, 8195), _ONE_AXIS), Sample((5, 16_500), _ONE_AXIS)),
    not_kept=("y",),
    small_workloads=(
        Workload("scaled", "rms_norm", (6, 20), dtype="float32"),
        Workload("plain", "rms_norm", (6, 20), dtype="float32", affine=False),
    ),
    gpu_workloads=(
        Workload("Llama 8B", "rms_norm", (8192, 4096), quick=True),
        Workload("Llama 405B", "rms_norm", (4096, 16384)),
        Workload("long rows", "rms_norm", (512, 131072), modes=FIRST_ORDER),
    ),
    cpu_workloads=(),
    # The heads of queries and keys.
    other_workloads=(unnamed("rms_norm", (1 << 18, 128), modes=FIRST_ORDER),),
    resized=(),
    calls=functools.partial(row_norm_calls, centered=False),
    # As those of layer norm, without the mean and the bias.
    passes={
        "forward": (2, 1, 1),
        "backward": (3, 2, 1),
        "jvp": (4, 2, 0),
        "hvp": (5, 4, 0),
        "double_backward": (5, 2, 1),
        "forward_backward": (5, 3, 2),
    },
    num_params=1,
)
