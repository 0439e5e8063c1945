r"""Group norm with SiLU behind it, one operator, which keeps nothing but what the norm keeps, and the bias.

With z the result of group norm (`layer_norm.py`, `grouped`) and s = sigmoid(z),

    y = z * s,      y' = s * (1 + z * (1 - s)) =: a(z),      y'' = s * (1 - s) * (2 + z * (1 - 2 * s)) =: b(z)

    jvp   y_dot = a(z) * z_dot
    vjp   the cotangents of the norm for z_bar = a(z) * y_bar

In second order these are derivatives of the norm's own second-order operators and products of full size. With
z_bar_dot, the derivative of z_bar along the tangents given,

    z_bar_dot = a(z) * y_bar_dot + b(z) * y_bar * z_dot

the tangents of the vjp are those of the norm's vjp for (z_bar, z_bar_dot). The gradient of the pairing <y_bar, y_dot>
in x, weight and bias is the same for y_bar_dot = 0, that in the tangents is the norm's vjp for z_bar, and that in
y_bar is y_dot. Shapes are those of `layer_norm.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from primitives._core import Primitive, value_and_jvp
from primitives.ops.axes import def_axes
from primitives.ops.norms.layer_norm import (
    GROUPS,
    NormOptions,
    layer_norm_bwd_jvp_p,
    layer_norm_bwd_p,
    layer_norm_jvp_p,
    layer_norm_p,
    options_of,
)
from primitives.ops.rules import (
    accumulation_dtype,
    bind_family,
    cast_to_float32,
    derivatives,
    empty_output,
    schema_of,
    second_order,
)

group_norm_silu_p = Primitive(
    "group_norm_silu",
    layer_norm_p.spec.schema,
    residuals=("x", "weight", "bias", "mean", "rstd"),
    statistics=("mean", "rstd"),
    recomputable=True,
)
group_norm_silu_bwd_p, group_norm_silu_jvp_p = derivatives(
    group_norm_silu_p, "x weight bias mean rstd", "x weight bias", schema_of(NormOptions)
)
group_norm_silu_fwd_jvp_p = value_and_jvp(group_norm_silu_p, group_norm_silu_jvp_p)


def _slopes(z: Tensor) -> tuple[Tensor, Tensor]:
    """SiLU's first and second derivative."""
    s = torch.sigmoid(z)
    rest = 1 - s
    return s * (1 + z * rest), s * rest * (2 + z * (rest - s))


# Reference and kernels for the CPU: those of the norm, in the dtype of sums, so that only results are rounded.


def _wide(x: Tensor, *params: Tensor | None) -> list[Any]:
    dtype = accumulation_dtype(x.dtype)
    return [None if p is None else p.to(dtype) for p in (x, *params)]


def _value(norm: Any, x: Tensor, weight: Any, bias: Any, *args: Any) -> Any:
    z, mean, rstd = norm(*_wide(x, weight, bias), *args)
    return silu(z).to(x.dtype), mean, rstd


def _sloped(v: Tensor, z: Tensor) -> Tensor:
    return v * _slopes(z)[0]


def _cotangents(
    sloped: Any, norm: Any, norm_bwd: Any, y_bar: Tensor, x: Tensor, weight: Any, bias: Any, *args: Any
) -> Any:
    mean, rstd, *options, output_mask = args
    wide, weight_wide, bias_wide = _wide(x, weight, bias)
    z = norm(wide, weight_wide, bias_wide, *options)[0]
    z_bar = sloped(y_bar.to(wide.dtype), z)
    bars = norm_bwd(z_bar, wide, weight_wide, mean, rstd, *options, output_mask)
    dtypes = (x.dtype, *[wide.dtype if weight is None else weight.dtype] * 2)
    return tuple(
        bar.to(dtype) if want else empty_output(x) for bar, dtype, want in zip(bars, dtypes, output_mask, strict=True)
    )


def _tangent(sloped: Any, norm: Any, norm_jvp: Any, x: Tensor, weight: Any, bias: Any, *args: Any) -> Tensor:
    (mean, rstd, *dots), options = args[:5], args[5:]
    wide, weight, bias, *dots = _wide(x, weight, bias, *dots)
    z = norm(wide, weight, bias, *options)[0]
    z_dot = norm_jvp(wide, weight, mean, rstd, *dots, *options)
    return sloped(z_dot, z).to(x.dtype)


group_norm_silu_p.def_reference(functools.partial(_value, layer_norm_p.rule("reference")))
group_norm_silu_p.def_kernel("cpu")(functools.partial(_value, layer_norm_p.rules.cpu))
for op, formula, of_norm in (
    (group_norm_silu_bwd_p, _cotangents, layer_norm_bwd_p),
    (group_norm_silu_jvp_p, _tangent, layer_norm_jvp_p),
):
    op.def_reference(functools.partial(formula, _sloped, *[p.rule("reference") for p in (layer_norm_p, of_norm)]))
    # One call of ATen.
    sloped = torch.ops.aten.silu_backward.default
    op.def_kernel("cpu")(functools.partial(formula, sloped, *[p.rules.cpu for p in (layer_norm_p, of_norm)]))

_ops = (group_norm_silu_p, group_norm_silu_bwd_p, group_norm_silu_jvp_p, group_norm_silu_fwd_jvp_p)
bind_family("norms.layer_norm", "layer_norm", *_ops, silu=True)
def_axes(GROUPS, *_ops)
group_norm_silu_p.def_autocast("cuda")(cast_to_float32)


def _bwd_jvp(output_mask: Sequence[bool], c: Any) -> tuple[Tensor, ...]:
    """Tangents of the cotangents of x, weight and bias.

    In the dtype of sums: rounded in between, sums of many would be off by more than a rounding.
    """
    options = options_of(c)
    x, weight, bias, *param_dots = _wide(c.x, c.weight, c.bias, c.weight_dot, c.bias_dot)
    a, b = _slopes(layer_norm_p(x, weight, bias, *options)[0])
    terms = [] if c.y_bar_dot is None else [a * c.y_bar_dot]
    if any(dot is not None for dot in (c.x_dot, *param_dots)):
        z_dot = layer_norm_jvp_p(x, weight, c.mean, c.rstd, c.x_dot, *param_dots, *options)
        terms.append(b * c.y_bar * z_dot)
    z_bar_dot = sum(terms[1:], terms[0]) if terms else None
    of_norm = (a * c.y_bar, x, weight, c.mean, c.rstd, z_bar_dot, c.x_dot, param_dots[0])
    x_bar_dot, *param_bars_dot = layer_norm_bwd_jvp_p(*of_norm, *options, output_mask)
    dtype = x.dtype if weight is None else c.weight.dtype
    return x_bar_dot.to(c.x.dtype), *[bar.to(dtype) for bar in param_bars_dot]


second_order(group_norm_silu_bwd_p, group_norm_silu_jvp_p, _bwd_jvp)
