"""Which outputs take a cotangent, and the cotangents that are given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from primitives.core.dtypes import has_derivatives
from primitives.core.errors import DeviceError, DtypeError, LeafError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from primitives.tracing.leaves import Leaves

__all__ = ["match_tangents", "require_loss", "takes_cotangent"]


def _storage(x: Tensor) -> int | None:
    # Tensors inside a transform, and sparse ones, have no storage to compare.
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def takes_cotangent(y: Any, inputs: Sequence[Any]) -> bool:
    """Whether `y` is differentiable, requires grad and shares no memory with an input."""
    if not isinstance(y, torch.Tensor) or not has_derivatives(y.dtype) or not y.requires_grad:
        return False
    storages = {_storage(x) for x in inputs if isinstance(x, torch.Tensor)} - {None}
    return _storage(y) not in storages


def match_tangents(function: str, outs: Leaves, taken: Sequence[bool], tangents: Any) -> list[Tensor | None]:
    """One cotangent, or `None`, for each leaf of `outs`; those of other shapes are viewed.

    Raises:
        TreeError: If the structure of `tangents` is not that of `outs`, with `None` where a leaf takes none.
        LeafError: If a cotangent is not a tensor, or given for a leaf that takes none.
        ShapeError: If it cannot be viewed in the shape of its output.
        DtypeError: If its dtype differs.
        DeviceError: If its device differs.
    """
    pieces = outs.aligned(function, "tangents", tangents, "outs")
    found: list[Tensor | None] = []
    for i, (piece, y) in enumerate(zip(pieces, outs.values, strict=True)):
        if piece is None:
            found.append(None)
            continue
        label = outs._replace(roots="tangents").label(i)
        if not taken[i]:
            raise LeafError(
                f"{function}: {label} must be None: this output takes no cotangent, as it is not a floating-point "
                "tensor, does not require grad, or shares memory with an input."
            )
        found.append(_viewed(function, label, piece, y))
    return found


def _viewed(function: str, label: str, y_bar: Any, y: Tensor) -> Tensor:
    if not isinstance(y_bar, torch.Tensor):
        raise LeafError(f"{function}: {label} must be a tensor or None, got {type(y_bar).__name__}.")
    if y_bar.dtype != y.dtype:
        raise DtypeError(f"{function}: {label} must have the dtype of its output, {y.dtype}, got {y_bar.dtype}.")
    if y_bar.device != y.device:
        raise DeviceError(f"{function}: {label} must be on the device of its output, {y.device}, got {y_bar.device}.")
    if y_bar.shape == y.shape:
        return y_bar
    try:
        return y_bar.view(y.shape)
    except RuntimeError:
        raise ShapeError(
            f"{function}: {label} must have the shape of its output, {list(y.shape)}, or be viewable in it, got "
            f"{list(y_bar.shape)} with strides {list(y_bar.stride())}."
        ) from None


def require_loss(function: str, outs: Leaves, taken: Sequence[bool]) -> None:
    """Raise unless the first leaf of `outs` is a scalar loss."""
    if outs.values and taken[0] and outs.values[0].numel() == 1:
        return
    got = "no output"
    if outs.values:
        y = outs.values[0]
        got = f"{list(y.shape)} of {y.dtype}" if isinstance(y, torch.Tensor) else type(y).__name__
        got += "" if taken[0] else ", which takes no cotangent"
    raise LeafError(
        f"{function}: with no_tangents=True the first output must be a floating-point tensor of one element that "
        f"requires grad, got {got}."
    )
