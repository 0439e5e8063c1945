"""`create_joint`: outputs and gradients are those of eager autograd, whatever is given and returned."""

import re

import pytest
import torch

import primitives as pr
from primitives._core.errors import DtypeError, LeafError, ShapeError, TreeError
from primitives.tracing import create_joint, trace_joint


def leaf(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


def rich(w, batch):
    """Outputs of every kind: differentiable, constant, integer, an alias of an input, none at all."""
    hidden = pr.functional.layer_norm(batch["x"], (4,), w, None)
    return {
        "y": hidden.sin().sum(-1),
        "constant": batch["x"].detach().cos(),
        "index": hidden.argmax(-1),
        "alias": batch["x"].view(-1),
        "none": None,
        "number": batch["k"],
    }


COTANGENTS = {"constant": None, "index": None, "alias": None, "none": None, "number": None}


def test_values_gradients_and_structure():
    w, x = leaf(4), leaf(3, 4, seed=1)
    unused, labels, y_bar = leaf(2), torch.arange(3), leaf(3, seed=2).detach()
    primals = w, {"x": x, "k": 3}, [unused, labels, None]
    outs, grads = create_joint(lambda w, batch, rest: rich(w, batch))(primals, {"y": y_bar, **COTANGENTS})
    expected = rich(w, {"x": x, "k": 3})
    w_bar, x_bar = torch.autograd.grad(expected["y"], (w, x), y_bar)
    assert torch.equal(outs["y"], expected["y"])
    assert torch.equal(outs["index"], expected["index"])
    assert (outs["none"], outs["number"], grads[1]["k"], grads[2]) == (None, 3, None, [None, None, None])
    assert outs["alias"].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(grads[0], w_bar)
    assert torch.equal(grads[1]["x"], x_bar)
    assert not outs["y"].requires_grad
    assert not grads[0].requires_grad
    assert w.grad is None


def test_partial_gradients_and_cotangents_that_are_viewed_or_none():
    w, ones, y_bar = leaf(3), torch.ones(3, dtype=torch.float64), leaf(6).detach()
    _, grads = create_joint(lambda a, b: a * b.sin())((w, w), ones)
    assert torch.equal(grads[0], w.detach().sin())
    assert torch.equal(grads[1], w.detach() * w.detach().cos())
    w = leaf(2, 3)
    _, (bar,) = create_joint(lambda w: (w.exp(), w.sin()))((w,), (None, y_bar))
    assert torch.equal(bar, y_bar.view(2, 3) * w.detach().cos())


ONES = torch.ones(3, dtype=torch.float64)
MISTAKES = {
    "structure": ((TreeError, LeafError), {"y": [ONES], **COTANGENTS}, "cotangents['y']"),
    "key": (TreeError, {"z": ONES, **COTANGENTS}, "cotangents"),
    "shape": (ShapeError, {"y": torch.ones(4, dtype=torch.float64), **COTANGENTS}, "cotangents['y'] must have shape"),
    "strides": (
        ShapeError,
        {"y": torch.ones((), dtype=torch.float64).expand(3, 1, 2), **COTANGENTS},
        "cotangents['y']",
    ),
    "dtype": (DtypeError, {"y": ONES.float(), **COTANGENTS}, "cotangents['y'] must have dtype"),
    "constant": (LeafError, {"y": ONES, **COTANGENTS, "constant": ONES}, "cotangents['constant'] must be None"),
    "alias": (LeafError, {"y": ONES, **COTANGENTS, "alias": ONES}, "cotangents['alias'] must be None"),
}


def test_wrong_calls():
    for error, cotangents, text in MISTAKES.values():
        with pytest.raises(error, match=re.escape(text)):
            create_joint(rich)((leaf(4), {"x": leaf(3, 4), "k": 3}), cotangents)
    joint = create_joint(torch.sin)
    with pytest.raises(TypeError, match="tuple of the positional arguments"):
        joint(leaf(3), ONES)
    for call in (lambda: joint((torch.ones(3),), ONES), lambda: trace_joint(torch.sin, (torch.ones(3),))):
        with pytest.raises(LeafError, match=r"Call requires_grad_\(\)"):
            call()
    for args in ((), (torch.ones(2, 3),)):
        with pytest.raises(LeafError, match=r"pure_module\(module\)"):
            trace_joint(torch.nn.Linear(3, 3), args)
    with pytest.raises(LeafError, match=re.escape("one element that requires grad, got [3]")):
        create_joint(torch.sin, no_cotangents=True)((leaf(3),))
