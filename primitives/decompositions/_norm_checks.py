"""What torch requires of the arguments of its normalizations: errors of the type that torch raises, before any work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["check_batch_norm", "check_group_norm", "check_instance_norm", "check_layer_norm"]


class _MissingStatisticsError(RuntimeError, ValueError):
    """torch raises a RuntimeError from `batch_norm`, and a ValueError (or crashes) from `native_batch_norm`."""


def _check_dtypes(caller: str, x: Tensor, *parameters: Tensor | None) -> None:
    if not x.is_floating_point():
        raise NotImplementedError(f"{caller}: input must be floating point, got {x.dtype}.")
    allowed = [x.dtype, torch.float32] if x.dtype in (torch.float16, torch.bfloat16) else [x.dtype]
    found = [parameter.dtype for parameter in parameters if parameter is not None]
    for dtype in found:
        if dtype != found[0] or dtype not in allowed:
            raise RuntimeError(
                f"{caller}: weight, bias and any running statistics must have one dtype, "
                f"{' or '.join(map(str, allowed))} for an input of {x.dtype}, got {', '.join(map(str, found))}."
            )


def check_layer_norm(
    caller: str, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> None:
    """Raise what torch raises for these arguments of a layer norm."""
    shape = list(normalized_shape)
    if not shape:
        raise RuntimeError(f"{caller}: normalized_shape must have at least one axis, got [].")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and list(parameter.shape) != shape:
            raise RuntimeError(
                f"{caller}: {name} must have shape {shape} (normalized_shape), got {list(parameter.shape)}."
            )
    if list(x.shape[-len(shape) :]) != shape:
        raise RuntimeError(f"{caller}: the last axes of input must be {shape} (normalized_shape), got {list(x.shape)}.")
    _check_dtypes(caller, x, weight, bias)


def _check_channels(caller: str, x: Tensor, training: bool, running: dict[str, Any], affine: dict[str, Any]) -> None:
    num_channels = x.shape[1] if x.dim() > 1 else 0
    for name, statistic in running.items():
        if statistic is None and not training:
            raise _MissingStatisticsError(f"{caller}: {name} must be given in evaluation mode.")
    for name, value in {**running, **affine}.items():
        if value is None:
            continue
        # torch counts the elements of weight and bias, whatever their shape.
        if value.numel() != num_channels or (name in running and value.dim() != 1):
            raise RuntimeError(
                f"{caller}: {name} must have shape [{num_channels}] (axis 1 of input), got {list(value.shape)}."
            )


def check_batch_norm(
    caller: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
) -> None:
    """Raise what torch raises for these arguments of a batch norm."""
    running = {"running_mean": running_mean, "running_var": running_var}
    _check_channels(caller, x, training, running, {"weight": weight, "bias": bias})
    if (running_mean is None) != (running_var is None):
        raise ValueError(f"{caller}: running_mean and running_var must be given together or not at all.")
    if x.dim() < 2:
        raise IndexError(f"{caller}: input must have at least 2 axes, [N, C, *], got shape {list(x.shape)}.")
    _check_dtypes(caller, x, weight, bias, running_mean, running_var)
    for name, statistic in running.items() if training and torch.is_grad_enabled() else ():
        if statistic is not None and statistic.requires_grad:
            raise RuntimeError(f"{caller}: {name} must not require grad in training: there it is state, not an input.")


def check_instance_norm(
    caller: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
) -> None:
    """Raise what torch raises for these arguments of an instance norm."""
    if not use_input_stats and (running_mean is None or running_var is None):
        raise RuntimeError(f"{caller}: running_mean and running_var must be given where use_input_stats is false.")
    check_batch_norm(caller, x, weight, bias, running_mean, running_var, use_input_stats)


def check_group_norm(caller: str, x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None) -> None:
    """Raise what torch raises for these arguments of a group norm."""
    if x.dim() < 2:
        raise RuntimeError(f"{caller}: input must have at least 2 axes, [N, C, *], got shape {list(x.shape)}.")
    channels = x.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise RuntimeError(f"{caller}: num_groups must be positive and divide {channels} channels, got {num_groups}.")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and tuple(value.shape) != (channels,):
            raise RuntimeError(
                f"{caller}: {name} must have shape [{channels}] (axis 1 of input), got {list(value.shape)}."
            )
    _check_dtypes(caller, x, weight, bias)
