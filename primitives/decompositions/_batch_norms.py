"""Decompositions of ATen's batch norms under all their names: backends, and what is written, returned or left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from primitives._core.decomposition import decomposition_table
from primitives._core.write_back import write_back
from primitives.decompositions._norms import BatchNorm, check_batch_norm, native_batch_norm_backward
from primitives.decompositions._statistics import (
    accumulated,
    channel_shape,
    constant_p,
    decomposes,
    moments,
    saved_dtype,
    scaled,
)

aten = torch.ops.aten


class _Normalized(NamedTuple):
    """The results of a batch norm; the running statistics are `None` where there are none."""

    y: Tensor
    mean: Tensor
    rstd: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None

    def write(self, running_mean: Tensor | None, running_var: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Write the new running statistics in place, as the last thing that can fail."""
        if running_mean is not None and running_var is not None and self.running_mean is not None:
            write_back([running_mean, running_var], [constant_p(self.running_mean), constant_p(self.running_var)])
        return self.y, self.mean, self.rstd


def _normalize(caller: str, *args: Any) -> _Normalized:
    """By the arguments of `BatchNorm`."""
    c: Any = BatchNorm(*args)
    check_batch_norm(caller, c)
    if c.training and c.input.numel() == 0:
        raise RuntimeError(f"{caller}: input must have at least one element in training, got {list(c.input.shape)}.")
    x, shape = accumulated(c.input), channel_shape(c.input)
    running: tuple[Any, Any] = c.running_mean, c.running_var
    (new_mean, new_var), has_running = running, all(v is not None for v in running)
    if c.training or not has_running:
        mean, variance = moments(x, [0, *range(2, x.dim())])
        if has_running:
            count = x.numel() // x.shape[1]
            # A single value has no unbiased variance: 0 / 0, as in torch.
            unbiased = variance.flatten() * count / (count - 1)
            new_mean = (c.momentum * mean.flatten() + (1 - c.momentum) * new_mean).to(new_mean.dtype)
            new_var = (c.momentum * unbiased + (1 - c.momentum) * new_var).to(new_var.dtype)
    else:
        mean, variance = (accumulated(v).reshape(shape) for v in (new_mean, new_var))
    rstd = (variance + c.eps).rsqrt()
    y = scaled((x - mean) * rstd, c.weight, c.bias, shape)
    dtype = saved_dtype(c.input, c.weight, c.bias, c.running_mean, c.running_var)
    saved = [v.flatten().to(dtype) if c.training else x.new_zeros(0, dtype=dtype) for v in (mean, rstd)]
    return _Normalized(y.to(c.input.dtype), saved[0], saved[1], new_mean, new_var)


# Each function from here on takes the arguments of its operator by position.


def _native(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: float) -> tuple:
    result = _normalize("batch_norm", x, weight, bias, mean, var, training, *rest)
    return result.write(mean, var) if training else result[:3]


def _functional(*args: Any) -> tuple:
    return tuple(_normalize("batch_norm", *args))


def _reserve(x: Tensor) -> Tensor:
    """The reserve of a batch norm for its backward: nothing here."""
    return x.new_zeros(0, dtype=torch.uint8)


def _with_update_functional(*args: Any) -> tuple:
    result = _functional(*args[:5], True, *args[5:])
    return *result[:3], _reserve(args[0]), *result[3:]


def _impl_index(x: Any, weight: Any, bias: Any, *args: Any) -> tuple:
    """Of whichever implementation torch takes: y, mean, rstd, nothing reserved, the native implementation."""
    if x.numel() == 0:
        # Before anything is checked, as in torch: it may have any number of axes. No running statistics are written.
        y = x.clone()
        y = y if weight is None else y * weight[0]
        y = y if bias is None else y + bias[0]
        return y, x.new_zeros(0), x.new_zeros(0), _reserve(x), 0
    return *decomposition_table[aten.native_batch_norm.default](x, weight, bias, *args[:-1]), _reserve(x), 0


def _instance_norm(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, use_input_stats: bool, *rest: Any
) -> Tensor:
    """Batch norm in which every channel of every sample is a channel; running statistics average over the samples."""
    running = running_mean, running_var
    if not use_input_stats and (running_mean is None or running_var is None):
        raise RuntimeError("instance_norm: running_mean and running_var must be given where use_input_stats is false.")
    check_batch_norm("instance_norm", BatchNorm(x, weight, bias, *running, use_input_stats))
    samples, channels = x.shape[:2]
    flat = x.reshape(1, samples * channels, *x.shape[2:])
    repeated = [None if p is None else p.repeat(samples) for p in (weight, bias, *running)]
    args: tuple[Any, ...] = flat, *repeated, use_input_stats, *rest
    if x.numel() == 0:
        result = _Normalized(_impl_index(*args)[0], flat, flat, *args[3:5])
    else:
        result = _normalize("instance_norm", *args[:-1])
    if use_input_stats:
        averaged = [None if p is None else p.reshape(samples, channels).mean(0) for p in result[3:]]
        _Normalized(*result[:3], *averaged).write(*running)
    return result.y.reshape(x.shape)


def _backend_backward(x: Any, y_bar: Any, *args: Any) -> tuple:
    # That of cuDNN and MIOpen is of training; batch norms reserve nothing for it here.
    return native_batch_norm_backward(y_bar, x, *args[:5], train=True, eps=args[5], output_mask=(True, True, True))


_NAMES: dict[OpOverload, Callable[..., Any]] = {
    aten.native_batch_norm.default: _native,
    aten._native_batch_norm_legit.default: _native,
    aten._native_batch_norm_legit.no_stats: lambda x, weight, bias, *args: _native(x, weight, bias, None, None, *args),
    aten._native_batch_norm_legit_no_training.default: lambda *args: _native(*args[:5], False, *args[5:]),
    aten._native_batch_norm_legit_functional.default: _functional,
    aten._batch_norm_with_update.default: lambda *args: (*_native(*args[:5], True, *args[5:]), _reserve(args[0])),
    aten._batch_norm_with_update_functional.default: _with_update_functional,
    aten._batch_norm_no_update.default: lambda *args: (*_native(*args[:5], False, *args[5:]), _reserve(args[0])),
    aten._batch_norm_impl_index.default: _impl_index,
    aten.batch_norm.default: lambda *args: _impl_index(*args)[0],
    aten.instance_norm.default: _instance_norm,
    aten.cudnn_batch_norm.default: lambda x, *args: (*_native(x, *args), _reserve(x)),
    aten.miopen_batch_norm.default: _native,
    aten.cudnn_batch_norm_backward.default: _backend_backward,
    aten.miopen_batch_norm_backward.default: _backend_backward,
    aten.batch_norm_backward.default: lambda *args: native_batch_norm_backward(*args[:10]),
    aten._batch_norm_impl_index_backward.default: lambda _index, x, y_bar, *args: native_batch_norm_backward(
        y_bar, x, *args[:8]
    ),
}


for _op, _function in _NAMES.items():
    decomposes(_op)(lambda call, function=_function: function(*call))
