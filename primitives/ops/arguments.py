"""Checks of the functional API: typed errors that name the operation, the argument, what is required and what came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from primitives._core.errors import AxisError, DeviceError, DtypeError, MutationError, ShapeError

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LOW_PRECISION = (torch.float16, torch.bfloat16)
# Autocast leaves these alone, as it does torch's.
_NOT_CAST = ("batch_norm", "batch_norm_relu", "pure_batch_norm", "instance_norm")
BATCH_NORM_MIN_DIM = 2


def _list(shape: Sequence[int]) -> list[int]:
    return list(shape)


def _is_integer(value: object) -> bool:
    # The first test is the one that torch.compile understands for a symbolic size; the last admits NumPy's integers.
    return isinstance(value, (int, torch.SymInt, Integral)) and not isinstance(value, bool)


def number(op_name: str, name: str, value: float) -> None:
    """Raise unless `value` is a number."""
    if type(value) is not float and not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        raise DtypeError(f"{op_name}: {name} must be a number, got {type(value).__name__}.")


def floating(op_name: str, label: str, dtype: torch.dtype, hint: str = "") -> None:
    """Raise unless `dtype` is one that the kernels compute with."""
    if dtype not in FLOATING:
        raise DtypeError(
            f"{op_name}: {label} must have dtype float16, bfloat16, float32 or float64, got {dtype}.{hint}"
        )


def _pair(op_name: str, label: str, x: Tensor, shape: tuple[int, ...], what: str, **pair: Tensor | None) -> None:
    """Raise unless both of a pair have this shape, one dtype, and a dtype and device that go with those of `x`."""
    dtype, device = x.dtype, x.device
    for value in pair.values():
        if value is not None and (value.dtype != dtype or value.shape != shape or value.device != device):
            break
    else:
        # Asked first: a training step asks for every layer.
        return
    given = {name: value for name, value in pair.items() if value is not None}
    for name, value in given.items():
        if tuple(value.shape) != shape:
            raise ShapeError(f"{op_name}: {name} must have shape {_list(shape)} ({what}), got {_list(value.shape)}.")
        if value.device != x.device:
            raise DeviceError(f"{op_name}: {name} must be on the device of {label}, {x.device}, got {value.device}.")
    if op_name not in _NOT_CAST and x.is_cuda and torch.is_autocast_enabled("cuda"):
        # Autocast will bring the arguments to one dtype.
        return
    allowed = [x.dtype, torch.float32] if x.dtype in LOW_PRECISION else [x.dtype]
    for name, value in given.items():
        if value.dtype not in allowed:
            names = " or ".join(str(dtype) for dtype in allowed)
            raise DtypeError(
                f"{op_name}: {name} must have dtype {names} for {label} of dtype {x.dtype}, got {value.dtype}."
            )
    if len({value.dtype for value in given.values()}) > 1:
        listed = ", ".join(f"{name} {value.dtype}" for name, value in given.items())
        raise DtypeError(f"{op_name}: {' and '.join(given)} must have the same dtype, got {listed}.")


def broadcasts(op_name: str, name: str, x: Tensor | None, shape: Sequence[int], what: str) -> None:
    """Raise unless `x` can be broadcast to `shape`, which is `what`."""
    if x is None:
        return
    last = shape[len(shape) - x.dim() :]
    if x.dim() > len(shape) or any(n not in (1, full) for n, full in zip(x.shape, last, strict=True)):
        raise ShapeError(
            f"{op_name}: {name} must broadcast to the shape {_list(shape)} of {what}, got {_list(x.shape)}."
        )


def normalized_shape(op_name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """`shape` as a tuple, checked to be a non-empty sequence of sizes."""
    if not isinstance(shape, (tuple, Sequence)):
        raise DtypeError(
            f"{op_name}: normalized_shape must be a sequence of ints, got {type(shape).__name__}. "
            "Write (n,) for one axis."
        )
    if len(shape) == 0:
        raise ShapeError(f"{op_name}: normalized_shape must name at least one axis, got [].")
    for size in shape:
        if type(size) is not int and not _is_integer(size):
            raise DtypeError(
                f"{op_name}: normalized_shape must be a sequence of ints, got one with a {type(size).__name__}."
            )
    return tuple(shape)


def module_shape(name: str, shape: Any) -> tuple[int, ...]:
    """The `normalized_shape` of a module, which may be a number."""
    return normalized_shape(name, (shape,) if _is_integer(shape) else shape)


def layer_norm(op_name: str, label: str, x: Tensor, shape: tuple[int, ...], **params: Tensor | None) -> None:
    """Raise unless `x` and the parameters fit `shape` and one another."""
    floating(op_name, label, x.dtype)
    if x.shape[-len(shape) :] != shape:
        wanted = ", ".join(["*", *map(str, shape)])
        raise ShapeError(
            f"{op_name}: {label} must have shape [{wanted}] (normalized_shape={_list(shape)}), got {_list(x.shape)}."
        )
    _pair(op_name, label, x, shape, "normalized_shape", **params)


def added(op_name: str, label: str, x: Tensor, residual: Any) -> None:
    """Raise unless `residual` is a tensor to which `x` can be added."""
    if residual is None:
        raise DtypeError(f"{op_name}: residual must be a tensor, got None. Without one, call the norm itself.")
    _pair(op_name, label, x, tuple(x.shape), f"that of {label}", residual=residual)


def add_layer_norm(op_name: str, label: str, x: Tensor, shape: tuple[int, ...], residual: Any, **params: Any) -> None:
    """Raise unless `residual` can be added to `x`, and the sum normalized."""
    added(op_name, label, x, residual)
    layer_norm(op_name, label, x, shape, **params)


def batch_axes(param: Tensor, norm_ndim: int) -> tuple[int, ...]:
    """Sizes of the leading axes of a parameter `[*batch, *norm]`, or `[*batch, 1, *norm]` with axes of tokens."""
    lead = list(param.shape[: param.dim() - norm_ndim])
    while lead and lead[-1] == 1:
        lead.pop()
    return tuple(lead)


def of_samples(op_name: str, label: str, x: Tensor, norm_ndim: int, **pair: Any) -> None:
    """Raise unless both of a pair are parameters of each sample of `x`, of one shape, that go with it."""
    for name, value in pair.items():
        if value is None:
            raise DtypeError(f"{op_name}: {name} must be a tensor, got None.")
    first, param = next(iter(pair.items()))
    rest_ndim, lead_ndim = x.dim() - norm_ndim, param.dim() - norm_ndim
    lead = batch_axes(param, norm_ndim)
    fits = 0 <= lead_ndim <= rest_ndim and param.shape[lead_ndim:] == x.shape[rest_ndim:]
    if not fits or lead != tuple(x.shape[: len(lead)]):
        raise ShapeError(
            f"{op_name}: {first} must have the leading axes of {label}, {_list(x.shape)}, as many as differ by sample, "
            f"then axes of size 1 or none, and its last {norm_ndim}, got {_list(param.shape)}."
        )
    _pair(op_name, label, x, tuple(param.shape), f"that of {first}", **pair)


def group_norm(label: str, x: Tensor, num_groups: int, **params: Tensor | None) -> None:
    """Raise unless `num_groups` divides the channels of `x`, and the parameters go with these."""
    floating("group_norm", label, x.dtype)
    if x.dim() < BATCH_NORM_MIN_DIM:
        raise ShapeError(f"group_norm: {label} must have at least 2 axes, [N, C, *], got {_list(x.shape)}.")
    if not _is_integer(num_groups):
        raise DtypeError(f"group_norm: num_groups must be an int, got {type(num_groups).__name__}.")
    channels = x.shape[1]
    if num_groups <= 0 or channels % num_groups:
        raise ShapeError(
            f"group_norm: num_groups must be positive and divide the channels of {label}, {channels}, got {num_groups}."
        )
    _pair("group_norm", label, x, (channels,), f"axis 1 of {label}", **params)
    # As torch counts them: over all samples.
    if math.prod(x.shape[2:], start=x.shape[0] * channels // num_groups) == 1:
        raise ShapeError(
            f"group_norm: {label} must have more than 1 value per group, got {_list(x.shape)} and "
            f"num_groups={num_groups}. Use fewer groups."
        )


def positive_eps(op_name: str, value: float) -> None:
    """Raise unless `value` is positive: a constant channel has no variance."""
    if value <= 0.0:
        raise ValueError(f"{op_name}: eps must be positive where statistics are those of the input, got {value}.")


def written(op_name: str, running_mean: Tensor | None, running_var: Tensor | None) -> None:
    """Raise unless the running statistics can be written in place."""
    for name, value in (("running_mean", running_mean), ("running_var", running_var)):
        if value is not None and value.requires_grad and torch.is_grad_enabled():
            raise MutationError(
                f"{op_name}: {name} is written in training and must not require grad. Pass {name}.detach(), or use "
                "pure_batch_norm, which writes nothing."
            )


def momentum(op_name: str, value: float | Tensor) -> None:
    """Raise unless `value` is a number, or a tensor of one."""
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point():
        return
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat)):
        raise DtypeError(
            f"{op_name}: momentum must be a number, got {type(value).__name__}. (The cumulative average that "
            "momentum=None means is a feature of the BatchNorm modules, which count the batches.)"
        )


def channels_of_nothing(*params: Tensor | None) -> int:
    """Those of an empty tensor of one axis: torch takes it beside the parameters of a layer, whatever their size."""
    return next((param.numel() for param in params if param is not None), 0)


def batch_norm(
    op_name: str, label: str, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, residual: Any = None, *, training: bool, writes: bool = False, is_whole: bool = True,
) -> None:  # fmt: skip
    """Raise unless the arguments of a batch norm fit one another; `is_whole`: no other process has a part of `x`."""
    is_of_samples = op_name == "instance_norm"
    flag, is_empty_row = "use_input_stats" if is_of_samples else "training", x.shape == (0,) and not is_of_samples
    if not is_empty_row and x.dim() < BATCH_NORM_MIN_DIM:
        raise ShapeError(f"{op_name}: {label} must have at least 2 axes, [N, C, *spatial], got {_list(x.shape)}.")
    floating(op_name, label, x.dtype)
    if (running_mean is None) != (running_var is None):
        missing, given = ("running_mean", "running_var") if running_mean is None else ("running_var", "running_mean")
        raise ShapeError(
            f"{op_name}: running_mean and running_var must both be given or both be None, "
            f"got {given} without {missing}."
        )
    if not training and running_mean is None and (x.numel() > 0 or is_of_samples):
        raise ShapeError(
            f"{op_name}: running_mean and running_var must be given with {flag}=False, got None. "
            f"Pass {flag}=True to normalize by the statistics of {label}."
        )
    if is_empty_row:
        channels, what = channels_of_nothing(running_mean, weight, bias), "that of the others"
    else:
        channels, what = x.shape[1], f"axis 1 of {label}"
    _pair(op_name, label, x, (channels,), what, running_mean=running_mean, running_var=running_var)
    _pair(op_name, label, x, (channels,), what, weight=weight, bias=bias)
    if training and is_whole and math.prod(x.shape[2:], start=1 if is_of_samples else x.shape[0]) == 1:
        what, remedy = "value per channel", "a larger batch, or evaluation mode"
        if is_of_samples:
            what, remedy = "position", "running statistics"
        raise ShapeError(
            f"{op_name}: {label} must have more than 1 {what} with {flag}=True, got {_list(x.shape)}. Use {remedy}."
        )
    if residual is not None:
        added(op_name, label, x, residual)
    if writes:
        written(op_name, running_mean, running_var)


def softmax(
    op_name: str, label: str, x: Tensor, dim: int | None, dtype: torch.dtype | None, mask: Tensor | None = None, *,
    like_torch: bool = True,
) -> None:  # fmt: skip
    """Raise unless `dim` is an axis of `x`, the dtypes are floating point, and the mask fits `x`.

    Functions `like_torch` take `dtype=`, and `None` for an axis.
    """
    if dtype is None:
        floating(op_name, label, x.dtype, " Pass dtype= to convert it." if like_torch else "")
    else:
        floating(op_name, "the result", dtype)
        if x.is_complex():
            raise DtypeError(f"{op_name}: {label} must be real, got {x.dtype}.")
    if mask is not None:
        _mask(op_name, label, x, dtype, mask)
    if dim is None and like_torch:
        return
    if dim is None or not _is_integer(dim):
        raise DtypeError(f"{op_name}: dim must be an int, got {type(dim).__name__}.")
    ndim = max(x.dim(), 1)
    if not -ndim <= dim < ndim:
        raise AxisError(f"{op_name}: dim must be in [{-ndim}, {ndim - 1}] for {label} of {x.dim()} axes, got {dim}.")


def _mask(op_name: str, label: str, x: Tensor, dtype: torch.dtype | None, mask: Tensor) -> None:
    """Raise unless the mask can be broadcast to `x`, and is boolean or of a dtype that sums of it are taken in."""
    broadcasts(op_name, "mask", mask, x.shape, label)
    if mask.device != x.device:
        raise DeviceError(f"{op_name}: mask must be on the device of {label}, {x.device}, got {mask.device}.")
    is_wide = torch.float64 in (x.dtype, dtype)
    if mask.dtype != torch.bool and mask.dtype not in (FLOATING if is_wide else FLOATING[:-1]):
        raise DtypeError(
            f"{op_name}: mask must have dtype bool, true where a position takes part, or one of float16, bfloat16 and "
            f"float32, or float64 beside float64, got {mask.dtype} for {label} of dtype {x.dtype}."
        )


def probability(op_name: str, p: float, name: str = "p") -> None:
    """Raise unless `p` is a number in [0, 1]."""
    number(op_name, name, p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{op_name}: {name} must be a probability, in [0, 1], got {p}.")


def dropout(label: str, x: Tensor, *, inplace: bool) -> None:
    """Raise unless `x` is floating point, and can be written if it is to be."""
    floating("dropout", label, x.dtype)
    if inplace and x.requires_grad and x.is_leaf and torch.is_grad_enabled():
        raise MutationError(
            f"dropout: {label} is a leaf that requires grad, and cannot be written in place. Pass inplace=False, or "
            "what an operation made of it."
        )
