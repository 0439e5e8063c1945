"""Batch norm under the other names that ATen has for it: backends, and what is written, returned or left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from primitives.core.decomposition import register_decomposition
from primitives.decompositions._norm_backwards import native_batch_norm_backward
from primitives.decompositions._norms import native_batch_norm, native_batch_norm_functional, reserve

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

aten = torch.ops.aten
_ALL = (True, True, True)


def _with_update(x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> tuple:
    return *native_batch_norm(x, weight, bias, mean, var, True, momentum, eps), reserve(x)


def _with_update_functional(x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> tuple:
    result = native_batch_norm_functional(x, weight, bias, mean, var, True, momentum, eps)
    return *result[:3], reserve(x), *result[3:]


def _no_update(x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> tuple:
    return *native_batch_norm(x, weight, bias, mean, var, False, momentum, eps), reserve(x)


# Each takes the arguments of its operator by position.
_NAMES: dict[OpOverload, Callable[..., Any]] = {
    aten._native_batch_norm_legit.default: native_batch_norm,
    aten._native_batch_norm_legit.no_stats: lambda x, weight, bias, *args: native_batch_norm(
        x, weight, bias, None, None, *args
    ),
    aten._native_batch_norm_legit_no_training.default: lambda *args: native_batch_norm(*args[:5], False, *args[5:]),
    aten._native_batch_norm_legit_functional.default: native_batch_norm_functional,
    aten._batch_norm_with_update.default: _with_update,
    aten._batch_norm_with_update_functional.default: _with_update_functional,
    aten._batch_norm_no_update.default: _no_update,
    aten.cudnn_batch_norm.default: lambda x, *args: (*native_batch_norm(x, *args), reserve(x)),
    aten.miopen_batch_norm.default: native_batch_norm,
    # The backward of cuDNN and MIOpen is that of training; batch norms reserve nothing for it here.
    aten.cudnn_batch_norm_backward.default: lambda x, y_bar, *args: native_batch_norm_backward(
        y_bar, x, *args[:5], True, args[5], _ALL
    ),
    aten.miopen_batch_norm_backward.default: lambda x, y_bar, *args: native_batch_norm_backward(
        y_bar, x, *args[:5], True, args[5], _ALL
    ),
    aten.batch_norm_backward.default: lambda *args: native_batch_norm_backward(*args[:10]),
    aten._batch_norm_impl_index_backward.default: lambda _index, x, y_bar, *args: native_batch_norm_backward(
        y_bar, x, *args[:8]
    ),
}


def _register(op: OpOverload, function: Callable[..., Any]) -> None:
    names = tuple(argument.name for argument in op._schema.arguments)

    def decomposition(*args: Any, **kwargs: Any) -> Any:
        return function(*args, *[kwargs[name] for name in names[len(args) :]])

    # With the overloads that have `out`: those of the same arguments.
    family = [getattr(op.overloadpacket, overload) for overload in op.overloadpacket.overloads()]
    same = [o for o in family if tuple(a.name for a in o._schema.arguments if not a.is_out) == names]
    register_decomposition(same)(decomposition)


for _op, _function in _NAMES.items():
    _register(_op, _function)
