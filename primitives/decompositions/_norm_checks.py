"""Torch's requirements on the arguments of its normalizations: errors of the type that it raises, before any work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from primitives._core.errors import PrimitivesError


def require(condition: bool, message: str) -> None:
    """Raise what torch raises unless a condition holds; Dynamo does not trace `torch._check` with such a message.

    Raises:
        RuntimeError: If it does not hold.
    """
    if not condition:
        raise RuntimeError(message)


class _MissingStatisticsError(PrimitivesError, RuntimeError, ValueError):
    """torch raises a RuntimeError from `batch_norm`, and a ValueError (or crashes) from `native_batch_norm`."""


def _check_dtypes(caller: str, x: Tensor, *parameters: Tensor | None) -> None:
    if not x.is_floating_point():
        raise NotImplementedError(f"{caller}: input must be floating point, got {x.dtype}.")
    allowed = [x.dtype, torch.float32] if x.dtype in (torch.float16, torch.bfloat16) else [x.dtype]
    found = [parameter.dtype for parameter in parameters if parameter is not None]
    if any(dtype != found[0] or dtype not in allowed for dtype in found):
        raise RuntimeError(
            f"{caller}: weight, bias and any running statistics must have one dtype, "
            f"{' or '.join(map(str, allowed))} for an input of {x.dtype}, got {', '.join(map(str, found))}."
        )


def _check_shapes(caller: str, wanted: list[int], source: str, parameters: dict[str, Tensor | None]) -> None:
    for name, value in parameters.items():
        if value is not None and list(value.shape) != wanted:
            raise RuntimeError(f"{caller}: {name} must have shape {wanted} ({source}), got {list(value.shape)}.")


def check_layer_norm(
    caller: str, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> None:
    """Raise what torch raises for these arguments of a layer norm."""
    shape = list(normalized_shape)
    if not shape:
        raise RuntimeError(f"{caller}: normalized_shape must have at least one axis, got [].")
    _check_shapes(caller, shape, "normalized_shape", {"weight": weight, "bias": bias})
    if list(x.shape[-len(shape) :]) != shape:
        raise RuntimeError(f"{caller}: the last axes of input must be {shape} (normalized_shape), got {list(x.shape)}.")
    _check_dtypes(caller, x, weight, bias)


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
    for name, statistic in running.items():
        if statistic is None and not training:
            raise _MissingStatisticsError(f"{caller}: {name} must be given in evaluation mode.")
    channels = [x.shape[1] if x.dim() > 1 else 0]
    # torch counts the elements of weight and bias, whatever their shape.
    affine = {"weight": weight, "bias": bias}
    flat = {name: None if value is None else value.flatten() for name, value in affine.items()}
    _check_shapes(caller, channels, "axis 1 of input", {**running, **flat})
    if (running_mean is None) != (running_var is None):
        raise ValueError(f"{caller}: running_mean and running_var must be given together or not at all.")
    if x.dim() < 2:
        raise IndexError(f"{caller}: input must have at least 2 axes, [N, C, *], got shape {list(x.shape)}.")
    _check_dtypes(caller, x, weight, bias, running_mean, running_var)
    for name, statistic in running.items() if training and torch.is_grad_enabled() else ():
        if statistic is not None and statistic.requires_grad:
            raise RuntimeError(f"{caller}: {name} must not require grad in training: there it is state, not an input.")


def check_group_norm(caller: str, x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None) -> None:
    """Raise what torch raises for these arguments of a group norm."""
    if x.dim() < 2:
        raise RuntimeError(f"{caller}: input must have at least 2 axes, [N, C, *], got shape {list(x.shape)}.")
    channels = x.shape[1]
    if num_groups < 1 or channels % num_groups:
        raise RuntimeError(f"{caller}: num_groups must be positive and divide {channels} channels, got {num_groups}.")
    _check_shapes(caller, [channels], "axis 1 of input", {"weight": weight, "bias": bias})
    _check_dtypes(caller, x, weight, bias)
