"""`differentiate_through`, and `override_torch` where they agree: plain torch code is right at every order."""

import contextlib
import itertools
import re

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, jvp, vmap
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError, checkpoint

from primitives import override_torch
from primitives._core import MissingRuleError
from primitives._core.decomposition import (
    decomposition_table,
    decomposition_table_for_jvp,
    register_decomposition,
    register_decomposition_for_jvp,
)
from primitives.decompositions import differentiate_through
from tests.support import DOUBLE, TORCH_ERRORS, along, plain_layer_norm, randn

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("seeded")
each_context = pytest.mark.parametrize("context", [differentiate_through, override_torch])


def norm(x):
    return functional.layer_norm(x, (3,), eps=1e-2)


def curvature(f, x, v):
    return along(along(f, v), v)(x)


TORCH_NORMS = {
    "layer_norm": torch.nn.LayerNorm(3, eps=1e-2, **DOUBLE),
    "batch_norm": lambda x: functional.batch_norm(x.T, None, None, training=True, eps=1e-2).T,
    "instance_norm": lambda x: functional.instance_norm(x.unsqueeze(0), eps=1e-2).squeeze(0),
    "native_layer_norm": lambda x: torch.native_layer_norm(x, (3,), None, None, 1e-2)[0],
    "native_batch_norm": lambda x: torch.native_batch_norm(x.T, *[None] * 4, True, 0.1, 1e-2)[0].T,
}


@each_context
@pytest.mark.parametrize("name", TORCH_NORMS)
def test_plain_torch_code_becomes_right_at_every_order(name, context):
    x, weights = randn(2, 3), randn(2, 3)
    for order in (1, 2, 3):
        for nesting in itertools.product([jacfwd, jacrev], repeat=order):
            ours, truth = (lambda x, f=f: (f(x) ** 2 * weights).sum() for f in (TORCH_NORMS[name], plain_layer_norm))
            for transform in nesting:
                ours, truth = transform(ours), transform(truth)
            with context():
                torch.testing.assert_close(ours(x), truth(x))


# Functions of tensors of shape [2, 4, 3, 3] that torch raises for, or differentiates wrong, in some nesting of order 2.
TARGET, WEIGHTS = torch.linspace(-1, 1, 72, **DOUBLE).reshape(2, 4, 3, 3), torch.linspace(1, 2, 3, **DOUBLE)
GROUP_NORM = torch.nn.GroupNorm(2, 4, **DOUBLE)
WRONG_IN_TORCH = {
    "mse_loss": lambda x: functional.mse_loss(x.exp(), TARGET),
    "group_norm": lambda x: (functional.group_norm(x, 2, eps=1e-2) ** 3 * WEIGHTS).sum(),
    "attention": lambda x: (functional.scaled_dot_product_attention(x.exp(), x, x.sin()) ** 3 * WEIGHTS).sum(),
    "GroupNorm": lambda x: (GROUP_NORM(x) ** 3 * WEIGHTS).sum(),
    "weight_norm": lambda x: (torch._weight_norm(x[0], x[1, :, :1, :1], 0) ** 3 * WEIGHTS).sum(),
    "huber_loss": lambda x: functional.huber_loss(x.exp(), TARGET, delta=0.3),
    "soft_margin_loss": lambda x: functional.soft_margin_loss(x.exp(), TARGET),
    "hardsigmoid": lambda x: (functional.hardsigmoid(4 * x) ** 3 * WEIGHTS).sum(),
    "glu": lambda x: (functional.glu(x, 1) ** 3 * WEIGHTS).sum(),
    "weight_norm of the whole": lambda x: (torch._weight_norm(x[0], x[1, 0, 0, 0], -1) ** 3 * WEIGHTS).sum(),
}


def _along(function, mode, v):
    return along(function, v) if mode == "jvp" else lambda x: (grad(function)(x) * v).sum()


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


# Dynamo has to be told of what is private, and of losses. Compiled jvp of jvp fails in torch, whatever the function.
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("function", WRONG_IN_TORCH.values(), ids=WRONG_IN_TORCH)
def test_second_derivatives_against_central_differences(function, compiles):
    x, v = (randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last) for _ in range(2))
    step = 1e-4
    truth = (function(x + step * v) - 2 * function(x) + function(x - step * v)) / step**2
    for modes in itertools.product(("jvp", "grad"), ["grad"] if compiles else ("jvp", "grad")):
        second = differentiate_through()(_along(_along(function, modes[0], v), modes[1], v))
        torch.testing.assert_close((compiled(second) if compiles else second)(x), truth, rtol=1e-5, atol=1e-5)
    with differentiate_through():
        assert functional.group_norm(x, 2).is_contiguous(memory_format=torch.channels_last)


@contextlib.contextmanager
def counted(*packets):
    """The overloads that run through the table meanwhile, of operators with or without a decomposition of their own."""
    calls, kept = [], dict(decomposition_table)
    for overload in (getattr(packet, name) for packet in packets for name in packet.overloads() if "out" not in name):

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


# A function that torch writes in Python hides the operator that it calls.
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
    x, v = randn(2, 3), randn(2, 3)
    truth = curvature(plain_layer_norm, x, v)
    with differentiate_through(aten.native_layer_norm):
        torch.testing.assert_close(curvature(norm, x, v), truth)
    with differentiate_through(aten.trace):
        assert not torch.allclose(curvature(norm, x, v), truth)
    with pytest.raises(MissingRuleError, match=re.escape("aten.cos.default")):
        differentiate_through(aten.cos.default)


def test_what_was_computed_inside_is_differentiated_right_outside():
    x = randn(2, 3).requires_grad_()
    with differentiate_through():
        y = norm(x)
    weights = [randn(2, 3) for _ in range(3)]

    def third(y):
        for weight in weights[:2]:
            y = torch.autograd.grad((y**2 * weight).sum(), x, create_graph=True)[0]
        return torch.autograd.grad((y * weights[2]).sum(), x)[0]

    torch.testing.assert_close(third(y), third(plain_layer_norm(x)))


# Every spelling.

LAST = 0.1, 1e-2


def running():
    return torch.zeros(2, **DOUBLE), torch.ones(2, **DOUBLE)


BATCH_NORMS = {
    "torch.batch_norm": lambda x: torch.batch_norm(x, *[None] * 4, True, *LAST, False),
    "torch.native_batch_norm": lambda x: torch.native_batch_norm(x, *[None] * 4, True, *LAST),
    "aten.batch_norm": lambda x: aten.batch_norm(x, *[None] * 4, True, *LAST, False),
    "impl_index": lambda x: aten._batch_norm_impl_index(x, *[None] * 4, True, *LAST, False),
    "legit": lambda x: torch._native_batch_norm_legit(x, None, None, *running(), True, *LAST),
    "functional": lambda x: aten._native_batch_norm_legit_functional(x, None, None, *running(), True, *LAST),
    "update": lambda x: aten._batch_norm_with_update(x, None, None, *running(), *LAST),
    "update, functional": lambda x: aten._batch_norm_with_update_functional(x, None, None, *running(), *LAST),
    "no_stats": lambda x: aten._native_batch_norm_legit.no_stats(x, None, None, True, *LAST),
}


def first(result):
    return result[0] if isinstance(result, tuple) else result


SPELLINGS = {
    "torch.layer_norm": lambda x: torch.layer_norm(x, (3,), eps=1e-2),
    "torch.native_layer_norm": lambda x: torch.native_layer_norm(x, (3,), weight=None, bias=None, eps=1e-2)[0],
    "aten.layer_norm": lambda x: aten.layer_norm(x, [3], None, None, 1e-2),
    "aten.layer_norm.default": lambda x: aten.layer_norm.default(input=x, normalized_shape=[3], eps=1e-2),
    "torch.instance_norm": lambda x: torch.instance_norm(x[None], None, None, None, None, True, *LAST, False)[0],
    "aten.instance_norm": lambda x: aten.instance_norm(x[None], None, None, None, None, True, *LAST, False)[0],
    **{name: lambda x, f=f: first(f(x.T)).T for name, f in BATCH_NORMS.items()},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_replaced(name):
    x, v = randn(2, 3), randn(2, 3)
    with differentiate_through():
        torch.testing.assert_close(SPELLINGS[name](x), plain_layer_norm(x))
        torch.testing.assert_close(curvature(SPELLINGS[name], x, v), curvature(plain_layer_norm, x, v))


def test_functions_and_methods_of_torch_are_replaced():
    x = torch.ones(2, 2)
    spellings = torch.trace, torch.Tensor.trace, aten.trace, aten.trace.default, lambda x: torch.trace(input=x)
    with counted(aten.trace) as calls, differentiate_through():
        assert [spelling(x).item() for spelling in spellings] == [2.0] * 5
    assert len(calls) == 5


def test_arguments_are_those_of_the_schema_and_calls_with_out_are_torchs():
    y_bar, y, out = randn(2, 3), randn(2, 3).softmax(1), torch.empty(2, 3, **DOUBLE)
    with counted(aten._softmax_backward_data) as calls, differentiate_through():
        found = aten._softmax_backward_data(grad_output=y_bar, output=y, dim=1, input_dtype=torch.float64)
        assert aten._softmax_backward_data(y_bar, y, 1, torch.float64, grad_input=out) is out
        torch.testing.assert_close(out, found)
        with pytest.raises(RuntimeError, match="out="):
            aten._softmax_backward_data(y_bar, y.requires_grad_(), 1, torch.float64, grad_input=out)
    assert len(calls) == 1


# Refused as torch refuses.

ROWS = [torch.ones(1, 2, 4, 3)] * 3
REFUSED = {
    "normalized_shape": lambda s: functional.layer_norm(torch.ones(2, 3), (4,)),
    "weight of 1": lambda s: functional.layer_norm(torch.ones(2, 3), (3,), torch.ones(1)),
    "weight that broadcasts": lambda s: functional.layer_norm(torch.ones(2, 3), (2, 3), torch.ones(3)),
    "no axes": lambda s: functional.layer_norm(torch.tensor([3.0, 5.0]), ()),
    "integers": lambda s: functional.layer_norm(torch.ones(2, 3, dtype=torch.int64), (3,)),
    "mixed": lambda s: functional.layer_norm(torch.ones(2, 3), (3,), torch.ones(3).half()),
    "no statistics": lambda s: functional.batch_norm(torch.ones(2, 3), None, None),
    "one statistic": lambda s: functional.batch_norm(torch.randn(2, 3), s[0], None, training=True),
    "one axis": lambda s: functional.batch_norm(torch.randn(3), *s),
    "channels": lambda s: functional.batch_norm(torch.randn(2, 4), *s, training=True),
    "channels of the weight": lambda s: functional.batch_norm(torch.randn(2, 3), *s, torch.ones(1), training=True),
    "mixed parameters": lambda s: functional.batch_norm(torch.randn(2, 3), *s, torch.ones(3).half(), training=True),
    "gradient": lambda s: functional.batch_norm(torch.randn(2, 3), s[0].requires_grad_(), s[1], training=True),
    "made up": lambda s: functional.instance_norm(torch.randn(2, 3, 4), use_input_stats=False),
    "instance weight": lambda s: functional.instance_norm(torch.randn(2, 3, 4), *s, weight=torch.ones(4)),
    "groups": lambda s: torch.group_norm(torch.randn(2, 4), 3),
    "group weight": lambda s: torch.group_norm(torch.randn(2, 4), 2, torch.ones(1)),
    "mask": lambda s: functional.scaled_dot_product_attention(*ROWS, torch.ones(4, 5)),
    "mask dtype": lambda s: functional.scaled_dot_product_attention(*ROWS, torch.ones(4, 4).double()),
    "heads": lambda s: functional.scaled_dot_product_attention(*ROWS[:1], *[torch.ones(1, 3, 4, 3)] * 2),
    "no tensor": lambda s: functional.layer_norm([torch.ones(3)], (3,)),
    "axis": lambda s: functional.log_softmax(torch.ones(2, 3), 5),
    "targets": lambda s: functional.cross_entropy(torch.ones(2, 3), torch.tensor([1])),
    "unknown argument": lambda s: torch.layer_norm(torch.ones(2, 3), (3,), axis=1),
}


@each_context
@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused_and_nothing_is_written(name, context):
    statistics = torch.zeros(3), torch.ones(3)
    with pytest.raises(TORCH_ERRORS) as theirs:
        REFUSED[name](statistics)
    with context(), pytest.raises(theirs.type):
        REFUSED[name](statistics)
    assert [statistic.tolist() for statistic in statistics] == [[0.0] * 3, [1.0] * 3]


@each_context
def test_running_statistics_are_written_as_torch_writes_them(context):
    def written(x, function):
        statistics = torch.full((3,), 5.0), torch.full((3,), 5.0)
        y = function(x.requires_grad_(), None, None, *statistics, True, 0.1, 1e-5, False)
        assert not any(statistic.requires_grad for statistic in statistics)
        return y, *statistics

    shapes = [(6, 3), (1, 3), (0, 3), (0,)], [(4, 3, 5), (2, 3, 1)]
    for function, x in [
        *[(torch.batch_norm, torch.randn(shape)) for shape in shapes[0]],
        *[(torch.instance_norm, torch.randn(shape)) for shape in shapes[1]],
    ]:
        expected = written(x, function)
        with context():
            torch.testing.assert_close(written(x, function), expected, equal_nan=True, rtol=0, atol=1e-4)


def test_shared_statistics_are_refused_under_vmap_before_anything_is_written():
    module = torch.nn.BatchNorm1d(3)
    with differentiate_through(), pytest.raises(RuntimeError, match="batch axis"):
        vmap(module)(torch.randn(4, 2, 3))
    assert (module.running_mean.tolist(), module.running_var.tolist()) == ([0.0] * 3, [1.0] * 3)


# The table for forward mode.


@pytest.fixture
def square():
    library = torch.library.Library("decomposition_mode_test", "DEF")
    library.define("square(Tensor x) -> Tensor")
    library.impl("square", lambda x: x * x, "CompositeImplicitAutograd")
    yield torch.ops.decomposition_mode_test.square
    for table in (decomposition_table, decomposition_table_for_jvp):
        table.pop(torch.ops.decomposition_mode_test.square.default, None)
    library._destroy()


@pytest.mark.parametrize("chosen", [False, True])
def test_forward_mode_looks_into_its_own_table_first(square, chosen):
    # Wrong on purpose, to be told apart: the derivative of each names the function that ran.
    register_decomposition_for_jvp(square)(lambda x: 10 * x)
    x, one = torch.tensor(3.0), torch.tensor(1.0)
    context = (lambda: differentiate_through(square)) if chosen else differentiate_through
    with context():
        assert square(x).item() == 9.0, "without a tangent nothing is decomposed"
        assert grad(square)(x).item() == 6.0
        assert jvp(square, (x,), (one,))[1].item() == 10.0
    register_decomposition(square)(lambda x: 100 * x)

    def slope(x):
        return jvp(square, (x,), (one,))[1]

    with context():
        assert square(x).item() == 300.0
        assert grad(square)(x).item() == 100.0
        assert slope(x).item() == 10.0
        assert grad(lambda x: slope(x) * x)(x).item() == 10.0
        assert vmap(slope)(x.expand(2)).tolist() == [10.0, 10.0]
        assert jvp(lambda y: square(x) + y, (x,), (one,))[0].item() == 303.0, "a constant carries no tangent"
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, one)
            assert torch.autograd.forward_ad.unpack_dual(square(dual)).tangent.item() == 10.0


# Compilers and checkpoints.


COMPILED = {
    "chosen": lambda x: aten.trace(x[:, :2]) + norm(x).unflatten(0, (1, -1)),
    "batch norm": lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-2, False),
    "nested": lambda x: grad(lambda x: jvp(norm, (x,), (x,))[1].square().sum())(x),
}


@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_into_one_graph(name):
    def function(x):
        with differentiate_through(aten.native_layer_norm, aten.trace) if name == "chosen" else differentiate_through():
            return COMPILED[name](x)

    x = randn(2, 3)
    torch.testing.assert_close(compiled(function)(x), function(x))


def test_compiled_code_is_replaced_under_the_context():
    x, v = randn(2, 3), randn(2, 3)
    program, truth = compiled(lambda x: curvature(norm, x, v)), curvature(plain_layer_norm, x, v)
    with differentiate_through():
        torch.testing.assert_close(program(x), truth)
    assert not torch.allclose(program(x), truth), "outside of the context torch's own derivative is compiled"


def test_forward_mode_is_known_to_compilers(square):
    register_decomposition(square)(lambda x: 100 * x)
    register_decomposition_for_jvp(square)(lambda x: 10 * x)

    def function(x):
        with differentiate_through():
            return square(x) + jvp(square, (x,), (torch.ones_like(x),))[1]

    assert compiled(function)(torch.tensor(3.0)).item() == 310.0


def test_checkpoints_enter_the_context_again():
    x, contexts = randn(2, 3).requires_grad_(), lambda: (contextlib.nullcontext(), differentiate_through())
    with differentiate_through():
        plain, forgotten = norm(x), checkpoint(norm, x, use_reentrant=False)
        entered = checkpoint(norm, x, use_reentrant=False, context_fn=contexts)
    expected, found = (torch.autograd.grad((y * plain.detach().exp()).sum(), x) for y in (plain, entered))
    torch.testing.assert_close(found, expected)
    with pytest.raises(CheckpointError):
        torch.autograd.grad(forgotten.sum(), x)
