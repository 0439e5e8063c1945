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

from typing import TYPE_CHECKING

from primitives._core import Primitive
from primitives.ops.norms import cpu_batch_norm_eval as cpu
from primitives.ops.norms.channels import (
    affine,
    arranged,
    axes_of,
    dense,
    normalized,
    parameter_cotangents,
    per_channel,
    sum_of_terms,
)
from primitives.ops.rules import accumulation_dtype, batch_all, bind_kernels, first_order, unwanted

if TYPE_CHECKING:
    from torch import Tensor

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


def _running(
    x: Tensor, running_mean: Tensor, running_var: Tensor, batch_ndim: int, eps: float
) -> tuple[Tensor, Tensor]:
    """x_hat and rstd under the running statistics."""
    acc = accumulation_dtype(x.dtype)
    rstd = (running_var.to(acc) + eps).rsqrt()
    return normalized(dense(x, x, batch_ndim), running_mean.to(acc), rstd, batch_ndim), rstd


@batch_norm_eval_p.def_reference
def _batch_norm_eval_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    batch_ndim: int,
    eps: float,
) -> Tensor:
    x_hat, _ = _running(x, running_mean, running_var, batch_ndim, eps)
    return arranged(affine(x_hat, weight, bias, batch_ndim).to(x.dtype), x, batch_ndim)


@batch_norm_eval_bwd_p.def_reference
def _batch_norm_eval_bwd_reference(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    batch_ndim: int,
    eps: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x_hat, rstd = _running(x, running_mean, running_var, batch_ndim, eps)
    y_bar = dense(y_bar, x, batch_ndim)
    scale = rstd if weight is None else rstd * weight
    x_bar = (y_bar * per_channel(scale, x, batch_ndim)).to(x.dtype) if wanted[0] else unwanted(x)
    weight_bar, bias_bar = parameter_cotangents(y_bar, x_hat, x, weight, batch_ndim, wanted)
    mean_bar, var_bar = unwanted(x), unwanted(x)
    axes = axes_of(x, batch_ndim)
    if wanted[3]:
        mean_bar = (-scale * y_bar.sum(axes)).to(running_mean.dtype)
    if wanted[4]:
        var_bar = (-0.5 * rstd * scale * (y_bar * x_hat).sum(axes)).to(running_var.dtype)
    return x_bar, weight_bar, bias_bar, mean_bar, var_bar


@batch_norm_eval_jvp_p.def_reference
def _batch_norm_eval_jvp_reference(
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    running_mean_dot: Tensor | None,
    running_var_dot: Tensor | None,
    batch_ndim: int,
    eps: float,
) -> Tensor:
    x_hat, rstd = _running(x, running_mean, running_var, batch_ndim, eps)
    scale = rstd if weight is None else rstd * weight
    terms = []
    if x_dot is not None:
        terms.append(dense(x_dot, x, batch_ndim) * per_channel(scale, x, batch_ndim))
    if weight_dot is not None:
        terms.append(x_hat * per_channel(weight_dot, x, batch_ndim))
    if bias_dot is not None:
        terms.append(per_channel(bias_dot, x, batch_ndim))
    if running_mean_dot is not None:
        terms.append(per_channel(-scale * running_mean_dot, x, batch_ndim))
    if running_var_dot is not None:
        terms.append(x_hat * per_channel(-0.5 * rstd * scale * running_var_dot, x, batch_ndim))
    return sum_of_terms(terms, x, batch_ndim)


# Kernels: Triton's and those for the CPU.

bind_kernels(batch_norm_eval_p, "batch_norm.batch_norm", "batch_norm_eval_fwd", cpu.forward)
bind_kernels(batch_norm_eval_bwd_p, "batch_norm.batch_norm", "batch_norm_eval_bwd", cpu.bwd)
bind_kernels(batch_norm_eval_jvp_p, "batch_norm.batch_norm", "batch_norm_eval_jvp", cpu.jvp)


# Derivatives.

first_order(batch_norm_eval_p, batch_norm_eval_bwd_p, batch_norm_eval_jvp_p)


# Batching: the batch multiplies the channels.

batch_all(batch_norm_eval_p, batch_norm_eval_bwd_p, batch_norm_eval_jvp_p, counter="batch_ndim")
