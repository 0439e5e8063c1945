"""Batch norm, a residual and ReLU, in training and in evaluation."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

import primitives as pr
from perf.calls import EPS
from perf.ops.batch_norm import BATCH_NORM, BATCH_NORM_EVAL, MOMENTUM, NO_RUNNING, BatchNorm
from perf.ops.record import Op
from perf.ops.samples import sample
from primitives.ops.norms.batch_norm_functions import batch_norm_of_tensors
from primitives.ops.rules import weight_beside


def _call(functional: Any, x: Tensor, residual: Any, *params: Any, training: bool) -> Tensor:
    """The function, or of a module without it torch's three."""
    weight, bias, *running = [*params, *[None] * (4 - len(params))]
    # They are written.
    moved = [None if value is None else value.clone() for value in running]
    given: Any = (*moved, weight, bias, training, MOMENTUM, EPS)
    if functional is pr.functional:
        return functional.batch_norm_relu(x, *given, residual=residual)
    y = functional.batch_norm(x, *given)
    return torch.relu(y if residual is None else (y + residual).to(y.dtype))


def _function(x: Tensor, residual: Any, weight: Any, bias: Any, *running: Any, training: bool) -> tuple:
    weight = weight_beside(bias, weight, x)
    options: Any = {"in_place": False, "relu": True, "residual": residual}
    given: Any = (*running, weight, bias, training, MOMENTUM, EPS)
    y, *moved = batch_norm_of_tensors(x, *given, **options)
    return y, *moved[: 2 * training]


def _sum(norm: Op, x: Tensor, residual: Any, *params: Any) -> tuple:
    y, *running = out if isinstance(out := norm.truth(x, *params), tuple) else (out,)
    return y if residual is None else y + residual, *running


def _truth(norm: Op, *tensors: Any) -> tuple:
    y, *running = _sum(norm, *tensors)
    return torch.relu(y), *running


class BatchNormRelu(BatchNorm):
    """Operands of batch norm, and those of what follows it."""

    NEVER_ABSENT: ClassVar = ("y",)
    FULL_SIZE: ClassVar = f"{BatchNorm.FULL_SIZE} y residual residual_dot"
    DEFAULTS: ClassVar = {"batch_ndim": 0, "relu": True}


# The residual and its tangent are read, and its cotangent written.
_PASSES = {"forward": 3, "backward": 5, "jvp": 6, "forward_backward": 8}
BATCH_NORM_RELU = BATCH_NORM.sibling(
    "batch_norm_relu",
    ("x", "residual", "weight", "bias", *NO_RUNNING),
    family="",
    call=functools.partial(_call, training=True),
    function=functools.partial(_function, training=True),
    truth=functools.partial(_truth, BATCH_NORM),
    differentiable=("x", "residual", "weight", "bias"),
    parameter_shape=lambda sample, name: sample.shape if name == "residual" else (sample.shape[1],),
    # The norm has its own.
    samples=(
        sample((3, 2, 3, 5)),
        sample((3, 2, 3, 5), absent=("residual", *NO_RUNNING), layout="channels_last"),
        sample((2, 3, 31), absent=("weight",), layout="transposed", mixed=True),
        sample((13, 5), absent=("residual", "weight", "bias"), layout="sliced"),
        sample((2, 3, 2, 2, 3), absent=("bias", *NO_RUNNING), layout="expanded"),
        sample((0, 3, 2)),
        sample((13, 5), absent=("residual",), layout="channels_last", mixed=True),
        sample((3, 2, 3, 5), layout="expanded", mixed=True),
    ),
    large=(sample((3, 9, 64, 90), layout="channels_last"),),
    not_kept=("residual", "bias", *NO_RUNNING),
    num_kept=2,
    operands=BatchNormRelu.of,
    passes=_PASSES,
    constants=BATCH_NORM_EVAL.constants,
    kink=lambda *tensors: _sum(BATCH_NORM, *tensors)[0],
)
BATCH_NORM_RELU_EVAL = BATCH_NORM_RELU.sibling(
    "batch_norm_relu_eval",
    BATCH_NORM_RELU.arguments,
    family="",
    function_name="batch_norm_relu",
    call=functools.partial(_call, training=False),
    function=functools.partial(_function, training=False),
    truth=functools.partial(_truth, BATCH_NORM_EVAL),
    differentiable=BATCH_NORM_RELU.arguments,
    samples=(
        sample((3, 2, 3, 5), mixed=True),
        sample((3, 2, 3, 5), absent=("residual",), layout="channels_last"),
        sample((13, 5), layout="transposed"),
        sample((2, 3, 2, 2, 3), absent=("weight", "bias"), layout="expanded"),
        sample((0, 3, 2)),
    ),
    small=sample((2, 2, 2)),
    tiny=sample((2, 1)),
    not_kept=("residual", "bias"),
    kink=lambda *tensors: _sum(BATCH_NORM_EVAL, *tensors)[0],
)
