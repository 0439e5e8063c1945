"""Instance norm, on the primitives and kernels of batch norm."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import Tensor

from perf.calls import EPS, Call
from perf.ops.batch_norm import BATCH_NORM, MOMENTUM, NO_RUNNING
from perf.ops.samples import ABSENT_PARAMS, LAYOUTS, Sample, make_samples, true_norm
from perf.ops.workload import FIRST_ORDER, Workload
from primitives.ops.norms.group_norm import pure_instance_norm


def _instance_norm(
    functional: Any, x: Tensor, weight: Any = None, bias: Any = None, running_mean: Any = None, running_var: Any = None
) -> Tensor:
    # They are written.
    running = [None if value is None else value.clone() for value in (running_mean, running_var)]
    return functional.instance_norm(x, *running, weight, bias, True, MOMENTUM, EPS)


def _with_state(x: Tensor, weight: Any, bias: Any, *running: Any) -> tuple:
    return pure_instance_norm(x, *running, weight, bias, True, MOMENTUM, EPS)


def _true_instance_norm(
    x: Tensor, weight: Any = None, bias: Any = None, running_mean: Any = None, running_var: Any = None
) -> tuple:
    axes = tuple(range(2, x.dim()))
    weight, bias = (None if p is None else p.reshape(-1, *[1] * len(axes)) for p in (weight, bias))
    y = true_norm(x, axes, weight, bias, EPS)
    if running_mean is None or x.numel() == 0:
        return y, running_mean, running_var
    unbiased = (x - x.mean(axes, keepdim=True)).square().sum(axes) / (math.prod(x.shape[2:]) - 1)
    moments = x.mean((0, *axes)), unbiased.mean(0)
    running = running_mean, running_var
    return y, *((1 - MOMENTUM) * old + MOMENTUM * new for old, new in zip(running, moments, strict=True))


def _calls(workload: Workload, mode: str) -> list[Call]:
    samples, channels, *positions = workload.shape
    shape = 1, samples * channels, math.prod(positions)
    return BATCH_NORM.calls(dataclasses.replace(workload, shape=shape), mode)


INSTANCE_NORM = BATCH_NORM.sibling(
    "instance_norm",
    BATCH_NORM.arguments,
    call=_instance_norm,
    function=_with_state,
    truth=_true_instance_norm,
    samples=make_samples(
        [((3, 2, 3, 5), ()), ((0, 3, 2), ()), ((2, 3, 7), ()), ((2, 3, 2, 2, 3), ())],
        [*ABSENT_PARAMS, NO_RUNNING, ("bias", *NO_RUNNING)],
        LAYOUTS,
    ),
    small=Sample((2, 2, 3)),
    tiny=Sample((1, 2, 2), absent=NO_RUNNING),
    large=(Sample((2, 3, 17_000)),),
    small_workloads=(Workload("first", (2, 2, 16, 16), dtype="float32"),),
    gpu_workloads=(Workload("style transfer", (8, 128, 64, 64), modes=FIRST_ORDER, quick=True),),
    cpu_workloads=(Workload("style transfer", (2, 128, 64, 64), "float32", quick=True),),
    calls=_calls,
)
