"""torch.compile: values, gradients and every nesting of transforms in one graph, by ahead-of-time autograd."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._dynamo import compiled_autograd

import primitives as pr
from tests.op_cases import CASES
from tests.properties import leaves
from tests.support import assert_close, like
from tests.test_nestings import flattened, nested, nestings, true_derivative

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Each test compiles from nothing."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


# A third derivative takes seconds to trace, which makes these the slowest tests of the front end: layer norm and batch
# norm have every nesting, the others in turn those with an even and those with an odd number of reverse modes.
THIRD_ORDERS = [
    pytest.param(case, word, id=f"{case.name}-{word}")
    for i, case in enumerate(CASES)
    for word in nestings(3)
    if case.name in ("layer_norm", "batch_norm") or (word.count("r") + i) % 2
]


@pytest.mark.parametrize("case, word", THIRD_ORDERS)
def test_third_orders_in_the_input(case, word, device):
    inputs = case.inputs(case.tiny, torch.float64, device)
    names = case.perturbable(case.tiny)
    actual = compiled(nested(case.of(names, inputs, case.tiny), word))(*[inputs[name] for name in names])
    assert_close(actual, true_derivative(case, device, (0,) * len(word), len(word)), order=len(word), what=word)


@every_case
@pytest.mark.parametrize("word", nestings(2))
def test_second_orders_in_all_arguments_at_once(case, word, device):
    function, vector = flattened(case, device, true=False)
    actual = compiled(nested(function, word))(vector)
    assert_close(actual, true_derivative(case, device, None, len(word)), order=len(word), what=word)


@every_case
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_training_step(case, dynamic, device):
    """Forward and backward of a compiled function, of two batch sizes."""
    sizes = [case.small, dataclasses.replace(case.small, shape=(5, *case.small.shape[1:]))]
    program = None
    for sample in sizes:
        inputs = leaves(case.inputs(sample, torch.float32, device), case.differentiable)
        args = [inputs[name] for name in case.perturbable(sample)]
        others = {name: value for name, value in inputs.items() if name not in case.differentiable}
        if program is None:
            names = case.perturbable(sample)

            def step(others, *values, names=names, sample=sample):
                return case.outputs(
                    {**dict.fromkeys(case.arguments), **others, **dict(zip(names, values, strict=True))}, sample
                )[0].sin()

            program = compiled(step, dynamic=dynamic)
        actual, expected = (f(others, *args) for f in (program, step))
        y_bar = like(expected.detach(), seed=3)
        pairs = zip(torch.autograd.grad(actual, args, y_bar), torch.autograd.grad(expected, args, y_bar), strict=True)
        assert_close(actual, expected)
        for got, want in pairs:
            assert_close(got, want)


@every_case
def test_vmap_and_jvp_in_one_graph(case, device):
    inputs = case.inputs(case.small, torch.float64, device)
    function = case.of(["x"], inputs, case.small)
    stack = torch.stack([inputs["x"], 2 * inputs["x"]])
    x_dot = like(inputs["x"], seed=3)

    def tangents(stack):
        return torch.vmap(lambda x: torch.func.jvp(function, (x,), (x_dot,))[1])(stack)

    assert_close(compiled(tangents)(stack), tangents(stack))


@every_case
def test_jvp_in_a_loss_that_is_trained(case, device):
    """A tangent inside the compiled function and a backward pass outside it: what a consistency loss does."""
    inputs = case.inputs(case.small, torch.float64, device)
    function = case.of(["x"], inputs, case.small)
    x = inputs["x"].clone().requires_grad_()
    x_dot = like(inputs["x"], seed=3)

    def loss(x):
        y, y_dot = torch.func.jvp(function, (x,), (x_dot,))
        return (y * y_dot.sin()).sum()

    actual, expected = (torch.autograd.grad(f(x), x)[0] for f in (compiled(loss), loss))
    assert_close(actual, expected, order=2)


# Torch warns of what it does itself: `meta_utils` asks intermediate tensors for their gradient, with its own norms too.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_autograd(device):
    """Backward passes that torch captures as graphs: other static arguments, and all families in one graph."""
    x, weight = (torch.randn(6, 4, device=device, requires_grad=True) for _ in range(2))

    def run(functions, eps):
        y = functions.batch_norm(x * weight, None, None, None, None, True, 0.1, eps)
        y = functions.log_softmax(functions.layer_norm(y, (4,), weight[0], None, eps), 1)
        return torch.autograd.grad(y.square().sum(), (x, weight))

    for eps in (1e-5, 1.0):
        with compiled_autograd._enable(torch.compile(backend="aot_eager")):
            actual = run(pr.functional, eps)
        for got, want in zip(actual, run(torch.nn.functional, eps), strict=True):
            assert_close(got, want, dtype=torch.float32, order=2)
