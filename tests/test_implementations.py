"""What implementations of an operator may return, by whichever way they are called."""

from __future__ import annotations

import itertools

import pytest
import torch

import primitives as pr
from primitives.core import Primitive

X = torch.tensor([1.0, 2.0])
SCHEMAS = {
    "one": ("(Tensor x) -> Tensor y", "a tensor"),
    "two": ("(Tensor x) -> (Tensor y, Tensor z)", "a tuple of 2 tensors"),
    "list": ("(Tensor x) -> Tensor[] ys", "a list of tensors"),
    "none": ("(Tensor x) -> ()", "a tuple of 0 tensors"),
}
WRONG = {
    "one": [None, 3, (X.clone(),), [X.clone()], (X.clone(), X.clone())],
    "two": [None, X.clone(), (X.clone(),), (X.clone(), 1.0), [X.clone()] * 3],
    "list": [None, X.clone(), [None], [X.clone(), 1.0]],
    "none": [X.clone(), 3],
}


numbers = itertools.count()


def define(schema, *, rules):
    op = Primitive(f"op{next(numbers)}", schema, namespace="primitives_test_implementations")
    for kind, rule in rules.items():
        getattr(op, f"def_{kind}")(rule)
    return op


def operator(schema, function):
    return define(SCHEMAS[schema][0], rules={"reference": function})


@pytest.mark.parametrize("schema, wrong", [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_outputs_raise(schema, wrong):
    op = operator(schema, lambda x: wrong)
    for call in (op, op.overload):
        with pytest.raises(TypeError, match=f"an implementation must return {SCHEMAS[schema][1]}, got "):
            call(X)


@pytest.mark.parametrize("x", [X, X.clone().requires_grad_()], ids=["plain", "recorded"])
def test_outputs_come_as_the_schema_says(x):
    """A list for a tuple and a tuple for a list are converted, and nothing is detached by that."""
    rules = {"reference": lambda x: [x * 2, x * 3], "vjp": lambda r, bars, wanted: {"x": 2 * bars.y + 3 * bars.z}}
    two = define(SCHEMAS["two"][0], rules=rules)(x)
    assert type(two) is tuple
    assert [y.tolist() for y in two] == [[2.0, 4.0], [3.0, 6.0]]
    assert [y.requires_grad for y in two] == [x.requires_grad] * 2
    if x.requires_grad:
        assert torch.autograd.grad(two[0].sum() + two[1].sum(), x)[0].tolist() == [5.0, 5.0]
    kept = [X * 2]
    for returned in (kept, tuple(kept)):
        op = operator("list", lambda x, returned=returned: returned)
        ys = op(X)
        assert type(ys) is list
        assert ys is not kept


def test_what_returns_nothing_runs_once():
    seen = []
    op = operator("none", seen.append)
    assert op(X) is None
    assert len(seen) == 1
    op.def_kernel("cpu")(lambda x: None)
    assert op(X) is None
    assert len(seen) == 1
    with pytest.raises(TypeError, match="got None"):
        operator("one", seen.append)(X)
    assert len(seen) == 2


def test_a_kernel_that_returns_none_leaves_the_call_to_the_reference():
    calls = []
    op = operator("one", lambda x: (calls.append("reference"), x * 2)[1])
    op.def_kernel("cpu")(lambda x: calls.append("kernel"))
    assert op(X).tolist() == [2.0, 4.0]
    assert calls == ["kernel", "reference"]
    with pr.use_backend("reference"):
        op(X)
    assert calls == ["kernel", "reference", "reference"]


def test_the_list_of_the_caller_is_not_the_kernels():
    op = define("(Tensor[] xs, float s) -> Tensor y", rules={"reference": lambda xs, s: xs.pop() * s})
    xs = [X, X]
    op(xs, 2.0)
    assert len(xs) == 2


def test_keywords_of_the_schema_are_no_positions():
    op = define("(Tensor x, *, float s) -> Tensor y", rules={"reference": lambda x, s: x * s})
    with pytest.raises(RuntimeError):
        op(X, 2.0)
