"""Softmax and its logarithm over one axis."""

from __future__ import annotations

import functools
import warnings
from typing import Any, cast

import torch
from torch import Tensor

from primitives._core.errors import DtypeError
from primitives._core.trees.leaves import map_tensors
from primitives._core.typing import Prefix, PyTree
from primitives._repair.plain import is_plain_on_cpu
from primitives.ops import arguments
from primitives.ops.softmax.log_softmax import log_softmax_p
from primitives.ops.softmax.softmax import softmax_p


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
    if _is_torchs(x, dim, dtype):
        try:
            return cast("PyTree", torch.log_softmax(x, cast("int", dim)))
        except IndexError:
            pass  # A check of this package says what is wrong.
    return _over_axis("log_softmax", input, dim, dtype, None, None, _stacklevel, namespace)


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
    if mask is None and type(scale) is float and scale == 1.0 and _is_torchs(x, dim, dtype):
        try:
            return cast("PyTree", torch.softmax(x, cast("int", dim)))
        except IndexError:
            pass  # A check of this package says what is wrong.
    if isinstance(scale, torch.Tensor):
        raise DtypeError("softmax: scale must be a number, got a Tensor. Multiply input by it.")
    arguments.number("softmax", "scale", scale)
    return _over_axis("softmax", input, dim, dtype, mask, scale, _stacklevel, namespace)


def _is_torchs(x: Any, dim: int | None, dtype: torch.dtype | None) -> bool:
    return type(dim) is int and dtype is None and is_plain_on_cpu(x)


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
    return _over_axis("softmin", input, dim, dtype, mask, -1.0, _stacklevel, namespace)


def _over_axis(
    name: str, input: Any, dim: int | None, dtype: torch.dtype | None, mask: Any, scale: float | None, stacklevel: int,
    namespace: str,
) -> Any:  # fmt: skip
    """The softmax of every tensor of `input`, with a mask of its shape; without a scale its logarithm."""
    check = functools.partial(arguments.softmax, name, dim=dim, dtype=dtype)

    def compute(x: Tensor, mask: Tensor | None) -> Tensor:
        # The axis that torch chooses when none is given.
        axis = int(x.dim() not in (0, 1, 3)) if dim is None else dim
        if not x.is_floating_point():
            x = x.to(dtype)
        # A number has one axis to torch's softmax; the primitive wants it spelled out.
        rows = x if x.dim() > 0 else x.reshape(1)
        if scale is None:
            y = log_softmax_p(rows, axis % rows.dim(), dtype)
        else:
            y = softmax_p(rows, None if mask is None else mask.expand(rows.shape), axis % rows.dim(), scale, dtype)
        return y if x.dim() > 0 else y.reshape(())

    if dim is None:
        message = f"{name}: choosing dim implicitly is deprecated; pass dim=."
        warnings.warn(message, UserWarning, stacklevel=stacklevel)
    return map_tensors(name, check, compute, input, {"mask": mask}, namespace=namespace)
