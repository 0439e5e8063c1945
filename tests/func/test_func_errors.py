"""The errors of primitives.func: their type, what they name, and that torch's own error is of the type too."""

import re

import optree
import pytest
import torch
from func_trees import NAMESPACE, Affine, Pair, nested_tensors

import primitives as pr
from primitives import func
from tests.support import TORCH_ERRORS

ONE, TWO = torch.ones(()), torch.ones(2)
INTS = torch.arange(2)
X = {"x": TWO}
N = {"namespace": NAMESPACE}
NESTED = nested_tensors(TWO, TWO)


class Unnamed(Pair):
    """Registered without the names of its children."""


class Named(Pair):
    """Registered with names, but not with how they are reached."""


for cls, names in ((Unnamed, ()), (Named, (("left", "right"),))):
    optree.register_pytree_node(
        cls,
        lambda pair, names=names: ((pair.left, pair.right), None, *names),
        lambda _, children, cls=cls: cls(*children),
        namespace=NAMESPACE,
    )


def total(tree):
    return tree["x"].sum()


def same(tree):
    return tree


# A call, its error and a part of the text; a call of torch that fails for the same reason, where there is one.
CASES = [
    # Outputs.
    (lambda: func.grad(lambda t: t["x"])(X), pr.ShapeError, "grad: func must return a tensor of shape [], got [2].",
     lambda: torch.func.grad(lambda x: x)(TWO)),
    (lambda: func.hvp(same, (TWO,), (TWO,)), pr.ShapeError, "hvp: func must return a tensor of shape []"),
    (lambda: func.grad(lambda t: 3.0)(X), pr.DtypeError, "must return a tensor, got float.",
     lambda: torch.func.grad(lambda x: 3.0)(TWO)),
    (lambda: func.grad(lambda t: total(t).long())(X), pr.DtypeError, "real floating point tensor, got torch.int64."),
    (lambda: func.vjp(lambda t: {"y": [t["x"].long()]}, X), pr.DtypeError,
     "vjp: output['y'][0] must be floating point or complex, got torch.int64.",
     lambda: torch.func.vjp(lambda x: x.long(), TWO)),
    (lambda: func.jvp(lambda t: [t["x"], "a"], (X,), (X,)), pr.DtypeError, "jvp: output[1] must be a tensor, got str."),
    (lambda: func.jvp(lambda t: {"none": None}, (X,), (X,)), pr.TreeError, "at least one tensor, got {'none': None}."),
    (lambda: func.jacrev(lambda t: {"y": t["x"] * 1j})(X), pr.DtypeError, "jacrev: output['y'] must be real floating"),
    (lambda: func.grad(total, has_aux=True)(X), pr.TreeError, "must return a tuple (output, aux), got Tensor.",
     lambda: torch.func.grad(total, has_aux=True)(X)),
    # Arguments.
    (lambda: func.grad(total, 2)(X, X), pr.AxisError, "grad: argnums must be in [-2, 1] for a call with 2 positional",
     lambda: torch.func.grad(total, 2)(X, X)),
    (lambda: func.jacfwd(total, (0, -1))(X), pr.AxisError, "jacfwd: argnums must name at least one argument, and each",
     lambda: torch.func.grad(total, (0, 0))(X)),
    (func.grad(total), pr.AxisError, "grad: func must be called with at least one positional argument"),
    (lambda: func.grad(total, [0])(X), pr.DtypeError, "argnums must be an int or a tuple of ints, got [0]."),
    (lambda: func.grad(total)({"x": TWO, "rest": (3.0,)}), pr.DtypeError,
     "grad: args[0]['rest'][0] must be a tensor to be differentiated, got float.",
     lambda: torch.func.grad(total)({"x": TWO, "rest": 3.0})),
    (lambda: func.grad(same)({"x": Affine(TWO, ONE)}), pr.DtypeError, "to be differentiated, got Affine"),
    (lambda: func.grad(same, 1, **N)(X, Affine(TWO, INTS)), pr.DtypeError, "grad: args[1].b must be floating point or",
     lambda: torch.func.grad(total)({"x": INTS})),
    (lambda: func.jacfwd(same, **N)(Pair(TWO, TWO * 1j)), pr.DtypeError, "jacfwd: args[0].right must be real floating"),
    (lambda: func.jvp(same, ({"s": "text"},), ({"s": "text"},)), pr.DtypeError, "jvp: primals[0]['s'] must be a tensor",
     lambda: torch.func.jvp(same, (INTS,), (INTS,))),
    (lambda: func.jacrev(lambda t, x: x)({"none": None}, TWO), pr.TreeError, "jacrev: args must hold a tensor"),
    (lambda: func.jvp(same, TWO, (TWO,)), pr.TreeError, "jvp: primals must be a tuple of the arguments of func, got"),
    # Tangents and cotangents.
    (lambda: func.hvp(total, (X,), (X, X)), pr.TreeError, "hvp: tangents must be a tuple of 1, one for each"),
    (lambda: func.jvp(same, ({"a": [TWO, None]},), ({"a": (TWO, None)},)), pr.TreeError,
     "tangents[0]['a'] is a tuple of 2 where primals[0] has a list of 2.\ntangents[0]: PyTreeSpec({'a': (*, None)})",
     lambda: torch.func.jvp(total, (X,), ({"y": TWO},))),
    (lambda: func.jvp(same, (TWO, {"p": {"w": TWO}}), (TWO, {"p": {"v": TWO, "w": TWO}})), pr.TreeError,
     "but tangents[1]['p'] is a dict with keys ['v', 'w'] where primals[1] has a dict with keys ['w']."),
    (lambda: func.jvp(same, ([TWO, None],), ([TWO, TWO],)), pr.TreeError, "leaf of type Tensor where primals[0] has"),
    (lambda: func.jvp(same, ([TWO],), ([None],)), pr.DtypeError, "tangents[0][0] must be a tensor like primals[0][0]"),
    (lambda: func.jvp(same, (Affine(TWO, ONE),), (Affine(ONE, ONE),), **N), pr.ShapeError,
     "jvp: tangents[0].w must have shape [2] (primals[0].w), got [].",
     lambda: torch.func.jvp(total, (X,), ({"x": ONE},))),
    # torch lets this one pass.
    (lambda: func.hvp(total, (X,), ({"x": TWO.double()},)), pr.DtypeError,
     "hvp: tangents[0]['x'] must have dtype torch.float32 (primals[0]['x']), got torch.float64."),
    (lambda: func.jvp(same, (X,), ({"x": TWO.to("meta")},)), pr.DeviceError, "tangents[0]['x'] must be on cpu"),
    (lambda: func.linearize(total, X)[1]({"x": TWO.half()}), pr.DtypeError, "linearize: tangents[0]['x'] must have"),
    (lambda: func.vjp(lambda t: {"y": t["x"]}, X)[1]({"z": TWO}), pr.TreeError, "cotangents is a dict with keys ['z']",
     lambda: torch.func.vjp(total, X)[1]((ONE,))),
    (lambda: func.vjp(lambda t: {"y": t["x"]}, X)[1]({"y": ONE}), pr.ShapeError, "cotangents['y'] must have shape [2]",
     lambda: torch.func.vjp(total, X)[1](TWO)),
    (lambda: func.vjp(lambda t: (t["x"], t["x"]), X)[1]((TWO, TWO.double())), pr.DtypeError, "cotangents[1] must have"),
    (lambda: func.hvp(total, ({"x": TWO, "n": INTS},), ({"x": TWO, "n": INTS},)), pr.DtypeError,
     "hvp: primals[0]['n'] must be floating point or complex to be differentiated, got torch.int64. Pass None"),
    (lambda: func.hvp(total, (X,), ({"x": None},)), pr.TreeError, "hvp: tangents must hold a tensor, got none."),
    (lambda: func.jvp(same, (Unnamed(TWO, [ONE]),), (Unnamed(TWO, [TWO]),), **N), pr.ShapeError,
     "jvp: tangents[0]<child 1 of Unnamed>[0] must have shape []"),
    (lambda: func.jvp(same, (Named(TWO, [ONE]),), (Named(TWO, (ONE,)),), **N), pr.TreeError,
     "but tangents[0].right is a tuple of 1"),
    # vmap.
    (lambda: func.vmap(same, in_dims=True)(X), pr.TreeError, "a tuple of 1, got bool."),
    (lambda: func.vmap(same, in_dims=({"x": "0"},))(X), pr.TreeError, "in_dims[0] of args[0]['x'] must be an int or"),
    (lambda: func.vmap(same, out_dims=False)(X), pr.TreeError, "out_dims of output['x'] must be an int or None"),
    (lambda: func.vmap(same, (0, {"a": 1, "b": None}))([TWO, TWO], {"a": torch.ones(2, 3), "b": ONE}), pr.ShapeError,
     "same size, but args[0][0] has 2 (axis 0), args[0][1] has 2 (axis 0), args[1]['a'] has 3 (axis 1).",
     lambda: torch.func.vmap(torch.add)(TWO, torch.ones(3))),
    (lambda: func.vmap(same, ({"x": 0, "y": 0},))(X), pr.TreeError,
     "in_dims[0] is a dict with keys ['x', 'y'] where args[0] has a dict with keys ['x'].\nin_dims[0]: PyTreeSpec(",
     lambda: torch.func.vmap(same, ({"x": 0, "y": 0},))(X)),
    (lambda: func.vmap(same, (0, 0))(X), pr.TreeError, "a tuple of 1, got a tuple of 2."),
    (lambda: func.vmap(same, ({"x": 1},))(X), pr.AxisError, "args[0]['x'] must be in [-1, 0] for shape [2], got 1.",
     lambda: torch.func.vmap(same, 1)(TWO)),
    (lambda: func.vmap(same)(ONE), pr.AxisError, "in_dims[0] of args[0] must be None for shape [], got 0."),
    (lambda: func.vmap(same)({"x": TWO, "n": 3}), pr.DtypeError, "args[0]['n'] must be a tensor where in_dims[0] is 0",
     lambda: torch.func.vmap(torch.add)(TWO, 3)),
    (lambda: func.vmap(same, None)(X), pr.TreeError, "in_dims must map at least one tensor, got none.",
     lambda: torch.func.vmap(same, (None,))(TWO)),
    (lambda: func.vmap(lambda t: {"y": t["x"]}, out_dims={"y": 1})(X), pr.AxisError, "output['y'] must be in [-1, 0]"),
    (lambda: func.vmap(lambda t: {"y": t["x"], "n": 3})(X), pr.DtypeError, "output['n'] must be a tensor where out_di",
     lambda: torch.func.vmap(lambda x: 3)(TWO)),
    (lambda: func.vmap(lambda t: {"y": t["x"]}, out_dims=None)(X), pr.TreeError, "output['y'] must be an int, as it",
     lambda: torch.func.vmap(same, out_dims=None)(TWO)),
    *[(lambda f=f: f(same, randomness="some"), RuntimeError, "randomness must be 'error', 'same' or 'different'",
       lambda: torch.func.vmap(same, randomness="some"))
      for f in (func.vmap, func.chunk_vmap, func.jacrev, func.jacfwd, func.hessian)],
    (lambda: func.jacrev(same, chunk_size=0), pr.ShapeError, "jacrev: chunk_size must be at least 1, got 0.",
     lambda: torch.func.jacrev(same, chunk_size=0)),
    (lambda: func.vmap(same, chunk_size=1.5), pr.DtypeError, "vmap: chunk_size must be an int, got float."),
    (lambda: func.chunk_vmap(same, chunks=0), pr.ShapeError, "chunk_vmap: chunks must be at least 1, got 0."),
    # Nested tensors, which torch's transforms fail on with internal errors.
    *[(lambda f=f, x=x: f([x]), pr.DtypeError, "[0][0] must not be a nested tensor to be differentiated")
      for x in NESTED
      for f in (func.grad(total), func.jacrev(total), func.jacfwd(total), lambda x: func.vjp(total, x),
                lambda x: func.linearize(total, x), lambda x: func.jvp(total, (x,), (x,)),
                lambda x: func.hvp(total, (x,), (x,)))],
    *[(lambda x=x: func.vmap(same, chunk_size=1)({"x": x}), pr.DtypeError, "args[0]['x'] must not be a nested tensor")
      for x in NESTED],
    # functional_call.
    (lambda: func.functional_call(torch.nn.Linear(2, 1), {"weight": 3}, TWO), pr.DtypeError, "weight must be a tensor"),
    (lambda: func.functional_call(torch.nn.Linear(2, 1), ({"bias": TWO}, {"bias": TWO}), TWO), pr.TreeError,
     "every name must be given once, got bias twice.",
     lambda: torch.func.functional_call(torch.nn.Linear(2, 1), ({"bias": TWO}, {"bias": TWO}), TWO)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[2])
def test_error(case):
    call, error, text, *torch_call = case
    with pytest.raises(error, match=re.escape(text)) as caught:
        call()
    assert caught.value.__cause__ is None
    if torch_call:
        with pytest.raises(TORCH_ERRORS) as torchs:
            torch_call[0]()
        assert issubclass(caught.type, torchs.type)
