r"""Layer norm of a residual stream to which a layer's output is added, after dropout; and RMS norm, not `centered`.

    s = residual + x * noise,      y = norm(s)

noise is that of dropout with probability p (see `dropout`), or 1 where `seed` is None; norm is that of `layer_norm`, of
s as it was rounded. s is the residual of the next layer. The sum is linear, so with P, x_hat and the statistics of s

    jvp   s_dot = residual_dot + x_dot * noise,      y_dot = P(s_dot) * weight + x_hat * weight_dot + bias_dot
    vjp   residual_bar = P(y_bar * weight) + s_bar,      x_bar = residual_bar * noise

and weight_bar and bias_bar are those of layer norm. All that is not linear is layer norm's: derivatives of second
order are `layer_norm_double_backward_p` and `layer_norm_bwd_jvp_p` between sums, and the references call layer norm's
primitives. Of x and residual nothing is kept.

Shapes: x, residual, y and s are [*batch, *rest, *norm], all else as in `layer_norm`; seed is [*batch], int64. s has the
dtype of the residual, which may be wider than that of x; y has `y_dtype`, that of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from primitives._core import Primitive, value_and_jvp
from primitives.ops.axes import Axes, def_axes
from primitives.ops.dropout.dropout import dropout_p
from primitives.ops.norms.layer_norm import (
    NormOptions,
    layer_norm_bwd_jvp_p,
    layer_norm_bwd_p,
    layer_norm_double_backward_p,
    layer_norm_jvp_p,
    layer_norm_p,
    options_of,
    rows,
)
from primitives.ops.rules import (
    accumulation_dtype,
    bind_family,
    cast_to_float32,
    define,
    empty_output,
    first_order,
    schema_of,
    second_order,
)

add_layer_norm_p = Primitive(
    "add_layer_norm",
    "(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, Tensor? seed, float p, ScalarType y_dtype,"
    f" {schema_of(NormOptions)})"
    " -> (Tensor y, Tensor s, Tensor mean, Tensor rstd)",
    residuals=("s", "weight", "mean", "rstd", "seed"),
    statistics=("mean", "rstd"),
    recomputable=True,
)
add_layer_norm_bwd_p = Primitive(
    "add_layer_norm_bwd",
    "(Tensor y_bar, Tensor? s_bar, Tensor s, Tensor? weight, Tensor mean, Tensor rstd, Tensor? seed, float p,"
    f" {schema_of(NormOptions)}, bool[] output_mask)"
    " -> (Tensor x_bar, Tensor residual_bar, Tensor weight_bar, Tensor bias_bar)",
    residuals=("y_bar", "s", "weight", "mean", "rstd", "seed"),
    cached=("mean", "rstd"),
    decomposable=True,
)
add_layer_norm_jvp_p = Primitive(
    "add_layer_norm_jvp",
    "(Tensor s, Tensor? weight, Tensor mean, Tensor rstd, Tensor? x_dot, Tensor? residual_dot, Tensor? weight_dot,"
    f" Tensor? bias_dot, Tensor? seed, float p, ScalarType y_dtype, {schema_of(NormOptions)})"
    " -> (Tensor y_dot, Tensor s_dot)",
    residuals=("s", "weight", "mean", "rstd", "weight_dot", "bias_dot", "seed", "s_dot"),
    cached=("mean", "rstd"),
    decomposable=True,
)
add_layer_norm_fwd_jvp_p = value_and_jvp(add_layer_norm_p, add_layer_norm_jvp_p)


def _in(dtype: torch.dtype, t: Any) -> Any:
    return None if t is None else t.to(dtype)


def _noisy(v: Tensor, seed: Tensor | None, p: float, batch_ndim: int) -> Tensor:
    return v if seed is None else dropout_p(v, seed, None, p, batch_ndim)


def _added(
    residual: Tensor | None, x: Tensor | None, seed: Tensor | None, p: float, batch_ndim: int, like: Tensor
) -> Tensor:
    """`residual + x * noise`, new and contiguous, in the dtype of `like`; what is None is zero."""
    acc = accumulation_dtype(like.dtype)
    terms = [] if residual is None else [residual.to(acc)]
    if x is not None:
        terms.append(_noisy(x.to(acc), seed, p, batch_ndim))
    if not terms:
        return like.new_zeros(like.shape)
    if len(terms) > 1:
        return (terms[0] + terms[1]).to(like.dtype).contiguous()
    return terms[0].to(like.dtype, copy=True, memory_format=torch.contiguous_format)


def _value(_: tuple, c: Any) -> tuple[Tensor, ...]:
    s, options = _added(c.residual, c.x, c.seed, c.p, c.batch_ndim, c.residual), options_of(c)
    if not c.rounded or s.dtype == c.y_dtype:
        y, mean, rstd = layer_norm_p(s, c.weight, c.bias, *options)
        return y.to(c.y_dtype), s, mean, rstd
    # Layer norm rounds x_hat to the dtype of s.
    norm = rows(s, NormOptions(*options))
    y = norm.scaled(norm.x_hat.to(c.y_dtype).to(norm.dtype), c.weight)
    y = y if c.bias is None else y + norm.param(c.bias)
    return y.to(c.y_dtype), s, norm.statistic(norm.mean), norm.statistic(norm.rstd)


def _cotangents(_: tuple, c: Any) -> tuple[Tensor, ...]:
    want_x, want_residual, *want_params = c.output_mask
    # In the dtype of sums, since what layer norm gives is added to before it is rounded.
    acc = accumulation_dtype(c.s.dtype)
    given = (c.y_bar.to(acc), c.s.to(acc), _in(acc, c.weight), c.mean, c.rstd)
    bar, *param_bars = layer_norm_bwd_p(*given, *options_of(c), (want_x or want_residual, *want_params))
    x_bar = residual_bar = empty_output(c.s)
    if want_residual:
        residual_bar = _added(c.s_bar, bar, None, c.p, c.batch_ndim, c.s)
    if want_x:
        bar = bar if c.s_bar is None else bar + c.s_bar.to(acc)
        x_bar = _added(None, bar, c.seed, c.p, c.batch_ndim, c.y_bar)
    dtype = acc if c.weight is None else c.weight.dtype
    pairs = zip(param_bars, want_params, strict=True)
    return x_bar, residual_bar, *(bar.to(dtype) if want else empty_output(c.s) for bar, want in pairs)


def _tangents(_: tuple, c: Any) -> tuple[Tensor, Tensor]:
    acc = accumulation_dtype(c.s.dtype)
    wide, params = c.s.to(acc), [_in(acc, param) for param in (c.weight, c.weight_dot, c.bias_dot)]
    moves = c.x_dot is not None or c.residual_dot is not None
    # The tangent of y takes that of s before it is rounded.
    dot = _added(c.residual_dot, c.x_dot, c.seed, c.p, c.batch_ndim, wide) if moves else None
    s_dot = c.s.new_zeros(c.s.shape) if dot is None else dot.to(c.s.dtype, copy=True)
    if not (moves or params[1:] != [None, None]):
        return c.s.new_zeros(c.s.shape, dtype=c.y_dtype), s_dot
    y_dot = layer_norm_jvp_p(wide, params[0], c.mean, c.rstd, dot, *params[1:], *options_of(c))
    return y_dot.to(c.y_dtype), s_dot


_of_sum = {add_layer_norm_p: _value, add_layer_norm_bwd_p: _cotangents, add_layer_norm_jvp_p: _tangents}
for _op, _formula in _of_sum.items():
    define(_op, _formula, lambda _: ())

# Triton's kernels; on the CPU those of layer norm and sums.
bind_family("norms.add_layer_norm", "add_layer_norm", *_of_sum, add_layer_norm_fwd_jvp_p)
_AXES = "x y s residual: *batch *rest *norm, weight bias: *batch *norm, mean rstd: *batch *rest, seed: *batch"
# The noise of an element follows from its place in the whole.
def_axes(lambda given: Axes(_AXES, "batch rest" if given["seed"] is None else ""), *_of_sum, add_layer_norm_fwd_jvp_p)
first_order(add_layer_norm_p, add_layer_norm_bwd_p, add_layer_norm_jvp_p)


@add_layer_norm_p.def_vjp
def _add_layer_norm_vjp(residuals: Any, cotangents: Any, output_mask: Any) -> dict[str, Tensor | None]:
    r, c = residuals, cotangents
    if c.y is None:
        return {"x": _noisy(c.s, r.seed, r.p, r.batch_ndim).to(r.y_dtype), "residual": c.s}
    # Without noise the two are one tensor.
    is_shared = output_mask.x and r.seed is None and r.y_dtype == r.s.dtype
    mask = (output_mask.x and not is_shared, output_mask.residual or is_shared, output_mask.weight, output_mask.bias)
    given = (c.y, c.s, r.s, r.weight, r.mean, r.rstd, r.seed, r.p)
    out = dict(zip(output_mask._fields, add_layer_norm_bwd_p(*given, *options_of(r), mask), strict=False))
    found = {**out, "x": out["residual"] if is_shared else out["x"]}
    return {name: bar for name, bar in found.items() if getattr(output_mask, name)}


# Second order. A tangent of s is what layer norm's rules take for one of x, and y_bar has the dtype of s there.


def _gradient(output_mask: Sequence[bool], c: Any) -> tuple[Tensor | None, ...]:
    """Of the pairing <y_bar, y_dot> + <s_bar, s_dot>, in what is named below."""
    want_y_bar, want_s_bar, *want_s, want_x_dot, want_residual_dot = output_mask[:6]
    noise, s_dot, s_dot_bar = (c.seed, c.p, c.batch_ndim), c.s_dot, c.s_bar
    if s_dot is None and (c.x_dot is not None or c.residual_dot is not None):
        s_dot = _added(c.residual_dot, c.x_dot, *noise, c.s)
    moves = want_x_dot or want_residual_dot
    mask = (want_y_bar, *want_s, moves, *output_mask[6:])
    out: list[Any] = [None] * len(mask)
    if c.y_bar is not None and any(mask):
        given = (_in(c.s.dtype, c.y_bar), c.s, c.weight, c.mean, c.rstd, s_dot, c.weight_dot, c.bias_dot)
        out = list(layer_norm_double_backward_p(*given, *options_of(c), mask))
        s_dot_bar = out[3] if s_dot_bar is None or not moves else s_dot_bar + out[3]
    x_dot_bar = None
    if want_x_dot and s_dot_bar is not None:
        x_dot_bar = _noisy(s_dot_bar, *noise).to(c.y_dtype)
    if c.y_bar is not None and want_y_bar:
        out[0] = out[0].to(c.y_bar.dtype)
    return out[0], s_dot if want_s_bar else None, *out[1:3], x_dot_bar, s_dot_bar, *out[4:]


def _bwd_jvp(output_mask: Sequence[bool], c: Any) -> tuple[Tensor, ...]:
    """Tangents of the cotangents of x, residual, weight and bias."""
    want_x, want_residual, *want_params = output_mask
    dots = (_in(c.s.dtype, c.y_bar_dot), c.s_dot, c.weight_dot)
    # The cotangent of s is added: where it alone moves, nothing else of the rows does.
    moves = c.s_bar_dot is None or any(dot is not None for dot in dots)
    mask = ((want_x or want_residual) and moves, *want_params)
    given = (_in(c.s.dtype, c.y_bar), c.s, c.weight, c.mean, c.rstd, *dots)
    bar_dot, *param_dots = layer_norm_bwd_jvp_p(*given, *options_of(c), mask)
    if c.s_bar_dot is not None:
        bar_dot = bar_dot + c.s_bar_dot if mask[0] else c.s_bar_dot
    x_bar_dot = residual_bar_dot = empty_output(c.s)
    if want_x:
        x_bar_dot = _noisy(bar_dot, c.seed, c.p, c.batch_ndim).to(c.y_bar.dtype)
    if want_residual:
        residual_bar_dot = bar_dot
    return x_bar_dot, residual_bar_dot, *param_dots


_EVERY = ("y_bar", "s_bar", "s", "weight", "x_dot", "residual_dot", "weight_dot", "bias_dot")
second_order(add_layer_norm_bwd_p, add_layer_norm_jvp_p, _bwd_jvp, _gradient, _EVERY)


@add_layer_norm_p.def_autocast("cuda")
def _add_layer_norm_autocast(primals: Any) -> Any:
    """As layer norm: all of it in float32."""
    primals = cast_to_float32(primals)
    return primals._replace(y_dtype=primals.x.dtype)
