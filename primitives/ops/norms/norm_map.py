"""The operators of all derivatives of a norm, made of its axes: `NormMap`, as `RowMap` makes those of a map of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from primitives._core import Primitive, value_and_jvp
from primitives.ops.rules import first_order, second_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from primitives.ops.norms.formulas import Norm

__all__ = ["NormMap", "norm_map"]

_NORM = "Tensor x, Tensor? weight, Tensor mean, Tensor rstd"
_DOTS = "Tensor? x_dot, Tensor? weight_dot, Tensor? bias_dot"
_BARS = "Tensor x_bar, Tensor weight_bar, Tensor bias_bar"


class NormMap(NamedTuple):
    """The primitives of the derivatives of a norm; formulas are in `formulas.py`.

    Attributes:
        bwd: Cotangents of x, weight and bias for y_bar.
        jvp: The tangent of y.
        fwd_jvp: Value and tangent.
        pairing: The gradient of <y_bar, y_dot> in all of it.
        bwd_jvp: The tangents of the cotangents.
    """

    bwd: Primitive
    jvp: Primitive
    fwd_jvp: Primitive
    pairing: Primitive
    bwd_jvp: Primitive


def norm_map(value: Primitive, options: str, norm: Callable[..., Norm]) -> NormMap:
    """The derivatives of the primitive `value`, which gets its rules, as do they; kernels and batching are yours.

    Args:
        value: `(Tensor x, Tensor? weight, Tensor? bias, ...) -> (Tensor y, Tensor mean, Tensor rstd, ...)`.
        options: Arguments of all derivatives that are not tensors, as the schema of `value` has them.
        norm: `(x, *options)`, the norm with its axes. It takes mean and rstd from x again, so that derivatives of the
            references reach it.
    """

    def made(suffix: str, schema: str, kept: str = "") -> Primitive:
        residuals = tuple(kept.split())
        return Primitive(
            f"{value.name}_{suffix}", schema, residuals=residuals, cached=("mean", "rstd"), decomposable=True
        )

    ops = NormMap(
        bwd=made("bwd", f"(Tensor y_bar, {_NORM}, {options}, bool[] wanted) -> ({_BARS})", "y_bar x weight mean rstd"),
        jvp=(
            jvp := made(
                "jvp",
                f"({_NORM}, {_DOTS}, {options}) -> Tensor y_dot",
                "x weight mean rstd x_dot weight_dot bias_dot",
            )
        ),
        fwd_jvp=value_and_jvp(value, jvp),
        pairing=made(
            "pairing",
            f"(Tensor y_bar, {_NORM}, {_DOTS}, {options}, bool[] wanted) -> (Tensor y_bar_bar, Tensor x_bar,"
            " Tensor weight_bar, Tensor x_dot_bar, Tensor weight_dot_bar, Tensor bias_dot_bar)",
        ),
        bwd_jvp=made(
            "bwd_jvp",
            f"(Tensor y_bar, {_NORM}, Tensor? y_bar_dot, Tensor? x_dot, Tensor? weight_dot, {options}, bool[] wanted)"
            " -> (Tensor x_bar_dot, Tensor weight_bar_dot, Tensor bias_bar_dot)",
        ),
    )

    @ops.bwd.def_reference
    def cotangents(y_bar: Tensor, x: Tensor, weight: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
        _, _, *given, wanted = args
        return norm(x, *given).bwd(y_bar, weight, wanted)

    @ops.jvp.def_reference
    def tangent(x: Tensor, weight: Tensor | None, *args: Any) -> Tensor:
        _, _, x_dot, weight_dot, bias_dot, *given = args
        of_x = norm(x, *given)
        return of_x.result(*of_x.jvp(weight, x_dot, weight_dot, bias_dot))

    @ops.pairing.def_reference
    def gradient(y_bar: Tensor, x: Tensor, weight: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
        _, _, x_dot, weight_dot, bias_dot, *given, wanted = args
        return norm(x, *given).pairing(y_bar, weight, x_dot, weight_dot, bias_dot, wanted)

    @ops.bwd_jvp.def_reference
    def tangents_of_cotangents(y_bar: Tensor, x: Tensor, weight: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
        _, _, y_bar_dot, x_dot, weight_dot, *given, wanted = args
        return norm(x, *given).bwd_jvp(y_bar, weight, y_bar_dot, x_dot, weight_dot, wanted)

    first_order(value, ops.bwd, ops.jvp)
    second_order(ops.bwd, ops.jvp, ops.bwd_jvp, ops.pairing)
    return ops
