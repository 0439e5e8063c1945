"""A map by a statistic of its rows, made of two functions: no operation of the package is of that kind."""

from typing import Any

from primitives.ops.by_statistic import map_by_statistic, power, where


def summand(x: Any, eps: Any) -> tuple[Any, ...]:
    return x * x + eps, 2.0 * x, 2.0


def value(x: Any, square: Any, eps: Any) -> tuple[Any, ...]:
    some = where(square == 0.0, 1.0, square)
    scale = where(square == 0.0, 0.0, power(some, -0.5))
    slope = -0.5 * scale / some
    return x * scale, scale, x * slope, 0.0, slope, -1.5 / some


# x over its norm, of which a small number is part for each column; a row of zeros is 0.
UNIT = map_by_statistic("unit", "int dim, float eps", summand, value, namespace="row_maps")
unit_p = UNIT.ops["fwd"]
