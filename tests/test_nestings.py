"""Derivatives of higher order: every nesting of forward and reverse mode against nested modes of the plain formula."""

from __future__ import annotations

import functools
import itertools
import math
import warnings

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, jvp

from tests.op_cases import BATCH_NORM, CASES, LAYER_NORM
from tests.support import assert_close, like, tolerance

MODES = {"f": jacfwd, "r": jacrev}


def nestings(*orders):
    """All words over f (jacfwd) and r (jacrev) of the given lengths; the first letter is the outermost transform."""
    return ["".join(word) for order in orders for word in itertools.product("fr", repeat=order)]


def nested(function, word, argnums=0):
    """`function` differentiated once per letter of `word`; `argnums` may give an argument for each letter."""
    positions = [argnums] * len(word) if isinstance(argnums, int) else argnums
    for letter, position in zip(reversed(word), reversed(positions), strict=True):
        function = MODES[letter](function, argnums=position)
    return function


def flattened(case, device, *, true):
    """`y` as a function of one vector that holds every differentiable argument, and that vector."""
    inputs = case.inputs(case.tiny, torch.float64, device)
    names = case.perturbable(case.tiny)
    shapes = [inputs[name].shape for name in names]
    function = case.of(names, inputs, case.tiny, true=true)

    def of_vector(vector):
        parts = vector.split([math.prod(shape) for shape in shapes])
        return function(*[part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)])

    return of_vector, torch.cat([inputs[name].flatten() for name in names])


@functools.cache
def true_derivative(case, device, argnums, order):
    """Derivative of the plain formula: of the argument positions `argnums`, or of the vector of all arguments."""
    if argnums is None:
        function, vector = flattened(case, device, true=True)
        return nested(function, "f" * order)(vector)
    inputs = case.inputs(case.tiny, torch.float64, device)
    names = case.perturbable(case.tiny)
    function = case.of(names, inputs, case.tiny, true=True)
    return nested(function, "f" * order, argnums)(*[inputs[name] for name in names])


def check_nesting(case, device, word, argnums):
    inputs = case.inputs(case.tiny, torch.float64, device)
    names = case.perturbable(case.tiny)
    actual = nested(case.of(names, inputs, case.tiny), word, argnums)(*[inputs[name] for name in names])
    assert_close(actual, true_derivative(case, device, argnums, len(word)), order=len(word), what=word)


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
single_argument = pytest.mark.parametrize(
    "case, position",
    [
        pytest.param(case, i, id=f"{case.name}-{name}")
        for case in CASES
        for i, name in enumerate(case.perturbable(case.tiny))
        if i > 0
    ],
)


@every_case
@pytest.mark.parametrize("word", nestings(1, 2, 3, 4))
def test_every_nesting_in_the_input(case, word, device):
    check_nesting(case, device, word, (0,) * len(word))


@single_argument
@pytest.mark.parametrize("word", nestings(1, 2, 3))
def test_every_nesting_in_each_other_argument(case, position, word, device):
    check_nesting(case, device, word, (position,) * len(word))


@every_case
@pytest.mark.parametrize("word", nestings(2, 3))
def test_every_nesting_in_all_arguments_at_once(case, word, device):
    """One vector holds all arguments: the result contains every mixed partial derivative."""
    function, vector = flattened(case, device, true=False)
    actual = nested(function, word)(vector)
    assert_close(actual, true_derivative(case, device, None, len(word)), order=len(word), what=word)


@single_argument
@pytest.mark.parametrize("word", nestings(2))
@pytest.mark.parametrize("input_first", [True, False], ids=["input_inside", "input_outside"])
def test_one_argument_in_each_mode(case, position, word, input_first, device):
    """One level perturbs the input, the other another argument: each rule sees one tangent or cotangent only."""
    check_nesting(case, device, word, (position, 0) if input_first else (0, position))


@single_argument
@pytest.mark.parametrize("word", nestings(3))
def test_input_then_another_argument_then_the_input(case, position, word, device):
    check_nesting(case, device, word, (0, position, 0))


@every_case
def test_hessian_vector_products_agree(case, device):
    """Forward over reverse, reverse over forward, reverse over reverse, and the eager double backward."""
    inputs = case.inputs(case.small, torch.float64, device)
    x, x_dot, y_bar = inputs["x"], like(inputs["x"], seed=3), like(inputs["x"], seed=4)

    def loss(function):
        return lambda x: (function(x).sin() * y_bar).sum()

    ours, theirs = (loss(case.of(["x"], inputs, case.small, true=true)) for true in (False, True))
    expected = jvp(grad(theirs), (x,), (x_dot,))[1]
    products = {
        "forward over reverse": jvp(grad(ours), (x,), (x_dot,))[1],
        "reverse over forward": grad(lambda x: jvp(ours, (x,), (x_dot,))[1])(x),
        "reverse over reverse": grad(lambda x: (grad(ours)(x) * x_dot).sum())(x),
        "torch.autograd.functional.hvp": torch.autograd.functional.hvp(ours, x, x_dot)[1],
        "torch.autograd.functional.vhp": torch.autograd.functional.vhp(ours, x, x_dot)[1],
    }
    leaf = x.clone().requires_grad_()
    (x_bar,) = torch.autograd.grad(ours(leaf), leaf, create_graph=True)
    products["double backward"] = torch.autograd.grad((x_bar * x_dot).sum(), leaf)[0]
    for name, product in products.items():
        assert_close(product, expected, order=2, what=name)


@pytest.mark.parametrize("case", [LAYER_NORM, BATCH_NORM], ids=lambda case: case.name)
@pytest.mark.parametrize("word", ["ff", "rf", "fff", "rrr"])
def test_torch_itself_is_wrong(case, word):
    """Why this package exists: jvp(jvp), grad(jvp) and third orders of torch.nn.functional, on the torch that is here.

    Passes either way; a warning says so once torch is right.
    """
    x, *others = case.inputs(case.tiny, torch.float64, torch.device("cpu")).values()
    options = dict(case.tiny.options)

    def theirs(x):
        return case.torch_function(x, *others, **options)

    def formula(x):
        out = case.truth(x, *others, **options)
        return out[0] if isinstance(out, tuple) else out

    expected = nested(formula, "f" * len(word))(x)
    error = (nested(theirs, word)(x) - expected).abs().max() / expected.abs().max()
    if error <= tolerance(torch.float64, order=len(word)):
        # The project's pytest settings make warnings errors; this one is news, not a failure.
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.warn(f"torch {torch.__version__} is right now: {case.name}, nesting {word}.", stacklevel=1)
    else:
        assert error > 1e-3, f"torch's {case.name} is off by rounding only in nesting {word}: {error:.1e}"
