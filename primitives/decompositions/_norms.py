"""Decompositions of ATen's normalizations and of their backward operators.

ATen hands mean and reciprocal standard deviation from the forward to the backward operator, and differentiates the
backward as if they were constants. Here they are taken from the input again, so that derivatives reach it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from primitives.core.decomposition import register_decomposition
from primitives.core.primitive import Primitive

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

aten = torch.ops.aten

# A value that no mode differentiates: Tensor.detach stops reverse mode alone.
constant_p = Primitive(
    "constant", "(Tensor x) -> Tensor value", state=("value",), namespace="primitives_decompositions"
)
constant_p.def_reference(lambda x: x.clone())
constant_p.def_vjp(lambda residuals, cotangents, wanted: {})
constant_p.def_jvp(lambda residuals, tangents: ())
constant_p.def_vmap(lambda batch, primals: (constant_p(primals.x), batch.axes.x))


def _accumulated(x: Tensor) -> Tensor:
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _moments(x: Tensor, axes: list[int]) -> tuple[Tensor, Tensor]:
    mean = x.mean(axes, keepdim=True)
    return mean, (x - mean).square().mean(axes, keepdim=True)


def _projected(v: Tensor, x_hat: Tensor, rstd: Tensor, axes: list[int]) -> Tensor:
    return rstd * (v - v.mean(axes, keepdim=True) - x_hat * (v * x_hat).mean(axes, keepdim=True))


@register_decomposition(aten.native_layer_norm.default)
def native_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm over the last axes: y, and mean and rstd with those axes kept as 1."""
    axes = list(range(-len(normalized_shape), 0))
    x = _accumulated(input)
    mean, variance = _moments(x, axes)
    rstd = (variance + eps).rsqrt()
    y = (x - mean) * rstd
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(input.dtype), mean, rstd


@register_decomposition(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Cotangents of input, weight and bias of a layer norm; what the mask leaves out, or is not there, is `None`."""
    axes = list(range(-len(normalized_shape), 0))
    rows = list(range(input.dim() - len(normalized_shape)))
    x, y_bar = _accumulated(input), _accumulated(grad_out)
    if x.numel() == 0:
        return _zeros(input, weight, bias, output_mask)
    mean, variance = _moments(x, axes)
    # ATen does not pass eps on. It is what separates the variance from 1 / rstd**2, and no function of the input.
    eps = constant_p(rstd.to(x.dtype).pow(-2) - variance)
    rstd = (variance + eps).rsqrt()
    x_hat = (x - mean) * rstd
    x_bar = weight_bar = bias_bar = None
    if output_mask[0]:
        x_bar = _projected(y_bar if weight is None else y_bar * weight, x_hat, rstd, axes).to(input.dtype)
    if output_mask[1] and weight is not None:
        weight_bar = _sum(y_bar * x_hat, rows).to(weight.dtype)
    if output_mask[2] and bias is not None:
        bias_bar = _sum(y_bar, rows).to(bias.dtype)
    return x_bar, weight_bar, bias_bar


def _sum(v: Tensor, axes: list[int]) -> Tensor:
    # An empty list of axes means all of them to torch.
    return v.sum(axes) if axes else v


def _zeros(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, output_mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    zeros = [
        torch.zeros_like(value) if wanted and value is not None else None
        for value, wanted in zip((x, weight, bias), output_mask, strict=True)
    ]
    return zeros[0], zeros[1], zeros[2]


def _channel_shape(x: Tensor) -> list[int]:
    return [1, x.shape[1], *[1] * (x.dim() - 2)]


@register_decomposition(aten._native_batch_norm_legit_functional.default)
def native_batch_norm_functional(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Batch norm that returns new running statistics: y, mean, rstd, running mean, running variance."""
    axes = [0, *range(2, input.dim())]
    x = _accumulated(input)
    if training:
        mean, variance = _moments(x, axes)
        count = max(x.numel() // max(x.shape[1], 1), 1)
        running_mean = (momentum * mean.flatten() + (1 - momentum) * running_mean).to(running_mean.dtype)
        unbiased = variance.flatten() * (count / max(count - 1, 1))
        running_var = (momentum * unbiased + (1 - momentum) * running_var).to(running_var.dtype)
    else:
        mean, variance = (_accumulated(v).reshape(_channel_shape(x)) for v in (running_mean, running_var))
    rstd = (variance + eps).rsqrt()
    y = (x - mean) * rstd
    if weight is not None:
        y = y * weight.reshape(_channel_shape(x))
    if bias is not None:
        y = y + bias.reshape(_channel_shape(x))
    saved = (mean.flatten(), rstd.flatten()) if training else (x.new_zeros(0), x.new_zeros(0))
    return y.to(input.dtype), *saved, running_mean, running_var


@register_decomposition(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Cotangents of input, weight and bias of a batch norm; what the mask leaves out is `None`.

    Weight and bias have the shape `[C]`; ATen gives bias its cotangent even where there is no weight.
    """
    x, y_bar = _accumulated(input), _accumulated(grad_out)
    axes, shape = [0, *range(2, x.dim())], _channel_shape(x)
    dtype = input.dtype if weight is None else weight.dtype
    if x.numel() == 0:
        channels = x.new_zeros(x.shape[1], dtype=dtype)
        return _zeros(input, channels, channels, output_mask)
    if train:
        mean, variance = _moments(x, axes)
    elif running_mean is None or running_var is None:
        raise RuntimeError("native_batch_norm_backward: running_mean and running_var must be given in evaluation mode.")
    else:
        mean, variance = (_accumulated(running_mean).reshape(shape), _accumulated(running_var).reshape(shape))
    rstd = (variance + eps).rsqrt()
    x_hat = (x - mean) * rstd
    x_bar = weight_bar = bias_bar = None
    if output_mask[0]:
        x_bar = _projected(y_bar, x_hat, rstd, axes) if train else y_bar * rstd
        x_bar = (x_bar if weight is None else x_bar * weight.reshape(shape)).to(input.dtype)
    if output_mask[1]:
        weight_bar = (y_bar * x_hat).sum(axes).to(dtype)
    if output_mask[2]:
        bias_bar = y_bar.sum(axes).to(dtype)
    return x_bar, weight_bar, bias_bar


@register_decomposition(aten.cudnn_batch_norm_backward.default)
def cudnn_batch_norm_backward(
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_var: Tensor | None,
    epsilon: float,
    reserveSpace: Tensor,  # noqa: N803 - ATen's name
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Training backward of cuDNN: `native_batch_norm_backward` with the arguments in its own order."""
    return native_batch_norm_backward(
        grad_output, input, weight, running_mean, running_var, save_mean, save_var, True, epsilon, (True, True, True)
    )


@register_decomposition(aten.miopen_batch_norm_backward.default)
def miopen_batch_norm_backward(
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_var: Tensor | None,
    epsilon: float,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Training backward of MIOpen: `native_batch_norm_backward` with the arguments in its own order."""
    return native_batch_norm_backward(
        grad_output, input, weight, running_mean, running_var, save_mean, save_var, True, epsilon, (True, True, True)
    )


@register_decomposition(aten.batch_norm_backward.default)
def batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_var: Tensor | None,
    update: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: Tensor,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The unified backward: `update` says whether the forward was in training."""
    return native_batch_norm_backward(
        grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, output_mask
    )
