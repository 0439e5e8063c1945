"""Decompositions of group norm, whose jvp torch refuses in channels_last, and of weight norm.

Weight norm has no jvp in torch, and its backward takes the norm for a constant: reversed twice it is silently wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from primitives.core.decomposition import decomposition_table, register_decomposition
from primitives.decompositions._norm_checks import check_group_norm
from primitives.decompositions._statistics import accumulated, channel_shape, moments, saved_dtype

if TYPE_CHECKING:
    from torch import Tensor

aten = torch.ops.aten


@register_decomposition(aten.native_group_norm)
def native_group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,  # noqa: N803 - ATen's names
    C: int,  # noqa: N803
    HxW: int,  # noqa: N803
    group: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Group norm of `[N, C, *]`: y, and mean and rstd of shape `[N, group]`."""
    check_group_norm("group_norm", input, group, weight, bias)
    x, shape = accumulated(input), channel_shape(input)
    mean, variance = moments(x.reshape(N, group, C // group * HxW), [2])
    rstd = (variance + eps).rsqrt()
    # The statistics are spread, and not x gathered in groups: y keeps the memory format of x.
    per_channel = [v.expand(N, group, C // group).reshape([N, *shape[1:]]) for v in (mean, rstd)]
    y = (x - per_channel[0]) * per_channel[1]
    if weight is not None:
        y = y * weight.reshape(shape)
    if bias is not None:
        y = y + bias.reshape(shape)
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
    samples, channels = input.shape[:2]
    pixels = input.shape[2:].numel()
    args = input, weight, bias, samples, channels, pixels, num_groups, eps
    return decomposition_table[aten.native_group_norm.default](*args)[0]


@register_decomposition(aten._weight_norm_interface)
def weight_norm_interface(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """`g * v / |v|`, and the norms over all axes but `dim`, of the whole for -1."""
    axes = [axis for axis in range(v.dim()) if dim == -1 or axis != dim]
    norms = torch.linalg.vector_norm(v, 2, axes, keepdim=dim != -1)
    return v * (g / norms), norms


@register_decomposition(aten._weight_norm)
def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """The weight of `weight_norm_interface`."""
    return decomposition_table[aten._weight_norm_interface.default](v, g, dim)[0]
