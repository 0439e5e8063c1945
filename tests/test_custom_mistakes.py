"""Mistakes in users' rules: each is caught at the call, with the rule's place, the key path, and what was expected."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch
from torch.func import grad, jvp, vmap

import primitives as pr
from primitives.core.errors import LeafError
from tests import custom_ops

HERE = re.escape(str(pathlib.Path(__file__)))
X, Y = torch.ones(2, 3), torch.ones(3)


def operator(*, backward=None, jvp=None, vmap=None, save=lambda inputs, output: None, reference=None, **options):
    """An operator over `{"w": Y, "n": 3}` and `X` with the given rules."""

    def function(params, x):
        return reference(params, x) if reference else {"y": params["w"] * x, "z": (x.sum(),)}

    op = custom_ops.operator(function, **options)
    if backward is not None:
        op.def_save_for_backward(save)
        op.def_backward(backward)
    if jvp is not None:
        op.def_jvp(jvp)
    if vmap is not None:
        op.def_vmap(vmap)
    return op


def good(**changes):
    return {"params": {"w": None, "n": None}, "x": None, **changes}


BACKWARD_MISTAKES = {
    "not a dict": ([None, None], pr.TreeError, "a dict from argument name to cotangent, .* got list"),
    "missing key": ({"x": None}, pr.TreeError, r"keys \['params', 'x'\], got keys \['x'\]"),
    "extra key": (good(bias=None), pr.TreeError, r"got keys \['bias', 'params', 'x'\]"),
    "wrong tree": (
        good(params=[None, None]),
        pr.TreeError,
        "the cotangent of params must have the structure of params",
    ),
    "not a tensor": (good(x=[X, X]), LeafError, "the cotangent of x must be a tensor like x, got list"),
    "for no tensor": (good(params={"w": None, "n": Y}), LeafError, r"params\['n'\] must be None, .*got Tensor"),
    "shape": (good(params={"w": X, "n": None}), pr.ShapeError, r"params\['w'\] must have shape \[3\] .*got \[2, 3\]"),
    "dtype": (good(x=X.double()), pr.DtypeError, r"x must have dtype torch\.float32 .*got torch\.float64"),
    "device": (good(x=X.to("meta")), pr.DeviceError, "x must be on cpu .*got meta"),
}


@pytest.mark.parametrize("mistake", BACKWARD_MISTAKES)
def test_mistakes_of_def_backward(mistake):
    result, error, text = BACKWARD_MISTAKES[mistake]
    op = operator(backward=lambda ctx, saved, y: result)
    with pytest.raises(error, match=rf"^tests::fresh_\d+: def_backward \({HERE}:\d+\).*{text}"):
        grad(lambda x: op({"w": Y, "n": 3}, x)["y"].sum())(X)
    with pytest.raises(error, match=text):
        op({"w": Y, "n": 3}, X.clone().requires_grad_())["y"].sum().backward()


JVP_MISTAKES = {
    "wrong tree": ({"y": X}, pr.TreeError, "the tangent of output must have the structure of output"),
    "shape": ({"y": Y, "z": (None,)}, pr.ShapeError, r"output\['y'\] must have shape \[2, 3\] .*got \[3\]"),
    "dtype": ({"y": X.double(), "z": None}, pr.DtypeError, r"output\['y'\] must have dtype"),
    "not a tensor": ({"y": X, "z": (1,)}, LeafError, r"output\['z'\]\[0\] must be a tensor"),
}


@pytest.mark.parametrize("mistake", JVP_MISTAKES)
def test_mistakes_of_def_jvp(mistake):
    result, error, text = JVP_MISTAKES[mistake]
    op = operator(jvp=lambda inputs, output, tangents: result)
    with pytest.raises(error, match=rf"def_jvp \({HERE}:\d+\).*{text}"):
        jvp(lambda x: op({"w": Y, "n": 3}, x), (X,), (X,))


def test_the_dtype_of_a_tangent_is_checked():
    """Torch lets it pass."""
    op = operator(jvp=lambda inputs, output, tangents: {"y": tangents.x, "z": None})
    with pytest.raises(pr.DtypeError, match=r"the tangent of params\['w'\] must have the dtype of its primal"):
        jvp(lambda w: op({"w": w, "n": 3}, X), (Y,), (Y.double(),))


VMAP_MISTAKES = {
    "not a pair": ({"y": X}, pr.TreeError, r"must return \(output, out_dims\), got dict"),
    "axis": (({"y": X, "z": (Y,)}, 4), pr.TreeError, "axes of the output or None, got 4"),
    "axes": (({"y": X, "z": (Y,)}, (0, 0, 0)), pr.TreeError, "out_dims must be one value or a tree prefix"),
    "tree": ((X, 0), pr.TreeError, "a result with the tree that it had before"),
    "samples": (({"y": X[:1], "z": (Y,)}, 0), pr.ShapeError, r"output\['y'\] must have 2 samples .*got shape \[1, 3\]"),
}


@pytest.mark.parametrize("mistake", VMAP_MISTAKES)
def test_mistakes_of_def_vmap(mistake):
    result, error, text = VMAP_MISTAKES[mistake]
    op = operator(vmap=lambda info, in_dims, inputs: result)
    op({"w": Y, "n": 3}, X)
    with pytest.raises(error, match=rf"def_vmap \({HERE}:\d+\).*{text}"):
        vmap(lambda x: op({"w": Y, "n": 3}, x))(torch.stack([X, X]))


def test_mistakes_of_kernels_and_references():
    params, op = {"w": Y, "n": 3}, operator()
    op(params, X)
    kernel = op.def_kernel("cpu")(lambda params, x: [params["w"] * x, x.sum()])
    place = rf"def_kernel\('cpu'\) \({HERE}:{kernel.__code__.co_firstlineno}\)"
    with pytest.raises(pr.TreeError, match=rf"{place} must return a result with the tree that it had before"):
        op(params, X)
    with pytest.raises(LeafError, match=r"reference .* but output\['y'\] is int"):
        operator(reference=lambda params, x: {"y": 3})(params, X)
    for view in (lambda params, x: [x.clone(), params["w"]], lambda params, x: [x.clone(), params["w"][1:]]):
        with pytest.raises(LeafError, match=r"output\[1\] shares its memory with the argument params\['w'\]; return a"):
            operator(reference=view)(params, X)
    with pytest.raises(LeafError, match=r"output\[1\]\['again'\] shares its memory with output\[0\]; return a clone"):
        operator(reference=lambda params, x: ((y := x * 2), {"again": y[:1]}))(params, X)


def test_rules_that_are_missing():
    op = operator()
    op({"w": Y, "n": 3}, X)
    with pytest.raises(pr.MissingRuleError, match=r'def_save_for_backward and def_backward, or .*"reference"'):
        op({"w": Y, "n": 3}, X.clone().requires_grad_())
    with pytest.raises(pr.MissingRuleError, match=r'forward-mode.*def_jvp, or .*"reference"'):
        jvp(lambda x: op({"w": Y, "n": 3}, x), (X,), (X,))


@pytest.mark.parametrize("found", ["def_backward", "def_save_for_backward"])
@pytest.mark.parametrize("options", [{}, {"differentiate": "reference"}], ids=["no_reference", "reference"])
def test_one_of_two_rules(found, options):
    op = operator(**options)
    rule = getattr(op, found)(lambda *args: None)
    place = f"{HERE}:{rule.__code__.co_firstlineno}"
    with pytest.raises(pr.MissingRuleError, match=rf"there is only {found} \({place}\); add def_(backward|save)"):
        op({"w": Y, "n": 3}, X.clone().requires_grad_())


def test_calls_that_are_wrong():
    op = operator()
    with pytest.raises(LeafError, match="positional arguments must hold a tensor, got none"):
        op({"w": 1, "n": 3}, None)
    with pytest.raises(LeafError, match=r"params\['n'\] must be hashable, .* got set"):
        op({"w": Y, "n": {3}}, X)
    static_only = custom_ops.operator(lambda x, *, options: x.clone())
    with pytest.raises(LeafError, match=r"static argument options must be hashable, .* got list; pass a tuple"):
        static_only(X, options=[1])
    with pytest.raises(LeafError, match="options is keyword-only, hence static, and must hold no tensor"):
        static_only(X, options=Y)
    with pytest.raises(pr.TreeError, match="structure 12 is unknown in this process"):
        static_only.primitive.overload([X], 12)


def test_definitions_that_are_wrong():
    for name in ("nameless", "a::b::c", "a.b::c", "::c"):
        with pytest.raises(ValueError, match='the name must be "namespace::name"'):
            pr.custom_op(name)(lambda x: x)
    with pytest.raises(ValueError, match="aten::sin exists already"):
        pr.custom_op("aten::sin")(lambda x: x)
    with pytest.raises(TypeError, match=r"takes \*xs, but an operator has a fixed number"):
        pr.custom_op("tests::variadic")(lambda *xs: xs)
    with pytest.raises(ValueError, match='differentiate must be None or "reference", got True'):
        operator(differentiate=True)
    with pytest.raises(TypeError, match="def_jvp takes a function, got int"):
        operator().def_jvp(3)
    with pytest.raises(ValueError, match='def_kernel takes "cuda" or "cpu", got \'tpu\''):
        operator().def_kernel("tpu")


def test_outputs_that_are_marked_wrongly():
    params = {"w": Y, "n": 3}
    with pytest.raises(pr.TreeError, match="one bool for each of 1 outputs, got 2"):
        operator(output_differentiability=[True, False])(params, X)
    marked = operator(reference=lambda params, x: (x * 2, None), output_differentiability=[True, True])
    with pytest.raises(pr.TreeError, match="marks output 1 as differentiable, but it holds no tensor"):
        marked(params, X)
