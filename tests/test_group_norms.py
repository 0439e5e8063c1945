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


@pytest.mark.parametrize("norm", NORMS)
def test_parameters_of_each_sample_of_vmap(norm):
    stacked = [torch.stack([v, 2 * v]) for v in (X, W, B)]
    f = torch.func.grad(lambda *values: NORMS[norm](functional, *values).pow(3).sum(), (0, 1, 2))
    for axes in ((0, 0, 0), (None, 0, None), (0, None, None)):
        given = [v if axis is None else s for v, s, axis in zip((X, W, B), stacked, axes, strict=True)]
        one_by_one = [f(*(v if axis is None else v[i] for v, axis in zip(given, axes, strict=True))) for i in range(2)]
        assert_close(torch.vmap(f, axes)(*given), tuple(map(torch.stack, zip(*one_by_one, strict=True))))


def test_running_statistics_move_as_torchs_do():
    states = [(B.clone(), W.exp()) for _ in range(2)]
    for (mean, var), space in zip(states, (functional, F), strict=True):
        space.instance_norm(X, mean, var, momentum=0.3)
    assert_close(*states)
    untouched = B.clone(), W.exp()
    functional.instance_norm(X[:0], *untouched)
    assert_close(untouched, (B, W.exp()), rtol=0, atol=0)


MISTAKES = {
    "one axis": (lambda: functional.group_norm(W, 2), pr.ShapeError, "group_norm: input must have at least 2 axes"),
    "groups": (
        lambda: functional.group_norm(X, 3),
        pr.ShapeError,
        "group_norm: num_groups must be positive and divide",
    ),
    "no int": (lambda: functional.group_norm(X, 2.0), pr.DtypeError, "group_norm: num_groups must be an int"),
    "weight": (lambda: functional.group_norm(X, 2, W[:2]), pr.ShapeError, r"group_norm: weight must have shape \[4\]"),
    "one value": (lambda: functional.group_norm(X[:1, :, 0, 0], 4), pr.ShapeError, "group_norm: input must have more"),
    "activation": (lambda: functional.group_norm(X, 2, activation="relu"), ValueError, "group_norm: activation must"),
    "one position": (lambda: functional.instance_norm(X[..., :1, :1]), pr.ShapeError, "instance_norm: input must have"),
    "one statistic": (
        lambda: functional.instance_norm(X, B),
        pr.ShapeError,
        "instance_norm: running_mean and running_var",
    ),
    "eps": (lambda: functional.instance_norm(X, eps=0.0), ValueError, "instance_norm: eps must be positive"),
    "momentum": (lambda: functional.instance_norm(X, momentum="1"), pr.DtypeError, "instance_norm: momentum must"),
    "integers": (lambda: functional.instance_norm(X.long()), pr.DtypeError, "instance_norm: input must have dtype"),
}


@pytest.mark.parametrize("call, error, text", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(call, error, text):
    with pytest.raises(error, match=f"^{text}"):
        call()
