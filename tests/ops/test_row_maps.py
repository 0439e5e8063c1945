"""Derivatives of a map that keeps x, by its formulas."""

import pytest
import torch

from tests.row_maps import UNIT, unit_p
from tests.support import assert_close, nested

EPS = 0.3


@pytest.mark.parametrize("word", ["f", "r", "ff", "fr", "rf", "rr", "frf"])
def test_derivatives_of_a_map_that_keeps_x(word):
    x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # Behind another function, so that the tangents of tangents move.
    ours = nested(lambda x: unit_p(x.sin(), 1, EPS)[0], word, 0)(x)
    true = nested(lambda x: x.sin() / (x.sin().square() + EPS).sum(1, keepdim=True).sqrt(), word, 0)(x)
    assert_close(ours, true, order=len(word), what=word)


def test_a_batch_is_one_more_axis():
    v, *x = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    bwd = UNIT.ops["bwd"]
    given = torch.stack(x), torch.stack([each.square().sum(0) for each in x])
    each = [bwd(v, *sample, 0, 0.0) for sample in zip(*given, strict=True)]
    torch.testing.assert_close(torch.vmap(lambda x, square: bwd(v, x, square, 0, 0.0))(*given), torch.stack(each))
