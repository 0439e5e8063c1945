r"""Logarithm of the softmax over one axis.

    y = x - log(sum(exp(x))),      p = exp(y)

    jvp   y_dot = x_dot - sum(p * x_dot)
    vjp   x_bar = y_bar - p * sum(y_bar)

All sums run over the axis. Both derivatives need the output y alone, so x is not kept.

Shapes: x, y and their tangents and cotangents are alike; y has `output_dtype` (None: that of x), and x is cast to it
as it is read. Sums are taken in float32, in float64 for float64 y.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from primitives.core import Primitive, value_and_jvp
from primitives.ops import _cpu_log_softmax as cpu
from primitives.ops._shared import accumulation_dtype, batch_all, bind_kernels, output_in_float32

if TYPE_CHECKING:
    from torch import Tensor

log_softmax_p = Primitive(
    "log_softmax",
    "(Tensor x, int dim, ScalarType? output_dtype) -> Tensor y",
    residuals=("y", "x.dtype"),
    recomputable=True,
)
log_softmax_bwd_p = Primitive(
    "log_softmax_bwd",
    "(Tensor y_bar, Tensor y, int dim, ScalarType x_dtype) -> Tensor x_bar",
    residuals=("y_bar", "y"),
    decomposable=True,
)
log_softmax_jvp_p = Primitive(
    "log_softmax_jvp",
    "(Tensor x_dot, Tensor y, int dim) -> Tensor y_dot",
    residuals=("x_dot", "y"),
    decomposable=True,
)
log_softmax_fwd_jvp_p = value_and_jvp(log_softmax_p, log_softmax_jvp_p)


# Reference.


@log_softmax_p.def_reference
def _log_softmax_reference(x: Tensor, dim: int, output_dtype: torch.dtype | None) -> Tensor:
    y_dtype = output_dtype or x.dtype
    # torch defines dtype= as a cast before the operation, so a narrower dtype rounds x too.
    x = x.contiguous().to(y_dtype).to(accumulation_dtype(y_dtype))
    if x.shape[dim] == 0:
        return torch.empty_like(x, dtype=y_dtype)
    # ATen's own has one running sum along any axis but the last. No derivative goes through the maximum: y is the same
    # whatever is subtracted first.
    shifted = x - x.detach().amax(dim, keepdim=True)
    return (shifted - shifted.exp().sum(dim, keepdim=True).log()).to(y_dtype)


@log_softmax_bwd_p.def_reference
def _log_softmax_bwd_reference(y_bar: Tensor, y: Tensor, dim: int, x_dtype: torch.dtype) -> Tensor:
    acc = accumulation_dtype(y.dtype)
    y_bar, y = y_bar.contiguous().to(acc), y.contiguous().to(acc)
    return (y_bar - y.exp() * y_bar.sum(dim, keepdim=True)).to(x_dtype)


@log_softmax_jvp_p.def_reference
def _log_softmax_jvp_reference(x_dot: Tensor, y: Tensor, dim: int) -> Tensor:
    acc = accumulation_dtype(y.dtype)
    x_dot, y_acc = x_dot.contiguous().to(acc), y.contiguous().to(acc)
    return (x_dot - (y_acc.exp() * x_dot).sum(dim, keepdim=True)).to(y.dtype)


# Kernels: Triton's and those for the CPU.

bind_kernels(log_softmax_p, "log_softmax", "log_softmax_fwd", cpu.forward)
bind_kernels(log_softmax_bwd_p, "log_softmax", "log_softmax_bwd", cpu.bwd)
bind_kernels(log_softmax_jvp_p, "log_softmax", "log_softmax_jvp", cpu.jvp)
bind_kernels(log_softmax_fwd_jvp_p, "log_softmax", "log_softmax_fwd_jvp")


# Derivatives.


@log_softmax_p.def_vjp
def _log_softmax_vjp(residuals: Any, cotangents: Any, wanted: Any) -> dict[str, Tensor]:
    return {"x": log_softmax_bwd_p(cotangents.y, residuals.y, residuals.dim, residuals.x_dtype)}


@log_softmax_p.def_jvp
def _log_softmax_jvp(residuals: Any, tangents: Any) -> Tensor:
    return log_softmax_jvp_p(tangents.x, residuals.y, residuals.dim)


# Batching: the batch is one more axis that the sum does not run over.

batch_all(log_softmax_p, log_softmax_bwd_p, log_softmax_jvp_p, log_softmax_fwd_jvp_p, counter="dim")


log_softmax_p.def_autocast("cuda")(output_in_float32)
