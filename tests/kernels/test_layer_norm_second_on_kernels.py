"""Second derivatives of the public layer norm on the Triton kernels, in the interpreter, against plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.func import grad, jvp, vmap

import primitives as pr

# The rules of the first-order operators that lead to the second-order kernels.
import primitives.ops.layer_norm_second_order
from tests.kernels.layer_norm_second_truth import plain_layer_norm
from tests.kernels.layer_norm_truth import EPS, random
from triton_kernels import layer_norm_second_order

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

NUM_COLS = 7
ARGNUMS = (0, 1, 2)


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the second-order launchers, in the order in which they are called."""
    names = []

    def count(name: str) -> None:
        launcher = getattr(layer_norm_second_order, name)

        def counting(*args):
            names.append(name)
            return launcher(*args)

        monkeypatch.setattr(layer_norm_second_order, name, counting)

    count("layer_norm_pairing")
    count("layer_norm_bwd_jvp")
    with pr.use_backend("triton"):
        yield names


def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A scalar of which no second derivative with respect to the arguments vanishes."""
    return weigh(pr.functional.layer_norm(x, (NUM_COLS,), weight, bias, EPS))


def plain_loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return weigh(plain_layer_norm(x, weight, bias))


def weigh(y: Tensor) -> Tensor:
    # The factors differ from row to row and from column to column.
    return (y.sin() * torch.linspace(0.5, 2, y.numel(), dtype=y.dtype).reshape(y.shape)).sum()


def arguments(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(random(*shape, dtype=dtype, seed=seed + i) for i, shape in enumerate([(4, 7), (7,), (7,)]))


# Drawn here because vmap refuses to draw random numbers.
DIRECTIONS = {dtype: arguments(dtype, seed=5) for dtype in (torch.float32, torch.float64)}


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for x, y in zip(actual, expected, strict=True):
        # Relative to the largest element; float32 loses digits where large terms cancel.
        atol = {torch.float64: 1e-12, torch.float32: 1e-5}[x.dtype] * max(y.abs().max().item(), 1.0)
        torch.testing.assert_close(x.double(), y, rtol=0.0, atol=atol)


def grad_of_grad(f):
    def inner(*args):
        return sum((g * v).sum() for g, v in zip(grad(f, ARGNUMS)(*args), DIRECTIONS[args[0].dtype], strict=True))

    return grad(inner, ARGNUMS)


def hvp(f):
    return lambda *args: jvp(grad(f, ARGNUMS), args, DIRECTIONS[args[0].dtype])[1]


def grad_of_jvp(f):
    return grad(lambda *args: jvp(f, args, DIRECTIONS[args[0].dtype])[1], ARGNUMS)


def double_backward(f):
    """Double backward of autograd, not of torch.func."""

    def second(*args):
        leaves = [arg.detach().clone().requires_grad_() for arg in args]
        first = torch.autograd.grad(f(*leaves), leaves, create_graph=True)
        return torch.autograd.grad(first, leaves, DIRECTIONS[args[0].dtype])

    return second


NESTINGS = {
    grad_of_grad: "layer_norm_pairing",
    hvp: "layer_norm_bwd_jvp",
    grad_of_jvp: "layer_norm_pairing",
    double_backward: "layer_norm_pairing",
}
every_nesting = pytest.mark.parametrize("nesting", NESTINGS, ids=lambda nesting: nesting.__name__)


@every_nesting
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_second_derivatives_run_on_the_kernels(nesting, dtype: torch.dtype, calls: list[str]) -> None:
    args = arguments(dtype)
    actual = nesting(loss)(*args)
    assert calls == [NESTINGS[nesting]]
    assert_same(actual, nesting(plain_loss)(*(arg.double() for arg in args)))


@every_nesting
@pytest.mark.parametrize("argnum", ARGNUMS)
def test_one_perturbed_argument(nesting, argnum: int) -> None:
    args = arguments()

    def with_one(f):
        return lambda arg: f(*args[:argnum], arg, *args[argnum + 1 :])

    def second(f):
        if nesting is hvp:
            return jvp(grad(with_one(f)), (args[argnum],), (DIRECTIONS[torch.float64][argnum],))[1]
        if nesting is grad_of_jvp:
            tangent = (DIRECTIONS[torch.float64][argnum],)
            return grad(lambda arg: jvp(with_one(f), (arg,), tangent)[1])(args[argnum])
        inner = grad(with_one(f))
        return grad(lambda arg: (inner(arg) * DIRECTIONS[torch.float64][argnum]).sum())(args[argnum])

    assert_same((second(loss),), (second(plain_loss),))


@pytest.mark.parametrize("nesting", [grad_of_grad, hvp, grad_of_jvp], ids=lambda nesting: nesting.__name__)
@pytest.mark.parametrize("batched", [(0, None, None), (0, 0, 0), (None, 0, None)], ids=str)
def test_vmap_of_second_derivatives(nesting, batched: tuple[int | None, ...], calls: list[str]) -> None:
    args = [
        arg if axis is None else random(3, *arg.shape, dtype=arg.dtype, seed=9)
        for arg, axis in zip(arguments(), batched, strict=True)
    ]
    actual = vmap(nesting(loss), batched)(*args)
    assert set(calls) == {NESTINGS[nesting]}
    assert_same(actual, vmap(nesting(plain_loss), batched)(*args))


def test_without_parameters(calls: list[str]) -> None:
    x, v = arguments()[0], DIRECTIONS[torch.float64][0]

    def second(norm):
        return jvp(grad(lambda x: weigh(norm(x))), (x,), (v,))[1], grad(
            lambda x: (grad(lambda x: weigh(norm(x)))(x) * v).sum()
        )(x)

    ones, zeros = torch.ones(NUM_COLS, dtype=x.dtype), torch.zeros(NUM_COLS, dtype=x.dtype)
    actual = second(lambda x: pr.functional.layer_norm(x, (NUM_COLS,), None, None, EPS))
    assert calls == ["layer_norm_bwd_jvp", "layer_norm_pairing"]
    assert_same(actual, second(lambda x: plain_layer_norm(x, ones, zeros)))


def test_gradgradcheck() -> None:
    x, weight, bias = (arg[:2] if arg.dim() == 2 else arg for arg in arguments())
    inputs = [arg.clone().requires_grad_() for arg in (x, weight, bias)]

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return pr.functional.layer_norm(x, (NUM_COLS,), weight, bias, EPS)

    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_third_order() -> None:
    """Beyond the second order, the second-order operators are differentiated through their references."""
    x, weight, bias = arguments()
    v = DIRECTIONS[torch.float64][0]

    def third(f):
        def second(x):
            return jvp(grad(lambda x: f(x, weight, bias)), (x,), (v,))[1]

        return jvp(second, (x,), (v,))[1], grad(lambda x: (second(x) * v).sum())(x)

    assert_same(third(loss), third(plain_loss))
