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

from typing import Any, cast

import torch
from torch import Tensor

from primitives._core import Primitive
from primitives._core.typing import PyTree
from primitives._repair.plain import is_plain_on_cpu
from primitives.ops.row_maps import RowMap, over_axis
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


def log_softmax(
    input: PyTree,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    *,
    namespace: str = "",
) -> PyTree:
    r"""Logarithm of the softmax of `input` over one axis.

    $$ y = x - \log \sum \exp(x) $$

    Args:
        input: Tensor of any shape, float16, bfloat16, float32 or float64, any strides; of any real dtype if `dtype`
            is given; or a pytree of such tensors, which is mapped leaf by leaf.
        dim: Axis that the sum runs over. `None` chooses one as torch does, with a warning.
        _stacklevel: How far up the call stack that warning points.
        dtype: Dtype that `input` is cast to first, and that the result has. `None` means that of `input`.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        `y`, with the shape and device of `input`, contiguous; for a pytree, in its structure.

    Raises:
        AxisError: If `dim` is not an axis of `input`.
        DtypeError: If a dtype is not one of the above.

    Derivatives:
        Forward and reverse mode, to any order, in `input`. Reverse mode keeps the output and not the input.

    Numerics:
        The maximum is subtracted before exponentiation. Accumulated in float32, in float64 for a float64 result. A
        row that is all `-inf`, or has `+inf` or NaN in it, gives NaN.

    Example:
        >>> import torch, primitives as pr
        >>> pr.functional.log_softmax(torch.zeros(2), dim=0)
        tensor([-0.6931, -0.6931])
    """
    x: Any = input
    if is_torchs(x, dim, dtype):
        try:
            return cast("PyTree", torch.log_softmax(x, cast("int", dim)))
        except IndexError:
            pass  # A check of this package says what is wrong.

    def of_rows(x: Tensor, _: None, axis: int) -> Tensor:
        return log_softmax_p(x, axis, dtype)

    more: Any = {"namespace": namespace, "like_torch": True, "dtype": dtype, "stacklevel": _stacklevel}
    return over_axis("log_softmax", of_rows, input, dim, **more)


def is_torchs(x: Any, dim: int | None, dtype: torch.dtype | None) -> bool:
    """Whether torch's own kernel computes this."""
    return type(dim) is int and dtype is None and is_plain_on_cpu(x)
