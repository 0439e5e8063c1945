"""Batch norm in evaluation on CPU tensors: ATen's kernels, and a linear combination per channel for the jvp.

The formulas are those of `batch_norm_eval.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from primitives.ops.cpu import in_accumulation_dtype, is_well_conditioned, ready, served
from primitives.ops.norms.cpu_channels import LONGEST_BACKWARD, LONGEST_IMAGE, Channels
from primitives.ops.rules import empty_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    batch_ndim: int,
    eps: float,
) -> Tensor | None:
    """y, by one call of ATen."""
    params = ready(x, weight, bias, running_mean, running_var)
    if batch_ndim or params is None:
        return None
    weight, bias, mean, variance = params
    if not is_well_conditioned(mean, (variance + eps).rsqrt_()):
        return None
    x = x if x.is_contiguous() else Channels.of(x).contiguous_like(x)
    return torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]


def bwd(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    batch_ndim: int,
    eps: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...] | None:
    """x_bar, and from the sums that ATen's backward takes, the cotangents of parameters and running statistics."""
    params = ready(x, weight, running_mean, running_var)
    if batch_ndim or params is None:
        return None
    layout = Channels.of(x)
    dtype = layout.acc if weight is None else weight.dtype
    weight, mean, variance = params
    rstd = (variance + eps).rsqrt_()
    scale = rstd if weight is None else rstd * weight
    y_bar, x = layout.contiguous_like(y_bar), layout.contiguous_like(x)
    sums_wanted = any(wanted[1:])
    # Sums apart cost no more than ATen's whole backward: x_bar does not depend on them.
    if layout.sums_within(LONGEST_BACKWARD, LONGEST_IMAGE):
        mask = (wanted[0], sums_wanted, sums_wanted)
        x_bar, with_x_hat, total = layout.bwd(y_bar, x, weight, mean, rstd, mask, (mean, variance), eps)
    else:
        x_bar = layout.combined([(y_bar, scale)]) if wanted[0] else empty_output(x)
        total, paired = layout.sums(y_bar, x, mean) if sums_wanted else (scale, scale)
        with_x_hat = paired * rstd
    bars = (
        lambda: with_x_hat.to(dtype),
        lambda: total.to(dtype),
        lambda: (-scale * total).to(running_mean.dtype),
        lambda: (-0.5 * rstd * scale * with_x_hat).to(running_var.dtype),
    )
    per_channel = [bar() if want else empty_output(x) for bar, want in zip(bars, wanted[1:], strict=True)]
    return x_bar if wanted[0] else empty_output(x), *per_channel


def jvp(x: Tensor, weight: Tensor | None, running_mean: Tensor, running_var: Tensor, *args: Any) -> Tensor | None:
    """y_dot: x_dot and, where weight or variance move, x - mean, by factors per channel."""
    x_dot, weight_dot, bias_dot, running_mean_dot, running_var_dot, batch_ndim, eps = args
    per_channel = (weight, weight_dot, bias_dot, running_mean_dot, running_var_dot)
    if batch_ndim or not served(x, running_mean, running_var, *per_channel):
        return None
    layout = Channels.of(x)
    weight, weight_dot, bias_dot, mean_dot, var_dot = in_accumulation_dtype(*per_channel)
    mean, variance = in_accumulation_dtype(running_mean, running_var)
    rstd = (variance + eps).rsqrt()
    if not is_well_conditioned(mean, rstd):
        return None
    scale = rstd if weight is None else rstd * weight
    constant = layout.filled(0.0) if bias_dot is None else bias_dot
    if mean_dot is not None:
        constant = constant - scale * mean_dot
    slope = layout.filled(0.0) if weight_dot is None else rstd * weight_dot
    if var_dot is not None:
        slope = slope - 0.5 * rstd.square() * scale * var_dot
    moves_x = weight_dot is not None or var_dot is not None or x_dot is None
    terms = [(x, slope)] if moves_x else []
    return layout.combined(terms if x_dot is None else [(x_dot, scale), *terms], constant - slope * mean)
