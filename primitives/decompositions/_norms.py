"""Decompositions of ATen's normalizations.

ATen returns mean and reciprocal standard deviation, and its derivative rules take them for constants in second and
higher derivatives. Here they are plain functions of the input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from primitives.core.decomposition import decomposition_table, register_decomposition
from primitives.core.write_back import write_back
from primitives.decompositions._norm_checks import check_batch_norm, check_instance_norm, check_layer_norm
from primitives.decompositions._statistics import accumulated, channel_shape, constant_p, moments, saved_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["native_batch_norm", "native_batch_norm_functional", "reserve"]

aten = torch.ops.aten


@register_decomposition(aten.native_layer_norm)
def native_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm over the last axes: y, and mean and rstd with those axes kept as 1."""
    check_layer_norm("layer_norm", input, normalized_shape, weight, bias)
    axes = list(range(-len(normalized_shape), 0))
    x = accumulated(input)
    mean, variance = moments(x, axes)
    if x.numel() == 0:
        # ATen has a mean of 0 for a row without elements, and NaN for its rstd.
        mean = torch.zeros_like(mean)
    rstd = (variance + eps).rsqrt()
    y = (x - mean) * rstd
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    dtype = saved_dtype(input, weight, bias)
    return y.to(input.dtype), mean.to(dtype), rstd.to(dtype)


@register_decomposition(aten.layer_norm)
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Layer norm over the last axes."""
    return decomposition_table[aten.native_layer_norm.default](input, normalized_shape, weight, bias, eps)[0]


class _Normalized(NamedTuple):
    """What a batch norm computes; the running statistics are `None` where there are none."""

    y: Tensor
    mean: Tensor
    rstd: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None

    def write(self, running_mean: Tensor | None, running_var: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Write the new running statistics in place, as the last thing that can fail."""
        if running_mean is not None and running_var is not None and self.running_mean is not None:
            write_back([running_mean, running_var], [constant_p(self.running_mean), constant_p(self.running_var)])
        return self.y, self.mean, self.rstd


def _normalize(
    caller: str,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> _Normalized:
    check_batch_norm(caller, input, weight, bias, running_mean, running_var, training)
    if training and input.numel() == 0:
        raise RuntimeError(f"{caller}: input must have at least one element in training, got {list(input.shape)}.")
    x, shape = accumulated(input), channel_shape(input)
    new_mean, new_var = running_mean, running_var
    if training or running_mean is None or running_var is None:
        mean, variance = moments(x, [0, *range(2, input.dim())])
        if running_mean is not None and running_var is not None:
            count = x.numel() // x.shape[1]
            # A single value has no unbiased variance: 0 / 0, as in torch.
            unbiased = variance.flatten() * count / (count - 1)
            new_mean = (momentum * mean.flatten() + (1 - momentum) * running_mean).to(running_mean.dtype)
            new_var = (momentum * unbiased + (1 - momentum) * running_var).to(running_var.dtype)
    else:
        mean, variance = (accumulated(v).reshape(shape) for v in (running_mean, running_var))
    rstd = (variance + eps).rsqrt()
    y = (x - mean) * rstd
    if weight is not None:
        y = y * weight.reshape(shape)
    if bias is not None:
        y = y + bias.reshape(shape)
    dtype = saved_dtype(input, weight, bias, running_mean, running_var)
    saved = [v.flatten().to(dtype) if training else x.new_zeros(0, dtype=dtype) for v in (mean, rstd)]
    return _Normalized(y.to(input.dtype), saved[0], saved[1], new_mean, new_var)


@register_decomposition(aten.native_batch_norm)
def native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm that writes the running statistics in training: y, mean, rstd."""
    args = input, weight, bias, running_mean, running_var, training, momentum, eps
    result = _normalize("native_batch_norm", *args)
    return result.write(running_mean, running_var) if training else result[:3]


def native_batch_norm_functional(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor | None, ...]:
    """Batch norm that returns new running statistics: y, mean, rstd, running mean, running variance."""
    args = input, weight, bias, running_mean, running_var, training, momentum, eps
    return tuple(_normalize("native_batch_norm", *args))


def reserve(x: Tensor) -> Tensor:
    """What a batch norm reserves for its backward here: nothing."""
    return x.new_zeros(0, dtype=torch.uint8)


@register_decomposition(aten._batch_norm_impl_index)
def batch_norm_impl_index(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Batch norm of whichever implementation torch takes: y, mean, rstd, nothing reserved, the native implementation.

    An input without elements is handed through, and no running statistics are written.
    """
    args = input, weight, bias, running_mean, running_var, training
    if input.numel() == 0:
        # Before anything is checked, as in torch: it may have any number of axes.
        y = input.clone()
        y = y if weight is None else y * weight[0]
        y = y if bias is None else y + bias[0]
        return y, input.new_zeros(0), input.new_zeros(0), reserve(input), 0
    return *decomposition_table[aten.native_batch_norm.default](*args, momentum, eps), reserve(input), 0


@register_decomposition(aten.batch_norm)
def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Batch norm that writes the running statistics in training."""
    args = input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled
    return batch_norm_impl_index(*args)[0]


@register_decomposition(aten.instance_norm)
def instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Batch norm in which every channel of every sample is a channel; running statistics average over the samples."""
    running = running_mean, running_var
    check_instance_norm("instance_norm", input, weight, bias, *running, use_input_stats)
    samples, channels = input.shape[:2]
    scale, shift, mean, var = (None if p is None else p.repeat(samples) for p in (weight, bias, *running))
    flat = input.reshape(1, samples * channels, *input.shape[2:])
    if input.numel() == 0:
        y = batch_norm(flat, scale, shift, mean, var, use_input_stats, momentum, eps, cudnn_enabled)
        means = [mean, var]
    else:
        result = _normalize("instance_norm", flat, scale, shift, mean, var, use_input_stats, momentum, eps)
        y, means = result.y, [result.running_mean, result.running_var]
    if use_input_stats:
        averaged = [None if p is None else p.reshape(samples, channels).mean(0) for p in means]
        _Normalized(y, y, y, averaged[0], averaged[1]).write(*running)
    return y.reshape(input.shape)
