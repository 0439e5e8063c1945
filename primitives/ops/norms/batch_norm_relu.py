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
from primitives.ops.norms.channels import ChannelOptions, contiguous_like
from primitives.ops.rules import accumulation_dtype, bind_family, derivatives, empty_output, schema_of, second_order


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


def _with_relu(norm: Primitive, bwd: Primitive, jvp: Primitive, launcher: str) -> list[Primitive]:
    """The operators of a norm with a residual and ReLU behind it, of training with one of value and tangent.

    Args:
        norm: The value of the norm.
        bwd: Its backward.
        jvp: Its jvp.
        launcher: What the names of their launchers in `primitives.kernels.batch_norm.batch_norm` begin with.
    """
    kept, is_training = bwd.spec.tensors[1:], bool(norm.spec.state)
    value = Primitive(
        norm.name.replace("batch_norm", "batch_norm_relu"),
        norm.spec.schema.replace("Tensor x,", "Tensor x, Tensor? residual,"),
        residuals=(*kept, "y"),
        statistics=norm.spec.statistics,
        state=norm.spec.state,
        recomputable=True,
    )
    wrt = " ".join(bwd.spec.outputs).replace("_bar", "").replace("x", "x residual")
    ops = [value, *derivatives(value, " ".join(["y", *kept]), wrt, schema_of(ChannelOptions), linear="residual")]
    forward_by = functools.partial(_forward_by, num_params=2 if is_training else 4)
    for op, of, by in zip(ops, (norm, bwd, jvp), (forward_by, _bwd_by, _jvp_by), strict=True):
        op.def_reference(by(of.rule("reference")))
        if "cpu" in of.rules.kernels:
            op.def_kernel("cpu")(by(of.rules.cpu))
    if is_training:
        ops.append(value_and_jvp(value, ops[2]))
    bind_family("batch_norm.batch_norm", launcher, *ops, relu=True)
    (def_axes_in_training if is_training else functools.partial(def_axes, AXES_IN_EVALUATION))(*ops)
    return ops


batch_norm_relu_p, batch_norm_relu_bwd_p, batch_norm_relu_jvp_p, batch_norm_relu_fwd_jvp_p = _with_relu(
    batch_norm_p, batch_norm_bwd_p, batch_norm_jvp_p, "batch_norm_train"
)
batch_norm_relu_eval_p, *_ = _with_relu(
    batch_norm_eval_p, batch_norm_eval_bwd_p, batch_norm_eval_jvp_p, "batch_norm_eval"
)


# Second order of training: the norm's operators of m * y_bar.


def _gradient(output_mask: Sequence[bool], c: Any) -> tuple[Tensor | None, ...]:
    """Of the pairing, in what is named below."""
    want_y_bar, want_x, want_weight, _, *want_dots = output_mask
    passed, dots = through(c.y, c.y_bar), (c.x_dot, c.weight_dot, c.bias_dot)
    moves = any(dot is not None for dot in dots)
    mask = (want_y_bar and moves, want_x and moves, want_weight and moves, *want_dots)
    found: list[Any] = [None] * len(mask)
    if any(mask):
        out = batch_norm_double_backward_p(passed, c.x, c.weight, c.mean, c.rstd, *dots, c.eps, c.batch_ndim, mask)
        found = [bar if want else None for bar, want in zip(out, mask, strict=True)]
    terms = [dot for dot in (found[0], c.residual_dot) if dot is not None and want_y_bar]
    y_bar_bar: Any = sum(terms[1:], terms[0]) if terms else None
    return None if y_bar_bar is None else through(c.y, y_bar_bar), *found[1:3], passed, *found[3:]


def _bwd_jvp(output_mask: Sequence[bool], c: Any) -> tuple[Tensor, ...]:
    """Tangents of the cotangents of x, residual, weight and bias."""
    want_x, want_residual, *want_params = output_mask
    passed, passed_dot = (None if v is None else through(c.y, v) for v in (c.y_bar, c.y_bar_dot))
    given = (passed, c.x, c.weight, c.mean, c.rstd, passed_dot, c.x_dot, c.weight_dot, c.eps, c.batch_ndim)
    x_bar_dot, *param_dots = batch_norm_bwd_jvp_p(*given, (want_x, *want_params))
    residual_bar_dot = empty_output(c.x)
    if want_residual:
        residual_bar_dot = torch.zeros_like(c.y_bar) if passed_dot is None else passed_dot
    return x_bar_dot, residual_bar_dot, *param_dots


_EVERY = ("y_bar", "x", "weight", "residual_dot", "x_dot", "weight_dot", "bias_dot")
second_order(batch_norm_relu_bwd_p, batch_norm_relu_jvp_p, _bwd_jvp, _gradient, _EVERY)
