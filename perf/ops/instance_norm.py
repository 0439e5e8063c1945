"""Instance norm, on the primitives and kernels of batch norm."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from torch import Tensor

from perf.calls import EPS
from perf.ops.batch_norm import BATCH_NORM, MOMENTUM, NO_RUNNING, BatchNorm, true_training_norm
from perf.ops.samples import ABSENT_PARAMS, LAYOUTS, make_samples, sample, shaped
from perf.ops.workload import Workload
from primitives.ops.norms.group_norm import pure_instance_norm


def _instance_norm(
    functional: Any, x: Tensor, weight: Any = None, bias: Any = None, running_mean: Any = None, running_var: Any = None
) -> Tensor:
    # They are written.
    running = [None if value is None else value.clone() for value in (running_mean, running_var)]
    return functional.instance_norm(x, *running, weight, bias, True, MOMENTUM, EPS)


def _with_state(x: Tensor, weight: Any, bias: Any, *running: Any) -> tuple:
    return pure_instance_norm(x, *running, weight, bias, True, MOMENTUM, EPS)


def _operands(workload: Workload) -> BatchNorm:
    samples, channels, *positions = workload.shape
    shape = 1, samples * channels, math.prod(positions)
    return BatchNorm.of(dataclasses.replace(workload, shape=shape))


INSTANCE_NORM = BATCH_NORM.sibling(
    "instance_norm",
    BATCH_NORM.arguments,
    call=_instance_norm,
    function=_with_state,
    truth=functools.partial(true_training_norm, batch=False),
    samples=make_samples(
        shaped((3, 2, 3, 5), (0, 3, 2), (2, 3, 7), (2, 3, 2, 2, 3)),
        [*ABSENT_PARAMS, NO_RUNNING, ("bias", *NO_RUNNING)],
        LAYOUTS,
    ),
    small=sample((2, 2, 3)),
    tiny=sample((1, 2, 2), NO_RUNNING),
    large=(sample((2, 3, 17_000)),),
    operands=_operands,
)
