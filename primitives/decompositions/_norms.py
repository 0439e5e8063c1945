"""Decompositions of layer norm, group norm and weight norm, of backward operators of norms, and torch's requirements.

ATen returns mean and reciprocal standard deviation, hands them to the backward operators, and takes them there, and in
second and higher derivatives of a layer norm, for constants; here they are plain functions of the input. Of group norm
torch refuses the jvp in channels_last. Weight norm has no jvp in torch, and its backward takes the norm for a constant:
reversed twice it is silently wrong.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from primitives._core.decomposition import decomposition_table, register_decomposition
from primitives._core.errors import PrimitivesError
from primitives.decompositions._statistics import (
    accumulated,
    channel_shape,
    constant_p,
    decomposes,
    moments,
    of_part,
    saved_dtype,
    scaled,
)

aten = torch.ops.aten


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


# The arguments of ATen's batch norms.
BatchNorm = namedtuple(
    "BatchNorm", "input weight bias running_mean running_var training momentum eps", defaults=(0.0, 0.0)
)


def check_batch_norm(caller: str, c: Any) -> None:
    """Raise what torch raises for these arguments of a batch norm."""
    x, running = c.input, {"running_mean": c.running_mean, "running_var": c.running_var}
    for name, statistic in running.items():
        if statistic is None and not c.training:
            raise _MissingStatisticsError(f"{caller}: {name} must be given in evaluation mode.")
    channels = [x.shape[1] if x.dim() > 1 else 0]
    # torch counts the elements of weight and bias, whatever their shape.
    affine = {"weight": c.weight, "bias": c.bias}
    flat = {name: None if value is None else value.flatten() for name, value in affine.items()}
    _check_shapes(caller, channels, "axis 1 of input", {**running, **flat})
    if (c.running_mean is None) != (c.running_var is None):
        raise ValueError(f"{caller}: running_mean and running_var must be given together or not at all.")
    if x.dim() < 2:
        raise IndexError(f"{caller}: input must have at least 2 axes, [N, C, *], got shape {list(x.shape)}.")
    _check_dtypes(caller, *c[:5])
    for name, statistic in running.items() if c.training and torch.is_grad_enabled() else ():
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


@decomposes(aten.native_layer_norm)
def native_layer_norm(c: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm over the last axes: y, and mean and rstd with those axes kept as 1."""
    check_layer_norm("layer_norm", c.input, c.normalized_shape, c.weight, c.bias)
    x = accumulated(c.input)
    mean, variance = moments(x, list(range(-len(c.normalized_shape), 0)))
    if x.numel() == 0:
        # ATen has a mean of 0 for a row without elements, and NaN for its rstd.
        mean = torch.zeros_like(mean)
    rstd = (variance + c.eps).rsqrt()
    y, dtype = scaled((x - mean) * rstd, c.weight, c.bias), saved_dtype(c.input, c.weight, c.bias)
    return y.to(c.input.dtype), mean.to(dtype), rstd.to(dtype)


@decomposes(aten.layer_norm)
def layer_norm(c: Any) -> Tensor:
    """Layer norm over the last axes."""
    return decomposition_table[aten.native_layer_norm.default](c.input, c.normalized_shape, c.weight, c.bias, c.eps)[0]


@decomposes(aten.native_group_norm)
def native_group_norm(c: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Group norm of `[N, C, *]`: y, and mean and rstd of shape `[N, group]`."""
    check_group_norm("group_norm", c.input, c.group, c.weight, c.bias)
    x, shape = accumulated(c.input), channel_shape(c.input)
    mean, variance = moments(x.reshape(c.N, c.group, c.C // c.group * c.HxW), [2])
    rstd = (variance + c.eps).rsqrt()
    # The statistics are spread, and not x gathered in groups: y keeps the memory format of x.
    per_channel = [v.expand(c.N, c.group, c.C // c.group).reshape([c.N, *shape[1:]]) for v in (mean, rstd)]
    y = scaled((x - per_channel[0]) * per_channel[1], c.weight, c.bias, shape)
    dtype = saved_dtype(c.input, c.weight, c.bias)
    return y.to(c.input.dtype), mean[..., 0].to(dtype), rstd[..., 0].to(dtype)


@decomposes(aten.group_norm)
def group_norm(c: Any) -> Tensor:
    """Group norm of `[N, C, *]`."""
    check_group_norm("group_norm", c.input, c.num_groups, c.weight, c.bias)
    sizes = *c.input.shape[:2], c.input.shape[2:].numel()
    return decomposition_table[aten.native_group_norm.default](c.input, c.weight, c.bias, *sizes, c.num_groups, c.eps)[
        0
    ]


@register_decomposition(aten._weight_norm_interface)
def weight_norm_interface(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """`g * v / |v|`, and the norms over all axes but `dim`, of the whole for -1."""
    axes = [axis for axis in range(v.dim()) if dim == -1 or axis != dim]
    # Not by vector_norm, whose derivatives of third order raise in torch.
    norms = v.square().sum(axes, keepdim=dim != -1).sqrt()
    return v * (g / norms), norms


of_part(aten._weight_norm, aten._weight_norm_interface.default, 0)


def _projected(v: Tensor, x_hat: Tensor, rstd: Tensor, axes: list[int]) -> Tensor:
    return rstd * (v - v.mean(axes, keepdim=True) - x_hat * (v * x_hat).mean(axes, keepdim=True))


@decomposes(aten.native_layer_norm_backward)
def native_layer_norm_backward(c: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Cotangents of input, weight and bias of a layer norm; what the mask leaves out, or is not there, is `None`."""
    axes = list(range(-len(c.normalized_shape), 0))
    rows = list(range(c.input.dim() - len(c.normalized_shape)))
    x, y_bar = accumulated(c.input), accumulated(c.grad_out)
    mean, variance = moments(x, axes)
    # ATen does not pass eps on. It is what separates the variance from 1 / rstd**2, and no function of the input.
    eps = constant_p(c.rstd.to(x.dtype).pow(-2) - variance)
    rstd = (variance + eps).rsqrt()
    x_hat = (x - mean) * rstd
    x_bar = weight_bar = bias_bar = None
    if c.output_mask[0]:
        x_bar = _projected(y_bar if c.weight is None else y_bar * c.weight, x_hat, rstd, axes).to(c.input.dtype)
    if c.output_mask[1] and c.weight is not None:
        weight_bar = _sum(y_bar * x_hat, rows).to(c.weight.dtype)
    if c.output_mask[2] and c.bias is not None:
        bias_bar = _sum(y_bar, rows).to(c.bias.dtype)
    return x_bar, weight_bar, bias_bar


def _sum(v: Tensor, axes: list[int]) -> Tensor:
    # An empty list of axes means all of them to torch.
    return v.sum(axes) if axes else v


@decomposes(aten.native_batch_norm_backward)
def native_batch_norm_backward(c: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Cotangents of input, weight and bias of a batch norm; what the mask leaves out is `None`.

    Weight and bias have the shape `[C]`; ATen gives bias its cotangent even without a weight.
    """
    x, y_bar = accumulated(c.input), accumulated(c.grad_out)
    axes, shape = [0, *range(2, x.dim())], channel_shape(x)
    dtype = c.input.dtype if c.weight is None else c.weight.dtype
    if c.train:
        mean, variance = moments(x, axes)
    elif c.running_mean is None or c.running_var is None:
        raise RuntimeError("native_batch_norm_backward: running_mean and running_var must be given in evaluation mode.")
    else:
        mean, variance = (accumulated(c.running_mean).reshape(shape), accumulated(c.running_var).reshape(shape))
    rstd = (variance + c.eps).rsqrt()
    x_hat = (x - mean) * rstd
    x_bar = weight_bar = bias_bar = None
    if c.output_mask[0]:
        x_bar = _projected(y_bar, x_hat, rstd, axes) if c.train else y_bar * rstd
        x_bar = (x_bar if c.weight is None else x_bar * c.weight.reshape(shape)).to(c.input.dtype)
    if c.output_mask[1]:
        weight_bar = (y_bar * x_hat).sum(axes).to(dtype)
    if c.output_mask[2]:
        bias_bar = y_bar.sum(axes).to(dtype)
    return x_bar, weight_bar, bias_bar
