r"""Batch normalization in evaluation: each channel of x by given statistics.

With x_hat = (x - running_mean) * rstd and rstd = 1 / sqrt(running_var + eps), per channel,

    y = x_hat * weight + bias

The running statistics are inputs like any other, written mean and var below, and have derivatives of their own:

    jvp   y_dot = rstd * weight * (x_dot - mean_dot) + x_hat * (weight_dot - rstd**2 / 2 * weight * var_dot) + bias_dot
    vjp   x_bar = rstd * weight * y_bar,   weight_bar = sum(y_bar * x_hat),   bias_bar = sum(y_bar)
          mean_bar = -rstd * weight * sum(y_bar),   var_bar = -rstd**2 / 2 * weight * sum(y_bar * x_hat)

Shapes: x is [*batch, N, C, *spatial] with `batch_ndim` batch axes, which vmap adds; everything per channel is
[*batch, C]. y is channels_last where x is, else contiguous.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from primitives._core import Primitive
from primitives.ops.axes import Axes, def_axes
from primitives.ops.norms.aten import RunningByAten, in_dtype_of_sums, is_well_conditioned
from primitives.ops.norms.channels import AXES, ChannelOptions, channels, contiguous_like
from primitives.ops.norms.formulas import Norm, Running
from primitives.ops.rules import accumulation_dtype, bind_family, define, derivatives, empty_output, schema_of

batch_norm_eval_p = Primitive(
    "batch_norm_eval",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var,"
    f" {schema_of(ChannelOptions)})"
    " -> Tensor y",
    residuals=("x", "weight", "running_mean", "running_var"),
    recomputable=True,
)
batch_norm_eval_bwd_p, batch_norm_eval_jvp_p = derivatives(
    batch_norm_eval_p,
    "x weight running_mean running_var",
    "x weight bias running_mean running_var",
    schema_of(ChannelOptions),
)


def _running(call: Any, of: type[Norm] = Running) -> Norm:
    """The norm by the running statistics."""
    acc = accumulation_dtype(call.x.dtype)
    statistics = call.running_mean.to(acc), (call.running_var.to(acc) + call.eps).rsqrt()
    return channels(call.x, ChannelOptions(call.eps, call.batch_ndim), statistics=statistics, of=of)


def _slopes(norm: Norm, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Derivatives of y with respect to mean, and to var but for x_hat, per channel."""
    rstd = norm.statistic(norm.rstd)
    scale = rstd if weight is None else rstd * weight
    return -scale, -0.5 * rstd * scale


def _cotangents(norm: Norm, call: Any) -> tuple[Tensor, ...]:
    bars = norm.bwd(call.y_bar, call.weight, call.output_mask[:3])
    mean_bar, var_bar = empty_output(call.x), empty_output(call.x)
    if call.output_mask[3] or call.output_mask[4]:
        (by_mean, by_var), y_bar = _slopes(norm, call.weight), norm.wide(call.y_bar)
        if call.output_mask[3]:
            mean_bar = (by_mean * norm.sums(y_bar, norm.dtype)).to(call.running_mean.dtype)
        if call.output_mask[4]:
            var_bar = (by_var * norm.sums(y_bar * norm.x_hat, norm.dtype)).to(call.running_var.dtype)
    return *bars, mean_bar, var_bar


def _tangent(norm: Norm, call: Any) -> Tensor:
    slope, shift = call.weight_dot, call.bias_dot
    if call.running_mean_dot is not None:
        along_mean = _slopes(norm, call.weight)[0] * call.running_mean_dot
        shift = along_mean if shift is None else shift + along_mean
    if call.running_var_dot is not None:
        along_var = _slopes(norm, call.weight)[1] * call.running_var_dot
        slope = along_var if slope is None else slope + along_var
    return norm.result(*norm.jvp(call.weight, call.x_dot, slope, shift))


define(batch_norm_eval_p, lambda norm, call: norm.value(call.weight, call.bias), _running)
define(batch_norm_eval_bwd_p, _cotangents, _running, functools.partial(_running, of=RunningByAten))
define(batch_norm_eval_jvp_p, _tangent, _running)


@batch_norm_eval_p.def_kernel("cpu")
def _batch_norm_eval_by_aten(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float, batch_ndim: int
) -> Tensor | None:
    if batch_ndim or x.numel() == 0:
        return None
    weight, bias, mean, var = in_dtype_of_sums(x, weight, bias, mean, var)
    if not is_well_conditioned(mean, (var + eps).rsqrt_()):
        return None
    return torch.native_batch_norm(contiguous_like(x, x, 0), weight, bias, mean, var, False, 0.0, eps)[0]


# Triton's kernels; by given statistics every axis is free.

AXES_IN_EVALUATION = Axes(AXES, "batch samples channels spatial")
_ops = (batch_norm_eval_p, batch_norm_eval_bwd_p, batch_norm_eval_jvp_p)
bind_family("batch_norm.batch_norm", "batch_norm_eval", *_ops)
def_axes(AXES_IN_EVALUATION, *_ops)
