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

import torch
from torch import Tensor

from primitives._core import Primitive
from primitives.ops.row_maps import RowMap
from primitives.ops.rules import accumulation_dtype, output_in_float32

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


# ATen adds up in running sums of float32, of which n numbers of one sign lose up to n * 2**-26. Along any axis but the
# last it has one for each position beside it, along the last one for each lane of a vector, eight in AVX2. So at these
# lengths sum(y_bar) of one sign loses up to 3e-5 and 1.2e-4 of itself, and x_bar that times p; y is as far off where x
# is of few values. Vocabularies of 50,000 stay below.
_LONGEST_SUM, _LONGEST_ROW = 2**11, 2**16


def aten_serves(y: Tensor, dim: int) -> bool:
    """Whether ATen's own softmaxes may add up `dim`."""
    return y.numel() > 0 and y.shape[dim] <= (_LONGEST_ROW if dim == y.dim() - 1 else _LONGEST_SUM)


@log_softmax_p.def_kernel("cpu")
def _log_softmax_by_aten(x: Tensor, dim: int, output_dtype: torch.dtype | None) -> Tensor | None:
    x = x.contiguous().to(output_dtype or x.dtype)
    return torch._log_softmax(x, dim, False) if aten_serves(x, dim) else None


def _bwd_by_aten(y_bar: Tensor, y: Tensor, dim: int) -> Tensor:
    if not aten_serves(y, dim):
        return _bwd(y_bar, y, dim)
    return torch._log_softmax_backward_data(y_bar, y, dim, y.dtype)


# The batch is one more axis that the sum does not run over.
RowMap(log_softmax_p, "y", "int dim", _bwd, _jvp, (_along_y, _along_y), by_aten=_bwd_by_aten)
