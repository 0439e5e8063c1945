"""Checks of attention: typed errors that name the argument, what is required and what came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from primitives.checks.arguments import floating, probability
from primitives.core.errors import DeviceError, DtypeError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["attention", "options"]

MIN_DIM = 2


def options(op_name: str, *, mask: Any, causal: Any, scale: Any, dropout_p: Any, seed: Any, offset: Any) -> None:
    """Raise unless the options of an attention go together."""
    probability(op_name, dropout_p, "dropout_p")
    if causal and mask is not None:
        raise ShapeError(
            f"{op_name}: a mask and causal attention were both asked for. Pass one mask: mask & "
            "torch.ones(rows, keys, dtype=torch.bool).tril()."
        )
    if scale is not None and (isinstance(scale, torch.Tensor) or not isinstance(scale, (int, float, torch.SymFloat))):
        raise DtypeError(
            f"{op_name}: scale must be a number, got {type(scale).__name__}. Multiply the query by a tensor."
        )
    if offset is not None and seed is None:
        raise ShapeError(f"{op_name}: offset counts blocks of the stream of seed, which is None. Pass a seed.")


def attention(
    op_name: str,
    label: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    names: Sequence[str],
    *,
    shares_heads: bool,
) -> None:
    """Raise unless the tensors of an attention fit one another.

    Args:
        op_name: The function.
        label: Name of q.
        q: Queries.
        k: Keys.
        v: Values.
        bias: Added to the scores.
        mask: Which scores count.
        names: Names of k, v, bias and mask.
        shares_heads: Whether several heads of q may share one of k and v.
    """
    key, value, bias_name, mask_name = names
    floating(op_name, label, q.dtype)
    tensors = {label: q, key: k, value: v, bias_name: bias, mask_name: mask}
    for name, x in tensors.items():
        if x is not None and x.device != q.device:
            raise DeviceError(f"{op_name}: {name} must be on the device of {label}, {q.device}, got {x.device}.")
    for name, x in list(tensors.items())[:3]:
        if x is not None and x.dim() < MIN_DIM:
            raise ShapeError(f"{op_name}: {name} must have at least 2 axes, [rows, width], got {list(x.shape)}.")
    casts = torch.is_autocast_enabled(q.device.type)
    for name, x in ((key, k), (value, v)):
        if x.dtype != q.dtype and not casts:
            raise DtypeError(f"{op_name}: {name} must have the dtype of {label}, {q.dtype}, got {x.dtype}.")
    if bias is not None and bias.dtype not in (q.dtype, torch.float32) and not casts:
        raise DtypeError(
            f"{op_name}: {bias_name} must have the dtype of {label}, {q.dtype}, or float32, got {bias.dtype}."
        )
    if mask is not None and mask.dtype != torch.bool:
        raise DtypeError(f"{op_name}: {mask_name} must have dtype bool, true where a row sees a key, got {mask.dtype}.")
    if k.shape[-1] != q.shape[-1]:
        raise ShapeError(f"{op_name}: {key} must be as wide as {label}, {q.shape[-1]}, got {list(k.shape)}.")
    if v.shape[-2] != k.shape[-2]:
        raise ShapeError(f"{op_name}: {value} must have the {k.shape[-2]} rows of {key}, got {list(v.shape)}.")
    _axes_before_rows(op_name, {label: q, key: k, value: v}, shares_heads)


def _axes_before_rows(op_name: str, tensors: dict[str, Tensor], shares_heads: bool) -> None:
    shapes = {name: list(x.shape) for name, x in tensors.items()}
    heads = [1 if x.dim() == MIN_DIM else x.shape[-3] for x in tensors.values()]
    lead = [x.shape[:-3] for x in tensors.values()]
    if shares_heads and 0 not in heads[1:]:
        if any(heads[0] % count for count in heads[1:]):
            raise ShapeError(
                f"{op_name}: the heads (axis -3) of key and value must divide those of query, got shapes {shapes}."
            )
    elif not _broadcasts([(count,) for count in heads]):
        raise ShapeError(
            f"{op_name}: query, key and value must have the same number of heads (axis -3), got shapes {shapes}. "
            "Pass enable_gqa=True for heads of key and value that several heads of query share."
        )
    if not _broadcasts(lead):
        raise ShapeError(f"{op_name}: the axes before the heads must go together, got shapes {shapes}.")


def _broadcasts(shapes: Sequence[Sequence[int]]) -> bool:
    try:
        torch.broadcast_shapes(*[tuple(shape) for shape in shapes])
    except RuntimeError:
        return False
    return True


def pairs(op_name: str, name: str, x: Tensor | None, shape: Sequence[int]) -> None:
    """Raise unless `x` can be broadcast to `shape`, [*batch, heads, rows, keys]."""
    if x is None:
        return
    last = list(shape[len(shape) - x.dim() :])
    if x.dim() > len(shape) or any(n not in (1, full) for n, full in zip(x.shape, last, strict=True)):
        raise ShapeError(
            f"{op_name}: {name} must be one that broadcasts to [*batch, heads, rows, keys], {list(shape)}, got "
            f"{list(x.shape)}."
        )
