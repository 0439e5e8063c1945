"""The errors of primitives.func: their type, what they name, and that torch's own error is of the type too."""

import optree
import pytest
import torch
from func_trees import NAMESPACE, Affine, N, Pair, nested_tensors

import primitives as pr
from primitives import func
from tests.support import assert_raises

ONE, TWO, INTS = torch.ones(()), torch.ones(2), torch.arange(2)
X, XY = {"x": TWO}, {"x": 0, "y": 0}
LINEAR = torch.nn.Linear(2, 1)
NESTED = nested_tensors(TWO, TWO)


class Unnamed(Pair):
    """Registered without the names of its children."""


optree.register_pytree_node(
    Unnamed, lambda pair: ((pair.left, pair.right), None), lambda _, children: Unnamed(*children), namespace=NAMESPACE
)


def total(tree):
    return tree["x"].sum()


def same(tree):
    return tree


def wrapped(tree):
    return {"y": tree["x"]}


def pull(function, cotangents):
    return func.vjp(function, X)[1](cotangents)


# Its error, a part of the text, and the call; then a call of torch that fails for the same reason, where there is one.
CASES = [
    # Outputs.
    (pr.ShapeError, "grad: func must", lambda: func.grad(same)(TWO), lambda: torch.func.grad(same)(TWO)),
    (pr.DtypeError, "got float", lambda: func.grad(lambda t: 3.0)(X), lambda: torch.func.grad(lambda x: 3.0)(TWO)),
    (pr.DtypeError, "vjp: output['y'][0]", lambda: func.vjp(lambda t: {"y": [t["x"].long()]}, X),
     lambda: torch.func.vjp(lambda x: x.long(), TWO)),
    (RuntimeError, "independent", lambda: func.jvp(lambda t: ONE, (X,), (X,), strict=True)),
    (pr.DtypeError, "jacrev: output['y'] must be real", lambda: func.jacrev(lambda t: {"y": t["x"] * 1j})(X)),
    (pr.TreeError, "(output, aux), got Tensor", lambda: func.grad(total, has_aux=True)(X),
     lambda: torch.func.grad(total, has_aux=True)(X)),
    # Arguments.
    (TypeError, "grad: the first argument must be a function or a module, got Tensor", lambda: func.grad(total(X))),
    (TypeError, "vjp: the first argument must be a function or a module, got Tensor", lambda: func.vjp(total(X), X)),
    (pr.AxisError, "[-2, 1]", lambda: func.grad(total, 2)(X, X), lambda: torch.func.grad(total, 2)(X, X)),
    (pr.AxisError, "argnums", lambda: func.jacfwd(total, (0, -1))(X), lambda: torch.func.grad(total, (0, 0))(X)),
    (pr.DtypeError, "grad: args[0]['rest'][0]", lambda: func.grad(total)({"x": TWO, "rest": (3.0,)}),
     lambda: torch.func.grad(total)({"x": TWO, "rest": 3.0})),
    (pr.DtypeError, "grad: args[1].b", lambda: func.grad(same, 1, **N)(X, Affine(TWO, INTS)),
     lambda: torch.func.grad(total)({"x": INTS})),
    (pr.DtypeError, "jacfwd: args[0].right must be real", lambda: func.jacfwd(same, **N)(Pair(TWO, TWO * 1j))),
    (pr.DtypeError, "jvp: primals[0]['s']", lambda: func.jvp(same, ({"s": "text"},), ({"s": "text"},)),
     lambda: torch.func.jvp(same, (INTS,), (INTS,))),
    (pr.TreeError, "hold a tensor", lambda: func.jacrev(lambda t, x: x)({"none": None}, TWO)),
    (pr.TreeError, "(x,)", lambda: func.jvp(total, X, X), lambda: torch.func.jvp(total, TWO, TWO)),
    # Tangents and cotangents.
    (pr.TreeError, "tangents[0]", lambda: func.jvp(total, (X,), ({"y": TWO},)),
     lambda: torch.func.jvp(total, (X,), ({"y": TWO},))),
    (pr.ShapeError, "tangents[0]['x']", lambda: func.jvp(total, (X,), ({"x": ONE},)),
     lambda: torch.func.jvp(total, (X,), ({"x": ONE},))),
    (pr.DeviceError, "tangents[0]['x'] must be on cpu", lambda: func.jvp(same, (X,), ({"x": TWO.to("meta")},))),
    (pr.DtypeError, "linearize: tangents[0]['x']", lambda: func.linearize(total, X)[1]({"x": TWO.half()})),
    (pr.TreeError, "extra key(s):", lambda: pull(wrapped, {"z": TWO}), lambda: torch.func.vjp(total, X)[1]((ONE,))),
    (pr.ShapeError, "cotangents['y']", lambda: pull(wrapped, {"y": ONE}), lambda: torch.func.vjp(total, X)[1](TWO)),
    (pr.DtypeError, "hvp: primals[0]['n']", lambda: func.hvp(total, ({**X, "n": INTS},), ({**X, "n": INTS},))),
    (pr.TreeError, "got none", lambda: func.hvp(total, (X,), ({"x": None},))),
    (pr.ShapeError, "tangents[0]<child 1 of Unnamed>[0]",
     lambda: func.jvp(same, (Unnamed(TWO, [ONE]),), (Unnamed(TWO, [TWO]),), **N)),
    (pr.TreeError, "given once, got weight",
     lambda: func.functional_call(LINEAR, ({"weight": TWO}, {"weight": TWO}), TWO),
     lambda: torch.func.functional_call(LINEAR, ({"weight": TWO}, {"weight": TWO}), TWO)),
    # vmap.
    (pr.TreeError, "in_dims[0] of args[0]['x']", lambda: func.vmap(same, in_dims=({"x": "0"},))(X)),
    (pr.TreeError, "out_dims of output['x']", lambda: func.vmap(same, out_dims=False)(X)),
    (pr.ShapeError, "args[0][1] has 2 (axis 0), args[1]['a'] has 3 (axis 1)",
     lambda: func.vmap(same, (0, {"a": 1, "b": None}))([TWO, TWO], {"a": torch.ones(2, 3), "b": ONE}),
     lambda: torch.func.vmap(torch.add)(TWO, torch.ones(3))),
    (pr.TreeError, "missing key(s):", lambda: func.vmap(same, (XY,))(X), lambda: torch.func.vmap(same, (XY,))(X)),
    (pr.AxisError, "args[0]['x']", lambda: func.vmap(same, ({"x": 1},))(X), lambda: torch.func.vmap(same, 1)(TWO)),
    (pr.DtypeError, "args[0]['n']", lambda: func.vmap(same)({**X, "n": 3}), lambda: torch.func.vmap(torch.add)(TWO, 3)),
    (pr.TreeError, "got none", lambda: func.vmap(same, None)(X), lambda: torch.func.vmap(same, (None,))(TWO)),
    (pr.DtypeError, "output['n']", lambda: func.vmap(lambda t: {**t, "n": 3})(X),
     lambda: torch.func.vmap(lambda x: 3)(TWO)),
    (pr.TreeError, "output['y']", lambda: func.vmap(wrapped, out_dims=None)(X),
     lambda: torch.func.vmap(same, out_dims=None)(TWO)),
    *[(RuntimeError, "randomness", lambda f=f: f(same, randomness="some"),
       lambda: torch.func.vmap(same, randomness="some"))
      for f in (func.vmap, func.chunk_vmap, func.jacrev, func.jacfwd, func.hessian)],
    (pr.ShapeError, "got 0", lambda: func.jacrev(same, chunk_size=0),
     lambda: torch.func.jacrev(same, chunk_size=0)),
    (pr.ShapeError, "chunk_vmap: chunks", lambda: func.chunk_vmap(same, chunks=0)),
    # Nested tensors, which torch's transforms fail on with internal errors.
    *[(pr.DtypeError, "[0][0] must not be a nested tensor", lambda f=f, x=x: f([x]))
      for x in NESTED
      for f in (func.grad(total), func.jacrev(total), func.jacfwd(total), lambda x: func.vjp(total, x),
                lambda x: func.linearize(total, x), lambda x: func.jvp(total, (x,), (x,)),
                lambda x: func.hvp(total, (x,), (x,)), func.vmap(lambda t: same(t[0]), chunk_size=1))],
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[1])
def test_error(case):
    error, text, *calls = case
    assert_raises(error, [text], *calls)
