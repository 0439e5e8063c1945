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
from typing import TYPE_CHECKING, Any

from primitives._core import Primitive
from primitives.ops.norms import cpu_batch_norm as cpu
from primitives.ops.norms.channels import channels, update_running
from primitives.ops.norms.norm_map import norm_map
from primitives.ops.rules import batch_all, bind_kernels, fold_batch

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


@batch_norm_p.def_reference
def _batch_norm_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *args: Any,
) -> tuple[Tensor, ...]:
    batch_ndim, momentum, eps = args
    norm = channels(x, batch_ndim, eps)
    mean, variance, rstd = (norm.statistic(v) for v in (norm.mean, norm.variance, norm.rstd))
    count = x.shape[batch_ndim] * x.shape[batch_ndim + 2 :].numel()
    new_mean = update_running(running_mean, mean, momentum, x)
    new_var = update_running(running_var, variance * (count / max(count - 1, 1)), momentum, x)
    return norm.value(weight, bias), mean, rstd, new_mean, new_var


derivatives = norm_map(batch_norm_p, "int batch_ndim, float eps", channels)
batch_norm_bwd_p, batch_norm_jvp_p, batch_norm_fwd_jvp_p, batch_norm_pairing_p, batch_norm_bwd_jvp_p = derivatives

bind_kernels(batch_norm_p, "batch_norm.batch_norm", "batch_norm_train_fwd", cpu.forward)
bind_kernels(batch_norm_bwd_p, "batch_norm.batch_norm", "batch_norm_train_bwd", cpu.bwd)
bind_kernels(batch_norm_jvp_p, "batch_norm.batch_norm", "batch_norm_train_jvp", cpu.jvp)
bind_kernels(batch_norm_fwd_jvp_p, "batch_norm.batch_norm", "batch_norm_train_fwd_jvp")
bind_kernels(batch_norm_pairing_p, "batch_norm.batch_norm", "batch_norm_pairing", cpu.pairing)
bind_kernels(batch_norm_bwd_jvp_p, "batch_norm.batch_norm", "batch_norm_bwd_jvp", cpu.bwd_jvp)

# The batch multiplies the channels.
batch_all(batch_norm_bwd_p, batch_norm_jvp_p, batch_norm_pairing_p, batch_norm_bwd_jvp_p, counter="batch_ndim")


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
