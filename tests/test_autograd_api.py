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
from tests.support import TORCH_ERRORS


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


def cotangents():
    return Losses(None, {"vector": torch.arange(3, dtype=torch.float64), "none": None})


def flat_gradient(params, **options):
    fit, rest = outputs(params)
    return torch.autograd.grad([fit, rest["vector"]], tensors(params), [None, cotangents().rest["vector"]], **options)


def test_grad_has_the_structure_of_inputs(params):
    gradient = autograd.grad(outputs(params), params, cotangents(), namespace=NAMESPACE)
    assert structure(gradient) == structure(params)
    assert_leaves(gradient, flat_gradient(params))
    assert all(p.grad is None for p in tensors(params))


def test_backward_accumulates_into_the_leaves_or_into_inputs_alone(params):
    w, b, scale = tensors(params)
    expected = flat_gradient(params)
    for times in (1, 2):
        autograd.backward(outputs(params), cotangents(), namespace=NAMESPACE)
        assert_leaves([w.grad, b.grad, scale.grad], [times * g for g in expected])
    autograd.backward(outputs(params), cotangents(), inputs={"some": [w], "last": scale}, namespace=NAMESPACE)
    assert_leaves([w.grad, b.grad, scale.grad], [3 * expected[0], 2 * expected[1], 3 * expected[2]])


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize("backward", [False, True])
def test_retain_graph_defaults_to_create_graph(backward):
    x = torch.tensor(2.0, requires_grad=True)

    def gradient(y, retain, create):
        x.grad = None
        if not backward:
            return autograd.grad(y, {"x": x}, None, retain, create)["x"]
        autograd.backward({"y": y}, None, retain, create, {"x": x})
        return x.grad

    for retain, create in ((None, False), (True, False), (None, True), (False, True)):
        y = x**3
        assert gradient(y, retain, create).requires_grad is create
        freed = not (create if retain is None else retain)
        with pytest.raises(RuntimeError, match="second time") if freed else contextlib.nullcontext():
            gradient(y, None, False)
    x.grad = None


@pytest.mark.parametrize("shape", [(2,), ()])
def test_unused_inputs(shape):
    x, y = (torch.ones(shape, requires_grad=True) for _ in range(2))
    inputs = {"used": x, "unused": [y]}
    text = r"grad: every one of inputs must be used to compute outputs, but inputs\['unused'\]\[0\] is not"
    for options in ({}, {"allow_unused": False}):
        with pytest.raises(RuntimeError, match=text):
            autograd.grad(x.sum(), inputs, **options)
    assert autograd.grad(x.sum(), inputs, allow_unused=True)["unused"] == [None]
    for options in ({}, {"allow_unused": True}):
        zeros = autograd.grad(x.sum(), inputs, materialize_grads=True, **options)["unused"][0]
        torch.testing.assert_close(zeros, torch.zeros(shape))
    batch = autograd.grad(x.sum(), inputs, torch.ones(3), is_grads_batched=True, materialize_grads=True)["unused"][0]
    batch[0] += 1
    assert batch.sum() == y.numel(), "the zeros of a batch share no memory"
    assert autograd.grad(x.sum(), inputs, materialize_grads=True, create_graph=True)["unused"][0].requires_grad
    with pytest.raises(ValueError, match="allow_unused must be True or not given with materialize_grads=True"):
        autograd.grad(x.sum(), inputs, allow_unused=False, materialize_grads=True)


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
    assert autograd.grad(edge, w, eye[:0], create_graph=True, **options).requires_grad
    with pytest.raises(pr.ShapeError, match=r"grad_outputs must have shape \[batch, 3\]"):
        autograd.grad(edge, w, torch.zeros(0, 2).double(), **options)


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
    unused = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"got a GradientEdge at inputs\[1\]"):
        autograd.grad(outputs, [x, get_gradient_edge(unused)], grad_outputs, materialize_grads=True, retain_graph=True)
    with pytest.raises(pr.ShapeError, match=r"grad_outputs\['edge'\] must be given, got None"):
        autograd.grad(outputs, inputs)
    with pytest.raises(pr.DtypeError, match=r"grad_outputs must have dtype torch.float32 \(outputs\)"):
        autograd.grad(outputs["edge"], x, torch.ones(2).double())


def test_iterables_that_are_no_nodes():
    """`module.parameters()` and the like, which torch makes a tuple of too."""
    model = torch.nn.Linear(2, 1)
    x = torch.ones(3, 2)
    expected = (torch.full((1, 2), 3.0), torch.full((1,), 3.0))
    parameters = dict(model.named_parameters())
    for inputs in (model.parameters(), parameters.values(), torch.nn.ParameterList(model.parameters())):
        gradient = autograd.grad(model(x).sum(), inputs)
        assert isinstance(gradient, tuple)
        assert_leaves(gradient, expected)
    autograd.backward(iter([model(x).sum(), model(x).sum()]), iter([None, torch.tensor(2.0)]), inputs=[model.weight])
    torch.testing.assert_close(model.weight.grad, 3 * expected[0])
    autograd.backward(model(x).sum(), inputs=model.parameters())
    torch.testing.assert_close(model.bias.grad, expected[1])
    with pytest.raises(pr.TreeError, match="inputs must hold at least one tensor"):
        autograd.grad(model(x).sum(), iter([]))


def test_complex_outputs():
    z = torch.tensor([1 + 2j, 3j], requires_grad=True)
    z_bar = torch.tensor([1j, 2.0 + 0j])
    result = autograd.grad({"y": z**2}, {"z": z}, {"y": z_bar}, retain_graph=True)
    torch.testing.assert_close(result["z"], z_bar * (2 * z).conj().detach())
    with pytest.raises(RuntimeError, match=r"grad: grad_outputs\['y'\] must be given, .* for a real output"):
        autograd.grad({"y": z.sum()}, z)


def test_inside_a_transform_grad_works_and_backward_explains():
    def penalty(tree):
        gradient = autograd.grad((tree["x"] ** 3).sum(), tree, create_graph=True)
        return (gradient["x"] ** 2).sum()

    x = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(pr.func.grad(penalty)({"x": x})["x"], 36 * x**3)
    for transform in (pr.func.grad, torch.func.grad, torch.func.vmap):
        with pytest.raises(RuntimeError, match=r"backward: .*Use primitives\.func\.grad or vjp inside them"):
            transform(lambda t: autograd.backward({"loss": t["x"].sum()}))({"x": x})


X = torch.ones(2, requires_grad=True)
# A call, its error and a part of the text; a call of torch that fails for the same reason, where there is one.
ERRORS = [
    (lambda: autograd.grad({"y": [X * 2]}, X, {"y": [torch.ones(3)]}), pr.ShapeError,
     "grad: grad_outputs['y'][0] must have shape [2] (outputs['y'][0]), got [3].",
     lambda: torch.autograd.grad(X * 2, X, torch.ones(3))),
    (lambda: autograd.backward({"y": [X * 2]}, {"y": [torch.ones(2).double()]}), pr.DtypeError,
     "backward: grad_tensors['y'][0] must have dtype torch.float32 (tensors['y'][0]), got torch.float64."),
    (lambda: autograd.grad(X * 2, X, torch.ones(2, device="meta")), pr.DeviceError, "grad_outputs must be on cpu"),
    (lambda: autograd.grad({"y": (X, None)}, X, {"y": [X, None]}), pr.TreeError,
     "but grad_outputs['y'] is a list of 2 where outputs has a tuple of 2.\ngrad_outputs: PyTreeSpec("),
    (lambda: autograd.grad([X.sum()], X, [1.0]), pr.DtypeError, "grad_outputs[0] must be a tensor or None, got float.",
     lambda: torch.autograd.grad(X.sum(), X, [1.0])),
    (lambda: autograd.backward(X.sum(), inputs=[None]), pr.TreeError, "backward: inputs must hold at least one tensor",
     lambda: torch.autograd.backward(X.sum(), inputs=[])),
    (lambda: autograd.grad([], X), pr.TreeError, "grad: outputs must hold at least one tensor"),
    (lambda: autograd.grad(X.sum(), {"p": [X.detach()]}), RuntimeError, "grad: inputs['p'][0] must require grad",
     lambda: torch.autograd.grad(X.sum(), X.detach())),
    (lambda: autograd.backward((X.sum(), X.detach().sum())), RuntimeError, "backward: tensors[1] must require grad"),
    (lambda: autograd.grad({"y": X.sum(), "n": 3.0}, X), pr.DtypeError, "outputs['n'] must be a tensor or a Gradient"),
    (lambda: autograd.grad([X * 2], X, [torch.ones(2)], is_grads_batched=True), pr.ShapeError,
     "grad: grad_outputs[0] must have shape [batch, 2] (outputs[0]), got [2].",
     lambda: torch.autograd.grad(X * 2, X, torch.ones(2), is_grads_batched=True)),
    (lambda: autograd.grad([X * 2, X], X, [torch.ones(3, 2), torch.ones(4, 2)], is_grads_batched=True), pr.ShapeError,
     "grad: all batch axes must have the same size, but grad_outputs[0] has 3, grad_outputs[1] has 4."),
    (lambda: autograd.grad([X.sum()], X, is_grads_batched=True), pr.ShapeError, "must be given with is_grads_batched"),
]  # fmt: skip


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case[2])
def test_error(case):
    call, error, text, *torch_call = case
    with pytest.raises(error, match=re.escape(text)) as caught:
        call()
    assert X.grad is None
    if torch_call:
        with pytest.raises(TORCH_ERRORS) as torchs:
            torch_call[0]()
        assert issubclass(caught.type, torchs.type)


def test_nested_tensors():
    for leaf in nested_tensors(torch.ones(2), torch.full((3,), 2.0)):
        x = leaf.requires_grad_()
        y = x * x
        (gradient,) = autograd.grad({"y": y}, [x], {"y": torch.ones_like(y)}, retain_graph=True)
        autograd.backward([y], [torch.ones_like(y)], retain_graph=True, inputs=x)
        for found in (gradient, x.grad):
            assert [row.tolist() for row in found.unbind()] == [[2.0] * 2, [4.0] * 3]
        unused = autograd.grad(X.sum(), {"n": x}, materialize_grads=True)["n"]
        assert [row.tolist() for row in unused.unbind()] == [[0.0] * 2, [0.0] * 3]
        with pytest.raises(pr.ShapeError, match=r"outputs\[0\] is a nested tensor"):
            autograd.grad([y], x)
        with pytest.raises(pr.ShapeError, match=r"grad_outputs\[0\] must be a nested tensor"):
            autograd.grad([y], x, [X])
        with pytest.raises(pr.ShapeError, match="grad_outputs must be a plain tensor"):
            autograd.grad(X * 2, X, x.detach())
        with pytest.raises(ValueError, match=r"inputs\[0\] must not be a nested tensor with is_grads_batched=True"):
            autograd.grad(X.sum(), [x], torch.ones(2), is_grads_batched=True)
