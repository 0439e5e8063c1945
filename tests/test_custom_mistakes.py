"""Mistakes in users' rules: each is caught at the call, with the rule's place, the key path, and what was expected."""

import pathlib
import re

import pytest
import torch
from torch.func import grad, jvp, vmap

import primitives as pr
from primitives._core.errors import LeafError
from tests import custom_ops

HERE = re.escape(str(pathlib.Path(__file__)))
X, Y = torch.ones(2, 3), torch.ones(3)
PARAMS = {"w": Y, "n": 3}


def operator(reference=lambda params, x: {"y": params["w"] * x, "z": (x.sum(),)}, *, rules=None, **options):
    """An operator over `PARAMS` and `X`; `rules` are given to the decorators of these names."""
    op = custom_ops.operator(lambda params, x: reference(params, x), **options)
    for decorator, rule in (rules or {}).items():
        getattr(op, decorator)(rule)
    return op


def good(**changes):
    return {"params": {"w": None, "n": None}, "x": None, **changes}


CALLS = {
    "def_backward": lambda op: grad(lambda x: op(PARAMS, x)["y"].sum())(X),
    "def_jvp": lambda op: jvp(lambda x: op(PARAMS, x), (X,), (X,)),
    "def_vmap": lambda op: vmap(lambda x: op(PARAMS, x))(torch.stack([X, X])),
    r"def_kernel\('cpu'\)": lambda op: op(PARAMS, X),
}
OTHER_TREE = "must return a result with the tree that it had before"
# The result of a rule, the error, and a part of its text.
MISTAKES = [
    ("def_backward", [None, None], pr.TreeError, "must return a dict .*, got list"),
    ("def_backward", {"x": None}, pr.TreeError, r"keys \['params', 'x'\], got keys \['x'\]"),
    ("def_backward", good(bias=None), pr.TreeError, "got keys .*bias"),
    ("def_backward", good(params=[None, None]), pr.TreeError, "params must have the structure of params"),
    ("def_backward", good(x=[X, X]), LeafError, "the cotangent of x must be a tensor .*got list"),
    ("def_backward", good(params={"w": None, "n": Y}), LeafError, r"params\['n'\] must be None, .*got Tensor"),
    ("def_backward", good(params={"w": X, "n": None}), pr.ShapeError, r"\['w'\] must have shape \[3\] .*\[2, 3\]"),
    ("def_backward", good(x=X.double()), pr.DtypeError, r"x must have dtype torch\.float32 .*torch\.float64"),
    ("def_backward", good(x=X.to("meta")), pr.DeviceError, "x must be on cpu .*meta"),
    ("def_jvp", None, pr.TreeError, "None for each tangent of zeros, got None alone for 2 tensors"),
    ("def_jvp", {"y": X}, pr.TreeError, "the tangent of output must have the structure of output"),
    ("def_jvp", {"y": Y, "z": (None,)}, pr.ShapeError, r"output\['y'\] must have shape \[2, 3\] .*\[3\]"),
    ("def_jvp", {"y": X.double(), "z": None}, pr.DtypeError, r"output\['y'\] must have dtype"),
    ("def_jvp", {"y": X, "z": (1,)}, LeafError, r"output\['z'\]\[0\] must be a tensor"),
    ("def_vmap", {"y": X}, pr.TreeError, r"must return \(output, out_dims\), got dict"),
    ("def_vmap", ({"y": X, "z": (Y,)}, 4), pr.TreeError, "axes of the output or None, got 4"),
    ("def_vmap", ({"y": X, "z": (Y,)}, (0, 0, 0)), pr.TreeError, "out_dims must be one value or a tree prefix"),
    ("def_vmap", (X, 0), pr.TreeError, OTHER_TREE),
    ("def_vmap", ({"y": X[:1], "z": (Y,)}, 0), pr.ShapeError, r"output\['y'\] must have 2 samples .*\[1, 3\]"),
    (r"def_kernel\('cpu'\)", [X, Y], pr.TreeError, OTHER_TREE),
]


@pytest.mark.parametrize("decorator, result, error, text", MISTAKES, ids=[f"{m[0]} {m[3]}" for m in MISTAKES])
def test_what_a_rule_returns_is_checked(decorator, result, error, text):
    op = operator(rules={"def_save_for_backward": lambda inputs, output: None})
    op(PARAMS, X)
    add = op.def_kernel("cpu") if "kernel" in decorator else getattr(op, decorator)
    place = add(lambda *args: result).__code__.co_firstlineno
    with pytest.raises(error, match=rf"(?s)^tests::fresh_\d+: {decorator} \({HERE}:{place}\).*{text}"):
        CALLS[decorator](op)


@pytest.mark.parametrize(
    "bars, error",
    [
        ({"w": Y, "x": X[:1]}, pr.ShapeError),
        ({"w": Y, "x": X.double()}, pr.DtypeError),
        ({"w": Y, "x": 0.0}, LeafError),
        ({"w": Y}, pr.TreeError),
    ],
)
def test_cotangents_of_arguments_that_are_no_trees_are_checked(bars, error):
    op = custom_ops.operator(lambda w, x: w * x)
    op.def_save_for_backward(lambda inputs, output: ())
    op.def_backward(lambda ctx, saved, y_bar: bars)
    with pytest.raises(error, match=rf"^tests::fresh_\d+: def_backward \({HERE}:\d+\).*x"):
        op(Y.clone().requires_grad_(), X.clone().requires_grad_()).sum().backward()


REFERENCES = [
    (lambda params, x: {"y": 3}, r"reference .* but output\['y'\] is int"),
    (lambda params, x: [x.clone(), params["w"]], r"output\[1\] shares its memory with the argument params\['w'\]; ret"),
    (lambda params, x: [x.clone(), params["w"][1:]], r"output\[1\] shares its memory with the argument params\['w'\]"),
    (lambda params, x: ((y := x * 2), {"again": y[:1]}), r"output\[1\]\['again'\] shares its memory with output\[0\]"),
]


def test_rules_that_are_missing():
    for call, words in (("def_backward", "def_save_for_backward and def_backward, or "), ("def_jvp", "def_jvp, or ")):
        with pytest.raises(pr.MissingRuleError, match=rf'{words}.*"reference"'):
            CALLS[call](operator())
    for options in ({}, {"differentiate": "reference"}):
        for found in ("def_backward", "def_save_for_backward"):
            op = operator(rules={found: lambda *args: None}, **options)
            with pytest.raises(pr.MissingRuleError, match=rf"there is only {found} \({HERE}:\d+\); add def_"):
                op(PARAMS, X.clone().requires_grad_())


static_only = custom_ops.operator(lambda x, *, options: x.clone())
WRONG_CALLS = [
    *[(lambda f=reference: operator(f)(PARAMS, X), LeafError, words) for reference, words in REFERENCES],
    (lambda: operator()({"w": 1, "n": 3}, None), LeafError, "positional arguments must hold a tensor, got none"),
    (lambda: operator()({"w": Y, "n": {3}}, X), LeafError, r"params\['n'\] must be hashable, .* got set"),
    (lambda: static_only(X, options=[1]), LeafError, "argument options must be hashable, .* got list; pass a tuple"),
    (lambda: static_only(X, options=X.numpy()), LeafError, "options must be hashable, .* got ndarray; pass a tensor"),
    (
        lambda: static_only(X, options=custom_ops.Affine(X)),
        LeafError,
        "argument options must be hashable, .* got Affine",
    ),
    (lambda: static_only(X, options=Y), LeafError, "options is keyword-only, hence static, and must hold no tensor"),
    (lambda: static_only.primitive.overload([X], 12), pr.TreeError, "structure 12 is unknown in this process"),
    *[
        (lambda name=name: pr.custom_op(name)(lambda x: x), ValueError, 'the name must be "library::name"')
        for name in ("nameless", "a::b::c", "a.b::c", "::c")
    ],
    (lambda: pr.custom_op("aten::sin")(lambda x: x), ValueError, "aten::sin exists already"),
    (lambda: pr.custom_op(good), TypeError, "name must be the name of the operator, .* got the function good"),
    (lambda: custom_ops.affine(X), TypeError, r"tests::affine\(\) missing 1 required positional argument"),
    (lambda: pr.custom_op("tests::variadic")(lambda *xs: xs), TypeError, r"takes \*xs, but an operator has a fixed"),
    (lambda: operator(differentiate=True), ValueError, 'differentiate must be None or "reference", got True'),
    (lambda: custom_ops.moving_average.def_vmap(print), pr.MutationError, "takes no def_vmap"),
    (lambda: custom_ops.affine.pure(X), pr.MutationError, "pure is for operators that update"),
    (lambda: operator(mutates=("other",)), ValueError, "mutates names 'other'"),
    (lambda: operator().def_jvp(3), TypeError, "def_jvp takes a function, got int"),
    (
        lambda: operator().def_jvp(lambda x: x),
        TypeError,
        r"def_jvp .* must take \(inputs, output, tangents\), but .* \(x\)",
    ),
    (lambda: operator().def_backward(lambda ctx, saved: {}), TypeError, r"must take \(ctx, saved, \*cotangents\)"),
    (lambda: operator().def_kernel("cpu")(lambda x: x), TypeError, r"def_kernel\('cpu'\) .* must take \(params, x\)"),
    (lambda: operator(lambda params, x: None)(PARAMS, X), pr.TreeError, "got None. Add the `return`"),
    (lambda: operator()(PARAMS, X.numpy()), LeafError, "got ndarray; pass a tensor: torch.from_numpy"),
    (lambda: operator().def_kernel("tpu"), ValueError, 'def_kernel takes "cuda" or "cpu", got \'tpu\''),
    (lambda: operator(output_differentiability=[True, False])(PARAMS, X), pr.TreeError, "each of 1 outputs, got 2"),
    (
        lambda: operator(lambda params, x: (x * 2, None), output_differentiability=[True, True])(PARAMS, X),
        pr.TreeError,
        "marks output 1 as differentiable, but it holds no tensor",
    ),
]


@pytest.mark.parametrize("call, error, text", WRONG_CALLS, ids=[case[2] for case in WRONG_CALLS])
def test_wrong_calls_and_definitions(call, error, text):
    with pytest.raises(error, match=text):
        call()
