"""The decomposition tables: values against ATen, derivatives against formulas, registration, use."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import jacfwd, jacrev, jvp

from primitives.core import MissingRuleError, Primitive
from primitives.core.decomposition import (
    decomposition_table,
    decomposition_table_for_jvp,
    get_decomposition,
    register_decomposition,
    register_decomposition_for_jvp,
)
from primitives.decompositions import decomposition_graph
from tests.decomposition_support import DOUBLE, plain_layer_norm, randn

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("seeded")


def _layer_norm_arguments(mask, affine=True):
    x, y_bar, weight, bias = randn(2, 4, 3), randn(2, 4, 3), randn(3), randn(3)
    weight, bias = (weight, bias) if affine else (None, None)
    _, mean, rstd = aten.native_layer_norm(x, [3], weight, bias, 1e-2)
    return y_bar, x, [3], mean, rstd, weight, bias, mask


def _batch_norm_arguments(train, mask, affine=True):
    x, y_bar, weight = randn(5, 3, 2), randn(5, 3, 2), randn(3) if affine else None
    running = randn(3), torch.rand(3, **DOUBLE) + 0.5
    mean, rstd = x.mean((0, 2)), (x.var((0, 2), unbiased=False) + 1e-2).rsqrt()
    return y_bar, x, weight, *running, mean, rstd, train, 1e-2, mask


def _nll_arguments(shape, weighted, reduction):
    x = randn(*shape).log_softmax(1 if len(shape) > 1 else 0)
    target_shape = (shape[0], *shape[2:]) if len(shape) > 1 else ()
    target = torch.randint(0, shape[1 if len(shape) > 1 else 0], target_shape)
    if target.numel() > 1:
        target.view(-1)[0] = -100
    weight = torch.rand(shape[1 if len(shape) > 1 else 0], **DOUBLE) if weighted else None
    forward = aten.nll_loss2d_forward if len(shape) == 4 else aten.nll_loss_forward
    out, total = forward(x, target, weight, reduction, -100)
    return randn(*out.shape), x, target, weight, reduction, -100, total


# (operator, arguments, positions of the arguments that are differentiated)
MASKS = [(True, True, True), (True, False, False), (False, True, True), (False, False, True)]
CASES = {
    "trace": (aten.trace.default, lambda: (randn(3, 4),), (0,)),
    "log_sigmoid": (aten.log_sigmoid_forward.default, lambda: (randn(7) * 30,), (0,)),
    "log_softmax_backward": (
        aten._log_softmax_backward_data.default,
        lambda: (randn(3, 4), randn(3, 4).log_softmax(1), 1, torch.float64),
        (0, 1),
    ),
    "softmax_backward": (
        aten._softmax_backward_data.default,
        lambda: (randn(3, 4), randn(3, 4).softmax(0), 0, torch.float64),
        (0, 1),
    ),
    **{
        f"nll_{len(shape)}d_{reduction}_{weighted}": (
            aten.nll_loss2d_backward.default if len(shape) == 4 else aten.nll_loss_backward.default,
            lambda shape=shape, weighted=weighted, reduction=reduction: _nll_arguments(shape, weighted, reduction),
            (0, 1),
        )
        for shape, weighted, reduction in [
            ((4,), True, 1),
            ((3, 4), False, 0),
            ((3, 4), True, 1),
            ((3, 4), True, 2),
            ((2, 4, 2, 3), True, 0),
            ((2, 4, 2, 3), False, 1),
        ]
    },
    **{
        f"layer_norm_backward_{i}": (
            aten.native_layer_norm_backward.default,
            lambda mask=mask, i=i: _layer_norm_arguments(mask, affine=i != 1),
            (0, 1),
        )
        for i, mask in enumerate(MASKS)
    },
    **{
        f"batch_norm_backward_{train}_{i}": (
            aten.native_batch_norm_backward.default,
            lambda train=train, mask=mask, i=i: _batch_norm_arguments(train, mask, affine=i != 1),
            (0, 1),
        )
        for train in (True, False)
        for i, mask in enumerate(MASKS)
    },
}


def _tensors(result):
    return list(result) if isinstance(result, (tuple, list)) else [result]


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_aten(name):
    op, build, _ = CASES[name]
    args = build()
    expected, got = _tensors(op(*args)), _tensors(get_decomposition(op)(*args))
    for theirs, ours in zip(expected, got, strict=True):
        if ours is not None or "norm" not in name:
            torch.testing.assert_close(ours, theirs)
        # Else ATen may have a cotangent for a parameter that is not there, or that nobody asked for.


# Given rstd, the layer norm backward takes eps for what is left of it, so moving x alone moves eps too: differences do
# not apply, and the test after this one stands in.
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("layer_norm")])
def test_derivatives_are_right_in_both_modes(name):
    op, build, positions = CASES[name]
    args = build()
    decomposition = get_decomposition(op)

    def function(*active):
        full = list(args)
        for position, value in zip(positions, active, strict=True):
            full[position] = value
        return tuple(t for t in _tensors(decomposition(*full)) if t is not None and t.numel())

    active = [args[i].detach().clone().requires_grad_() for i in positions]
    assert torch.autograd.gradcheck(function, active, check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("nesting", list(itertools.product([jacfwd, jacrev], repeat=2)), ids=lambda n: n[0].__name__)
def test_the_backward_of_layer_norm_differentiates_through_its_statistics(nesting):
    y_bar, x = randn(2, 3), randn(2, 3)

    def by_decomposition(x):
        _, mean, rstd = aten.native_layer_norm(x, [3], None, None, 1e-2)
        args = (y_bar, x, [3], mean, rstd, None, None, (True, False, False))
        return (get_decomposition(aten.native_layer_norm_backward.default)(*args)[0] ** 2).sum()

    def by_formula(x):
        _, pullback = torch.func.vjp(plain_layer_norm, x)
        return (pullback(y_bar)[0] ** 2).sum()

    ours, truth = by_decomposition, by_formula
    for transform in nesting:
        ours, truth = transform(ours), transform(truth)
    torch.testing.assert_close(ours(x), truth(x))


@pytest.mark.parametrize("training", [True, False])
def test_the_backends_batch_norms_are_the_native_one(training):
    y_bar, x, *rest, _, eps, mask = _batch_norm_arguments(training, (True, True, True))
    native, *backends, unified = (
        get_decomposition(getattr(aten, f"{name}batch_norm_backward").default)
        for name in ("native_", "cudnn_", "miopen_", "")
    )
    expected, reserve = native(y_bar, x, *rest, training, eps, mask), torch.empty(0, dtype=torch.uint8)
    torch.testing.assert_close(unified(y_bar, x, *rest, training, eps, mask, reserve), expected)
    for backend, more in zip(backends if training else (), ((reserve,), ()), strict=False):
        torch.testing.assert_close(backend(x, y_bar, *rest, eps, *more), expected)


@pytest.mark.parametrize(
    "name, training",
    [
        ("_native_batch_norm_legit", (True,)),
        ("_native_batch_norm_legit_functional", (True,)),
        ("_native_batch_norm_legit_no_training", ()),
        ("_batch_norm_with_update", ()),
        ("_batch_norm_with_update_functional", ()),
        ("_batch_norm_no_update", ()),
    ],
)
def test_every_name_of_batch_norm_computes_and_writes_what_aten_does(name, training):
    op, x, weight = getattr(aten, name).default, randn(5, 3, 2), randn(3)
    results = []
    for function in (op, get_decomposition(op)):
        running = torch.full((3,), 0.5, **DOUBLE), torch.full((3,), 2.0, **DOUBLE)
        outputs = function(x, weight, None, *running, *training, momentum=0.2, eps=1e-2)
        results.append((outputs[0], *running, *(outputs[-2:] if "functional" in name else ())))
    torch.testing.assert_close(*results)


def test_empty_inputs():
    """Zeros of the right shapes, and for rows without elements the statistics of ATen."""
    x, weight = torch.zeros(0, 3, **DOUBLE), torch.ones(3, **DOUBLE)
    empty, mask = torch.zeros(0, 1, **DOUBLE), (True, True, True)
    for op, args in (
        (aten.native_layer_norm_backward.default, (x, x, [3], empty, empty, weight, weight, mask)),
        (aten.native_batch_norm_backward.default, (x, x, *[weight] * 5, True, 1e-5, mask)),
    ):
        torch.testing.assert_close(get_decomposition(op)(*args), (x, *[torch.zeros_like(weight)] * 2))
    op, args = aten.native_layer_norm.default, (torch.zeros(4, 0), [0], None, None, 1e-5)
    torch.testing.assert_close(get_decomposition(op)(*args), op(*args), equal_nan=True)


@pytest.mark.parametrize("parameter_dtype", [None, torch.float16, torch.float32])
def test_statistics_have_the_dtype_of_aten(parameter_dtype):
    x = torch.randn(4, 3).half()
    weight, mean, var = (None if parameter_dtype is None else torch.ones(3, dtype=parameter_dtype) for _ in range(3))
    for op, args in (
        (aten.native_layer_norm.default, (x, [3], weight, None, 1e-5)),
        (aten.native_batch_norm.default, (x, weight, None, mean, var, True, 0.1, 1e-5)),
        (aten.native_batch_norm.default, (x, weight, weight, None, None, True, 0.1, 1e-5)),
    ):
        assert [t.dtype for t in get_decomposition(op)(*args)] == [t.dtype for t in op(*args)]


def test_labels_may_be_bytes():
    x = randn(3, 200).log_softmax(1)
    target = torch.tensor([1, 156, 199], dtype=torch.uint8)
    for ignored in (-100, 199):
        args = torch.ones(3, **DOUBLE), x, target, None, 0, ignored, torch.tensor(3.0, **DOUBLE)
        expected = aten.nll_loss_backward(*args)
        torch.testing.assert_close(get_decomposition(aten.nll_loss_backward)(*args), expected)
        # -100 as a byte is 156, which is a label like any other.
        assert expected[1].any()


# Registration.


@pytest.fixture
def scratch_op():
    library = torch.library.Library("decomposition_test", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.define("double.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
    yield torch.ops.decomposition_test.double
    for overload in ("default", "out"):
        for table in (decomposition_table, decomposition_table_for_jvp):
            table.pop(getattr(torch.ops.decomposition_test.double, overload), None)
    library._destroy()


def test_registering_an_operator_registers_its_overloads_and_unwraps_out(scratch_op):
    @register_decomposition(scratch_op)
    def double(x):
        return x + x

    x = torch.ones(2)
    assert get_decomposition(scratch_op) is double
    out = torch.empty(0)
    assert decomposition_table[scratch_op.out](x, out=out) is out
    assert out.tolist() == [2.0, 2.0]


def test_registering_twice_raises_unless_tolerated(scratch_op):
    register_decomposition(scratch_op.default)(lambda x: x + x)
    with pytest.raises(ValueError, match=re.escape("decomposition_test.double.default already has a decomposition")):
        register_decomposition(scratch_op)(lambda x: x * 2)
    assert scratch_op.out not in decomposition_table, "nothing is registered when anything fails"
    general = register_decomposition(scratch_op, allow_existing=True)(lambda x: x * 2)
    assert scratch_op.out in decomposition_table
    assert get_decomposition(scratch_op.default, for_jvp=True) is general
    special = register_decomposition_for_jvp(scratch_op.default)(lambda x: 2 * x)
    assert get_decomposition(scratch_op.default, for_jvp=True) is special
    assert get_decomposition(scratch_op.default) is general


def test_what_is_missing_is_named(scratch_op):
    with pytest.raises(MissingRuleError, match=re.escape("decomposition_test.double.default: no decomposition")):
        get_decomposition(scratch_op.default)
    with pytest.raises(MissingRuleError, match="register_decomposition_for_jvp"):
        get_decomposition(scratch_op.default, for_jvp=True)
    for function in (register_decomposition, register_decomposition_for_jvp, get_decomposition):
        with pytest.raises(TypeError, match=f"{function.__name__}: expected an operator overload"):
            function("aten::trace")


def test_core_uses_the_tables_where_a_rule_is_missing():
    op = Primitive("tabled", "(Tensor x) -> Tensor y", namespace="decomposition_test_core")
    op.def_reference(lambda x: x**3)
    x = torch.tensor([2.0], **DOUBLE)
    with pytest.raises(MissingRuleError, match="no vjp rule and no decomposition"):
        torch.func.grad(lambda x: op(x).sum())(x)
    register_decomposition(op)(lambda x: x * x * x)
    assert torch.func.grad(lambda x: op(x).sum())(x).item() == 12.0
    register_decomposition_for_jvp(op)(lambda x: x**3 + 0 * x)
    assert jvp(op, (x,), (torch.ones_like(x),))[1].item() == 12.0
    assert jacfwd(jacrev(lambda x: op(x).sum()))(x).item() == 12.0


# Graphs.


def test_graphs_are_traced_once_a_signature_and_follow_the_table(scratch_op):
    traced = []
    register_decomposition(scratch_op.default)(lambda x: traced.append(x.shape) or x + x)
    graph = decomposition_graph(scratch_op.default, torch.ones(2))
    decomposition_graph(scratch_op.default, torch.zeros(3))
    for node in graph.graph.nodes:
        # It belongs to whoever asked for it.
        node.target = aten.mul.Tensor if node.op == "call_function" else node.target
    graph.recompile()
    assert decomposition_graph(scratch_op.default, torch.ones(2))(torch.full((2,), 3.0)).tolist() == [6.0, 6.0]
    assert traced == [(2,), (3,)]
    register_decomposition(scratch_op.default, allow_existing=True)(lambda x: x * 2)
    assert "aten.mul" in decomposition_graph(scratch_op.default, torch.ones(2)).code


def in_fake_mode(function):
    with FakeTensorMode():
        function(torch.empty(3, 3))


INSIDE = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x.expand(2, 3, 3)),
    "jvp": lambda f, x: jvp(f, (x,), (x,)),
    "mode": lambda f, x: in_fake_mode(f),
    "autocast": lambda f, x: torch.autocast("cpu")(f)(x),
}


@pytest.mark.parametrize("transform", INSIDE)
def test_a_graph_asked_for_inside_a_transform_is_the_one_outside(transform, scratch_op):
    register_decomposition(scratch_op)(lambda x: x @ x)
    graphs, x = [], torch.eye(3)
    INSIDE[transform](lambda x: graphs.append(decomposition_graph(scratch_op.default, x)) or x.sum(), x)
    graphs.append(decomposition_graph(scratch_op.default, x))
    assert "aten.mm" in graphs[1].code
    assert graphs[0].code == graphs[1].code
    assert not any(foreign in graphs[1].code for foreign in ("constant", "to_copy"))
    for graph in graphs:
        assert graph(2 * x).tolist() == (4 * x).tolist()


def test_graphs_take_arguments_by_name():
    x, out = torch.ones(3, 3), torch.zeros(())
    graph = decomposition_graph(aten.trace.out, x, out=out)
    assert graph(2 * x, out).item() == 6.0
    assert out.item() == 6.0
    with pytest.raises(TypeError, match=re.escape("aten.trace.out: missing keyword argument out")):
        decomposition_graph(aten.trace.out, x)
