"""Means, variances and other statistics, as ATen's normalizations take them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from primitives._core.decomposition import decomposition_table, overloads_of, register_decomposition
from primitives._core.primitive import Primitive

__all__ = ["accumulated", "channel_shape", "constant_p", "decomposes", "moments", "of_part", "saved_dtype", "scaled"]

# A value that no mode differentiates: Tensor.detach stops reverse mode alone.
constant_p = Primitive(
    "constant", "(Tensor x) -> Tensor value", state=("value",), namespace="primitives_decompositions"
)
constant_p.def_reference(lambda x: x.clone())
constant_p.def_vjp(lambda residuals, cotangents, output_mask: {})
constant_p.def_jvp(lambda residuals, tangents: ())
constant_p.def_vmap(lambda batch, primals: (constant_p(primals.x), batch.axes.x))


def decomposes(ops: Any) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """Decorator that makes a decomposition of a function of a call, whose fields are the arguments of the schema."""
    arguments = overloads_of(ops)[0]._schema.arguments
    defaults = [argument.default_value for argument in arguments if argument.has_default_value()]
    call = namedtuple("call", [str(argument.name) for argument in arguments], defaults=defaults)

    def decorator(function: Callable[[Any], Any]) -> Callable[..., Any]:
        return register_decomposition(ops)(lambda *args, **kwargs: function(call(*args, **kwargs)))

    return decorator


def of_part(ops: Any, whole: OpOverload, part: int | slice) -> None:
    """Give operators, as their decomposition, some results of that of another one, which takes the same arguments."""
    register_decomposition(ops)(lambda *args, **kwargs: decomposition_table[whole](*args, **kwargs)[part])


def accumulated(x: Tensor) -> Tensor:
    """`x` in the dtype that its sums are taken in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def saved_dtype(x: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """Dtype in which ATen returns the statistics of `x`: on the CPU that of the parameters, or else of `x`."""
    if x.device.type != "cpu":
        return torch.float64 if x.dtype == torch.float64 else torch.float32
    return next((parameter.dtype for parameter in parameters if parameter is not None), x.dtype)


def moments(x: Tensor, axes: list[int]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over `axes`, kept as 1."""
    mean = x.mean(axes, keepdim=True)
    return mean, (x - mean).square().mean(axes, keepdim=True)


def channel_shape(x: Tensor) -> list[int]:
    """Shape in which a vector with one entry per channel broadcasts against `x`, `[N, C, *]`."""
    return [1, x.shape[1], *[1] * (x.dim() - 2)]


def scaled(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int] | None = None) -> Tensor:
    """`x_hat * weight + bias`, of what is there, each in this shape."""
    weight, bias = (p if p is None or shape is None else p.reshape(shape) for p in (weight, bias))
    y = x_hat if weight is None else x_hat * weight
    return y if bias is None else y + bias
