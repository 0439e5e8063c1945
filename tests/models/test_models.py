"""Unedited models of libraries, inside `repair_torch`, converted or not: derivatives of two orders, and usage."""

import contextlib
import copy
import functools

import pytest
import torch
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import primitives as pr
from perf.ops.samples import normal
from primitives._audit.nestings import InFloat64, difference, nested
from tests.models.table import CASES, MODELS
from tests.support import nestings

# A context, and what makes a model ready to run in it.
WAYS = {"override": (pr.repair_torch, lambda model: model), "convert": (pr.repair_torch, pr.nn.convert)}
EITHER = pytest.mark.parametrize("way", WAYS)
EACH = pytest.mark.parametrize("name", [case.name for case in MODELS])


@functools.cache
def built(name, dtype=torch.float64):
    return CASES[name].build(dtype)


def ready(name, way, dtype=torch.float64):
    context, prepare = WAYS[way]
    return CASES[name], context, prepare(copy.deepcopy(built(name, dtype)))


def loss_of_output(model, case, x, v=None):
    y = case.call(model, x)
    return (y - torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).square().mean()


def loss_with_jvp(model, case, x, v):
    """Of the output and its derivative along a direction, as in consistency models and MeanFlow."""
    y, y_dot = jvp(lambda x: case.call(model, x), (x,), (v,))
    return (y - y_dot).square().mean()


def loss_with_gradient(model, case, x, v):
    """The squared gradient in the input: a Hessian-vector product for all weights."""
    loss = loss_of_output(model, case, x)
    return torch.autograd.grad(loss, x, create_graph=True)[0].square().mean()


def loss_and_gradients(
    model,
    case,
    context=contextlib.nullcontext,
    loss=loss_with_jvp,
    memory_format=torch.contiguous_format,
    exact=InFloat64,
):
    """In the input and all weights, as one vector; the last backward pass runs when the context has ended."""
    dtype = next(model.parameters()).dtype
    x, v = (normal(case.shape, seed).to(dtype, memory_format=memory_format) for seed in (1, 2))
    # It widens whatever is narrower.
    with context(), exact() if dtype == torch.float64 else contextlib.nullcontext():
        value = loss(model, case, x.requires_grad_(), v)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    parts = torch.autograd.grad(value, [x, *weights], materialize_grads=True)
    return torch.cat([part.detach().flatten() for part in (value, *parts)])


def assert_near(actual, expected, tolerance):
    """Relative to the largest element: what another one loses in rounding counts as little as it is."""
    assert_close(actual, expected, rtol=0.0, atol=tolerance * expected.abs().max().item())


@EITHER
@EACH
def test_loss_and_gradients_are_those_of_torch(name, way):
    case, context, model = ready(name, way)
    found = loss_and_gradients(model, case, context, loss_of_output)
    assert_near(found, loss_and_gradients(built(name), case, loss=loss_of_output), 1e-12)


def moving(model, case):
    """The loss as a function of the input and all weights, these, and a direction for each."""
    points = {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}
    points["input"] = normal(case.shape, 1)

    def loss(*xs):
        moved = dict(zip(points, xs, strict=True))
        x = moved.pop("input")
        return loss_of_output(lambda **given: functional_call(model, moved, (), given), case, x)

    return loss, list(points.values()), [0.1 * normal(p.shape, i) for i, p in enumerate(points.values())]


@functools.cache
def second_derivative(name):
    """By central differences of torch's gradient, and in torch, on attention that is composed."""
    loss, xs, directions = moving(built(name), CASES[name])
    with sdpa_kernel(SDPBackend.MATH), InFloat64():
        gradient = nested(loss, directions, "r")
        return difference(gradient, directions)(*xs), nested(loss, directions, "rr")(*xs)


@EITHER
@EACH
def test_second_derivatives_are_central_differences(name, way):
    case, context, model = ready(name, way)
    differences, torchs = second_derivative(name)
    loss, xs, directions = moving(model, case)
    for nesting in nestings(2):
        with context(), InFloat64():
            found = nested(loss, directions, nesting)(*xs)
        assert_near(found, differences, 1e-7)
        # The one nesting that torch has.
        assert_near(found, torchs, 1e-10)


@pytest.mark.parametrize("name", ["timm_efficientnet", "timm_coatnet"])
def test_a_jvp_in_training_counts_batches(name):
    """Torch's batch norm refuses: it adds to its counter."""
    case, context, model = ready(name, "convert")
    state, x, v, h = copy.deepcopy(model.train().state_dict()), normal(case.shape, 1), normal(case.shape, 2), 1e-4
    with context():
        y_dot = jvp(model, (x,), (v,))[1]
    counters = [value for key, value in model.state_dict().items() if key.endswith("num_batches_tracked")]
    assert counters
    assert {int(count) for count in counters} == {1}
    model.load_state_dict(state)
    with torch.no_grad():
        a, b, c, d = [model(x + k * h * v) for k in (-2, -1, 1, 2)]
    assert_near(y_dot, (a - 8 * b + 8 * c - d) / (12 * h), 1e-6)


@functools.cache
def usual(name, loss=loss_with_jvp, dtype=torch.float64):
    return loss_and_gradients(built(name, dtype), CASES[name], pr.repair_torch, loss)


@EITHER
@pytest.mark.parametrize("name", ["gpt2", "sd3", "unet2d_condition"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # the old name, in all versions
def test_gradient_checkpointing(name, way):
    case, context, model = ready(name, way)
    # Layers run again after the context has ended.
    inside = {"context_fn": lambda: (contextlib.nullcontext(), pr.repair_torch())}
    if case.library == "transformers":
        model.train().gradient_checkpointing_enable({"use_reentrant": False, **inside})
    else:
        model.train().enable_gradient_checkpointing(functools.partial(checkpoint, use_reentrant=False, **inside))
    for loss in (loss_of_output, loss_with_gradient):
        assert_near(loss_and_gradients(model, case, context, loss), usual(name, loss), 1e-12)


@EITHER
@pytest.mark.parametrize("name", ["gpt2", "sd3"])
def test_checkpoint_of_this_package(name, way):
    """It takes a loss with a JVP, for which torch's raises."""
    case, context, model = ready(name, way)
    if case.library == "transformers":
        model.train()._set_gradient_checkpointing(True, pr.func.checkpoint)
    else:
        model.train().enable_gradient_checkpointing(pr.func.checkpoint)
    assert_near(loss_and_gradients(model, case, context), usual(name), 1e-12)


@EITHER
@pytest.mark.parametrize("name", ["unet2d", "unet2d_condition"])
def test_channels_last(name, way):
    case, context, model = ready(name, way)
    last = {"memory_format": torch.channels_last}
    assert_near(loss_and_gradients(model.to(**last), case, context, **last), usual(name), 1e-12)


@EITHER
def test_attention_that_transformers_composes(way):
    case, context, model = ready("gpt2", way)
    model.set_attn_implementation("eager")
    assert_near(loss_and_gradients(model, case, context), usual("gpt2"), 1e-12)


@EITHER
def test_autocast(way):
    case, context, model = ready("gpt2", way, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = loss_and_gradients(model, case, context)
    # Eight bits, through two layers.
    assert_near(found, usual("gpt2", dtype=torch.float32), 0.05)


# Inductor takes 20 s for a model: one of them by day, another in the graphs alone.
DAILY = ("gpt2", loss_with_jvp, "inductor"), ("vit", loss_with_gradient, "eager")
BY_NIGHT = [
    pytest.param(name, loss, "inductor", marks=pytest.mark.nightly)
    for name in ("gpt2", "bert", "llama", "vit", "timm_vit", "timm_convnext", "dit", "unet2d")
    for loss in (loss_with_jvp, loss_with_gradient)
    if (name, loss, "inductor") not in DAILY
]


@pytest.mark.parametrize("name, loss, compiler", [*DAILY, *BY_NIGHT])
def test_compiled_here(name, loss, compiler):
    case, _, model = ready(name, "override")

    def exactly(*args):
        with InFloat64():
            return loss(*args)

    found = loss_and_gradients(model, case, loss=pr.compile(exactly, backend=compiler), exact=contextlib.nullcontext)
    assert_near(found, usual(name, loss), 1e-10)


@pytest.mark.parametrize(
    "name, way",
    [
        ("llama", "convert"),
        pytest.param("vit", "convert", marks=pytest.mark.nightly),
        pytest.param("timm_convnext", "convert", marks=pytest.mark.nightly),
        pytest.param("gpt2", "override", marks=pytest.mark.nightly),
        pytest.param("level", "convert", marks=pytest.mark.nightly),
    ],
)
def test_compiled(name, way):
    case, context, model = ready(name, way)

    expected = loss_and_gradients(copy.deepcopy(model), case, context, exact=contextlib.nullcontext)
    with context():
        step = torch.compile(loss_with_jvp, fullgraph=True)
        found = loss_and_gradients(model, case, loss=step, exact=contextlib.nullcontext)
    # diffusers embeds the time, and Llama its places, in float32.
    assert_near(found, expected, 1e-6 if case.library == "diffusers" or name == "llama" else 1e-12)
