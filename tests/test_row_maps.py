"""A map that keeps x and a statistic of it, made of formulas alone: no operation of the package is of that kind."""

from __future__ import annotations

import pytest
import torch

from primitives._core import Primitive
from primitives._ops._row_maps import RowMap
from tests.support import assert_close, nested

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


UNIT = RowMap(unit_p, "x", "int dim", _map, second_order=(_along_x, _along_x), counter="dim")


@pytest.mark.parametrize("word", ["f", "r", "ff", "fr", "rf", "rr", "frf"])
def test_derivatives_of_a_map_that_keeps_x(word):
    x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # Behind another function, so that the tangents of tangents move.
    ours = nested(lambda x: unit_p(x.sin(), 1)[0], word, 0)(x)
    true = nested(lambda x: x.sin() / x.sin().norm(dim=1, keepdim=True), word, 0)(x)
    assert_close(ours, true, order=len(word), what=word)


def test_a_batch_is_one_more_axis():
    v, *x = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    bwd = UNIT.ops["bwd"]
    given = torch.stack(x), torch.stack([each.norm(dim=0) for each in x])
    each = [bwd(v, *sample, 0) for sample in zip(*given, strict=True)]
    torch.testing.assert_close(torch.vmap(lambda x, norm: bwd(v, x, norm, 0))(*given), torch.stack(each))
