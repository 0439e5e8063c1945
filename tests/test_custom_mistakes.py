"""Mistakes in users' rules: each is caught at the call, with the rule's place, the key path, and what was expected."""

from __future__ import annotations

import itertools
import pathlib
import re

import pytest
import torch
from torch.func import grad, jvp, vmap

import primitives as pr

_numbers = itertools.count()
HERE = re.escape(str(pathlib.Path(__file__)))
X, Y = torch.ones(2, 3), torch.ones(3)


def operator(*, backward=None, jvp=None, vmap=None, save=lambda inputs, output: None, reference=None, **options):
    """An operator over `{"w": Y, "n": 3}` and `X` with the given rules."""

    @pr.custom_op(f"tests::mistaken_{next(_numbers)}", **options)
    def op(params, x):
        return reference(params, x) if reference else {"y": params["w"] * x, "z": (x.sum(),)}

    for decorator, rule in ((op.def_save_for_backward, save), (op.def_backward, backward), (op.def_jvp, jvp)):
        if rule is not None and (backward is not None or rule is jvp):
            decorator(rule)
    if vmap is not None:
        op.def_vmap(vmap)
    return op


def gradient(op):
    return grad(lambda x: op({"w": Y, "n": 3}, x)["y"].sum())(X)


def good(**changes):
    return {"params": {"w": None, "n": None}, "x": None, **changes}


BACKWARD_MISTAKES = {
    "no dict": (
        lambda ctx, saved, y: [None, None],
        pr.TreeError,
        "must return a dict from argument name to cotangent, got list",
    ),
    "missing key": (lambda ctx, saved, y: {"x": None}, pr.TreeError, r"keys \['params', 'x'\], .* lacks \['params'\]"),
    "extra key": (lambda ctx, saved, y: good(bias=None), pr.TreeError, r"has \['bias'\]"),
    "wrong tree": (
        lambda ctx, saved, y: good(params=[None, None]),
        pr.TreeError,
        "the cotangent of params is a list of 2 where params has a dict",
    ),
    "list too long": (
        lambda ctx, saved, y: good(x=[X, X]),
        pr.core.errors.LeafError,
        "cotangent of x must be a tensor or None, got list",
    ),
    "no tensor": (
        lambda ctx, saved, y: good(x=3.0),
        pr.core.errors.LeafError,
        "the cotangent of x must be a tensor or None, got float",
    ),
    "for no tensor": (
        lambda ctx, saved, y: good(params={"w": None, "n": Y}),
        pr.core.errors.LeafError,
        r"the cotangent of params\['n'\] must be None, because that is no tensor, got a tensor of shape \[3\]",
    ),
    "shape": (
        lambda ctx, saved, y: good(params={"w": X, "n": None}),
        pr.ShapeError,
        r"the cotangent of params\['w'\] must have shape \[3\], got \[2, 3\]",
    ),
    "dtype": (
        lambda ctx, saved, y: good(x=X.double()),
        pr.DtypeError,
        r"x must have dtype torch\.float32, got torch\.float64",
    ),
    "device": (lambda ctx, saved, y: good(x=X.to("meta")), pr.DeviceError, "x must be on cpu, got meta"),
}


@pytest.mark.parametrize("mistake", BACKWARD_MISTAKES)
def test_mistakes_of_def_backward(mistake):
    rule, error, text = BACKWARD_MISTAKES[mistake]
    place = f"{HERE}:{rule.__code__.co_firstlineno}"
    with pytest.raises(error, match=rf"^tests::mistaken_\d+: def_backward \({place}\).*{text}"):
        gradient(operator(backward=rule))
    leaf = X.clone().requires_grad_()
    with pytest.raises(error, match=text):
        operator(backward=rule)({"w": Y, "n": 3}, leaf)["y"].sum().backward()


JVP_MISTAKES = {
    "wrong tree": (
        lambda inputs, output, tangents: {"y": X},
        pr.TreeError,
        "must have the structure of output, but the tangent of output is a dict",
    ),
    "shape": (
        lambda inputs, output, tangents: {"y": Y, "z": (None,)},
        pr.ShapeError,
        r"output\['y'\] must have shape \[2, 3\], got \[3\]",
    ),
    "dtype": (
        lambda inputs, output, tangents: {"y": X.double(), "z": None},
        pr.DtypeError,
        r"output\['y'\] must have dtype",
    ),
    "no tensor": (
        lambda inputs, output, tangents: {"y": X, "z": (1,)},
        pr.core.errors.LeafError,
        r"output\['z'\]\[0\] must be a tensor",
    ),
}


@pytest.mark.parametrize("mistake", JVP_MISTAKES)
def test_mistakes_of_def_jvp(mistake):
    rule, error, text = JVP_MISTAKES[mistake]
    op = operator(jvp=rule)
    with pytest.raises(error, match=rf"def_jvp \({HERE}:\d+\).*{text}"):
        jvp(lambda x: op({"w": Y, "n": 3}, x), (X,), (X,))


VMAP_MISTAKES = {
    "no pair": (lambda info, in_dims, inputs: {"y": X}, r"must return \(output, out_dims\), got dict"),
    "axis": (
        lambda info, in_dims, inputs: ({"y": X, "z": (Y,)}, 4),
        "out_dims must be axes of the output or None, got 4",
    ),
    "tree of axes": (
        lambda info, in_dims, inputs: ({"y": X, "z": (Y,)}, (0, 0, 0)),
        "out_dims must be an int, None or a tree prefix",
    ),
    "tree": (lambda info, in_dims, inputs: (X, 0), "must return a result with the tree of the reference's"),
}


@pytest.mark.parametrize("mistake", VMAP_MISTAKES)
def test_mistakes_of_def_vmap(mistake):
    rule, text = VMAP_MISTAKES[mistake]
    op = operator(vmap=rule)
    op({"w": Y, "n": 3}, X)
    with pytest.raises(pr.TreeError, match=rf"def_vmap \({HERE}:\d+\).*{text}"):
        vmap(lambda x: op({"w": Y, "n": 3}, x))(torch.stack([X, X]))


def test_mistakes_of_kernels_and_references():
    params = {"w": Y, "n": 3}
    op = operator()
    kernel = op.def_kernel("cpu")(lambda params, x: [params["w"] * x, x.sum()])
    place = f"{HERE}:{kernel.__code__.co_firstlineno}"
    with pytest.raises(
        pr.TreeError, match=rf"def_kernel\('cpu'\) \({place}\) must return a result with the tree of the ref"
    ):
        op(params, X)
    with pytest.raises(pr.core.errors.LeafError, match=r"reference .* but output\['y'\] is int"):
        operator(reference=lambda params, x: {"y": 3})(params, X)
    for view in (lambda params, x: [x.clone(), params["w"]], lambda params, x: [x.clone(), params["w"][1:]]):
        with pytest.raises(
            pr.core.errors.LeafError, match=r"output\[1\] shares its memory with the argument params\['w'\]; return a"
        ):
            operator(reference=view)(params, X)


def test_rules_that_are_missing():
    op = operator()
    leaf = X.clone().requires_grad_()
    op({"w": Y, "n": 3}, leaf.detach())
    with pytest.raises(
        pr.MissingRuleError, match=r'def_save_for_backward and def_backward, or .*differentiate="reference"'
    ):
        op({"w": Y, "n": 3}, leaf)
    with pytest.raises(pr.MissingRuleError, match=r'forward-mode.*def_jvp, or .*differentiate="reference"'):
        jvp(lambda x: op({"w": Y, "n": 3}, x), (X,), (X,))


@pytest.mark.parametrize(
    "found, missing", [("def_backward", "def_save_for_backward"), ("def_save_for_backward", "def_backward")]
)
@pytest.mark.parametrize("options", [{}, {"differentiate": "reference"}], ids=["no_reference", "reference"])
def test_one_of_two_rules(found, missing, options):
    op = operator(**options)
    rule = getattr(op, found)(lambda *args: None)
    place = f"{HERE}:{rule.__code__.co_firstlineno}"
    with pytest.raises(pr.MissingRuleError, match=rf"there is only {found} \({place}\); add {missing}"):
        op({"w": Y, "n": 3}, X.clone().requires_grad_())


def test_calls_that_are_wrong():
    op = operator()
    with pytest.raises(pr.core.errors.LeafError, match="positional arguments must hold a tensor, got none"):
        op({"w": 1, "n": 3}, None)
    with pytest.raises(pr.core.errors.LeafError, match=r"params\['n'\] must be hashable, .* got set"):
        op({"w": Y, "n": {3}}, X)

    @pr.custom_op("tests::static_only")
    def static_only(x, *, options):
        return x.clone()

    with pytest.raises(
        pr.core.errors.LeafError, match=r"static argument options must be hashable, .* got list; pass a tuple"
    ):
        static_only(X, options=[1])
    with pytest.raises(
        pr.core.errors.LeafError, match="options is keyword-only, hence static, and must hold no tensor"
    ):
        static_only(X, options=Y)
    with pytest.raises(pr.TreeError, match="structure 12 is unknown in this process"):
        torch.ops.tests.static_only([X], 12)


def test_definitions_that_are_wrong():
    for name in ("nameless", "a::b::c", "a.b::c", "::c"):
        with pytest.raises(ValueError, match='the name must be "namespace::name"'):
            pr.custom_op(name)(lambda x: x)
    with pytest.raises(ValueError, match="aten::sin exists already"):
        pr.custom_op("aten::sin")(lambda x: x)
    with pytest.raises(TypeError, match=r"takes \*xs, but an operator has a fixed number"):
        pr.custom_op("tests::variadic")(lambda *xs: xs)
    with pytest.raises(ValueError, match='differentiate must be None or "reference", got True'):
        pr.custom_op("tests::differentiated", differentiate=True)(lambda x: x)
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


def test_the_dtype_of_a_tangent_is_checked():
    """Torch lets it pass."""
    op = operator(jvp=lambda inputs, output, tangents: {"y": tangents.x, "z": None})
    with pytest.raises(pr.DtypeError, match=r"the tangent of params\['w'\] must have the dtype of its primal"):
        jvp(lambda w: op({"w": w, "n": 3}, X), (Y,), (Y.double(),))
