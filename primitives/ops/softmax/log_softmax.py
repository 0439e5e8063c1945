r"""Logarithm of the softmax over one axis, and its derivatives of first and second order.

    y = x - log(sum(exp(x))),      p = exp(y)

    jvp   y_dot = x_dot - sum(p * x_dot)
    vjp   x_bar = y_bar - p * sum(y_bar)

All sums run over the axis. Both derivatives need the output y alone, so x is not kept. Their pairing, whose gradient is
the vjp of either one, is

    L = <y_bar, y_dot> = <y_bar, x_dot> - sum(y_bar) * sum(p * x_dot),      dL/dy = -p * x_dot * sum(y_bar)

and forward over reverse is

    x_bar_dot = y_bar_dot - p * (y_dot * sum(y_bar) + sum(y_bar_dot))

Shapes: x, y and their tangents and cotangents are alike; y has `output_dtype` (None: that of x), and x is cast to it
as it is read. Sums are taken in float32, in float64 for float64 y.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from primitives._core import Primitive
from primitives.ops.row_maps import RowMap
from primitives.ops.rules import accumulation_dtype, output_in_float32
from primitives.ops.softmax import cpu_log_softmax as cpu

if TYPE_CHECKING:
    from torch import Tensor

log_softmax_p = Primitive(
    "log_softmax",
    "(Tensor x, int dim, ScalarType? output_dtype) -> Tensor y",
    residuals=("y", "x.dtype"),
    recomputable=True,
)
log_softmax_p.def_autocast("cuda")(output_in_float32)


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


def _bwd(y_bar: Tensor, y: Tensor, dim: int) -> Tensor:
    return y_bar - y.exp() * y_bar.sum(dim, keepdim=True)


def _jvp(x_dot: Tensor, y: Tensor, dim: int) -> Tensor:
    return x_dot - (y.exp() * x_dot).sum(dim, keepdim=True)


def _along_y(y_bar: Tensor, y: Tensor, dot: Tensor, dim: int) -> Tensor:
    """Of the gradient of L the part for y, and what the tangent of y adds to that of x_bar."""
    return -y.exp() * dot * y_bar.sum(dim, keepdim=True)


# The batch is one more axis that the sum does not run over.
RowMap(log_softmax_p, "y", "int dim", _bwd, _jvp, (_along_y, _along_y), cpu=cpu, counter="dim")
