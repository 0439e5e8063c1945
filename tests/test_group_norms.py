"""Beside the records of group norm and instance norm: layouts of results, state, mistakes."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import primitives as pr
from tests.support import data

functional = pr.functional


X, W, B = data(2, 4, 3, 2), data(4, seed=1), data(4, seed=2)
NORMS = {
    "group": lambda space, x, w, b: space.group_norm(x, 2, w, b),
    "instance": lambda space, x, w, b: space.instance_norm(x, None, None, w, b),
    "instance by running statistics": lambda space, x, w, b: space.instance_norm(x, B, W.exp(), w, b, False),
}


@pytest.mark.parametrize("norm", NORMS)
def test_results_have_the_layout_of_torchs_and_may_be_written(norm):
    for x in (X, X.contiguous(memory_format=torch.channels_last), X[:, :, :, :1], X.expand(2, 4, 3, 2).transpose(2, 3)):
        primals = tuple(v.clone().requires_grad_() for v in (x, W, B))
        results = [F.relu(NORMS[norm](space, *primals), inplace=True) for space in (functional, F)]
        # By running statistics it is batch norm, which keeps channels_last, as torch's batch norm does.
        assert_close(*results, check_stride="running" not in norm)
        assert_close(*[torch.autograd.grad(y.pow(2).sum(), primals) for y in results])


def test_samples_that_are_none_move_no_statistics():
    untouched = B.clone(), W.exp()
    functional.instance_norm(X[:0], *untouched)
    assert_close(untouched, (B, W.exp()), rtol=0, atol=0)
