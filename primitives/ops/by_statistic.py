"""A map by a statistic of its rows, with all derivatives and kernels, from two functions of numbers.

`kernels.rows.by_statistic` has the formulas, whose names are used here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from primitives._core import Primitive, triton_kernels_module
from primitives.ops.row_maps import RowMap
from primitives.ops.rules import accumulation_dtype


def map_by_statistic(
    name: str, options: str, summand: Callable[..., Any], value: Callable[..., Any], *, namespace: str = "primitives"
) -> RowMap:
    """The map `y = value(x, t)`, where t is the sum of `summand(x)` along an axis; it keeps x and t.

    The operator is `ops["fwd"]` of the result, `(x, dim, *numbers)` to y and t, which has no derivative.

    Args:
        name: Of the map.
        options: `"int dim"`, and the numbers that the map takes beside it, as in a schema.
        summand: `(x, *numbers)` to t and its derivatives t_x and t_xx. It and `value` are compiled by Triton too: they
            compute by operators, by methods that tensors of both share, as `x.abs()` and `x.exp()`, and by `power` and
            `where`. Generic tests draw no zeros: give a case to what they return there, and for rows of zeros.
        value: `(x, t, *numbers)` to y, y_x, y_t, y_xx, y_xt and `y_tt / y_t`, which must be the same for all x of a
            row. The name of its second argument is that of t.
        namespace: Of the operators.
    """
    statistic, numbers = [*inspect.signature(value).parameters][1], [o.split()[-1] for o in options.split(", ")[1:]]
    op = Primitive(
        name,
        f"(Tensor x, {options}) -> (Tensor y, Tensor {statistic})",
        residuals=("x", statistic),
        statistics=(statistic,),
        recomputable=True,
        namespace=namespace,
    )

    def parts(x: Tensor, dim: int, *given: float) -> tuple[Any, Any, Tensor]:
        # As tensors, because torch casts the tangent of a tensor times a number wrongly (pytorch#160508).
        constants = [x.new_full((), number) for number in given]
        of_summand = summand(x, *constants)
        total = of_summand[0].sum(dim, keepdim=True)
        return of_summand, value(x, total, *constants), total

    @op.def_reference
    def reference(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        _, y, total = parts(x.contiguous().to(accumulation_dtype(x.dtype)), *args)
        return y[0].to(x.dtype), total.squeeze(args[0])

    def bwd(y_bar: Tensor, x: Tensor, *args: Any) -> Tensor:
        t, y, _ = parts(x, *args)
        return y[1] * y_bar + t[1] * (y[2] * y_bar).sum(args[0], keepdim=True)

    def jvp(x_dot: Tensor, x: Tensor, *args: Any) -> Tensor:
        t, y, _ = parts(x, *args)
        return y[1] * x_dot + y[2] * (t[1] * x_dot).sum(args[0], keepdim=True)

    def along_x(a: Tensor, x: Tensor, v: Tensor, *args: Any) -> Tensor:
        t, y, _ = parts(x, *args)
        b, c, e = (term.sum(args[0], keepdim=True) for term in (y[2] * a, t[1] * v, y[4] * a * v))
        return a * (y[3] * v + y[4] * c) + t[2] * v * b + t[1] * (e + y[5] * b * c)

    @functools.cache
    def launchers() -> Any:
        make = triton_kernels_module("rows.by_statistic").map_by_statistic
        made = make(name, summand, value, statistic, numbers).launchers()
        return SimpleNamespace(**{launcher.__name__: launcher for launcher in made})

    return RowMap(op, "x", options, bwd, jvp, (along_x, along_x), launchers=launchers)


def power(base: Tensor, exponent: Any) -> Tensor:
    """`base ** exponent` of a base that is not negative."""
    return base.pow(exponent)


def where(condition: Tensor, one: Any, other: Any) -> Tensor:
    """`one` where the condition holds, else `other`; at least one of them is a tensor."""
    return torch.where(condition, one, other)
