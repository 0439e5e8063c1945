"""A map by a statistic of its rows, made of two functions: no operation of the package is of that kind."""

from typing import Any

from primitives.ops.by_statistic import map_by_statistic, power


def summand(x: Any, eps: Any) -> tuple[Any, ...]:
    return x * x + eps, 2.0 * x, 2.0


def value(x: Any, square: Any, eps: Any) -> tuple[Any, ...]:
    scale = power(square, -0.5)
    slope = -0.5 * scale / square
    return x * scale, scale, x * slope, 0.0, slope, -1.5 / square


# x over its norm, of which a small number is part for each column.
UNIT = map_by_statistic("unit", "int dim, float eps", summand, value, namespace="row_maps")
unit_p = UNIT.ops["fwd"]
