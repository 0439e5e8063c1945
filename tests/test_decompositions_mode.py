"""`differentiate_through`: plain torch code is right at every order, and otherwise does what it does in torch."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re

import pytest
import torch
from torch.func import jacfwd, jacrev, jvp, vmap

from primitives.core import MissingRuleError
from primitives.core.decomposition import decomposition_table, register_decomposition
from primitives.decompositions import differentiate_through
from tests.decomposition_support import DOUBLE, plain_layer_norm, randn
from tests.support import TORCH_ERRORS

aten = torch.ops.aten
functional = torch.nn.functional
pytestmark = pytest.mark.usefixtures("seeded")


TORCH_NORMS = {
    "layer_norm": (torch.nn.LayerNorm(3, eps=1e-2, **DOUBLE), plain_layer_norm),
    "batch_norm": (
        lambda x: functional.batch_norm(x, None, None, training=True, eps=1e-2),
        lambda x: plain_layer_norm(x.T).T,
    ),
    "instance_norm": (lambda x: functional.instance_norm(x.unsqueeze(0), eps=1e-2).squeeze(0), plain_layer_norm),
}


@pytest.mark.parametrize("name", TORCH_NORMS)
def test_plain_torch_code_becomes_right_at_every_order(name):
    norm, formula = TORCH_NORMS[name]
    x, weights = randn(2, 3), randn(2, 3)
    for order in (1, 2, 3):
        for nesting in itertools.product([jacfwd, jacrev], repeat=order):
            ours, truth = (lambda x, f=f: (f(x) ** 2 * weights).sum() for f in (norm, formula))
            for transform in nesting:
                ours, truth = transform(ours), transform(truth)
            with differentiate_through():
                torch.testing.assert_close(ours(x), truth(x))


# Functions of tensors of shape [2, 4, 3, 3] that torch raises for, or differentiates wrong, in some nesting of order 2.
TARGET, WEIGHTS = torch.linspace(-1, 1, 72, **DOUBLE).reshape(2, 4, 3, 3), torch.linspace(1, 2, 3, **DOUBLE)
WRONG_IN_TORCH = {
    "mse_loss": lambda x: functional.mse_loss(x.exp(), TARGET),
    "MSELoss": lambda x: torch.nn.MSELoss()(x.exp(), TARGET) * 3,
    "group_norm": lambda x: (functional.group_norm(x, 2, eps=1e-2) ** 3 * WEIGHTS).sum(),
    "GroupNorm": lambda x: (torch.nn.GroupNorm(2, 4, **DOUBLE)(x) ** 3 * WEIGHTS).sum(),
    "weight_norm": lambda x: (torch._weight_norm(x[0], x[1, :, :1, :1], 0) ** 3 * WEIGHTS).sum(),
    "weight_norm of the whole": lambda x: (torch._weight_norm(x[0], x[1, 0, 0, 0], -1) ** 3 * WEIGHTS).sum(),
}


def _along(function, mode, v):
    if mode == "jvp":
        return lambda x: jvp(function, (x,), (v,))[1]
    return lambda x: (torch.func.grad(function)(x) * v).sum()


@pytest.mark.parametrize("name", WRONG_IN_TORCH)
def test_second_derivatives_against_central_differences(name):
    function = WRONG_IN_TORCH[name]
    x, v = (randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last) for _ in range(2))
    step = 1e-4
    truth = (function(x + step * v) - 2 * function(x) + function(x - step * v)) / step**2
    for modes in itertools.product(("jvp", "grad"), repeat=2):
        with differentiate_through():
            second = _along(_along(function, modes[0], v), modes[1], v)(x)
        torch.testing.assert_close(second, truth, rtol=1e-5, atol=1e-5)


def test_group_norm_keeps_value_statistics_and_memory_format():
    x, weight, bias = randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last), randn(4), randn(4)
    expected = aten.native_group_norm(x, weight, bias, 2, 4, 9, 2, 1e-2)
    for got, wanted in zip(
        decomposition_table[aten.native_group_norm.default](x, weight, bias, 2, 4, 9, 2, 1e-2), expected, strict=True
    ):
        torch.testing.assert_close(got, wanted)
    with differentiate_through():
        y = functional.group_norm(x, 2, weight, bias, 1e-2)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, expected[0])


@contextlib.contextmanager
def counted(*packets):
    """The overloads that run through the table meanwhile, of operators with or without a decomposition of their own."""
    calls, kept = [], dict(decomposition_table)
    for overload in (getattr(packet, name) for packet in packets for name in packet.overloads()):

        def called(*args, overload=overload, **kwargs):
            calls.append(overload)
            return kept.get(overload, overload)(*args, **kwargs)

        if overload in kept:
            decomposition_table[overload] = called
        else:
            register_decomposition(overload)(called)
    try:
        yield calls
    finally:
        decomposition_table.clear()
        decomposition_table.update(kept)


# What torch writes in Python hides the operator that it calls.
WRAPPERS = {
    "mse_loss": lambda x: functional.mse_loss(x, 2 * x),
    "glu": lambda x: functional.glu(x, 1),
    "group_norm": lambda x: functional.group_norm(x, 2),
    "hardsigmoid": functional.hardsigmoid,
    "native_group_norm": torch.nn.GroupNorm(2, 4, **DOUBLE),
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("chosen", [False, True])
def test_operators_behind_functions_written_in_python_are_replaced(name, chosen):
    op, x = getattr(aten, name), randn(2, 4)
    expected = WRAPPERS[name](x)
    with counted(op) as calls, differentiate_through(op.default) if chosen else differentiate_through():
        torch.testing.assert_close(WRAPPERS[name](x), expected)
    assert calls == [op.default]


def test_a_subclass_that_handles_functions_is_asked_first():
    class Handling(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return func.__name__

    with differentiate_through():
        assert functional.mse_loss(randn(2).as_subclass(Handling), randn(2)) == "mse_loss"


def test_only_the_operators_asked_for_are_replaced():
    norm = functools.partial(functional.layer_norm, normalized_shape=(3,), eps=1e-2)
    x, v = randn(2, 3), randn(2, 3)
    truth = jvp(lambda x: jvp(plain_layer_norm, (x,), (v,))[1], (x,), (v,))[1]
    with differentiate_through(aten.native_layer_norm):
        torch.testing.assert_close(jvp(lambda x: jvp(norm, (x,), (v,))[1], (x,), (v,))[1], truth)
    with differentiate_through(aten.trace):
        assert not torch.allclose(jvp(lambda x: jvp(norm, (x,), (v,))[1], (x,), (v,))[1], truth)
    with pytest.raises(MissingRuleError, match=re.escape("aten.cos.default")):
        differentiate_through(aten.cos.default)


def test_what_was_computed_inside_is_differentiated_right_outside():
    x = randn(2, 3).requires_grad_()
    with differentiate_through():
        y = functional.layer_norm(x, (3,), eps=1e-2)
    weights = [randn(2, 3) for _ in range(3)]

    def third(y):
        first = torch.autograd.grad((y**2 * weights[0]).sum(), x, create_graph=True)[0]
        second = torch.autograd.grad((first * weights[1]).sum(), x, create_graph=True)[0]
        return torch.autograd.grad((second * weights[2]).sum(), x)[0]

    torch.testing.assert_close(third(y), third(plain_layer_norm(x)))


# Every spelling.


def _running():
    return torch.zeros(2, **DOUBLE), torch.ones(2, **DOUBLE)


ROWS = {
    "torch.layer_norm": lambda x: torch.layer_norm(x, (3,), eps=1e-2),
    "torch.native_layer_norm": lambda x: torch.native_layer_norm(
        input=x, normalized_shape=(3,), weight=None, bias=None, eps=1e-2
    ),
    "aten.layer_norm": lambda x: aten.layer_norm(x, [3], None, None, 1e-2),
    "aten.layer_norm.default": lambda x: aten.layer_norm.default(x, [3], eps=1e-2),
    "aten.native_layer_norm.default": lambda x: aten.native_layer_norm.default(x, [3], None, None, 1e-2),
    "torch.instance_norm": lambda x: torch.instance_norm(x[None], None, None, None, None, True, 0.1, 1e-2, False)[0],
    "aten.instance_norm": lambda x: aten.instance_norm(x[None], None, None, None, None, True, 0.1, 1e-2, False)[0],
}
COLUMNS = {
    **{
        f"{module} {name}": lambda x, h=holder, n=name, a=arguments: getattr(h, n)(x, None, None, None, None, True, *a)
        for module, holder in (("torch", torch), ("aten", aten))
        for name, arguments in (
            ("batch_norm", (0.1, 1e-2, False)),
            ("native_batch_norm", (0.1, 1e-2)),
            ("_batch_norm_impl_index", (0.1, 1e-2, False)),
        )
    },
    **{
        f"{module} {name}": lambda x, h=holder, n=name, a=arguments: getattr(h, n)(x, None, None, *_running(), *a)
        for module, holder, name, arguments in (
            ("torch", torch, "_native_batch_norm_legit", (True, 0.1, 1e-2)),
            ("aten", aten, "_native_batch_norm_legit", (True, 0.1, 1e-2)),
            ("aten", aten, "_native_batch_norm_legit_functional", (True, 0.1, 1e-2)),
            ("aten", aten, "_batch_norm_with_update", (0.1, 1e-2)),
            ("aten", aten, "_batch_norm_with_update_functional", (0.1, 1e-2)),
        )
    },
    "aten.batch_norm.default": lambda x: aten.batch_norm.default(x, *[None] * 4, True, 0.1, 1e-2, False),
    "no statistics": lambda x: aten._native_batch_norm_legit(x, None, None, True, 0.1, 1e-2),
    "no_stats": lambda x: aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-2),
}


def _first(result):
    return result[0] if isinstance(result, tuple) else result


SPELLINGS = {
    **{name: lambda x, f=f: _first(f(x)) for name, f in ROWS.items()},
    **{name: lambda x, f=f: _first(f(x.T)).T for name, f in COLUMNS.items()},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_replaced(name):
    norm = SPELLINGS[name]
    x, v, w = randn(2, 3), randn(2, 3), randn(2, 3)

    def curvature(f):
        return jvp(lambda x: jvp(f, (x,), (v,))[1], (x,), (w,))[1]

    with differentiate_through():
        torch.testing.assert_close(norm(x), plain_layer_norm(x))
        torch.testing.assert_close(curvature(norm), curvature(plain_layer_norm))


def test_functions_and_methods_of_torch_are_replaced():
    x = torch.ones(2, 2)
    spellings = torch.trace, torch.Tensor.trace, aten.trace, aten.trace.default, lambda x: torch.trace(input=x)
    with counted(aten.trace) as calls, differentiate_through():
        assert [spelling(x).item() for spelling in spellings] == [2.0] * 5
    assert len(calls) == 5


def test_out_arguments_are_those_of_the_schema():
    y_bar, y = randn(2, 3), randn(2, 3).softmax(1)
    expected, out, buffer = aten._softmax_backward_data(y_bar, y, 1, torch.float64), *torch.empty(2, 2, 3, **DOUBLE)
    with (
        counted(aten._softmax_backward_data, aten.native_layer_norm_backward, aten.log_sigmoid_forward) as calls,
        differentiate_through(),
    ):
        assert aten._softmax_backward_data(y_bar, y, 1, torch.float64, grad_input=out) is out
        torch.testing.assert_close(out, expected)
        aten._softmax_backward_data(grad_output=y_bar, output=y, dim=1, input_dtype=torch.float64)
        _, mean, rstd = torch.native_layer_norm(y, (3,), None, None, 1e-2)
        aten.native_layer_norm_backward(y_bar, y, [3], mean, rstd, None, None, output_mask=[True, False, False])
        aten.log_sigmoid_forward(y, output=out, buffer=buffer)
        torch.testing.assert_close(out, functional.logsigmoid(y))
    assert len(calls) == 5


# Refused as torch refuses.

REFUSED = {
    "normalized_shape": lambda s: functional.layer_norm(torch.ones(2, 3), (4,)),
    "weight of 1": lambda s: functional.layer_norm(torch.ones(2, 3), (3,), torch.ones(1)),
    "weight that broadcasts": lambda s: functional.layer_norm(torch.ones(2, 3), (2, 3), torch.ones(3)),
    "no axes": lambda s: functional.layer_norm(torch.tensor([3.0, 5.0]), ()),
    "integers": lambda s: functional.layer_norm(torch.ones(2, 3, dtype=torch.int64), (3,)),
    "mixed": lambda s: functional.layer_norm(torch.ones(2, 3), (3,), torch.ones(3).half()),
    "native weight": lambda s: torch.native_layer_norm(torch.ones(2, 3), (3,), torch.ones(1), None, 1e-5),
    "no statistics": lambda s: functional.batch_norm(torch.ones(2, 3), None, None),
    "one statistic": lambda s: functional.batch_norm(torch.randn(2, 3), s[0], None, training=True),
    "one axis": lambda s: functional.batch_norm(torch.randn(3), *s),
    "one axis in training": lambda s: functional.batch_norm(torch.randn(3), None, None, training=True),
    "one value": lambda s: functional.batch_norm(torch.ones(1, 3), *s, training=True),
    "channels": lambda s: functional.batch_norm(torch.randn(2, 4), *s, training=True),
    "channels of the weight": lambda s: functional.batch_norm(torch.randn(2, 3), *s, torch.ones(1), training=True),
    "integer batch": lambda s: functional.batch_norm(torch.ones(2, 3, dtype=torch.int64), *s, training=True),
    "mixed parameters": lambda s: functional.batch_norm(torch.randn(2, 3), *s, torch.ones(3).half(), training=True),
    "eps": lambda s: functional.batch_norm(torch.randn(2, 3), *s, training=True, eps=-1.0),
    "momentum": lambda s: functional.batch_norm(torch.randn(2, 3), *s, training=True, momentum=None),
    "gradient": lambda s: functional.batch_norm(torch.randn(2, 3), s[0].requires_grad_(), s[1], training=True),
    "module": lambda s: torch.nn.BatchNorm1d(3)(torch.ones(1, 3)),
    "one pixel": lambda s: functional.instance_norm(torch.randn(2, 3, 1)),
    "made up": lambda s: functional.instance_norm(torch.randn(2, 3, 4), use_input_stats=False),
    "instance weight": lambda s: functional.instance_norm(torch.randn(2, 3, 4), *s, weight=torch.ones(4)),
    "one instance statistic": lambda s: functional.instance_norm(torch.randn(2, 3, 4), s[0]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused_and_nothing_is_written(name):
    statistics = torch.zeros(3), torch.ones(3)
    with pytest.raises(TORCH_ERRORS) as theirs:
        REFUSED[name](statistics)
    with differentiate_through(), pytest.raises(theirs.type):
        REFUSED[name](statistics)
    assert [statistic.tolist() for statistic in statistics] == [[0.0] * 3, [1.0] * 3]


def test_running_statistics_are_written_as_torch_writes_them():
    def written(x, function):
        statistics = torch.full((3,), 5.0), torch.full((3,), 5.0)
        y = function(x.requires_grad_(), None, None, *statistics, True, 0.1, 1e-5, False)
        assert not any(statistic.requires_grad for statistic in statistics)
        return y, *statistics

    for x, function in (
        (torch.randn(6, 3), torch.batch_norm),
        (torch.randn(4, 3, 5), torch.instance_norm),
        (torch.ones(1, 3), torch.batch_norm),
        (torch.ones(0, 3), torch.batch_norm),
        (torch.ones(0), torch.batch_norm),
        (torch.ones(0, 3, 4), torch.instance_norm),
        (torch.randn(2, 3, 1), torch.instance_norm),
    ):
        expected = written(x, function)
        with differentiate_through():
            torch.testing.assert_close(written(x, function), expected, equal_nan=True, rtol=0, atol=1e-4)


def test_shared_statistics_are_refused_under_vmap_before_anything_is_written():
    norm = torch.nn.BatchNorm1d(3)
    with differentiate_through(), pytest.raises(RuntimeError, match="batch axis"):
        vmap(norm)(torch.randn(4, 2, 3))
    assert norm.running_mean.eq(0).all()
    assert norm.running_var.eq(1).all()
