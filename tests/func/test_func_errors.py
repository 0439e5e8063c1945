"""The errors of primitives.func: type and text."""

import re

import optree
import pytest
import torch
from func_trees import NAMESPACE, Affine, Pair

import primitives as pr
from primitives import func
from tests.support import TORCH_ERRORS

ONE, TWO = torch.ones(()), torch.ones(2)
INTS = torch.arange(2)
X = {"x": TWO}


N = {"namespace": NAMESPACE}


class Unnamed(Pair):
    """Registered without the names of its children."""


class Named(Pair):
    """Registered with names, but not with how they are reached."""


def _register(cls, *names):
    optree.register_pytree_node(
        cls,
        lambda pair: ((pair.left, pair.right), None, *names),
        lambda _, children: cls(*children),
        namespace=NAMESPACE,
    )


_register(Unnamed)
_register(Named, ("left", "right"))


def total(tree):
    return tree["x"].sum()


def same(tree):
    return tree


CASES = {
    # Outputs.
    "scalar": (
        lambda: func.grad(lambda t: t["x"])(X), pr.ShapeError,
        "grad: func must return a tensor of shape [], got [2]. Reduce it, or use vjp or jacrev.",
    ),
    "scalar of value": (
        lambda: func.grad_and_value(lambda t: t["x"][:1])(X), pr.ShapeError,
        "grad_and_value: func must return a tensor of shape [], got [1].",
    ),
    "scalar of hvp": (
        lambda: func.hvp(same, (TWO,), (TWO,)), pr.ShapeError, "hvp: func must return a tensor of shape [], got [2]."
    ),
    "number": (lambda: func.grad(lambda t: 3.0)(X), pr.DtypeError, "grad: func must return a tensor, got float."),
    "tree": (lambda: func.grad(lambda t: {"y": total(t)})(X), pr.DtypeError, "func must return a tensor, got dict."),
    "integer output": (
        lambda: func.grad(lambda t: total(t).long())(X), pr.DtypeError,
        "grad: func must return a real floating point tensor, got torch.int64.",
    ),
    "complex output": (
        lambda: func.grad(lambda t: total(t) * 1j)(X), pr.DtypeError,
        "grad: func must return a real floating point tensor, got torch.complex64.",
    ),
    "integer output of vjp": (
        lambda: func.vjp(lambda t: {"y": [t["x"].long()]}, X), pr.DtypeError,
        "vjp: output['y'][0] must be floating point or complex, got torch.int64.",
    ),
    "output of vjp": (
        lambda: func.vjp(lambda t: {"y": 3}, X), pr.DtypeError, "vjp: output['y'] must be a tensor, got int."
    ),
    "output of jvp": (
        lambda: func.jvp(lambda t: [t["x"], "a"], (X,), (X,)), pr.DtypeError,
        "jvp: output[1] must be a tensor, got str.",
    ),
    "no output": (
        lambda: func.jvp(lambda t: {"none": None}, (X,), (X,)), pr.TreeError,
        "jvp: func must return at least one tensor, got {'none': None}.",
    ),
    "complex output of jacrev": (
        lambda: func.jacrev(lambda t: {"y": t["x"] * 1j})(X), pr.DtypeError,
        "jacrev: output['y'] must be real floating point, got torch.complex64.",
    ),
    "integer output of jacfwd": (
        lambda: func.jacfwd(lambda t: t["x"].long())(X), pr.DtypeError,
        "jacfwd: output must be real floating point, got torch.int64.",
    ),
    "aux": (
        lambda: func.grad(total, has_aux=True)(X), pr.TreeError,
        "grad: with has_aux=True, func must return a tuple (output, aux), got Tensor.",
    ),
    "aux of three": (
        lambda: func.jvp(lambda t: (total(t), 1, 2), (X,), (X,), has_aux=True), pr.TreeError,
        "jvp: with has_aux=True, func must return a tuple (output, aux), got a tuple of 3.",
    ),
    # Arguments.
    "argnums": (
        lambda: func.grad(total, 2)(X, X), pr.AxisError,
        "grad: argnums must be in [-2, 1] for a call with 2 positional arguments, got 2.",
    ),
    "negative argnums": (
        lambda: func.jacrev(total, (0, -2))(X), pr.AxisError,
        "jacrev: argnums must be in [-1, 0] for a call with 1 positional argument, got (0, -2).",
    ),
    "duplicate argnums": (
        lambda: func.jacfwd(total, (0, -1))(X), pr.AxisError,
        "jacfwd: argnums must name at least one argument, and each one once, got (0, -1).",
    ),
    "no argnums": (lambda: func.grad(total, ())(X), pr.AxisError, "argnums must name at least one argument"),
    "no positional argument": (
        func.grad(total), pr.AxisError, "grad: func must be called with at least one positional argument",
    ),
    "type of argnums": (
        lambda: func.grad(total, [0])(X), pr.DtypeError, "grad: argnums must be an int or a tuple of ints, got [0]."
    ),
    "float leaf": (
        lambda: func.grad(total)({"x": TWO, "rest": (3.0,)}), pr.DtypeError,
        "grad: args[0]['rest'][0] must be a tensor to be differentiated, got float.",
    ),
    "integer leaf": (
        lambda: func.grad(same, 1, namespace=NAMESPACE)(X, Affine(TWO, INTS)), pr.DtypeError,
        "grad: args[1].b must be floating point or complex to be differentiated, got torch.int64.",
    ),
    "complex leaf of jacfwd": (
        lambda: func.jacfwd(same, namespace=NAMESPACE)(Pair(TWO, TWO * 1j)), pr.DtypeError,
        "jacfwd: args[0].right must be real floating point to be differentiated, got torch.complex64.",
    ),
    "integer leaf of vjp": (
        lambda: func.vjp(same, X, {"i": INTS}), pr.DtypeError,
        "vjp: primals[1]['i'] must be floating point or complex to be differentiated, got torch.int64.",
    ),
    "string leaf of jvp": (
        lambda: func.jvp(same, ({"s": "text"},), ({"s": "text"},)), pr.DtypeError,
        "jvp: primals[0]['s'] must be a tensor to be differentiated, got str.",
    ),
    "nothing to differentiate": (
        lambda: func.jacrev(lambda t, x: x)({"none": None}, TWO), pr.TreeError,
        "jacrev: args must hold a tensor to differentiate, got none.",
    ),
    "primals": (
        lambda: func.jvp(same, TWO, (TWO,)), pr.TreeError,
        "jvp: primals must be a tuple of the arguments of func, got Tensor. Write (x,) for a single argument.",
    ),
    # Tangents and cotangents.
    "number of tangents": (
        lambda: func.hvp(total, (X,), (X, X)), pr.TreeError,
        "hvp: tangents must be a tuple of 1, one for each of primals, got a tuple of 2.",
    ),
    "tree of tangents": (
        lambda: func.jvp(same, ({"a": [TWO, None]},), ({"a": (TWO, None)},)), pr.TreeError,
        ("jvp: tangents[0] must have the structure of primals[0], but tangents[0]['a'] is a tuple of 2 where "
        "primals[0] has a list of 2.\ntangents[0]: PyTreeSpec({'a': (*, None)})\n"
        "primals[0]: PyTreeSpec({'a': [*, None]})"),
    ),
    "keys of tangents": (
        lambda: func.jvp(same, (TWO, {"p": {"w": TWO}}), (TWO, {"p": {"v": TWO, "w": TWO}})), pr.TreeError,
        "but tangents[1]['p'] is a dict with keys ['v', 'w'] where primals[1] has a dict with keys ['w'].",
    ),
    "class of tangents": (
        lambda: func.jvp(same, (Affine(TWO, ONE),), (Pair(TWO, ONE),), namespace=NAMESPACE), pr.TreeError,
        "but tangents[0] is a node of type Pair where primals[0] has a node of type Affine.",
    ),
    "none in tangents": (
        lambda: func.jvp(same, ([TWO, None],), ([TWO, TWO],)), pr.TreeError,
        "but tangents[0][1] is a leaf of type Tensor where primals[0] has None.",
    ),
    "none as tangent": (
        lambda: func.jvp(same, ([TWO],), ([None],)), pr.DtypeError,
        "jvp: tangents[0][0] must be a tensor like primals[0][0], got NoneType.",
    ),
    "shape of tangents": (
        lambda: func.jvp(same, (Affine(TWO, ONE),), (Affine(ONE, ONE),), namespace=NAMESPACE), pr.ShapeError,
        "jvp: tangents[0].w must have shape [2] (primals[0].w), got [].",
    ),
    "dtype of tangents": (
        lambda: func.hvp(total, (X,), ({"x": TWO.double()},)), pr.DtypeError,
        "hvp: tangents[0]['x'] must have dtype torch.float32 (primals[0]['x']), got torch.float64.",
    ),
    "device of tangents": (
        lambda: func.jvp(same, (X,), ({"x": TWO.to("meta")},)), pr.DeviceError,
        "jvp: tangents[0]['x'] must be on cpu (primals[0]['x']), got meta.",
    ),
    "tangents of linearize": (
        lambda: func.linearize(total, X)[1]({"x": TWO.half()}), pr.DtypeError,
        "linearize: tangents[0]['x'] must have dtype torch.float32 (primals[0]['x']), got torch.float16.",
    ),
    "tree of cotangents": (
        lambda: func.vjp(lambda t: {"y": t["x"]}, X)[1]({"z": TWO}), pr.TreeError,
        ("vjp: cotangents must have the structure of output, but cotangents is a dict with keys ['z'] where output "
        "has a dict with keys ['y']."),
    ),
    "shape of cotangents": (
        lambda: func.vjp(lambda t: {"y": t["x"]}, X)[1]({"y": ONE}), pr.ShapeError,
        "vjp: cotangents['y'] must have shape [2] (output['y']), got [].",
    ),
    "dtype of cotangents": (
        lambda: func.vjp(lambda t: (t["x"], t["x"]), X)[1]((TWO, TWO.double())), pr.DtypeError,
        "vjp: cotangents[1] must have dtype torch.float32 (output[1]), got torch.float64.",
    ),
    "tangent of an integer leaf of hvp": (
        lambda: func.hvp(total, ({"x": TWO, "n": INTS},), ({"x": TWO, "n": INTS},)), pr.DtypeError,
        ("hvp: primals[0]['n'] must be floating point or complex to be differentiated, got torch.int64. "
        "Pass None in tangents[0] to hold it constant."),
    ),
    "tangent of another leaf of hvp": (
        lambda: func.hvp(total, ({"x": TWO, "n": 3},), ({"x": TWO, "n": 3},)), pr.DtypeError,
        "hvp: primals[0]['n'] must be a tensor to be differentiated, got int. Pass None in tangents[0] to hold",
    ),
    "no tangent of hvp": (
        lambda: func.hvp(total, (X,), ({"x": None},)), pr.TreeError,
        "hvp: tangents must hold a tensor, got none.",
    ),
    "unnamed child": (
        lambda: func.jvp(same, (Unnamed(TWO, [ONE]),), (Unnamed(TWO, [TWO]),), **N), pr.ShapeError,
        "jvp: tangents[0]<child 1 of Unnamed>[0] must have shape [] (primals[0]<child 1 of Unnamed>[0]), got [2].",
    ),
    "named child": (
        lambda: func.jvp(same, (Named(TWO, [ONE]),), (Named(TWO, (ONE,)),), **N), pr.TreeError,
        "but tangents[0].right is a tuple of 1 where primals[0] has a list of 1.",
    ),
    # vmap.
    "boolean in_dims": (
        lambda: func.vmap(same, in_dims=True)(X), pr.TreeError,
        "vmap: in_dims must be an int, None or a tree prefix of args, a tuple of 1, got bool.",
    ),
    "boolean leaf of in_dims": (
        lambda: func.vmap(same, in_dims=(True,))(X), pr.TreeError,
        "vmap: in_dims[0] of args[0]['x'] must be an int or None, got True.",
    ),
    "boolean out_dims": (
        lambda: func.vmap(same, out_dims=False)(X), pr.TreeError,
        "vmap: out_dims of output['x'] must be an int or None, got False.",
    ),
    "batch sizes": (
        lambda: func.vmap(same, (0, {"a": 1, "b": None}))([TWO, TWO], {"a": torch.ones(2, 3), "b": ONE}),
        pr.ShapeError,
        ("vmap: all mapped axes must have the same size, but args[0][0] has 2 (axis 0), args[0][1] has 2 (axis 0), "
        "args[1]['a'] has 3 (axis 1)."),
    ),
    "prefix": (
        lambda: func.vmap(same, ({"x": 0, "y": 0},))(X), pr.TreeError,
        ("vmap: in_dims[0] must be an int, None or a tree prefix of args[0], but in_dims[0] is a dict with keys "
        "['x', 'y'] where args[0] has a dict with keys ['x'].\nin_dims[0]: PyTreeSpec({'x': *, 'y': *}, NoneIsLeaf)"),
    ),
    "prefix of another class": (
        lambda: func.chunk_vmap(same, ({"x": (0,)},))({"x": [TWO]}), pr.TreeError,
        ("chunk_vmap: in_dims[0] must be an int, None or a tree prefix of args[0], but in_dims[0]['x'] is a tuple of 1 "
        "where args[0] has a list of 1."),
    ),
    "number of in_dims": (
        lambda: func.vmap(same, (0, 0))(X), pr.TreeError,
        "vmap: in_dims must be an int, None or a tree prefix of args, a tuple of 1, got a tuple of 2.",
    ),
    "list of in_dims": (lambda: func.vmap(same, [0])(X), pr.TreeError, "a tuple of 1, got list."),
    "type of in_dims": (
        lambda: func.vmap(same, ({"x": "0"},))(X), pr.TreeError,
        "vmap: in_dims[0] of args[0]['x'] must be an int or None, got '0'.",
    ),
    "in_dim out of range": (
        lambda: func.vmap(same, ({"x": 1},))(X), pr.AxisError,
        "vmap: in_dims[0] of args[0]['x'] must be in [-1, 0] for shape [2], got 1.",
    ),
    "in_dim of a scalar": (
        lambda: func.vmap(same)(ONE), pr.AxisError, "vmap: in_dims[0] of args[0] must be None for shape [], got 0."
    ),
    "in_dim of a number": (
        lambda: func.vmap(same)({"x": TWO, "n": 3}), pr.DtypeError,
        "vmap: args[0]['n'] must be a tensor where in_dims[0] is 0, got int. Pass None as its in_dims[0].",
    ),
    "nothing mapped": (
        lambda: func.vmap(same, None)(X), pr.TreeError, "vmap: in_dims must map at least one tensor, got none."
    ),
    "no arguments": (
        func.vmap(lambda: TWO), pr.TreeError,
        "vmap: func must be called with at least one positional argument, got none.",
    ),
    "out_dim out of range": (
        lambda: func.vmap(lambda t: {"y": t["x"]}, out_dims={"y": 1})(X), pr.AxisError,
        "vmap: out_dims of output['y'] must be in [-1, 0] for shape [], got 1.",
    ),
    "out_dim of a number": (
        lambda: func.vmap(lambda t: {"y": t["x"], "n": 3})(X), pr.DtypeError,
        "vmap: output['n'] must be a tensor where out_dims is 0, got int. Pass None as its out_dims.",
    ),
    "out_dim None": (
        lambda: func.vmap(lambda t: {"y": t["x"]}, out_dims=None)(X), pr.TreeError,
        "vmap: out_dims of output['y'] must be an int, as it is mapped, got None.",
    ),
    "prefix of the output": (
        lambda: func.vmap(same, out_dims=[0, 0])(X), pr.TreeError,
        ("vmap: out_dims must be an int, None or a tree prefix of output, but out_dims is a list of 2 where output has "
        "a dict with keys ['x']."),
    ),
    "randomness": (
        lambda: func.vmap(same, randomness="some"), RuntimeError,
        "vmap: randomness must be 'error', 'same' or 'different', got 'some'.",
    ),
    "chunk_size": (
        lambda: func.jacrev(same, chunk_size=0), pr.ShapeError, "jacrev: chunk_size must be at least 1, got 0."
    ),
    "type of chunk_size": (
        lambda: func.vmap(same, chunk_size=1.5), pr.DtypeError, "vmap: chunk_size must be an int, got float."
    ),
    "chunks": (lambda: func.chunk_vmap(same, chunks=0), pr.ShapeError, "chunk_vmap: chunks must be at least 1, got 0."),
    # functional_call.
    "parameter": (
        lambda: func.functional_call(torch.nn.Linear(2, 1), {"weight": 3}, TWO), pr.DtypeError,
        "functional_call: weight must be a tensor, got int.",
    ),
    "name twice": (
        lambda: func.functional_call(torch.nn.Linear(2, 1), ({"bias": TWO}, {"bias": TWO}), TWO), pr.TreeError,
        "functional_call: every name must be given once, got bias twice.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_error(case):
    call, error, text = CASES[case]
    with pytest.raises(error, match=re.escape(text)) as caught:
        call()
    assert caught.value.__cause__ is None


TORCH = {
    "scalar": (lambda: torch.func.grad(lambda x: x)(TWO), "scalar"),
    "number": (lambda: torch.func.grad(lambda x: 3.0)(TWO), "number"),
    "argnums": (lambda: torch.func.grad(total, 2)(X, X), "argnums"),
    "duplicates": (lambda: torch.func.grad(total, (0, 0))(X), "duplicate argnums"),
    "float leaf": (lambda: torch.func.grad(total)({"x": TWO, "rest": 3.0}), "float leaf"),
    "integer leaf": (lambda: torch.func.grad(total)({"x": INTS}), "integer leaf"),
    "integer primal": (lambda: torch.func.jvp(same, (INTS,), (INTS,)), "string leaf of jvp"),
    "tree of tangents": (lambda: torch.func.jvp(total, (X,), ({"y": TWO},)), "tree of tangents"),
    "shape of tangents": (lambda: torch.func.jvp(total, (X,), ({"x": ONE},)), "shape of tangents"),
    "tree of cotangents": (lambda: torch.func.vjp(total, X)[1]((ONE,)), "tree of cotangents"),
    "shape of cotangents": (lambda: torch.func.vjp(total, X)[1](TWO), "shape of cotangents"),
    "integer output": (lambda: torch.func.vjp(lambda x: x.long(), TWO), "integer output of vjp"),
    "aux": (lambda: torch.func.grad(total, has_aux=True)(X), "aux"),
    "batch sizes": (lambda: torch.func.vmap(torch.add)(TWO, torch.ones(3)), "batch sizes"),
    "in_dims": (lambda: torch.func.vmap(same, ({"x": 0, "y": 0},))(X), "prefix"),
    "in_dim": (lambda: torch.func.vmap(same, 1)(TWO), "in_dim out of range"),
    "in_dim of a number": (lambda: torch.func.vmap(torch.add)(TWO, 3), "in_dim of a number"),
    "nothing mapped": (lambda: torch.func.vmap(same, (None,))(TWO), "nothing mapped"),
    "out_dim of a number": (lambda: torch.func.vmap(lambda x: 3)(TWO), "out_dim of a number"),
    "out_dim None": (lambda: torch.func.vmap(same, out_dims=None)(TWO), "out_dim None"),
    "prefix of the output": (lambda: torch.func.vmap(same, out_dims=(0, 0))(TWO), "prefix of the output"),
    "randomness": (lambda: torch.func.vmap(same, randomness="some"), "randomness"),
    "chunk_size": (lambda: torch.func.jacrev(same, chunk_size=0), "chunk_size"),
    "name twice": (
        lambda: torch.func.functional_call(torch.nn.Linear(2, 1), ({"bias": TWO}, {"bias": TWO}), TWO), "name twice"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH)
def test_every_error_is_of_the_type_that_torch_raises(name):
    torch_call, case = TORCH[name]
    with pytest.raises(TORCH_ERRORS) as torchs:
        torch_call()
    assert issubclass(_raised(case), torchs.type)


def _raised(case):
    with pytest.raises(CASES[case][1]) as caught:
        CASES[case][0]()
    return caught.type


def test_torch_takes_an_integer_output_for_a_gradient_of_zero():
    """Recorded, so that a torch that refuses it is noticed."""
    assert torch.func.grad(lambda x: x.sum().long())(TWO).tolist() == [0.0, 0.0]
