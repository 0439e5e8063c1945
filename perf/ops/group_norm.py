"""Group norm, on the primitives and kernels of layer norm, and with SiLU behind it, on its own and these kernels."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from perf.calls import EPS
from perf.ops.layer_norm import CHANNELS_LAST, LAYER_NORM, LayerNorm, with_params
from perf.ops.samples import ABSENT_PARAMS, LAYOUTS, make_samples, sample, shaped, true_norm
from perf.ops.workload import Workload


def _group_norm(functional: Any, x: Tensor, weight: Any = None, bias: Any = None, num_groups: int = 2) -> Tensor:
    return functional.group_norm(x, num_groups, weight, bias, EPS)


def _group_norm_silu(functional: Any, x: Tensor, weight: Any = None, bias: Any = None, num_groups: int = 2) -> Tensor:
    if functional is torch.nn.functional:
        return functional.silu(_group_norm(functional, x, weight, bias, num_groups))
    return functional.group_norm(x, num_groups, weight, bias, EPS, activation="silu")


def _true_group_norm(x: Tensor, weight: Any = None, bias: Any = None, num_groups: int = 2) -> Tensor:
    groups = x.reshape(*x.shape[:1], num_groups, x.shape[1] // num_groups, x[:1, :1].numel())
    weight, bias = (None if p is None else p.reshape(num_groups, -1, 1) for p in (weight, bias))
    return true_norm(groups, (2, 3), weight, bias).reshape(x.shape)


def _true_group_norm_silu(x: Tensor, weight: Any = None, bias: Any = None, num_groups: int = 2) -> Tensor:
    z = _true_group_norm(x, weight, bias, num_groups)
    return z / (1 + (-z).exp())


def _options(workload: Workload) -> dict[str, int]:
    """Groups as all models have them, and few in tests."""
    return {"num_groups": 32 if workload.shape[1] % 32 == 0 else 2}


def _operands(workload: Workload, *, silu: bool = False) -> LayerNorm:
    samples, channels, *positions = workload.shape
    num_groups = _options(workload)["num_groups"]
    shape = (samples, num_groups, channels // num_groups, torch.Size(positions).numel())
    kind: Any = {"norm_ndim": 2, "grouped": CHANNELS_LAST if workload.channels_last else 1, "silu": silu}
    return with_params(LayerNorm.draw(shape, workload.torch_dtype, **kind), workload)


_TWO = shaped((3, 4, 3, 5), (0, 4, 3), (5, 6), (1, 4, 2, 3, 2), num_groups=2)
GROUP_NORM = LAYER_NORM.sibling(
    "group_norm",
    LAYER_NORM.arguments,
    call=_group_norm,
    truth=_true_group_norm,
    parameter_shape=lambda sample, name: (sample.shape[1],),
    samples=make_samples(
        [*_TWO, sample((2, 3, 7), num_groups=1), sample((2, 4, 33), num_groups=4)], ABSENT_PARAMS, LAYOUTS
    ),
    small=sample((2, 4, 2), num_groups=2),
    tiny=sample((1, 2, 2), num_groups=1),
    large=tuple(shaped((1, 4, 17_000), (2_100, 4, 3), (2, 600, 9), num_groups=2)),
    operands=_operands,
    options=_options,
)
# Its second order is products of full size, and group norm's.
GROUP_NORM_SILU = GROUP_NORM.sibling(
    "group_norm_silu",
    GROUP_NORM.arguments,
    family="",
    function_name="group_norm",
    call=_group_norm_silu,
    truth=_true_group_norm_silu,
    samples=GROUP_NORM.samples,
    not_kept=("y",),
    operands=functools.partial(_operands, silu=True),
)
