r"""Batch norm, a residual and ReLU: the end of a block of a ResNet.

With the norm z of `batch_norm.py`, or in evaluation of `batch_norm_eval.py`,

    y = max(z + residual, 0)

Write m for the mask that is 1 where y > 0 (and where y is NaN, as in torch). It is constant, so the rules are those of
the norm behind or before it:

    jvp   y_dot = m * (z_dot + residual_dot)
    vjp   residual_bar = m * y_bar, and of x and the parameters what the norm's vjp makes of that

and derivatives of second order are the norm's operators of m * y_bar and of the tangents. Evaluation, and third order,
differentiate the references.

Shapes are those of the norm; the residual has that of x, and may have another dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from primitives._core import Primitive, value_and_jvp
from primitives.ops.axes import def_axes
from primitives.ops.norms.batch_norm import (
    batch_norm_bwd_jvp_p,
    batch_norm_bwd_p,
    batch_norm_double_backward_p,
    batch_norm_jvp_p,
    batch_norm_p,
    def_axes_in_training,
)
from primitives.ops.norms.batch_norm_eval import (
    AXES_IN_EVALUATION,
    batch_norm_eval_bwd_p,
    batch_norm_eval_jvp_p,
    batch_norm_eval_p,
)
from primitives.ops.norms.channels import contiguous_like
from primitives.ops.rules import accumulation_dtype, bind_family, empty_output, first_order, second_order


def through(y: Tensor, v: Tensor) -> Tensor:
    """The part of v that passes the ReLU: m * v."""
    return torch.ops.aten.threshold_backward(v, y, 0)


# References, made of the norm's, and kernels for the CPU, made of what the norm runs there.


def _wide(values: Sequence[Tensor | None], added: Tensor | None) -> list[Any]:
    """Values in the dtype of sums where something is still to be added before the result is rounded."""
    return [v if v is None or added is None else v.to(accumulation_dtype(v.dtype)) for v in values]


def _forward_by(norm: Callable[..., Any], num_params: int) -> Callable[..., Any]:
    """The forward on a norm whose first `num_params` arguments behind x are per channel, and no state."""

    def forward(x: Tensor, residual: Tensor | None, *args: Any) -> Any:
        out = norm(*_wide((x, *args[:num_params]), residual), *args[num_params:])
        y, *others = out if isinstance(out, tuple) else (out,)
        y = y if residual is None else y + residual
        (_, _, *running), batch_ndim = args[:4], args[-1]
        y = contiguous_like(y.relu().to(x.dtype), x, batch_ndim)
        # Of running statistics that there are not, a stand-in has the dtype of x.
        others[2:] = [empty_output(x) if old is None else new for old, new in zip(running, others[2:], strict=False)]
        return (y, *others) if others else y

    return forward


def _bwd_by(norm: Callable[..., Any]) -> Callable[..., Any]:
    """The backward on that of a norm."""

    def bwd(y_bar: Tensor, y: Tensor, x: Tensor, *args: Any) -> Any:
        *given, (want_x, want_residual, *want_params) = args
        passed, batch_ndim = through(y, y_bar), given[-1]
        out = norm(passed, x, *given, (want_x, *want_params))
        residual_bar = contiguous_like(passed.to(x.dtype), x, batch_ndim) if want_residual else empty_output(x)
        return (out[0], residual_bar, *out[1:])

    return bwd


def _jvp_by(norm: Callable[..., Any]) -> Callable[..., Any]:
    """The jvp on that of a norm."""

    def jvp(y: Tensor, x: Tensor, *args: Any) -> Any:
        weight, mean, scale, x_dot, residual_dot, *param_dots, eps, batch_ndim = args
        y_dot = residual_dot
        if any(dot is not None for dot in (x_dot, *param_dots)):
            y_dot = norm(*_wide((x, weight, mean, scale, x_dot, *param_dots), residual_dot), eps, batch_ndim)
            y_dot = y_dot if residual_dot is None else y_dot + residual_dot
        return contiguous_like(through(y, y_dot).to(x.dtype), x, batch_ndim)

    return jvp


def _with_relu(
    norm: Primitive, bwd: Primitive, jvp: Primitive, kept: Sequence[str], launcher: str
) -> tuple[Primitive, Primitive, Primitive, Primitive | None]:
    """The operators of a norm with a residual and ReLU behind it; the last, of training alone, is value and tangent.

    Args:
        norm: The value of the norm.
        bwd: Its backward.
        jvp: Its jvp.
        kept: What these take beside cotangents and tangents.
        launcher: What the names of their launchers in `primitives.kernels.batch_norm.batch_norm` begin with.
    """
    name, is_training = norm.name.replace("batch_norm", "batch_norm_relu"), bool(norm.spec.state)
    cached: dict[str, Any] = {"cached": kept[2:]} if is_training else {}
    value = Primitive(
        name,
        norm.spec.schema.replace("Tensor x,", "Tensor x, Tensor? residual,"),
        residuals=(*kept, "y"),
        statistics=norm.spec.statistics,
        state=norm.spec.state,
        recomputable=True,
    )
    value_bwd = Primitive(
        f"{name}_bwd",
        bwd.spec.schema.replace("Tensor x,", "Tensor y, Tensor x,").replace("x_bar,", "x_bar, Tensor residual_bar,"),
        residuals=("y_bar", "y", *kept) if is_training else (),
        decomposable=True,
        **cached,
    )
    value_jvp = Primitive(
        f"{name}_jvp",
        jvp.spec.schema.replace("Tensor x,", "Tensor y, Tensor x,").replace("x_dot,", "x_dot, Tensor? residual_dot,"),
        residuals=("y", *kept, "x_dot", "weight_dot", "bias_dot") if is_training else (),
        decomposable=True,
        **cached,
    )
    both = value_and_jvp(value, value_jvp) if is_training else None
    num_params = 2 if is_training else 4
    for op, of, by in (
        (value, norm, functools.partial(_forward_by, num_params=num_params)),
        (value_bwd, bwd, _bwd_by),
        (value_jvp, jvp, _jvp_by),
    ):
        op.def_reference(by(of.rule("reference")))
        if "cpu" in of.rules.kernels:
            op.def_kernel("cpu")(by(of.rules.cpu))
    with_tangent = [] if both is None else [both]
    bind_family("batch_norm.batch_norm", launcher, value, value_bwd, value_jvp, *with_tangent, relu=True)
    first_order(value, value_bwd, value_jvp)
    def_family_axes = def_axes_in_training if is_training else functools.partial(def_axes, AXES_IN_EVALUATION)
    def_family_axes(value, value_bwd, value_jvp, *with_tangent)
    return value, value_bwd, value_jvp, both


batch_norm_relu_p, batch_norm_relu_bwd_p, batch_norm_relu_jvp_p, batch_norm_relu_fwd_jvp_p = _with_relu(
    batch_norm_p, batch_norm_bwd_p, batch_norm_jvp_p, ("x", "weight", "mean", "rstd"), "batch_norm_train"
)
batch_norm_relu_eval_p, *_ = _with_relu(
    batch_norm_eval_p,
    batch_norm_eval_bwd_p,
    batch_norm_eval_jvp_p,
    ("x", "weight", "running_mean", "running_var"),
    "batch_norm_eval",
)


# Second order of training: the norm's operators of m * y_bar.


def _gradient(output_mask: Sequence[bool], value: Callable[[str], Any]) -> tuple[Tensor | None, ...]:
    """Of the pairing, in what is named below."""
    want_y_bar, want_x, want_weight, _, *want_dots = output_mask
    y, passed = value("y"), through(value("y"), value("y_bar"))
    dots = [value(name) for name in ("x_dot", "weight_dot", "bias_dot")]
    moves = any(dot is not None for dot in dots)
    mask = (want_y_bar and moves, want_x and moves, want_weight and moves, *want_dots)
    found: list[Any] = [None] * len(mask)
    if any(mask):
        given = (*map(value, ("x", "weight", "mean", "rstd")), *dots, value("eps"), value("batch_ndim"), mask)
        out = batch_norm_double_backward_p(passed, *given)
        found = [bar if want else None for bar, want in zip(out, mask, strict=True)]
    terms = [dot for dot in (found[0], value("residual_dot")) if dot is not None and want_y_bar]
    y_bar_bar: Any = sum(terms[1:], terms[0]) if terms else None
    return None if y_bar_bar is None else through(y, y_bar_bar), *found[1:3], passed, *found[3:]


def _bwd_jvp(output_mask: Sequence[bool], value: Callable[[str], Any]) -> tuple[Tensor, ...]:
    """Tangents of the cotangents of x, residual, weight and bias."""
    want_x, want_residual, *want_params = output_mask
    passed, passed_dot = (None if v is None else through(value("y"), v) for v in map(value, ("y_bar", "y_bar_dot")))
    given = (*map(value, ("x", "weight", "mean", "rstd")), passed_dot, *map(value, ("x_dot", "weight_dot")))
    options = value("eps"), value("batch_ndim"), (want_x, *want_params)
    x_bar_dot, *param_dots = batch_norm_bwd_jvp_p(passed, *given, *options)
    residual_bar_dot = empty_output(value("x"))
    if want_residual:
        residual_bar_dot = torch.zeros_like(value("y_bar")) if passed_dot is None else passed_dot
    return x_bar_dot, residual_bar_dot, *param_dots


_EVERY = ("y_bar", "x", "weight", "residual_dot", "x_dot", "weight_dot", "bias_dot")
second_order(batch_norm_relu_bwd_p, batch_norm_relu_jvp_p, _bwd_jvp, _gradient, _EVERY)
