r"""Batch normalization in training: each channel of x by its own statistics over everything but the channel.

With x_hat = (x - mean) * rstd, per channel,

    y = x_hat * weight + bias

mean and var (biased) are those of the batch, rstd = 1 / sqrt(var + eps), and the running statistics move on,

    running_mean' = (1 - momentum) * running_mean + momentum * mean
    running_var'  = (1 - momentum) * running_var  + momentum * var * n / (n - 1),     n = values per channel

as outputs: nothing is written in place. With P(v) = rstd * (v - mean(v) - x_hat * mean(v * x_hat)) per channel,

    jvp   y_dot = P(x_dot) * weight + x_hat * weight_dot + bias_dot
    vjp   x_bar = P(y_bar) * weight,   weight_bar = sum(y_bar * x_hat),   bias_bar = sum(y_bar)

Shapes: x is [*batch, N, C, *spatial] with `batch_ndim` batch axes, which vmap adds; everything per channel is
[*batch, C]. mean and rstd are float32 (float64 for float64 x). y is channels_last where x is, else contiguous.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from primitives._core import Primitive, value_and_jvp
from primitives.ops.norms import cpu_batch_norm as cpu
from primitives.ops.norms.channels import (
    affine,
    arranged,
    axes_of,
    dense,
    moved_on,
    normalized,
    parameter_cotangents,
    per_channel,
    sum_of_terms,
)
from primitives.ops.rules import batch_all, bind_kernels, first_order, fold_batch, unwanted

if TYPE_CHECKING:
    from torch import Tensor

batch_norm_p = Primitive(
    "batch_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, int batch_ndim,"
    " float momentum, float eps) -> (Tensor y, Tensor mean, Tensor rstd, Tensor new_running_mean,"
    " Tensor new_running_var)",
    residuals=("x", "weight", "mean", "rstd"),
    statistics=("mean", "rstd"),
    state=("new_running_mean", "new_running_var"),
    recomputable=True,
)
batch_norm_bwd_p = Primitive(
    "batch_norm_bwd",
    "(Tensor y_bar, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, int batch_ndim, float eps, bool[] wanted)"
    " -> (Tensor x_bar, Tensor weight_bar, Tensor bias_bar)",
    residuals=("y_bar", "x", "weight", "mean", "rstd"),
    cached=("mean", "rstd"),
    decomposable=True,
)
batch_norm_jvp_p = Primitive(
    "batch_norm_jvp",
    "(Tensor x, Tensor? weight, Tensor mean, Tensor rstd, Tensor? x_dot, Tensor? weight_dot, Tensor? bias_dot,"
    " int batch_ndim, float eps) -> Tensor y_dot",
    residuals=("x", "weight", "mean", "rstd", "x_dot", "weight_dot", "bias_dot"),
    cached=("mean", "rstd"),
    decomposable=True,
)
batch_norm_fwd_jvp_p = value_and_jvp(batch_norm_p, batch_norm_jvp_p)


# Reference.


def statistics(x: Tensor, batch_ndim: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and rstd of each channel, [*batch, C]."""
    axes = axes_of(x, batch_ndim)
    mean = x.mean(axes)
    # Less the rounding error of the mean, channels of one value become 0. Its derivative in x is 0.
    mean = mean + (x - per_channel(mean, x, batch_ndim)).detach().mean(axes)
    variance = (x - per_channel(mean, x, batch_ndim)).square().mean(axes)
    return mean, variance, (variance + eps).rsqrt()


def project(v: Tensor, x_hat: Tensor, rstd: Tensor, batch_ndim: int) -> Tensor:
    """`P(v)`, the derivative of x_hat with respect to x along v; rstd is [*batch, C]."""
    axes = axes_of(v, batch_ndim)
    centered = v - v.mean(axes, keepdim=True) - x_hat * (v * x_hat).mean(axes, keepdim=True)
    return per_channel(rstd, v, batch_ndim) * centered


@batch_norm_p.def_reference
def _batch_norm_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batch_ndim: int,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    x_acc = dense(x, x, batch_ndim)
    mean, variance, rstd = statistics(x_acc, batch_ndim, eps)
    y = arranged(affine(normalized(x_acc, mean, rstd, batch_ndim), weight, bias, batch_ndim).to(x.dtype), x, batch_ndim)
    count = x.shape[batch_ndim] * x.shape[batch_ndim + 2 :].numel()
    new_mean = moved_on(running_mean, mean, momentum, x)
    new_var = moved_on(running_var, variance * (count / max(count - 1, 1)), momentum, x)
    return y, mean, rstd, new_mean, new_var


@batch_norm_bwd_p.def_reference
def _batch_norm_bwd_reference(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    batch_ndim: int,
    eps: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    y_bar, x_acc = dense(y_bar, x, batch_ndim), dense(x, x, batch_ndim)
    # mean and rstd are values of x: taken from x again, so that a derivative of this function reaches it.
    mean, _, rstd = statistics(x_acc, batch_ndim, eps)
    x_hat = normalized(x_acc, mean, rstd, batch_ndim)
    x_bar = unwanted(x)
    if wanted[0]:
        x_bar = affine(project(y_bar, x_hat, rstd, batch_ndim), weight, None, batch_ndim).to(x.dtype)
        x_bar = arranged(x_bar, x, batch_ndim)
    return x_bar, *parameter_cotangents(y_bar, x_hat, x, weight, batch_ndim, wanted)


@batch_norm_jvp_p.def_reference
def _batch_norm_jvp_reference(
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    batch_ndim: int,
    eps: float,
) -> Tensor:
    x_acc = dense(x, x, batch_ndim)
    mean, _, rstd = statistics(x_acc, batch_ndim, eps)
    x_hat = normalized(x_acc, mean, rstd, batch_ndim)
    terms = []
    if x_dot is not None:
        projected = project(dense(x_dot, x, batch_ndim), x_hat, rstd, batch_ndim)
        terms.append(affine(projected, weight, None, batch_ndim))
    if weight_dot is not None:
        terms.append(x_hat * per_channel(weight_dot, x, batch_ndim))
    if bias_dot is not None:
        terms.append(per_channel(bias_dot, x, batch_ndim))
    return sum_of_terms(terms, x, batch_ndim)


# Kernels: Triton's and those for the CPU.

bind_kernels(batch_norm_p, "batch_norm.batch_norm", "batch_norm_train_fwd", cpu.forward)
bind_kernels(batch_norm_bwd_p, "batch_norm.batch_norm", "batch_norm_train_bwd", cpu.bwd)
bind_kernels(batch_norm_jvp_p, "batch_norm.batch_norm", "batch_norm_train_jvp", cpu.jvp)
bind_kernels(batch_norm_fwd_jvp_p, "batch_norm.batch_norm", "batch_norm_train_fwd_jvp")


# Derivatives.

first_order(batch_norm_p, batch_norm_bwd_p, batch_norm_jvp_p)


# Batching: the batch multiplies the channels.

batch_all(batch_norm_bwd_p, batch_norm_jvp_p, counter="batch_ndim")


def batch_state(*ops: Primitive) -> None:
    """Give `ops`, whose outputs are those of the forward and more, a vmap rule."""
    for op in ops:
        op.def_vmap(functools.partial(_batch_norm_vmap, op=op))


def _batch_norm_vmap(batch: Any, primals: Any, op: Primitive) -> tuple[Any, Any]:
    out = list(op(*fold_batch(batch, primals, op.spec.tensors)._replace(batch_ndim=primals.batch_ndim + 1)))
    axes: list[int | None] = [0] * len(out)
    for i, name in ((3, "running_mean"), (4, "running_var")):
        # Without a batch axis of its own, or of x, the next one is the same for every sample.
        if getattr(primals, name) is None:
            axes[i] = None
        elif not batch.is_batched("x", name):
            out[i], axes[i] = out[i][0].clone(), None
    return tuple(out), tuple(axes)


batch_state(batch_norm_p, batch_norm_fwd_jvp_p)
