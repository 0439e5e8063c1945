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

whose gradient `softmax_double_backward` returns. With respect to x_dot it is x_bar, to y_bar y_dot, and to y

    scale * (y_bar * (x_dot - sum(y * x_dot)) - x_dot * sum(y * y_bar))

which leads on to x. The jvp of the map, and so of both operators, is `softmax_bwd_jvp`:

    x_bar_dot = scale * (y * (y_bar_dot - sum(y * y_bar_dot + y_dot * y_bar)) + y_dot * (y_bar - sum(y * y_bar)))

Third and higher orders differentiate the references.

Shapes: all tensors have that of x; a mask is broadcast to it, by strides of zero. y has `output_dtype` (None: that of
x), and x is cast to it as it is read. Sums are taken in float32, in float64 for float64 y.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from primitives._core import Primitive
from primitives._core.errors import DtypeError
from primitives._core.typing import Prefix, PyTree
from primitives.ops import arguments
from primitives.ops.arguments import LOW_PRECISION
from primitives.ops.row_maps import RowMap, over_axis
from primitives.ops.rules import accumulation_dtype, masked, output_in_float32
from primitives.ops.softmax.log_softmax import aten_serves, is_torchs

softmax_p = Primitive(
    "softmax",
    "(Tensor x, Tensor? mask, int dim, float scale, ScalarType? output_dtype) -> Tensor y",
    residuals=("y", "x.dtype", "mask.dtype"),
    recomputable=True,
)
softmax_p.def_autocast("cuda")(output_in_float32)


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


def _map(v: Tensor, y: Tensor, dim: int, scale: float) -> Tensor:
    """P(v), times scale."""
    return scale * y * (v - (y * v).sum(dim, keepdim=True))


def _along_y(y_bar: Tensor, y: Tensor, x_dot: Tensor, dim: int, scale: float) -> Tensor:
    """The part of the gradient of L for y."""
    total, dot_total = ((y * v).sum(dim, keepdim=True) for v in (y_bar, x_dot))
    return scale * (y_bar * (x_dot - dot_total) - x_dot * total)


def _of_y_dot(y_bar: Tensor, y: Tensor, y_dot: Tensor, dim: int, scale: float) -> Tensor:
    """The part that the tangent of y adds to that of x_bar."""
    along = y_dot * (y_bar - (y * y_bar).sum(dim, keepdim=True))
    return scale * (along - y * (y_dot * y_bar).sum(dim, keepdim=True))


@softmax_p.def_kernel("cpu")
def _softmax_by_aten(
    x: Tensor, mask: Tensor | None, dim: int, scale: float, output_dtype: torch.dtype | None
) -> Tensor | None:
    if not aten_serves(x, dim):
        return None
    y_dtype = output_dtype or x.dtype
    x = x.contiguous().to(y_dtype)
    # Along any axis but the last ATen rounds exponentials to half precision.
    if mask is None and scale == 1.0 and (x.dtype not in LOW_PRECISION or dim == x.dim() - 1):
        return torch._softmax(x, dim, False)
    u = masked(x.to(accumulation_dtype(y_dtype)), mask, scale)
    y = torch._softmax(u, dim, False)
    # NaN in a row is NaN in all of it; where no position takes part y is 0.
    if mask is not None and y.select(dim, 0).isnan().any():
        y.masked_fill_(u.amax(dim, keepdim=True) == -torch.inf, 0.0)
    return y.to(y_dtype)


def _map_by_aten(v: Tensor, y: Tensor, dim: int, scale: float) -> Tensor:
    if not aten_serves(y, dim):
        return _map(v, y, dim, scale)
    u_bar = torch._softmax_backward_data(v, y, dim, y.dtype)
    return u_bar if scale == 1.0 else u_bar.mul_(scale)


# The batch is one more axis that the sum does not run over.
_derivatives = RowMap(
    softmax_p,
    "y",
    "int dim, float scale",
    _map,
    second_order=(_along_y, _of_y_dot),
    by_aten=_map_by_aten,
)
softmax_bwd_p, softmax_jvp_p = _derivatives.ops["bwd"], _derivatives.ops["jvp"]


@softmax_p.def_vjp
def _softmax_vjp(residuals: Any, cotangents: Any, output_mask: Any) -> dict[str, Tensor]:
    r, y_bar, found = residuals, cotangents.y, {}
    if output_mask.mask:
        found["mask"] = softmax_bwd_p(y_bar, r.y, r.dim, 1.0, r.mask_dtype)
    if output_mask.x:
        is_same = output_mask.mask and r.scale == 1.0 and r.x_dtype == r.mask_dtype
        found["x"] = found["mask"] if is_same else softmax_bwd_p(y_bar, r.y, r.dim, r.scale, r.x_dtype)
    return found


@softmax_p.def_jvp
def _softmax_jvp(residuals: Any, tangents: Any) -> Tensor:
    r, x_dot, mask_dot = residuals, tangents.x, tangents.mask
    if mask_dot is None:
        return softmax_jvp_p(x_dot, r.y, r.dim, r.scale)
    u_dot = mask_dot if x_dot is None else r.scale * x_dot + mask_dot
    return softmax_jvp_p(u_dot, r.y, r.dim, 1.0)


def softmax(
    input: PyTree,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    *,
    scale: float = 1.0,
    mask: Prefix | None = None,
    namespace: str = "",
) -> PyTree:
    r"""Softmax of `input` over one axis, with a scale and a mask as attention has them.

    $$ y = \frac{\exp(u)}{\sum \exp(u)}, \quad u = \text{scale} \cdot x + \text{mask} $$

    Args:
        input: Tensor of any shape, float16, bfloat16, float32 or float64, any strides; of any real dtype if `dtype`
            is given; or a pytree of such tensors, which is mapped leaf by leaf.
        dim: Axis that the sum runs over. `None` chooses one as torch does, with a warning.
        _stacklevel: How far up the call stack that warning points.
        dtype: Dtype that `input` is cast to first, and that the result has. `None` means that of `input`.
        scale: Factor of `input`, a number: one over the temperature.
        mask: Tensor that can be broadcast to the shape of `input`. If boolean, a position takes part where it is true,
            as in `scaled_dot_product_attention`. Else it is added and has derivatives, and a position with `-inf`
            takes no part: float16, bfloat16 or float32, or float64 beside float64. For a pytree `input`, a tensor or a
            tree prefix of it.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        `y`, with the shape and device of `input`, contiguous; for a pytree, in its structure.

    Raises:
        AxisError: If `dim` is not an axis of `input`.
        ShapeError: If `mask` cannot be broadcast to `input`.
        DtypeError: If a dtype is not one of the above, or `scale` is not a number.
        DeviceError: If the tensors are on different devices.
        TreeError: If `mask` is not a prefix of the tree `input`.

    Derivatives:
        Forward and reverse mode, to any order, in `input` and an added `mask`. Reverse mode keeps the output alone.

    Numerics:
        The maximum is subtracted before exponentiation. Accumulated in float32, in float64 for a float64 result; scale
        and mask are applied in that dtype. A masked position is 0, whatever `input` is there. With a mask, a row in
        which no position takes part is 0, and so are its derivatives, where adding the mask before gives NaN. Without
        one, a row that is all `-inf` gives NaN, as one with `+inf` or NaN in it always does.

    Example:
        >>> import torch, primitives as pr
        >>> pr.functional.softmax(torch.zeros(2, 2), dim=1, mask=torch.tensor([[True, True], [True, False]]))
        tensor([[0.5000, 0.5000],
                [1.0000, 0.0000]])
    """
    x: Any = input
    if mask is None and type(scale) is float and scale == 1.0 and is_torchs(x, dim, dtype):
        try:
            return cast("PyTree", torch.softmax(x, cast("int", dim)))
        except IndexError:
            pass  # A check of this package says what is wrong.
    if isinstance(scale, torch.Tensor):
        raise DtypeError("softmax: scale must be a number, got a Tensor. Multiply input by it.")
    arguments.number("softmax", "scale", scale)
    return _over_axis("softmax", scale, input, dim, _stacklevel, dtype, mask, namespace)


def softmin(
    input: PyTree,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    *,
    mask: Prefix | None = None,
    namespace: str = "",
) -> PyTree:
    """`softmax` of `-input`, with its arguments, errors and derivatives.

    Example:
        >>> import torch, primitives as pr
        >>> pr.functional.softmin(torch.zeros(2), dim=0)
        tensor([0.5000, 0.5000])
    """
    return _over_axis("softmin", -1.0, input, dim, _stacklevel, dtype, mask, namespace)


def _over_axis(
    name: str, scale: float, input: Any, dim: Any, stacklevel: int, dtype: Any, mask: Any, namespace: str
) -> Any:
    def of_rows(x: Tensor, mask: Any, axis: int) -> Tensor:
        return softmax_p(x, mask, axis, scale, dtype)

    more: Any = {"dtype": dtype, "mask": mask, "stacklevel": stacklevel + 1}
    return over_axis(name, of_rows, input, dim, namespace=namespace, like_torch=True, **more)
