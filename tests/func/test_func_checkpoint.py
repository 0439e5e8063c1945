"""checkpoint: values and derivatives of the function itself, in any nesting, with less memory."""

import functools

import pytest
import torch
from torch import nn

import primitives as pr
from perf.measuring import peak
from primitives.func import checkpoint, grad, jvp, vmap
from primitives.func._reached import Reached
from primitives.tracing import PhiloxState, functionalize_rng, pure_module, trace_joint
from tests.nested_losses import NESTINGS, Net, V, X, called, gradients, in_params, tangent
from tests.support import data

CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def in_regions(region, block, x):
    return region(lambda x: region(block[2:], region(block[:2], x)), x)


def dropout(name, explicit, region):
    net = Net(region, dropout=0.5)
    if explicit:
        found, state = functionalize_rng(lambda: NESTINGS[name](net))(PhiloxState.from_seed(3))
        return found, state.seed, state.offset
    torch.manual_seed(3)
    return NESTINGS[name](net), torch.rand(2)


class Attend(nn.Module):
    def forward(self, x):
        return pr.functional.attention(x, x.cos(), x, dropout_p=0.5)


def attention(name, region):
    torch.manual_seed(3)
    return NESTINGS[name](Net(region, norm=lambda width: Attend())), torch.rand(2)


def two_steps_of_batch_norm(name, norm, region):
    net = Net(region, norm=norm)
    found = [NESTINGS[name](net) for _ in range(2)]
    assert not any(buffer.requires_grad for buffer in net.buffers())
    return found, dict(net.named_buffers())


def batch_norm_per_sample(region):
    # The average over all steps, which needs their count.
    pure = pure_module(Net(region, norm=functools.partial(nn.BatchNorm1d, momentum=None)))
    params, buffers = pure.init()

    def loss(params, buffers, x):
        y, buffers = pure(params, buffers, x)
        return y.square().sum(), buffers

    return vmap(grad(loss, has_aux=True), in_dims=(None, None, 0))(params, buffers, data(5, 3, 4))


def trees_keywords_and_closures(region):
    torch.manual_seed(0)
    w, layer = data(4).requires_grad_(), nn.Linear(4, 4).double()

    def step(tree, scale, *, n):
        return {"y": layer(tree["x"][0] * w).tanh() * scale, "n": n, "i": tree["i"] + 1}

    def loss(x):
        out = region(step, {"x": [x], "i": torch.tensor(1)}, 2.0, n="name")
        assert (out["n"], out["i"]) == ("name", 2)
        return out["y"].square().sum()

    # A tensor of a transform around, in a closure.
    def held(x):
        h = x * 2
        return region(lambda y: (y * h).sin(), x.cos())

    y, y_dot = jvp(loss, (X,), (V,))
    return torch.autograd.grad(y + y_dot, [w, *layer.parameters()]), grad(loss)(X), jvp(held, (X,), (V,))


def under_autocast_and_override(region):
    net = Net(region, norm=nn.LayerNorm).float()
    with torch.autocast("cpu", torch.bfloat16), pr.repair_torch():
        loss = jvp(net, (X.float(),), (V.float(),))[1].float().square().sum()
    return gradients(net, loss)


def joint_graph(region):
    def run(function, params):
        params = {name: p.requires_grad_() for name, p in params.items()}
        graph = trace_joint(lambda p, x: function(p, x).sum(), (params, X), no_cotangents=True, functionalize_rng=True)
        return graph((params, X), rng=(PhiloxState.from_seed(1), PhiloxState.from_seed(2)))[:2]

    return in_params(run)(Net(region, dropout=0.5))


def views_of_a_leaf(region):
    """Several from one call: torch lets them require grad also where it records nothing."""
    x = X.clone().requires_grad_()
    a = region(lambda x: torch.mul(*x.chunk(2, dim=-1)).sin() * x.unbind(1)[0][:, None], x)
    return torch.autograd.grad(a.sum(), x)


OF_LOSSES = [f"backward of {loss}" for loss in ("plain", "tangent", "penalty")]
# Functions of a region, `checkpoint` or a plain call.
CASES = {
    "views of a leaf": views_of_a_leaf,
    **{name: lambda region, run=run: run(Net(region)) for name, run in NESTINGS.items()},
    **{
        f"regions in regions, {name}": lambda region, run=NESTINGS[name]: run(
            Net(functools.partial(in_regions, region))
        )
        for name in ("grad of jvp", "backward of tangent", "backward of penalty")
    },
    **{
        f"dropout, {name}, explicit={explicit}": functools.partial(dropout, name, explicit)
        for name in (*OF_LOSSES, "grad in parameters of jvp")
        for explicit in (False, True)
    },
    **{f"attention with dropout, {name}": functools.partial(attention, name) for name in OF_LOSSES},
    **{
        f"batch norm of {norm.__module__}, {name}": functools.partial(two_steps_of_batch_norm, name, norm)
        for norm, name in (
            *((pr.nn.BatchNorm1d, name) for name in OF_LOSSES),
            *((nn.BatchNorm1d, name) for name in ("backward of plain", "backward in a dual level")),
        )
    },
    "batch norm per sample": batch_norm_per_sample,
    "trees": trees_keywords_and_closures,
    "autocast and override": under_autocast_and_override,
    "joint graph": joint_graph,
}


@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_function_itself(name):
    torch.testing.assert_close(CASES[name](checkpoint), CASES[name](called), **CLOSE)


def test_buffers_in_inference_mode():
    net, truth = (Net(region, norm=nn.BatchNorm1d) for region in (checkpoint, called))
    with torch.inference_mode():
        torch.testing.assert_close(net(X), truth(X), **CLOSE)
    torch.testing.assert_close(dict(net.named_buffers()), dict(truth.named_buffers()), **CLOSE)


def test_a_loss_with_a_jvp_takes_less_memory():
    """Of five regions with four blocks each, one is in memory at a time, and the inputs and tangents of all."""

    def bytes_of(region):
        net, x, v = Net(region), data(256, 8), data(256, 8, seed=1)
        net.blocks = nn.ModuleList(Net(called, depth=4, width=8) for _ in range(5))
        return peak(lambda: tangent(net, x, v).backward())

    assert bytes_of(checkpoint) < bytes_of(called) / 2.5


# By day the same is compiled inside of transforms, and measured in eager mode.
@pytest.mark.nightly
def test_a_compiled_loss_with_a_jvp_keeps_what_an_eager_one_does():
    torch._dynamo.reset()
    net, x, v = Net(checkpoint), data(64, 4), data(64, 4, seed=1)
    loss = torch.compile(tangent, fullgraph=True)(net, x, v)
    kept = sum(tensor.numel() for tensor in loss.grad_fn.saved_tensors)
    # Inputs and tangents of each region, what the loss takes of the last, and parameters.
    assert kept <= (2 * len(net.blocks) + 3) * x.numel() + sum(p.numel() for p in net.parameters())
    torch.testing.assert_close(gradients(net, loss), gradients(net, tangent(net, x, v)), **CLOSE)


class Holder:
    def __init__(self, x):
        self.x = x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


def unknown(x):
    """Of classes nobody looks at attributes."""
    return type("Unknown", (), {"x": x})


@pytest.mark.parametrize("kind", [Holder, Slotted])
def test_attributes_of_captured_objects_are_known(kind):
    held = kind(data(4).requires_grad_())
    (x_bar,) = torch.autograd.grad(checkpoint(lambda x: x * held.x, X).sum(), held.x)
    torch.testing.assert_close(x_bar, X.sum_to_size(x_bar.shape))


def test_globals_of_functions_of_this_package_are_not_searched_and_what_they_hold_is():
    """Thousands of objects lie behind the former, which took ten seconds to look at."""
    assert Reached([pr.functional.layer_norm], lambda x: True).described() == [("training", [])]
    pure = pure_module(net := nn.Linear(3, 3))
    assert Reached([lambda x: pure({}, {}, x)], lambda x: True).modules == [net]


def test_tensors_that_a_region_cannot_know_are_refused():
    def within(x):
        held = unknown(x * 2)
        return checkpoint(lambda x: x * held.x, x).sum()

    held = unknown(data(4).requires_grad_())
    for call in (lambda: checkpoint(lambda x: x * held.x, X.clone().requires_grad_()), lambda: grad(within)(X)):
        with pytest.raises(pr.LeafError, match="Pass it as an argument"):
            call()


def test_a_graph_that_is_not_recorded_is_not_asked_for_gradients():
    x = X.clone().requires_grad_()
    with pytest.raises(pr.LeafError, match=r"Call torch\.func\.grad there"):
        checkpoint(lambda x: torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0], x)
    (x_bar,) = torch.autograd.grad(checkpoint(grad(lambda x: x.sin().sum()), x).sum(), x)
    torch.testing.assert_close(x_bar, -x.sin(), **CLOSE)
