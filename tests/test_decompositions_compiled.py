"""`differentiate_through` together with forward mode's own table, compilers and checkpoints."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError, checkpoint

from primitives.core.decomposition import (
    decomposition_table,
    decomposition_table_for_jvp,
    register_decomposition,
    register_decomposition_for_jvp,
)
from primitives.decompositions import differentiate_through
from tests.decomposition_support import DOUBLE, plain_layer_norm, randn

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("seeded")


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
    special = register_decomposition_for_jvp(square)(lambda x: 10 * x)
    x, one = torch.tensor(3.0), torch.tensor(1.0)
    context = (lambda: differentiate_through(square)) if chosen else differentiate_through
    with context():
        assert square(x).item() == 9.0, "without a tangent there is no decomposition"
        assert grad(square)(x).item() == 6.0
        assert jvp(square, (x,), (one,))[1].item() == 10.0
    register_decomposition(square)(lambda x: 100 * x)
    assert special is decomposition_table_for_jvp[square.default]
    with context():
        assert square(x).item() == 300.0
        assert grad(square)(x).item() == 100.0
        assert jvp(square, (x,), (one,))[1].item() == 10.0
        assert grad(lambda x: jvp(lambda y: square(y) * x, (x,), (one,))[1])(x).item() == 10.0
        assert vmap(lambda x: jvp(square, (x,), (one,))[1])(x.expand(2)).tolist() == [10.0, 10.0]
        assert jvp(vmap(square), (x.expand(2),), (one.expand(2),))[1].tolist() == [10.0, 10.0]
        assert jvp(lambda y: square(x) + y, (x,), (one,))[0].item() == 303.0, "a constant carries no tangent"
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, one)
            assert torch.autograd.forward_ad.unpack_dual(square(dual)).tangent.item() == 10.0


# Compilers and checkpoints.


def _chosen_inside(x):
    with differentiate_through(aten.native_layer_norm, aten.trace):
        return aten.trace(x[:, :2]) + functional.layer_norm(x, (3,), eps=1e-2)


def _batch_norm_inside(x):
    with differentiate_through():
        return torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-2, False)


def _squared_error_inside(x):
    with differentiate_through():
        return jvp(grad(lambda x: functional.mse_loss(x.exp(), x.detach())), (x,), (x,))[1]


def _nested_inside(x):
    with differentiate_through():
        return grad(lambda x: jvp(lambda x: functional.layer_norm(x, (3,), eps=1e-2), (x,), (x,))[1].square().sum())(x)


@pytest.mark.parametrize("function", [_chosen_inside, _batch_norm_inside, _nested_inside, _squared_error_inside])
def test_it_compiles_into_one_graph(function):
    x = randn(2, 3)
    torch.testing.assert_close(torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x))


def test_compiled_code_is_replaced_under_the_context():
    x, v = randn(2, 3), randn(2, 3)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def curvature(x):
        def norm(x):
            return functional.layer_norm(x, (3,), eps=1e-2)

        return jvp(lambda x: jvp(norm, (x,), (v,))[1], (x,), (v,))[1]

    truth = jvp(lambda x: jvp(plain_layer_norm, (x,), (v,))[1], (x,), (v,))[1]
    with differentiate_through():
        torch.testing.assert_close(curvature(x), truth)
    assert not torch.allclose(curvature(x), truth), "outside of the context torch's own derivative is compiled"


def test_forward_mode_is_known_to_compilers(square):
    register_decomposition(square)(lambda x: 100 * x)
    register_decomposition_for_jvp(square)(lambda x: 10 * x)

    def function(x):
        with differentiate_through():
            return square(x) + jvp(square, (x,), (torch.ones_like(x),))[1]

    assert torch.compile(function, backend="aot_eager", fullgraph=True)(torch.tensor(3.0)).item() == 310.0


def test_checkpoints_enter_the_context_again():
    x = randn(2, 3).requires_grad_()
    norm = torch.nn.LayerNorm(3, **DOUBLE)
    with differentiate_through():
        plain = norm(x)
        forgotten = checkpoint(norm, x, use_reentrant=False)
        entered = checkpoint(
            norm, x, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), differentiate_through())
        )
    weights = randn(2, 3)
    expected = torch.autograd.grad((plain * weights).sum(), x)
    torch.testing.assert_close(torch.autograd.grad((entered * weights).sum(), x), expected)
    with pytest.raises(CheckpointError):
        torch.autograd.grad((forgotten * weights).sum(), x)
