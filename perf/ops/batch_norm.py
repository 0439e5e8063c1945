"""Batch norm in training, and in evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

import primitives as pr
from perf.calls import EPS, Operands, random, randoms
from perf.ops.record import Op
from perf.ops.samples import ABSENT_PARAMS, LAYOUTS, affine, make_samples, sample, shaped, true_norm
from perf.ops.workload import Workload

MOMENTUM = 0.3


def _batch_norm(x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any) -> tuple:
    return pr.functional.pure_batch_norm(x, running_mean, running_var, weight, bias, True, MOMENTUM, EPS)


def per_channel(value: Any, x: Tensor) -> Any:
    """A number of each channel, that goes with x."""
    return None if value is None else value.reshape(1, -1, *[1] * (x.dim() - 2))


def true_training_norm(x: Tensor, weight: Any = None, bias: Any = None, *running: Any, batch: bool = True) -> tuple:
    """Batch norm by its definition, or instance norm, and the running statistics that it leaves."""
    axes = (*[0] * batch, *range(2, x.dim()))
    y = true_norm(x, axes, per_channel(weight, x), per_channel(bias, x))
    if not running or running[0] is None or x.numel() == 0:
        return y, *running
    moments = (moment if batch else moment.mean(0) for moment in (x.mean(axes), x.var(axes)))
    return y, *((1 - MOMENTUM) * old + MOMENTUM * new for old, new in zip(running, moments, strict=True))


def _call(
    functional: Any, x: Tensor, weight: Any = None, bias: Any = None, mean: Any = None, var: Any = None, *,
    training: bool,
) -> Tensor:  # fmt: skip
    # In training they are written.
    running = [value.clone() if training and value is not None else value for value in (mean, var)]
    return functional.batch_norm(x, *running, weight, bias, training, MOMENTUM, EPS)


def _running(workload: Workload, draw: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    mean, variance = (draw(workload.param_shape, torch.float32) for _ in range(2))
    return mean, variance.square_().add_(0.5)


def _true_batch_norm_eval(x: Tensor, weight: Any, bias: Any, *running: Tensor) -> Tensor:
    mean, variance = (per_channel(value, x) for value in running)
    return affine((x - mean) / (variance + EPS).sqrt(), per_channel(weight, x), per_channel(bias, x))


class BatchNorm(Operands):
    """Operands of batch norm in training and evaluation."""

    MODULES: ClassVar = ("batch_norm.batch_norm",)
    FULL_SIZE: ClassVar = "x y_bar x_dot y_bar_dot"
    DEFAULTS: ClassVar = {**dict.fromkeys(("y", "residual", "residual_dot")), "batch_ndim": 0, "relu": False}

    @classmethod
    def draw(
        cls, shape: Sequence[int], dtype: torch.dtype = torch.float32, batch_ndim: int = 0,
        arrange: Callable[[Tensor], Tensor] = torch.Tensor.contiguous,
    ) -> Any:  # fmt: skip
        """Random operands, those of full size in some layout."""
        channels = (*shape[:batch_ndim], shape[batch_ndim + 1])
        param_dtype = torch.promote_types(dtype, torch.float32)
        full_size = {name: arrange(x) for name, x in randoms(cls.FULL_SIZE, shape, dtype).items()}
        names = "weight bias running_mean running_var weight_dot bias_dot running_mean_dot running_var_dot"
        params = randoms(names, channels, param_dtype)
        # A variance.
        params["running_var"] = random(*channels, dtype=torch.float64, seed=3).abs().add(0.1).to(param_dtype)
        return cls(**full_size, **params, batch_ndim=batch_ndim)

    @classmethod
    def of(cls, workload: Workload) -> Any:
        """Operands of a workload."""
        return cls.draw(workload.shape, workload.torch_dtype, arrange=workload.arrange)


_SHAPED = shaped((3, 2, 3, 5), (0, 3, 2), (2, 1, 1, 2), (13, 5), (2, 3, 131), (2, 3, 2, 2, 3))
NO_RUNNING = ("running_mean", "running_var")
BATCH_NORM = Op(
    name="batch_norm",
    call=functools.partial(_call, training=True),
    function=_batch_norm,
    truth=true_training_norm,
    arguments=("x", "weight", "bias", "running_mean", "running_var"),
    differentiable=("x", "weight", "bias"),
    parameter_shape=lambda sample, name: (sample.shape[1],),
    samples=make_samples(
        _SHAPED,
        [*ABSENT_PARAMS, NO_RUNNING, ("bias", *NO_RUNNING)],
        LAYOUTS,
        constant_when_expanded=lambda shape: len(shape) == 2,
    ),
    small=sample((3, 2, 2)),
    tiny=sample((3, 1), NO_RUNNING),
    # Of each channel more values than any kernel adds up at once, in each layout.
    large=(*shaped((2, 3, 17_000), (33_000, 5)), sample((3, 9, 64, 90), layout="channels_last")),
    not_kept=("bias", "y", "running_mean", "running_var"),
    operands=BatchNorm.of,
    has_channels=True,
    num_params=2,
)

BATCH_NORM_EVAL = BATCH_NORM.sibling(
    "batch_norm_eval",
    BATCH_NORM.arguments,
    family="",
    function_name="batch_norm",
    call=functools.partial(_call, training=False),
    truth=_true_batch_norm_eval,
    differentiable=BATCH_NORM.arguments,
    samples=make_samples([*_SHAPED, *shaped((1, 1))], ABSENT_PARAMS, LAYOUTS),
    small=sample((2, 2, 2)),
    tiny=sample((2, 1)),
    not_kept=("bias", "y"),
    constants=_running,
)
