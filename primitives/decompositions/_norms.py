"""Decompositions of layer norm, group norm and weight norm.

ATen returns mean and reciprocal standard deviation, and takes those of a layer norm for constants in second and higher
derivatives; here they are plain functions of the input. Of group norm torch refuses the jvp in channels_last. Weight
norm has no jvp in torch, and its backward takes the norm for a constant: reversed twice it is silently wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from primitives._core.decomposition import decomposition_table, register_decomposition
from primitives.decompositions._norm_checks import check_group_norm, check_layer_norm
from primitives.decompositions._statistics import (
    accumulated,
    channel_shape,
    moments,
    of_part,
    saved_dtype,
    scaled,
)

aten = torch.ops.aten


@register_decomposition(aten.native_layer_norm)
def native_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer norm over the last axes: y, and mean and rstd with those axes kept as 1."""
    check_layer_norm("layer_norm", input, normalized_shape, weight, bias)
    x = accumulated(input)
    mean, variance = moments(x, list(range(-len(normalized_shape), 0)))
    if x.numel() == 0:
        # ATen has a mean of 0 for a row without elements, and NaN for its rstd.
        mean = torch.zeros_like(mean)
    rstd = (variance + eps).rsqrt()
    y, dtype = scaled((x - mean) * rstd, weight, bias), saved_dtype(input, weight, bias)
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


@register_decomposition(aten.native_group_norm)
def native_group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Group norm of `[N, C, *]`: y, and mean and rstd of shape `[N, group]`."""
    check_group_norm("group_norm", input, group, weight, bias)
    x, shape = accumulated(input), channel_shape(input)
    mean, variance = moments(x.reshape(N, group, C // group * HxW), [2])
    rstd = (variance + eps).rsqrt()
    # The statistics are spread, and not x gathered in groups: y keeps the memory format of x.
    per_channel = [v.expand(N, group, C // group).reshape([N, *shape[1:]]) for v in (mean, rstd)]
    y = scaled((x - per_channel[0]) * per_channel[1], weight, bias, shape)
    dtype = saved_dtype(input, weight, bias)
    return y.to(input.dtype), mean[..., 0].to(dtype), rstd[..., 0].to(dtype)


@register_decomposition(aten.group_norm)
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Group norm of `[N, C, *]`."""
    check_group_norm("group_norm", input, num_groups, weight, bias)
    sizes = *input.shape[:2], input.shape[2:].numel()
    return decomposition_table[aten.native_group_norm.default](input, weight, bias, *sizes, num_groups, eps)[0]


@register_decomposition(aten._weight_norm_interface)
def weight_norm_interface(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """`g * v / |v|`, and the norms over all axes but `dim`, of the whole for -1."""
    axes = [axis for axis in range(v.dim()) if dim == -1 or axis != dim]
    # Not by vector_norm, whose derivatives of third order raise in torch.
    norms = v.square().sum(axes, keepdim=dim != -1).sqrt()
    return v * (g / norms), norms


of_part(aten._weight_norm, aten._weight_norm_interface.default, 0)
