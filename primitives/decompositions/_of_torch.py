"""Torch's own decompositions of operators whose nested derivatives raise or are wrong otherwise."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, _decomp
from torch._decomp.decompositions import one_layer_lstm
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from primitives._core.batching import to_front
from primitives._core.decomposition import register_decomposition, register_decomposition_for_jvp
from primitives._core.primitive import Primitive
from primitives.decompositions._statistics import accumulated

aten = torch.ops.aten

# Right in every nesting to order 3, by `perf.torch_derivatives`.
for _operator in (
    aten.binary_cross_entropy_with_logits.default,
    aten.grid_sampler_2d.default,
    aten.native_dropout_backward.default,
):
    register_decomposition(_operator)(_decomp.decomposition_table[_operator])


@register_decomposition_for_jvp(aten.mkldnn_rnn_layer)
def lstm_layer(
    x: Tensor, w_x: Tensor, w_h: Tensor, b_x: Tensor, b_h: Tensor, h: Tensor, c: Tensor, reverse: bool, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One direction of a layer of an LSTM in float32 on the CPU, `[T, N, C]`, whose operator has no forward mode."""
    _sizes, _kind, _hidden, _layers, has_biases, *_ = options
    weights = [w_x, w_h, b_x, b_h] if has_biases else [w_x, w_h]
    states = [state.reshape(state.shape[-2:]) for state in (h, c)]
    y, last = one_layer_lstm(x, states, weights, has_biases, reverse)
    h, c = (new.reshape(h.shape) for new in last)
    return y, h, c, x.new_empty(0, dtype=torch.uint8)


@register_decomposition(aten._safe_softmax)
def safe_softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax, and zeros with derivatives of zero for a row of `-inf`, which torch's own decomposition makes NaN."""
    is_hidden = (self == -math.inf).all(dim, keepdim=True)
    return torch.where(is_hidden, 0, torch.where(is_hidden, 0, self).softmax(dim, dtype=dtype))


@register_decomposition(aten.glu)
def glu(x: Tensor, dim: int = -1) -> Tensor:
    """The first half times the sigmoid of the second; Dynamo does not trace torch's own decomposition."""
    if x.dim() == 0 or x.shape[dim] % 2 or not x.is_floating_point():
        return aten.glu(x, dim)  # which raises
    a, b = x.chunk(2, dim)
    return a * b.sigmoid()


@register_decomposition(aten.hardsigmoid)
def hardsigmoid(x: Tensor) -> Tensor:
    """A sixth of x + 3, within 0 and 1; likewise."""
    if not x.is_floating_point():
        return aten.hardsigmoid(x)  # which raises
    return torch.where(x <= -3, 0.0, torch.where(x >= 3, 1.0, x / 6 + 0.5))


@register_decomposition(aten.hardsigmoid_backward)
def hardsigmoid_backward(grad_output: Tensor, self: Tensor) -> Tensor:
    """A sixth of the cotangent where x lies between -3 and 3."""
    return torch.where((self > -3) & (self < 3), grad_output / 6, 0.0)


@register_decomposition(aten.sinc)
def sinc(self: Tensor) -> Tensor:
    """`sin(t) / t` of `t = pi x`, around zero by its series to 1e-21: torch takes derivatives there for constants."""
    if not self.is_floating_point():
        return torch.sinc(self)
    t = math.pi * accumulated(self)
    is_small = t.abs() < 0.1
    square, series = torch.where(is_small, t, 0).square(), 1.0
    for n in (11, 9, 7, 5, 3):
        series = 1 - square / (n * (n - 1)) * series
    away = torch.where(is_small, 1, t)
    return torch.where(is_small, series, away.sin() / away).to(self.dtype)


@register_decomposition(aten.sgn)
def sgn(self: Tensor) -> Tensor:
    """A complex number divided by its size; torch overwrites the quotient of 0, which reverse mode needs."""
    if not self.is_complex():
        return torch.sgn(self)
    is_zero = self == 0
    return torch.where(is_zero, 0, self / torch.where(is_zero, 1, self).abs())


@register_decomposition(aten.special_i1)
def special_i1(self: Tensor) -> Tensor:
    """Bessel function, around zero by its series: torch takes derivatives there for constants."""
    if not self.is_floating_point():
        return torch.special.i1(self)
    x = accumulated(self)
    is_small = x.abs() < 1
    half = torch.where(is_small, x, 0) / 2
    square, series = half.square(), 1.0
    for n in range(11, 0, -1):
        series = 1 + square / (n * (n + 1)) * series
    away = torch.where(is_small, 1, x)
    return torch.where(is_small, half * series, torch.special.i1e(away) * away.abs().exp()).to(self.dtype)


# Its rules call it, so that they have derivatives of any order, none by an exponent that is a constant.
pow_p = Primitive(
    "pow", "(Tensor x, Tensor y) -> Tensor z", residuals=("x", "y"), namespace="primitives_decompositions"
)
pow_p.def_reference(torch.pow)


def _slope_x(x: Tensor, y: Tensor) -> Tensor:
    # 0 * x**-n, which is 0, would be NaN.
    is_flat = (y == 0) & (x.square().square() == 0)
    return y * pow_p(x, torch.where(is_flat, y, y - 1))


def _slope_y(x: Tensor, y: Tensor) -> Tensor:
    is_zero = (x == 0) & (y.real >= 0)
    return pow_p(x, y) * torch.where(is_zero, 1, x).log()


@pow_p.def_vjp
def _pow_vjp(residuals: Any, cotangents: Any, output_mask: Any) -> dict[str, Tensor]:
    slopes = {"x": _slope_x, "y": _slope_y}
    return {name: cotangents.z * rule(*residuals).conj() for name, rule in slopes.items() if getattr(output_mask, name)}


@pow_p.def_jvp
def _pow_jvp(residuals: Any, tangents: Any) -> Tensor:
    if tangents.y is None:
        return _slope_x(*residuals) * tangents.x
    along_y = _slope_y(*residuals) * tangents.y
    return along_y if tangents.x is None else along_y + _slope_x(*residuals) * tangents.x


@pow_p.def_vmap
def _pow_vmap(batch: Any, primals: Any) -> Any:
    return pow_p(*map(to_front, primals, batch.axes, (batch.size, batch.size))), 0


@register_decomposition(aten.pow.Tensor_Tensor)
def pow_of_tensors(self: Tensor, exponent: Tensor) -> Tensor:
    """Torch takes derivatives at exponent 0 for constants, and those by a constant exponent, which may be NaN."""
    wide, dtype = elementwise_dtypes(self, exponent, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.pow(self, exponent)
    return pow_p(*torch.broadcast_tensors(self.to(wide), exponent.to(wide))).to(dtype)


@register_decomposition(aten.pow.Scalar)
def pow_of_number(self: Any, exponent: Tensor) -> Tensor:
    """Powers of a number; torch's second derivative of powers of 0 is NaN."""
    # In the dtype that torch takes with a number.
    return pow_of_tensors(torch.full_like(exponent, self, dtype=torch.result_type(exponent, self)), exponent)
