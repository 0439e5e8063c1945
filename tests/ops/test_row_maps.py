"""Rules of a map that keeps x."""

import torch

from primitives.testing import check_rules
from tests.row_maps import unit_p
from tests.support import randn

EPS = 0.3


def test_the_rules_of_a_map_that_keeps_x_hold():
    x = randn(2, 3)
    torch.testing.assert_close(unit_p(x, 1, EPS)[0], x / (x.square() + EPS).sum(1, keepdim=True).sqrt())
    check_rules(unit_p, (x, 1, EPS), order=3, compile=False)
