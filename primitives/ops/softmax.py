r"""Softmax over one axis, with a scale and a mask, and its derivatives of first and second order.

    u = scale * x + mask,      y = exp(u) / sum(exp(u))

All sums run over the axis. A boolean mask is 0 where it is true and -inf elsewhere; a position with -inf in the mask
takes no part, whatever x is there. A row in which no position takes part is 0, and so are its derivatives; without a
mask a row of -inf is NaN, as in torch.

The derivative of y with respect to u is symmetric, P(v) = y * (v - sum(y * v)), so one map serves both modes, and the
output y is all that is kept:

    jvp   y_dot = P(scale * x_dot + mask_dot)
    vjp   u_bar = P(y_bar),   x_bar = scale * u_bar,   mask_bar = u_bar

Both operators are partial derivatives of one scalar, the pairing

    L = <y_bar, y_dot> = scale * (sum(y * y_bar * x_dot) - sum(y * y_bar) * sum(y * x_dot))

whose gradient `softmax_pairing_p` returns. With respect to x_dot it is x_bar, to y_bar y_dot, and to y

    scale * (y_bar * (x_dot - sum(y * x_dot)) - x_dot * sum(y * y_bar))

which leads on to x. The jvp of the map, and so of both operators, is `softmax_bwd_jvp_p`:

    x_bar_dot = scale * (y * (y_bar_dot - sum(y * y_bar_dot + y_dot * y_bar)) + y_dot * (y_bar - sum(y * y_bar)))

Third and higher orders differentiate the references.

Shapes: all tensors have that of x; a mask is broadcast to it, by strides of zero. y has `output_dtype` (None: that of
x), and x is cast to it as it is read. Sums are taken in float32, in float64 for float64 y.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from primitives.core import Primitive, value_and_jvp
from primitives.ops import _cpu_softmax as cpu
from primitives.ops._shared import (
    accumulation_dtype,
    batch_all,
    bind_kernels,
    masked,
    output_in_float32,
    output_second_order,
    unwanted,
)

if TYPE_CHECKING:
    from torch import Tensor

softmax_p = Primitive(
    "softmax",
    "(Tensor x, Tensor? mask, int dim, float scale, ScalarType? output_dtype) -> Tensor y",
    residuals=("y", "x.dtype", "mask.dtype"),
    recomputable=True,
)
softmax_bwd_p = Primitive(
    "softmax_bwd",
    "(Tensor y_bar, Tensor y, int dim, float scale, ScalarType x_dtype) -> Tensor x_bar",
    residuals=("y_bar", "y"),
    decomposable=True,
)
softmax_jvp_p = Primitive(
    "softmax_jvp",
    "(Tensor x_dot, Tensor y, int dim, float scale) -> Tensor y_dot",
    residuals=("x_dot", "y"),
    decomposable=True,
)
softmax_fwd_jvp_p = value_and_jvp(softmax_p, softmax_jvp_p)
softmax_pairing_p = Primitive(
    "softmax_pairing",
    "(Tensor y_bar, Tensor y, Tensor x_dot, int dim, float scale, bool[] wanted)"
    " -> (Tensor y_bar_bar, Tensor output_bar, Tensor x_dot_bar)",
    decomposable=True,
)
softmax_bwd_jvp_p = Primitive(
    "softmax_bwd_jvp",
    "(Tensor y_bar, Tensor y, Tensor? y_bar_dot, Tensor? y_dot, int dim, float scale, ScalarType x_dtype)"
    " -> Tensor x_bar_dot",
    decomposable=True,
)


# Reference.


@softmax_p.def_reference
def _softmax_reference(
    x: Tensor, mask: Tensor | None, dim: int, scale: float, output_dtype: torch.dtype | None
) -> Tensor:
    y_dtype = output_dtype or x.dtype
    u = masked(x.contiguous().to(y_dtype).to(accumulation_dtype(y_dtype)), mask, scale)
    if u.shape[dim] == 0:
        return torch.empty_like(u, dtype=y_dtype)
    top = u.detach().amax(dim, keepdim=True)
    if mask is None:
        weights = (u - top).exp()
        return (weights / weights.sum(dim, keepdim=True)).to(y_dtype)
    weights = (u - top.masked_fill(top == -torch.inf, 0.0)).exp()
    total = weights.sum(dim, keepdim=True)
    return (weights / total.masked_fill(total == 0.0, 1.0)).to(y_dtype)


@softmax_bwd_p.def_reference
def _softmax_bwd_reference(y_bar: Tensor, y: Tensor, dim: int, scale: float, x_dtype: torch.dtype) -> Tensor:
    acc = accumulation_dtype(y.dtype)
    y_bar, y = y_bar.contiguous().to(acc), y.contiguous().to(acc)
    return (scale * y * (y_bar - (y * y_bar).sum(dim, keepdim=True))).to(x_dtype)


@softmax_jvp_p.def_reference
def _softmax_jvp_reference(x_dot: Tensor, y: Tensor, dim: int, scale: float) -> Tensor:
    return _softmax_bwd_reference(x_dot, y, dim, scale, y.dtype)


@softmax_pairing_p.def_reference
def _softmax_pairing_reference(
    y_bar: Tensor, y: Tensor, x_dot: Tensor, dim: int, scale: float, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    acc = accumulation_dtype(y.dtype)
    y_bar_acc, y_acc, x_dot_acc = (t.contiguous().to(acc) for t in (y_bar, y, x_dot))
    output_bar = unwanted(y)
    if wanted[1]:
        total, dot_total = ((y_acc * v).sum(dim, keepdim=True) for v in (y_bar_acc, x_dot_acc))
        output_bar = (scale * (y_bar_acc * (x_dot_acc - dot_total) - x_dot_acc * total)).to(y.dtype)
    y_bar_bar = _softmax_bwd_reference(x_dot, y, dim, scale, y_bar.dtype) if wanted[0] else unwanted(y)
    x_dot_bar = _softmax_bwd_reference(y_bar, y, dim, scale, x_dot.dtype) if wanted[2] else unwanted(y)
    return y_bar_bar, output_bar, x_dot_bar


@softmax_bwd_jvp_p.def_reference
def _softmax_bwd_jvp_reference(
    y_bar: Tensor,
    y: Tensor,
    y_bar_dot: Tensor | None,
    y_dot: Tensor | None,
    dim: int,
    scale: float,
    x_dtype: torch.dtype,
) -> Tensor:
    acc = accumulation_dtype(y.dtype)
    y_bar, y = y_bar.contiguous().to(acc), y.contiguous().to(acc)
    terms = []
    if y_bar_dot is not None:
        y_bar_dot = y_bar_dot.contiguous().to(acc)
        terms.append(y * (y_bar_dot - (y * y_bar_dot).sum(dim, keepdim=True)))
    if y_dot is not None:
        y_dot = y_dot.contiguous().to(acc)
        terms.append(y_dot * (y_bar - (y * y_bar).sum(dim, keepdim=True)))
        terms.append(-y * (y_dot * y_bar).sum(dim, keepdim=True))
    return (scale * sum(terms[1:], terms[0])).to(x_dtype, copy=True)


# Kernels: Triton's and those for the CPU.

bind_kernels(softmax_p, "softmax", "softmax_fwd", cpu.forward)
bind_kernels(softmax_bwd_p, "softmax", "softmax_bwd", cpu.bwd)
bind_kernels(softmax_jvp_p, "softmax", "softmax_jvp", cpu.jvp)
bind_kernels(softmax_fwd_jvp_p, "softmax", "softmax_fwd_jvp")
bind_kernels(softmax_pairing_p, "softmax", "softmax_pairing", cpu.pairing)
bind_kernels(softmax_bwd_jvp_p, "softmax", "softmax_bwd_jvp", cpu.bwd_jvp)


# Derivatives.


@softmax_p.def_vjp
def _softmax_vjp(residuals: Any, cotangents: Any, wanted: Any) -> dict[str, Tensor]:
    r, y_bar, found = residuals, cotangents.y, {}
    if wanted.mask:
        found["mask"] = softmax_bwd_p(y_bar, r.y, r.dim, 1.0, r.mask_dtype)
    if wanted.x:
        is_same = wanted.mask and r.scale == 1.0 and r.x_dtype == r.mask_dtype
        found["x"] = found["mask"] if is_same else softmax_bwd_p(y_bar, r.y, r.dim, r.scale, r.x_dtype)
    return found


@softmax_p.def_jvp
def _softmax_jvp(residuals: Any, tangents: Any) -> Tensor:
    r, x_dot, mask_dot = residuals, tangents.x, tangents.mask
    if mask_dot is None:
        return softmax_jvp_p(x_dot, r.y, r.dim, r.scale)
    u_dot = mask_dot if x_dot is None else r.scale * x_dot + mask_dot
    return softmax_jvp_p(u_dot, r.y, r.dim, 1.0)


@softmax_jvp_p.def_jvp
def _softmax_jvp_jvp(residuals: Any, tangents: Any) -> Tensor:
    r, t = residuals, tangents
    return softmax_bwd_jvp_p(r.x_dot, r.y, t.x_dot, t.y, r.dim, r.scale, r.y.dtype)


output_second_order(softmax_bwd_p, softmax_jvp_p, softmax_pairing_p, softmax_bwd_jvp_p)

# Batching: the batch is one more axis that the sum does not run over.

batch_all(softmax_p, softmax_bwd_p, softmax_jvp_p, softmax_fwd_jvp_p, counter="dim")
batch_all(softmax_pairing_p, softmax_bwd_jvp_p, counter="dim")

softmax_p.def_autocast("cuda")(output_in_float32)
