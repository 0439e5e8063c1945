"""primitives.autograd: backward and grad over pytrees, against torch.autograd on flat tensors."""

import contextlib
import re
from typing import NamedTuple

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

import primitives as pr
from primitives import autograd
from tests.func.func_trees import NAMESPACE, Affine, assert_leaves, nested_tensors, structure
from tests.support import assert_raises


class Losses(NamedTuple):
    fit: torch.Tensor
    rest: dict


@pytest.fixture(name="params")
def _params():
    torch.manual_seed(0)
    leaves = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    return {"affine": Affine(leaves[0], leaves[1]), "list": [leaves[2], None]}


def tensors(params):
    return params["affine"].w, params["affine"].b, params["list"][0]


def outputs(params):
    w, b, scale = tensors(params)
    return Losses((w * b).sin().sum(), {"vector": w**2 * scale, "none": None})


COTANGENTS = Losses(None, {"vector": torch.arange(3, dtype=torch.float64), "none": None})


def flat_gradient(params):
    fit, rest = outputs(params)
    return torch.autograd.grad([fit, rest["vector"]], tensors(params), [None, COTANGENTS.rest["vector"]])


def test_grad_has_the_structure_of_inputs(params):
    gradient = autograd.grad(outputs(params), params, COTANGENTS, namespace=NAMESPACE)
    assert structure(gradient) == structure(params)
    assert_leaves(gradient, flat_gradient(params))
    assert all(p.grad is None for p in tensors(params))


def test_a_bare_input_gives_a_tuple_as_in_torch():
    x = torch.ones(2, 3, requires_grad=True)
    for inputs in (x, edge(x)):
        (gradient,) = autograd.grad((x**3).sum(), inputs)
        assert gradient.equal(torch.full((2, 3), 3.0))


def test_backward_accumulates_into_the_leaves_or_into_inputs_alone(params):
    w, b, scale = tensors(params)
    expected = flat_gradient(params)
    for times in (1, 2):
        autograd.backward(outputs(params), COTANGENTS, namespace=NAMESPACE)
        assert_leaves([w.grad, b.grad, scale.grad], [times * g for g in expected])
    autograd.backward(outputs(params), COTANGENTS, inputs={"some": [w], "last": scale}, namespace=NAMESPACE)
    assert_leaves([w.grad, b.grad, scale.grad], [3 * expected[0], 2 * expected[1], 3 * expected[2]])


def test_retain_graph_defaults_to_create_graph():
    x = torch.tensor(2.0, requires_grad=True)
    for retain, create in ((None, False), (True, False), (None, True), (False, True)):
        y = x**3
        assert autograd.grad(y, {"x": x}, None, retain, create)["x"].requires_grad is create
        freed = not (create if retain is None else retain)
        with pytest.raises(RuntimeError, match="second time") if freed else contextlib.nullcontext():
            autograd.backward({"y": y}, None, None, False, inputs={"x": x})


@pytest.mark.parametrize("shape", [(2,), ()])
def test_unused_inputs(shape):
    x, y = (torch.ones(shape, requires_grad=True) for _ in range(2))
    inputs = {"used": x, "unused": [y]}
    for options in ({}, {"allow_unused": False}):
        with pytest.raises(RuntimeError, match=re.escape("inputs['unused'][0] is not")):
            autograd.grad(x.sum(), inputs, **options)
    with pytest.raises(pr.LeafError, match=re.escape("Call requires_grad_()")):
        autograd.grad(x.detach().sum(), inputs)
    assert autograd.grad(x.sum(), inputs, allow_unused=True)["unused"] == [None]
    for options in ({}, {"allow_unused": True}):
        zeros = autograd.grad(x.sum(), inputs, materialize_grads=True, **options)["unused"][0]
        torch.testing.assert_close(zeros, torch.zeros(shape))
    batch = autograd.grad(x.sum(), inputs, torch.ones(3), is_grads_batched=True, materialize_grads=True)["unused"][0]
    batch[0] += 1
    assert batch.sum() == y.numel(), "the zeros of a batch share no memory"
    assert autograd.grad(x.sum(), inputs, materialize_grads=True, create_graph=True)["unused"][0].requires_grad


def test_batched_gradients(params):
    w, _, scale = tensors(params)
    eye = torch.eye(3, dtype=torch.float64)
    outputs = {"y": w**2 * scale, "z": w.sum()}
    expected = torch.diag(2 * w * scale).detach(), torch.zeros_like(eye), torch.diag(w**2).detach()
    options = {"is_grads_batched": True, "retain_graph": True, "namespace": NAMESPACE}
    for size in (3, 0):
        batch = {"y": eye[:size], "z": torch.zeros_like(eye[:size, 0])}
        result = autograd.grad(outputs, params, batch, materialize_grads=True, **options)
        assert_leaves(result, [rows[:size] for rows in expected])
        assert autograd.grad(outputs, params, batch, allow_unused=True, **options)["affine"].b is None
    edge = get_gradient_edge(outputs["y"])
    assert autograd.grad(edge, w, eye[:0], create_graph=True, **options)[0].requires_grad


def test_gradient_edges():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    middle = x**2
    outputs = {"sum": middle.sum() * 3, "edge": get_gradient_edge(middle * 5)}
    grad_outputs = {"sum": None, "edge": torch.tensor([1.0, 10.0])}
    inputs = {"middle": get_gradient_edge(middle), "leaf": (x, get_gradient_edge(x))}
    expected = torch.tensor([8.0, 53.0])
    result = autograd.grad(outputs, inputs, grad_outputs, retain_graph=True)
    torch.testing.assert_close(result, {"middle": expected, "leaf": (2 * x.detach() * expected,) * 2})
    autograd.backward(outputs, grad_outputs, retain_graph=True, inputs=[get_gradient_edge(x)])
    torch.testing.assert_close(x.grad, 2 * x.detach() * expected)


def test_nested_tensors():
    for leaf in nested_tensors(torch.ones(2), torch.full((3,), 2.0)):
        x = leaf.requires_grad_()
        y = x * x
        (gradient,) = autograd.grad({"y": y}, [x], {"y": torch.ones_like(y)}, retain_graph=True)
        autograd.backward([y], [torch.ones_like(y)], retain_graph=True, inputs=x)
        unused = autograd.grad(X.sum(), {"n": x}, materialize_grads=True)["n"]
        for found, scale in ((gradient, 2.0), (x.grad, 2.0), (unused, 0.0)):
            assert [row.tolist() for row in found.unbind()] == [[scale] * 2, [2 * scale] * 3]


X, UNUSED, Z = (torch.ones(2, dtype=dtype, requires_grad=True) for dtype in (None, None, torch.complex64))
NESTED = [x.requires_grad_() for x in nested_tensors(torch.ones(2), torch.ones(3))]
BATCH = {"is_grads_batched": True}


def edge(x):
    return get_gradient_edge(x)


# An error and a part of the text, and the call; then a call of torch that fails for the same reason, if there is one.
ERRORS = [
    (pr.ShapeError, "grad_outputs['y'][0]", lambda: autograd.grad({"y": [X * 2]}, X, {"y": [torch.ones(3)]}),
     lambda: torch.autograd.grad(X * 2, X, torch.ones(3))),
    (pr.DtypeError, "grad_tensors['y'][0]", lambda: autograd.backward({"y": [X * 2]}, {"y": [torch.ones(2).double()]})),
    (pr.DeviceError, "must be on cpu", lambda: autograd.grad(X * 2, X, torch.ones(2, device="meta"))),
    (pr.TreeError, "outputs['y']\nAt that key path", lambda: autograd.grad({"y": (X, None)}, X, {"y": [X, None]})),
    (pr.DtypeError, "grad_outputs[0]", lambda: autograd.grad([X.sum()], X, [1.0]),
     lambda: torch.autograd.grad(X.sum(), X, [1.0])),
    (pr.TreeError, "backward: inputs", lambda: autograd.backward(X.sum(), inputs=[None]),
     lambda: torch.autograd.backward(X.sum(), inputs=[])),
    (pr.TreeError, "outputs must hold", lambda: autograd.grad([], X)),
    (RuntimeError, "inputs['p'][0]", lambda: autograd.grad(X.sum(), {"p": [X.detach()]}),
     lambda: torch.autograd.grad(X.sum(), X.detach())),
    (pr.DtypeError, "outputs['n']", lambda: autograd.grad({"y": X.sum(), "n": 3.0}, X)),
    (pr.ShapeError, "grad_outputs['y'] must be given", lambda: autograd.grad({"y": edge(X * 2)}, X)),
    (pr.DtypeError, "real output", lambda: autograd.grad({"y": Z.sum()}, Z), lambda: torch.autograd.grad(Z.sum(), Z)),
    (pr.DtypeError, "grad_outputs must", lambda: autograd.grad(edge(X * 2), X, torch.ones(2).double())),
    (ValueError, "allow_unused", lambda: autograd.grad(X.sum(), X, allow_unused=False, materialize_grads=True),
     lambda: torch.autograd.grad(X.sum(), X, allow_unused=False, materialize_grads=True)),
    (RuntimeError, "inputs[1]", lambda: autograd.grad(X.sum(), [X, edge(UNUSED)], materialize_grads=True)),
    (pr.ShapeError, "grad_outputs[0]", lambda: autograd.grad([X * 2], X, [torch.ones(2)], **BATCH),
     lambda: torch.autograd.grad(X * 2, X, torch.ones(2), **BATCH)),
    (pr.ShapeError, "[0, 2]", lambda: autograd.grad(edge(X * 2), X, torch.zeros(0, 3), **BATCH)),
    (pr.ShapeError, "[0] has 3", lambda: autograd.grad([X * 2, X], X, [torch.ones(3, 2), torch.ones(4, 2)], **BATCH)),
    (pr.ShapeError, "grad_outputs[0]", lambda: autograd.grad([X.sum()], X, **BATCH)),
    *[(RuntimeError, "backward", lambda t=t: t(lambda x: autograd.backward({"loss": x.sum()}))(X))
      for t in (pr.func.grad, torch.func.grad, torch.func.vmap)],
    *[case for x in NESTED for case in (
        (pr.ShapeError, "outputs[0] is a nested", lambda x=x: autograd.grad([x * x], x)),
        (pr.ShapeError, "grad_outputs[0] must be a nested", lambda x=x: autograd.grad([x * x], x, [X])),
        (pr.ShapeError, "must be a plain", lambda x=x: autograd.grad(X * 2, X, x.detach())),
        (ValueError, "inputs[0]", lambda x=x: autograd.grad(X.sum(), [x], torch.ones(2), **BATCH)),
    )],
]  # fmt: skip


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case[1])
def test_error(case):
    error, text, *calls = case
    assert_raises(error, [text], *calls)
    assert X.grad is None
