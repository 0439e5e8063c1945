"""torch.compile: values, gradients and nestings of transforms in one graph, up to the code that Inductor writes."""

import dataclasses

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.nn import BatchNorm2d, Conv2d, Dropout, LayerNorm, Linear, Sequential

import primitives as pr
from perf.ops import FAMILIES
from tests.nested_losses import gradients, tangent
from tests.properties import leaves, tiny_function
from tests.support import assert_close, like, nested, nestings


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function, backend="aot_eager"):
    return torch.compile(function, fullgraph=True, backend=backend)


def compiled_nestings():
    """Seconds each, hence by night: order two by Inductor, and order three."""
    for case in FAMILIES:
        for word in nestings(2):
            name = f"{case.name}-{word}-all-inductor"
            yield pytest.param(case, word, None, "inductor", id=name, marks=pytest.mark.nightly)
        for word in nestings(3):
            name = f"{case.name}-{word}-x-aot_eager"
            yield pytest.param(case, word, (0, 0, 0), "aot_eager", id=name, marks=pytest.mark.nightly)


# Inductor calls what torch deprecates.
@pytest.mark.filterwarnings("ignore:.*torch._prims_common.check.*:FutureWarning")
@pytest.mark.parametrize("case, word, positions, backend_of_torch", list(compiled_nestings()))
def test_nestings(case, word, positions, backend_of_torch, device):
    function, args = tiny_function(case, device)

    def of_all(vector):
        parts = vector.split([arg.numel() for arg in args])
        return function(*[part.view_as(arg) for part, arg in zip(parts, args, strict=True)])

    given = args if positions else [torch.cat([arg.flatten() for arg in args])]
    derivative = nested(function if positions else of_all, word, positions or 0)
    assert_close(compiled(derivative, backend_of_torch)(*given), derivative(*given), order=len(word))


def sized(case, size):
    """The small sample with another first axis; of attention with other rows and keys."""
    sample, options = case.small, dict(case.small.options)
    if "keys" not in options:
        return dataclasses.replace(sample, shape=(size, *sample.shape[1:]))
    options["keys"] += size - sample.shape[-2]
    return dataclasses.replace(
        sample, shape=(*sample.shape[:-2], size, sample.shape[-1]), options=tuple(options.items())
    )


# These take seconds more, and their rules are those of norms and of log-softmax.
WITH_MORE = (
    "softmax",
    "group_norm_silu",
    "batch_norm_eval",
    "batch_norm_relu",
    "batch_norm_relu_eval",
    "add_layer_norm",
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=[pytest.mark.nightly] * (each.name in WITH_MORE)) for each in FAMILIES],
    ids=lambda case: case.name,
)
def test_training_step(case, device):
    """Value, tangent and the backward of both, compiled once for inputs of any size."""
    names = case.perturbable(case.small)

    def step(options, others, x, *values):
        def function(x):
            given = dict(zip(names, (x, *values), strict=True))
            inputs = {**dict.fromkeys(case.arguments), **others, **given}
            return case.outputs(inputs, dataclasses.replace(case.small, options=options))[0]

        y, y_dot = torch.func.jvp(function, (x,), (x.detach().cos(),))
        return y.sin() + y_dot

    program = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for i, size in enumerate((7, 5)):
        sample = sized(case, size)
        inputs = leaves(case.inputs(sample, torch.float32, device), case.differentiable)
        args = [inputs[name] for name in names]
        others = {name: value for name, value in inputs.items() if name not in case.differentiable}
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            actual = program(sample.options, others, *args)
        expected = step(sample.options, others, *args)
        y_bar = like(expected.detach(), seed=3)
        pairs = zip(torch.autograd.grad(actual, args, y_bar), torch.autograd.grad(expected, args, y_bar), strict=True)
        assert_close(actual, expected)
        for got, want in pairs:
            assert_close(got, want)


# Torch warns of what it does itself: `meta_utils` asks intermediate tensors for their gradient, with its own norms too.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_autograd(device):
    """Backward passes that torch captures as graphs, of all families in one graph."""
    x, weight = (torch.randn(6, 4, device=device, requires_grad=True) for _ in range(2))

    def run(functions):
        y = functions.batch_norm(x * weight, None, None, None, None, True, 0.1, 1.0)
        y = functions.log_softmax(functions.layer_norm(y, (4,), weight[0], None, 1.0), 1)
        return torch.autograd.grad(y.square().sum(), (x, weight))

    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        actual = run(pr.functional)
    for got, want in zip(actual, run(torch.nn.functional), strict=True):
        assert_close(got, want, dtype=torch.float32, order=2)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_dynamo_leaves_our_frames_alone_where_a_graph_breaks_inside_a_transform():
    """It then tries each function that runs: 112 of them before they were marked, with warnings of graph breaks."""

    def slope(x):
        x = pr.functional.layer_norm(x, (8,))
        torch._dynamo.graph_break()
        return pr.functional.log_softmax(pr.functional.layer_norm(x, (8,)), 1)

    def loss(x):
        return torch.func.jvp(slope, (x,), (torch.ones_like(x),))[1].square().sum()

    torch._dynamo.reset()
    counters.clear()
    x = torch.randn(4, 8, requires_grad=True)
    torch.testing.assert_close(*[torch.autograd.grad(f(x), x)[0] for f in (loss, torch.compile(loss, backend="eager"))])
    assert counters["frames"]["total"] < 30


@pytest.mark.parametrize("function", [lambda x: x / 6, torch.nn.functional.hardsigmoid, torch.linalg.det])
def test_dual_numbers_are_traced_as_without_this_package(function):
    def tangent(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(x, x.cos()))).tangent

    x = torch.randn(3, 3)
    with pr.repair_torch():
        torch.testing.assert_close(compiled(tangent)(x), tangent(x))


# Inductor plans memory and writes kernels: there a tensor without memory, or a wrong stride, ends a process.


THROUGH_INDUCTOR = {
    # The zero tangent of the last weight has no memory in torch, and the process died.
    "layer norm": (LayerNorm(8, elementwise_affine=False), (4, 6, 8)),
    "batch norm of channels_last": (BatchNorm2d(4), (2, 4, 3, 3)),
    "dropout": (Dropout(0.5), (4, 6, 8)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("module, shape", THROUGH_INDUCTOR.values(), ids=THROUGH_INDUCTOR)
def test_a_differentiated_derivative_is_that_of_eager(module, shape):
    torch.manual_seed(0)
    x, v = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    ends = [Linear(8, 8), Linear(8, 8)]
    if len(shape) == 4:
        ends = [Conv2d(4, 4, 1), Conv2d(4, 4, 1)]
        x, v = (t.to(memory_format=torch.channels_last) for t in (x, v))
    net = pr.nn.convert(Sequential(ends[0], module, ends[1]).double())

    # With its own random numbers Inductor would draw another mask.
    with torch._inductor.config.patch(fallback_random=True):
        torch.manual_seed(1)
        compiled = torch.compile(tangent, fullgraph=True)(net, x, v)
    torch.manual_seed(1)
    expected = tangent(net, x, v)
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(*[gradients(net, value) for value in (compiled, expected)])
