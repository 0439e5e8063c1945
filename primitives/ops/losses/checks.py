"""Checks of the losses: typed errors that name the operation, the argument, what is required and what came."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primitives._core.errors import DeviceError, DtypeError, ShapeError
from primitives._core.trees.leaves import require_dense
from primitives.ops.arguments import LOW_PRECISION, floating, number, probability

REDUCTIONS = ("none", "mean", "sum")
_MATRIX = 2


def options(op_name: str, reduction: str, ignore_index: int, label_smoothing: float = 0.0, z_loss: float = 0.0) -> None:
    """Raise unless the options of a loss are of their kinds."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op_name}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}.")
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, (int, torch.SymInt)):
        raise DtypeError(f"{op_name}: ignore_index must be an int, got {type(ignore_index).__name__}.")
    probability(op_name, label_smoothing, "label_smoothing")
    if isinstance(z_loss, bool):
        raise DtypeError(f"{op_name}: z_loss must be a number, got bool.")
    number(op_name, "z_loss", z_loss)


def has_probabilities(shape: tuple[int, ...], target: Tensor) -> bool:
    """Whether a target beside logits of this shape is of probabilities: torch tells by the shape alone."""
    return tuple(target.shape) == shape


def class_indices(op_name: str, shape: tuple[int, ...], target: Tensor) -> None:
    """Raise if `target` is of probabilities, of which no row is ignored by its class."""
    if has_probabilities(shape, target):
        raise DtypeError(
            f"{op_name}: ignore_index goes with class indices, got a target of probabilities, of shape {list(shape)}. "
            "Leave ignore_index out, and set the rows to ignore to zero."
        )


def class_axis(x: Tensor) -> int:
    """The axis of the classes."""
    return min(x.dim() - 1, 1)


def loss(
    op_name: str, label: str, x: Tensor, target: Any, weight: Any, *, takes_probabilities: bool, ignore_index: int = -1
) -> None:
    """Raise unless `target` and `weight` fit the logits, or logarithms of probabilities, `x`."""
    floating(op_name, label, x.dtype)
    if x.dim() == 0:
        raise ShapeError(f"{op_name}: {label} must have shape [C] or [N, C, *], got [].")
    fit(op_name, label, x.dtype, x.device, tuple(x.shape), target, weight, takes_probabilities=takes_probabilities)
    if ignore_index >= 0:
        class_indices(op_name, tuple(x.shape), target)


def fit(
    op_name: str, label: str, dtype: torch.dtype, device: torch.device, shape: tuple[int, ...], target: Tensor | None,
    weight: Tensor | None, *, takes_probabilities: bool,
) -> None:  # fmt: skip
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


_NAME = "linear_cross_entropy"


def _layer(x: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> None:
    """Raise unless the parameters of a linear layer fit one another and the rows `x`."""
    if x.dim() == 0 or linear_weight.dim() <= 1 or min(x.dim(), linear_weight.dim()) > _MATRIX:
        raise ShapeError(
            f"{_NAME}: input must have shape [*, D] and linear_weight [C, D], or [D] or [N, D] and [C, *, D], got "
            f"{list(x.shape)} and {list(linear_weight.shape)}."
        )
    if linear_weight.shape[-1] != x.shape[-1]:
        raise ShapeError(
            f"{_NAME}: linear_weight must have shape [C, *, {x.shape[-1]}], got {list(linear_weight.shape)}."
        )
    classes = list(linear_weight.shape[:-1])
    if linear_bias is not None and list(linear_bias.shape) != classes:
        raise ShapeError(f"{_NAME}: linear_bias must have shape {classes}, got {list(linear_bias.shape)}.")
    for label, value in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if value is not None and value.dtype != x.dtype:
            raise DtypeError(f"{_NAME}: {label} must have the dtype of input, {x.dtype}, got {value.dtype}.")
        if value is not None and value.device != x.device:
            raise DeviceError(f"{_NAME}: {label} must be on the device of input, {x.device}, got {value.device}.")


def linear_loss(
    x: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None, *, shift: bool
) -> tuple[int, ...]:
    """The shape of the logits; raises unless the arguments of a linear cross-entropy fit one another."""
    given = {"input": x, "linear_weight": linear_weight, "target": target, "linear_bias": linear_bias, "weight": weight}
    for label, value in given.items():
        if value is None and label in ("linear_bias", "weight"):
            continue
        if not isinstance(value, torch.Tensor):
            raise DtypeError(f"{_NAME}: {label} must be a tensor, got {type(value).__name__}.")
        require_dense(_NAME, label, value)
    floating(_NAME, "input", x.dtype)
    _layer(x, linear_weight, linear_bias)
    rows, classes = tuple(x.shape[:-1]), tuple(linear_weight.shape[:-1])
    labels = target
    if len(rows) > 1:
        # The logits of more axes have the classes last, and the target a label for each row.
        if tuple(target.shape) != rows:
            raise ShapeError(f"{_NAME}: target must have shape {list(rows)}, got {list(target.shape)}.")
        labels, rows = target.reshape(-1), (target.numel(),)
    shape = (*rows, *classes)
    if not rows and len(classes) > 1:
        raise ShapeError(f"{_NAME}: input must have shape [N, D] for linear_weight [C, *, D], got {list(x.shape)}.")
    fit(_NAME, "the logits", x.dtype, x.device, shape, labels, weight, takes_probabilities=True)
    if shift and (has_probabilities(shape, labels) or target.dim() == 0):
        raise ShapeError(f"{_NAME}: shift needs class indices of shape [*, tokens], got {list(target.shape)}.")
    return shape


def linear_options(softcap: float | None, chunk_rows: int | None) -> None:
    """Raise unless the options of a linear cross-entropy are in range."""
    if softcap is not None:
        number(_NAME, "softcap", softcap)
        if softcap <= 0.0:
            raise ValueError(f"{_NAME}: softcap must be positive, got {softcap}.")
    if chunk_rows is not None and (isinstance(chunk_rows, bool) or not isinstance(chunk_rows, int) or chunk_rows < 1):
        raise ValueError(f"{_NAME}: chunk_rows must be a positive int, got {chunk_rows!r}.")
