"""Decompositions of the backward operators of ATen's normalizations.

ATen hands mean and reciprocal standard deviation from the forward to the backward operator, and differentiates the
backward as if they were constants. Here they are taken from the input again, so that derivatives reach it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from primitives._core.decomposition import register_decomposition
from primitives.decompositions._statistics import accumulated, channel_shape, constant_p, moments

aten = torch.ops.aten


def _projected(v: Tensor, x_hat: Tensor, rstd: Tensor, axes: list[int]) -> Tensor:
    return rstd * (v - v.mean(axes, keepdim=True) - x_hat * (v * x_hat).mean(axes, keepdim=True))


@register_decomposition(aten.native_layer_norm_backward)
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
    x, y_bar = accumulated(input), accumulated(grad_out)
    mean, variance = moments(x, axes)
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


@register_decomposition(aten.native_batch_norm_backward)
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

    Weight and bias have the shape `[C]`; ATen gives bias its cotangent even without a weight.
    """
    x, y_bar = accumulated(input), accumulated(grad_out)
    axes, shape = [0, *range(2, x.dim())], channel_shape(x)
    dtype = input.dtype if weight is None else weight.dtype
    if train:
        mean, variance = moments(x, axes)
    elif running_mean is None or running_var is None:
        raise RuntimeError("native_batch_norm_backward: running_mean and running_var must be given in evaluation mode.")
    else:
        mean, variance = (accumulated(running_mean).reshape(shape), accumulated(running_var).reshape(shape))
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
