r"""Batch normalization in training: each channel of x by its own statistics over everything but the channel.

`formulas.py` has the formulas. mean and var (biased) are those of the batch, and the running statistics move on,

    running_mean' = (1 - momentum) * running_mean + momentum * mean
    running_var'  = (1 - momentum) * running_var  + momentum * var * n / (n - 1),     n = values per channel

as outputs: nothing is written in place.

Shapes: x is [*batch, N, C, *spatial] with `batch_ndim` batch axes, which vmap adds; everything per channel is
[*batch, C]. mean and rstd are float32 (float64 for float64 x). y is channels_last where x is, else contiguous.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from primitives._core import Primitive
from primitives.ops.arguments import LOW_PRECISION
from primitives.ops.axes import Axes, def_axes, fold_batch
from primitives.ops.norms.aten import (
    LARGEST_OFFSET,
    LONGEST_CHANNEL,
    ChannelsByAten,
    in_dtype_of_sums,
    is_well_conditioned,
)
from primitives.ops.norms.channels import AXES, ChannelOptions, channels, contiguous_like, update_running
from primitives.ops.norms.formulas import Norm
from primitives.ops.norms.norm_map import norm_map
from primitives.ops.rules import accumulation_dtype, bind_family, bind_kernels, define, empty_output, schema_of

batch_norm_p = Primitive(
    "batch_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, float momentum,"
    f" {schema_of(ChannelOptions)}) -> (Tensor y, Tensor mean, Tensor rstd, Tensor new_running_mean,"
    " Tensor new_running_var)",
    residuals=("x", "weight", "mean", "rstd"),
    statistics=("mean", "rstd"),
    state=("new_running_mean", "new_running_var"),
    recomputable=True,
)


def _value(norm: Norm, c: Any) -> tuple[Tensor, ...]:
    mean, variance, rstd = (norm.statistic(v) for v in (norm.mean, norm.variance, norm.rstd))
    count = c.x.shape[c.batch_ndim] * c.x.shape[c.batch_ndim + 2 :].numel()
    new_mean = update_running(c.running_mean, mean, c.momentum, c.x)
    new_var = update_running(c.running_var, variance * (count / max(count - 1, 1)), c.momentum, c.x)
    return norm.value(c.weight, c.bias), mean, rstd, new_mean, new_var


define(batch_norm_p, _value, lambda c: channels(c.x, ChannelOptions(c.eps, c.batch_ndim)))


# ATen's statistics of rows have one running sum a channel, whose error reaches the output times the offset. For numbers
# that differ at random it grows with the square root of how many they are; at these limits it is 4e-5 standard
# deviations. Those of an image are in float64.
LARGEST_OFFSET_OF_SUM, LENGTH_OF_LARGEST_OFFSET = 16.0, 2**12


@batch_norm_p.def_kernel("cpu")
def _batch_norm_by_aten(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, *args: Any
) -> Any:
    """y, mean, rstd and the new running statistics."""
    momentum, (eps, batch_ndim) = args[0], ChannelOptions(*args[1:])
    count = 0 if batch_ndim else x.numel() // max(x.shape[1], 1)
    if count < 2 or (mean is None) != (var is None):
        return None
    x = contiguous_like(x, x, 0)
    limit, is_planar = LARGEST_OFFSET, x.shape[2:].numel() > 1 and x.is_contiguous()
    if not is_planar:
        limit = LARGEST_OFFSET_OF_SUM * min(1.0, (LENGTH_OF_LARGEST_OFFSET / count) ** 0.5)
        if count > LONGEST_CHANNEL[0]:
            return None
    weight, bias = in_dtype_of_sums(x, weight, bias)
    # Copies, which ATen writes. Without any in float32, it rounds the statistics of a low-precision x to its dtype.
    acc = accumulation_dtype(x.dtype)
    moved: list[Any] = [None if old is None else old.to(acc, copy=True) for old in (mean, var)]
    if mean is None and x.dtype in LOW_PRECISION:
        moved = [x.new_zeros(x.shape[1], dtype=acc) for _ in range(2)]
    y, batch_mean, rstd = torch.native_batch_norm(x, weight, bias, moved[0], moved[1], True, momentum, eps)
    if not is_well_conditioned(batch_mean, rstd, limit):
        return None
    running = [
        empty_output(x) if old is None else new.to(old.dtype) for new, old in zip(moved, (mean, var), strict=True)
    ]
    return y, batch_mean, rstd, *running


operators = norm_map(batch_norm_p, ChannelOptions, functools.partial(channels, of=ChannelsByAten))
batch_norm_bwd_p, batch_norm_jvp_p, batch_norm_fwd_jvp_p, batch_norm_double_backward_p, batch_norm_bwd_jvp_p = operators

bind_family("batch_norm.batch_norm", "batch_norm_train", batch_norm_p, *operators[:3])
bind_kernels(batch_norm_double_backward_p, "batch_norm.batch_norm", "batch_norm_double_backward")
bind_kernels(batch_norm_bwd_jvp_p, "batch_norm.batch_norm", "batch_norm_bwd_jvp")


def def_axes_in_training(*ops: Primitive) -> None:
    """`def_axes` of `ops` whose statistics are those of x: the channels are free."""
    def_axes(Axes(AXES, "batch channels", can_compose=True), *ops)
    for op in ops:
        if op.spec.state:
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


def_axes_in_training(batch_norm_p, *operators)
