"""A map that keeps x and a statistic of it, made of formulas alone: no operation of the package is of that kind."""

from primitives._core import Primitive
from primitives.ops.row_maps import RowMap

unit_p = Primitive(
    "unit",
    "(Tensor x, int dim) -> (Tensor y, Tensor norm)",
    residuals=("x", "norm"),
    statistics=("norm",),
    namespace="row_maps",
)


@unit_p.def_reference
def _unit_reference(x, dim):
    norm = x.square().sum(dim, keepdim=True).sqrt()
    return x / norm, norm.squeeze(dim)


def _map(v, x, dim):
    n = x.square().sum(dim, keepdim=True).sqrt()
    return v / n - x * (x * v).sum(dim, keepdim=True) / n**3


def _along_x(y_bar, x, x_dot, dim):
    n2, a, b, c = (v.sum(dim, keepdim=True) for v in (x * x, x * y_bar, x * x_dot, y_bar * x_dot))
    return (x * (3 * a * b / n2 - c) - y_bar * b - x_dot * a) / n2**1.5


UNIT = RowMap(unit_p, "x", "int dim", _map, second_order=(_along_x, _along_x))
