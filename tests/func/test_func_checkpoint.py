"""checkpoint: values and derivatives of the function itself, in any nesting, with less memory."""

from __future__ import annotations

import functools

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves

import primitives as pr
from primitives.func import checkpoint, functional_call, grad, hessian, jacrev, jvp, vmap
from primitives.tracing import PhiloxState, functionalize_rng, trace_joint

CLOSE = {"rtol": 1e-11, "atol": 1e-11}


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Net(nn.Module):
    """Blocks, each of which may be checkpointed."""

    def __init__(self, region=None, dropout=0.0, norm=None, width=4, depth=2):
        super().__init__()
        torch.manual_seed(0)
        self.region = region or (lambda block, x: block(x))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width),
                nn.Identity() if norm is None else norm(width),
                nn.Tanh(),
                nn.Dropout(dropout),
                nn.Linear(width, width),
            )
            for _ in range(depth)
        ).double()

    def forward(self, x):
        for block in self.blocks:
            x = self.region(block, x)
        return x


X, V = data(3, 4), data(3, 4, seed=1)


def gradients(net, loss):
    return torch.autograd.grad(loss, list(net.parameters()), materialize_grads=True)


def second_backward(net):
    x = X.clone().requires_grad_()
    (x_bar,) = torch.autograd.grad(net(x).sin().sum(), x, create_graph=True)
    return gradients(net, x_bar.square().sum())


def of_params(net):
    params, buffers = functional_call(net).init()
    return lambda p, x: functional_call(net)(p, buffers, x)[0], params


def tangents(params):
    return {name: data(*p.shape, seed=i) for i, (name, p) in enumerate(params.items())}


def in_params(transform):
    def run(net):
        function, params = of_params(net)
        return transform(function, params)

    return run


NESTINGS = {
    "backward": lambda net: gradients(net, net(X).square().sum()),
    "backward twice": second_backward,
    "backward of jvp": lambda net: gradients(net, sum(y.pow(3).sum() for y in jvp(net, (X,), (V,)))),
    "backward of jvp of jvp": lambda net: gradients(
        net, jvp(lambda x: jvp(net, (x,), (V,))[1], (X,), (X,))[1].square().sum()
    ),
    "backward of vmap of jvp": lambda net: gradients(
        net, vmap(lambda x, v: jvp(net, (x,), (v,))[1])(X, V).square().sum()
    ),
    "grad of jvp": lambda net: grad(lambda x: jvp(net, (x,), (V,))[1].square().sum())(X),
    "hessian": lambda net: hessian(lambda x: net(x).square().sum())(X[0]),
    "jacrev of jacrev": lambda net: jacrev(jacrev(lambda x: net(x).square().sum()))(X[0]),
    "grad in parameters": in_params(lambda f, p: grad(lambda p: f(p, X).square().sum())(p)),
    "jvp in parameters": in_params(lambda f, p: jvp(lambda p: f(p, X), (p,), (tangents(p),))),
    "grad in parameters of jvp": in_params(
        lambda f, p: grad(lambda p: jvp(lambda x: f(p, x), (X,), (V,))[1].square().sum())(p)
    ),
    "jvp in parameters of grad": in_params(
        lambda f, p: jvp(grad(lambda p: f(p, X).square().sum()), (p,), (tangents(p),))
    ),
    "grad per sample": in_params(
        lambda f, p: vmap(grad(lambda p, x: f(p, x[None]).square().sum()), in_dims=(None, 0))(p, X)
    ),
    "ensemble": in_params(
        lambda f, p: vmap(f, in_dims=(0, None))({name: torch.stack([x, x + 1]) for name, x in p.items()}, X)
    ),
}


def in_regions(block, x):
    return checkpoint(lambda x: checkpoint(block[2:], checkpoint(block[:2], x)), x)


@pytest.mark.parametrize(
    "name, region",
    [*[(name, checkpoint) for name in NESTINGS],
     *[(name, in_regions) for name in ("grad of jvp", "backward of jvp", "backward twice")]],
)  # fmt: skip
def test_nestings_equal_those_without(name, region):
    torch.testing.assert_close(NESTINGS[name](Net(region)), NESTINGS[name](Net()), **CLOSE)


def mean_flow_loss(net, x, v):
    u, u_dot = jvp(net, (x,), (v,))
    return (u - v + u_dot).square().mean()


class PeakBytes(TorchDispatchMode):
    """The most bytes that are alive at one time, of what is computed inside."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in arg_tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def test_a_loss_with_a_jvp_takes_less_memory():
    """Of five regions with four blocks each, one is in memory at a time, and the inputs and tangents of all."""
    peaks = []
    for region in (None, checkpoint):
        net, x, v = Net(region), data(256, 8), data(256, 8, seed=1)
        net.blocks = nn.ModuleList(Net(depth=4, width=8) for _ in range(5))
        with PeakBytes() as memory:
            mean_flow_loss(net, x, v).backward()
        peaks.append(memory.peak)
    assert peaks[1] < peaks[0] / 2.5


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("name", ["backward", "backward of jvp", "backward twice", "grad in parameters of jvp"])
def test_dropout_is_the_same_when_it_is_computed_again(name, explicit):
    def run(region):
        net = Net(region, dropout=0.5)
        if explicit:
            return functionalize_rng(lambda: NESTINGS[name](net))(PhiloxState.from_seed(3))
        torch.manual_seed(3)
        return NESTINGS[name](net), torch.rand(2)

    (found, state), (expected, expected_state) = run(checkpoint), run(None)
    assert str(state) == str(expected_state)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("name", ["backward", "backward of jvp", "backward twice"])
def test_buffers_change_once_a_step(name):
    nets = [Net(region, norm=pr.nn.BatchNorm1d) for region in (None, checkpoint)]
    expected, found = [[NESTINGS[name](net) for _ in range(2)] for net in nets]
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(dict(nets[1].named_buffers()), dict(nets[0].named_buffers()), **CLOSE)
    assert nets[1].blocks[0][1].num_batches_tracked == 2
    assert not any(buffer.requires_grad for buffer in nets[1].buffers())


@pytest.mark.parametrize("transform", [grad, pr.func.jacfwd])
def test_a_pure_call_in_a_region(transform):
    # It looks at the module's own parameters, which are differentiated in and not used.
    pure = functional_call(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double())
    (params, buffers), x = pure.init(), data(3, 4)

    def loss(region):
        return transform(lambda params: region(lambda p: pure(p, buffers, x)[0], params).sum())(params)

    torch.testing.assert_close(loss(checkpoint), loss(lambda fn, *args: fn(*args)), **CLOSE)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_in_a_pure_call_under_vmap(momentum):
    def run(region):
        pure = functional_call(Net(region, norm=functools.partial(nn.BatchNorm1d, momentum=momentum)))
        params, buffers = pure.init()

        def loss(params, buffers, x):
            y, buffers = pure(params, buffers, x)
            return y.square().sum(), buffers

        return vmap(grad(loss, has_aux=True), in_dims=(None, None, 0))(params, buffers, data(5, 3, 4))

    torch.testing.assert_close(run(checkpoint), run(None), **CLOSE)


def test_trees_keywords_and_what_a_closure_holds():
    w = data(4).requires_grad_()
    layer = nn.Linear(4, 4).double()

    def run(region):
        def step(tree, scale, *, n):
            return {"y": layer(tree["x"][0] * w).tanh() * scale, "n": n, "i": tree["i"] + 1}

        def loss(x):
            out = region(step, {"x": [x], "i": torch.tensor(1)}, 2.0, n="name")
            assert out["n"] == "name"
            assert out["i"] == 2
            return out["y"].square().sum()

        shifted = []
        for scale in (1.0, 2.0):
            # A tensor of a transform around, in a closure.
            def within(x, scale=scale):
                h = x * scale
                return region(lambda x: (x * h).sin(), x.cos())

            shifted += jvp(within, (X,), (V,))
        y, y_dot = jvp(loss, (X,), (V,))
        return torch.autograd.grad(y + y_dot, [w, *layer.parameters()]), grad(loss)(X), shifted

    def plainly(fn, *args, **kwargs):
        return fn(*args, **kwargs)

    torch.testing.assert_close(run(checkpoint), run(plainly), **CLOSE)


def test_what_torch_sets_around_a_region_is_set_again():
    def cast(net):
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(X.float()).float().square().sum()
        return gradients(net, loss)

    def overridden(net):
        with pr.override_torch():
            loss = jvp(net, (X,), (V,))[1].square().sum()
        return gradients(net, loss)

    found, expected = (cast(Net(region).float()) for region in (checkpoint, None))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    found, expected = (overridden(Net(region, norm=nn.LayerNorm)) for region in (checkpoint, None))
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_joint_graph_of_regions():
    def run(region):
        function, params = of_params(Net(region, dropout=0.5))
        params = {name: p.requires_grad_() for name, p in params.items()}
        graph = trace_joint(lambda p, x: function(p, x).sum(), params, X, no_tangents=True, functionalize_rng=True)
        return graph((params, X), rng=(PhiloxState.from_seed(1), PhiloxState.from_seed(2)))[:2]

    torch.testing.assert_close(run(checkpoint), run(None), **CLOSE)


def maybe(compiled, function):
    return torch.compile(function, fullgraph=True) if compiled else function


COMPILED = {
    "backward": lambda net, c: gradients(net, maybe(c, lambda net: net(X).square().sum())(net)),
    "mean flow": lambda net, c: gradients(net, maybe(c, mean_flow_loss)(net, X, V)),
    "grad of jvp": lambda net, c: maybe(
        c, torch.func.grad(lambda x: torch.func.jvp(net, (x,), (V,))[1].square().sum())
    )(X),
    "per sample": lambda net, c: maybe(c, torch.vmap(torch.func.grad(lambda x: net(x).square().sum())))(X),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_by_inductor(name):
    torch._dynamo.reset()
    torch.testing.assert_close(COMPILED[name](Net(checkpoint), True), COMPILED[name](Net(), False), **CLOSE)


def test_a_compiled_loss_with_a_jvp_keeps_less():
    def kept(region):
        torch._dynamo.reset()
        sizes = []

        def forward(module, _):
            outputs = next(iter(reversed(module.graph.nodes))).args[0]
            sizes.append(sum(node.meta["val"].numel() for node in outputs if "val" in getattr(node, "meta", {})))
            return make_boxed_func(module.forward)

        backend = aot_autograd(
            fw_compiler=forward,
            bw_compiler=lambda module, _: make_boxed_func(module.forward),
            partition_fn=min_cut_rematerialization_partition,
        )
        torch.compile(mean_flow_loss, fullgraph=True, backend=backend)(Net(region, depth=8), data(64, 4), data(64, 4))
        return sizes[0]

    assert kept(checkpoint) < kept(None) / 2


class Holder:
    def __init__(self, x):
        self.x = x


def test_tensors_that_a_region_cannot_know_are_refused():
    held = Holder(data(4).requires_grad_())
    with pytest.raises(pr.core.errors.LeafError, match="Pass it as an argument"):
        checkpoint(lambda x: x * held.x, X.clone().requires_grad_())

    def within(x):
        held = Holder(x * 2)
        return checkpoint(lambda x: x * held.x, x)

    with pytest.raises(pr.core.errors.LeafError, match="Pass it as an argument"):
        grad(lambda x: within(x).sum())(X)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, V)
        with pytest.raises(pr.MissingRuleError, match="dual_level"):
            checkpoint(torch.sin, dual)
