"""Checks of the losses: typed errors that name the operation, the argument, what is required and what came."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from primitives.checks.arguments import LOW_PRECISION, floating, number, probability
from primitives.core.errors import DeviceError, DtypeError, ShapeError

if TYPE_CHECKING:
    from torch import Tensor

REDUCTIONS = ("none", "mean", "sum")


def options(op_name: str, reduction: str, ignore_index: int, label_smoothing: float = 0.0, z_loss: float = 0.0) -> None:
    """Raise unless the options of a loss are of their kinds."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op_name}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}.")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, (int, torch.SymInt)):
        raise DtypeError(f"{op_name}: ignore_index must be an int, got {type(ignore_index).__name__}.")
    probability(op_name, label_smoothing, "label_smoothing")
    number(op_name, "z_loss", z_loss)


def has_probabilities(shape: tuple[int, ...], target: Tensor) -> bool:
    """Whether a target beside logits of this shape is of probabilities: torch tells by the shape alone."""
    return tuple(target.shape) == shape


def class_axis(x: Tensor) -> int:
    """The axis of the classes."""
    return min(x.dim() - 1, 1)


def loss(
    op_name: str, label: str, x: Tensor, target: Tensor | None, weight: Tensor | None, *, takes_probabilities: bool
) -> None:
    """Raise unless `target` and `weight` fit the logits, or logarithms of probabilities, `x`."""
    floating(op_name, label, x.dtype)
    if x.dim() == 0:
        raise ShapeError(f"{op_name}: {label} must have shape [C] or [N, C, *], got [].")
    fit(op_name, label, x.dtype, x.device, tuple(x.shape), target, weight, takes_probabilities=takes_probabilities)


def fit(
    op_name: str,
    label: str,
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, ...],
    target: Tensor | None,
    weight: Tensor | None,
    *,
    takes_probabilities: bool,
) -> None:
    """Raise unless `target` and `weight` fit logits of this shape, dtype and device, of which `label` is the name."""
    if target is None:
        raise DtypeError(f"{op_name}: target must be a tensor, got NoneType.")
    axis = min(len(shape) - 1, 1)
    if takes_probabilities and has_probabilities(shape, target):
        floating(op_name, f"target of the shape of {label}, which is of probabilities,", target.dtype)
    else:
        wanted = (*shape[:axis], *shape[axis + 1 :])
        # Torch takes one label in a list of one for logits without a batch.
        if tuple(target.shape) != wanted and not (len(shape) == 1 and tuple(target.shape) == (1,)):
            more = f", or {list(shape)} for probabilities" if takes_probabilities else ""
            raise ShapeError(
                f"{op_name}: target must have shape {list(wanted)}{more}, for {label} of shape {list(shape)}, "
                f"got {list(target.shape)}."
            )
        if target.dtype == torch.bool or target.is_floating_point() or target.is_complex():
            raise DtypeError(f"{op_name}: target must have an integer dtype for class indices, got {target.dtype}.")
    for name, value in (("target", target), ("weight", weight)):
        if value is not None and value.device != device:
            raise DeviceError(f"{op_name}: {name} must be on the device of {label}, {device}, got {value.device}.")
    if weight is None:
        return
    if tuple(weight.shape) != (shape[axis],):
        raise ShapeError(
            f"{op_name}: weight must have shape {[shape[axis]]}, one for each class, got {list(weight.shape)}."
        )
    allowed = [dtype, torch.float32] if dtype in LOW_PRECISION else [dtype]
    # Autocast will bring the arguments to one dtype.
    if weight.dtype not in allowed and not torch.is_autocast_enabled(device.type):
        names = " or ".join(map(str, allowed))
        raise DtypeError(f"{op_name}: weight must have dtype {names} for {label} of dtype {dtype}, got {weight.dtype}.")
