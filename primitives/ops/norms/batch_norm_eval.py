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

from typing import TYPE_CHECKING, Any

from primitives._core import Primitive
from primitives.ops.norms import cpu_batch_norm_eval as cpu
from primitives.ops.norms.channels import channels
from primitives.ops.rules import accumulation_dtype, batch_all, bind_kernels, empty_output, first_order

if TYPE_CHECKING:
    from torch import Tensor

    from primitives.ops.norms.formulas import Norm

batch_norm_eval_p = Primitive(
    "batch_norm_eval",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, int batch_ndim, float eps)"
    " -> Tensor y",
    residuals=("x", "weight", "running_mean", "running_var"),
    recomputable=True,
)
batch_norm_eval_bwd_p = Primitive(
    "batch_norm_eval_bwd",
    "(Tensor y_bar, Tensor x, Tensor? weight, Tensor running_mean, Tensor running_var, int batch_ndim, float eps,"
    " bool[] wanted)"
    " -> (Tensor x_bar, Tensor weight_bar, Tensor bias_bar, Tensor running_mean_bar, Tensor running_var_bar)",
    decomposable=True,
)
batch_norm_eval_jvp_p = Primitive(
    "batch_norm_eval_jvp",
    "(Tensor x, Tensor? weight, Tensor running_mean, Tensor running_var, Tensor? x_dot, Tensor? weight_dot,"
    " Tensor? bias_dot, Tensor? running_mean_dot, Tensor? running_var_dot, int batch_ndim, float eps) -> Tensor y_dot",
    decomposable=True,
)


# Reference.


def _running(x: Tensor, running_mean: Tensor, running_var: Tensor, batch_ndim: int, eps: float) -> Norm:
    """The norm by the running statistics."""
    acc = accumulation_dtype(x.dtype)
    return channels(x, batch_ndim, statistics=(running_mean.to(acc), (running_var.to(acc) + eps).rsqrt()))


def _slopes(norm: Norm, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Derivatives of y with respect to mean, and to var but for x_hat, per channel."""
    rstd = norm.statistic(norm.rstd)
    scale = rstd if weight is None else rstd * weight
    return -scale, -0.5 * rstd * scale


@batch_norm_eval_p.def_reference
def _batch_norm_eval_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, *args: Any) -> Tensor:
    return _running(x, *args).value(weight, bias)


@batch_norm_eval_bwd_p.def_reference
def _batch_norm_eval_bwd_reference(y_bar: Tensor, x: Tensor, weight: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    running_mean, running_var, *options, wanted = args
    norm = _running(x, running_mean, running_var, *options)
    bars, (by_mean, by_var) = norm.bwd(y_bar, weight, wanted[:3]), _slopes(norm, weight)
    y_bar, mean_bar, var_bar = norm.wide(y_bar), empty_output(x), empty_output(x)
    if wanted[3]:
        mean_bar = (by_mean * norm.sums(y_bar, norm.dtype)).to(running_mean.dtype)
    if wanted[4]:
        var_bar = (by_var * norm.sums(y_bar * norm.x_hat, norm.dtype)).to(running_var.dtype)
    return *bars, mean_bar, var_bar


@batch_norm_eval_jvp_p.def_reference
def _batch_norm_eval_jvp_reference(
    x: Tensor, weight: Tensor | None, running_mean: Tensor, running_var: Tensor, *args: Any
) -> Tensor:
    x_dot, weight_dot, bias_dot, mean_dot, var_dot, *options = args
    norm = _running(x, running_mean, running_var, *options)
    terms, (by_mean, by_var) = norm.jvp(weight, x_dot, weight_dot, bias_dot), _slopes(norm, weight)
    if mean_dot is not None:
        terms.append(norm.param(by_mean * mean_dot))
    if var_dot is not None:
        terms.append(norm.x_hat * norm.param(by_var * var_dot))
    return norm.result(*terms)


# Kernels: Triton's and those for the CPU.

bind_kernels(batch_norm_eval_p, "batch_norm.batch_norm", "batch_norm_eval_fwd", cpu.forward)
bind_kernels(batch_norm_eval_bwd_p, "batch_norm.batch_norm", "batch_norm_eval_bwd", cpu.bwd)
bind_kernels(batch_norm_eval_jvp_p, "batch_norm.batch_norm", "batch_norm_eval_jvp", cpu.jvp)


# Derivatives.

first_order(batch_norm_eval_p, batch_norm_eval_bwd_p, batch_norm_eval_jvp_p)


# Batching: the batch multiplies the channels.

batch_all(batch_norm_eval_p, batch_norm_eval_bwd_p, batch_norm_eval_jvp_p, counter="batch_ndim")
