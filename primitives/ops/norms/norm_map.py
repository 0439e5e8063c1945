"""The operators of all derivatives of a norm, made of its axes: `NormMap`, as `RowMap` makes those of a map of rows."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from primitives._core import Primitive, value_and_jvp
from primitives.ops.norms.aten import is_well_conditioned
from primitives.ops.norms.formulas import Norm
from primitives.ops.rules import define, derivatives, schema_of, second_order


class NormMap(NamedTuple):
    """The primitives of the derivatives of a norm; formulas are in `formulas.py`.

    Attributes:
        bwd: Cotangents of x, weight and bias for y_bar.
        jvp: The tangent of y.
        fwd_jvp: Value and tangent.
        double_backward: The gradient of <y_bar, y_dot> in all of it.
        bwd_jvp: The tangents of the cotangents.
    """

    bwd: Primitive
    jvp: Primitive
    fwd_jvp: Primitive
    double_backward: Primitive
    bwd_jvp: Primitive


def norm_map(value: Primitive, options: type, norm: Callable[..., Norm]) -> NormMap:
    """The derivatives of the primitive `value`, which gets its rules, as do they; kernels and batching are yours.

    Args:
        value: `(Tensor x, Tensor? weight, Tensor? bias, ...) -> (Tensor y, Tensor mean, Tensor rstd, ...)`.
        options: The named tuple of their other arguments.
        norm: `(x, options)`, the norm with its axes. It takes mean and rstd from x again, so that derivatives of the
            references reach it.
    """
    arguments = schema_of(options)
    bwd, jvp, bwd_jvp = derivatives(value, "x weight mean rstd", "x weight bias", arguments, second="x weight")
    double_backward = Primitive(
        f"{value.name}_double_backward",
        f"(Tensor y_bar, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, Tensor? x_dot, Tensor? weight_dot,"
        f" Tensor? bias_dot, {arguments}, bool[] output_mask) -> (Tensor y_bar_bar, Tensor x_bar, Tensor weight_bar,"
        " Tensor x_dot_bar, Tensor weight_dot_bar, Tensor bias_dot_bar)",
        cached=("mean", "rstd"),
        decomposable=True,
    )
    ops = NormMap(bwd, jvp, value_and_jvp(value, jvp), double_backward, bwd_jvp)
    get = attrgetter(*options.__annotations__)
    every = attrgetter("y_bar", "weight", "x_dot", "weight_dot", "bias_dot", "output_mask")

    def on_cpu(call: Any) -> Norm | None:
        if call.x.numel() == 0 or not is_well_conditioned(call.mean, call.rstd):
            return None
        return norm(call.x, options(*get(call)), statistics=(call.mean, call.rstd))

    def defined(op: Primitive, formula: Callable[[Norm, Any], Any]) -> None:
        define(op, formula, lambda call: norm(call.x, options(*get(call))), on_cpu)

    defined(ops.bwd, lambda of, c: of.bwd(c.y_bar, c.weight, c.output_mask))
    defined(ops.jvp, lambda of, c: of.result(*of.jvp(c.weight, c.x_dot, c.weight_dot, c.bias_dot)))
    defined(ops.double_backward, lambda of, c: of.double_backward(*every(c)))
    defined(ops.bwd_jvp, lambda of, c: of.bwd_jvp(c.y_bar, c.weight, c.y_bar_dot, c.x_dot, c.weight_dot, c.output_mask))
    second_order(ops.bwd, ops.jvp, ops.bwd_jvp, ops.double_backward)
    return ops
