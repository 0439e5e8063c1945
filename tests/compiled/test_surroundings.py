"""What surrounds compiled functions: other compilers, checkpoints, copies, threads, errors, classes, and logs."""

import contextlib
import copy
import functools
import itertools
import logging
import os
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch._inductor import compile_fx, config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import primitives as pr
from primitives._compiled import _graphs
from tests.compiled.support import data, gradients, mlp, plainly, same

X = data(6, 3)


def test_functional_call():
    net = mlp()
    compiled = plainly(lambda x: net(x).sum())
    params = {name: data(*p.shape, seed=5).requires_grad_() for name, p in net.named_parameters()}
    model = plainly(net)
    for given in (params, {name: p * 2 for name, p in params.items()}):
        same(torch.func.functional_call(model, given, (X,)), torch.func.functional_call(net, given, (X,)))
    found = torch.func.grad(lambda p: torch.func.functional_call(model, p, (X,)).sin().sum())(params)
    truth = torch.func.grad(lambda p: torch.func.functional_call(net, p, (X,)).sin().sum())(params)
    same(found.values(), truth.values())
    same(compiled(X), net(X).sum())


def test_derivatives_do_not_depend_on_parameters_that_others_stand_for():
    net = mlp()
    params = {name: data(*p.shape, seed=5) for name, p in net.named_parameters()}
    loss = plainly(lambda p, x: torch.func.functional_call(net, p, (x,)).square().sum())
    gradient = torch.func.grad(loss)
    found = [*gradient(params, X).values(), *torch.func.vmap(gradient, (None, 0))(params, X).values()]
    found += torch.func.jvp(lambda p: loss(p, X), (params,), (params,))
    # Else each step of an optimizer lengthens a graph.
    assert not any(y.requires_grad for y in found)


def test_code_is_told_which_tensors_require_grad_outside():
    net = mlp()

    def norms(x):
        return {name: x.sum() * p.square().sum() for name, p in net.named_parameters() if p.requires_grad}

    def adapted(x):
        with torch.enable_grad():
            return torch.autograd.grad(net(x).square().sum(), [*net.parameters()])

    with torch.no_grad():
        same(plainly(adapted)(X), adapted(X))

    def beside(f):
        return torch.func.grad(lambda x: (x.sum(), f(x)), has_aux=True)(X)[1]

    step, without = plainly(norms), torch.no_grad()(lambda f: f(X))
    ways = [lambda f: f(X), without, beside, lambda f: torch.func.vmap(f)(X[None])]
    for requires_grad, way in itertools.product((True, False, True), ways):
        net[0].requires_grad_(requires_grad)
        found, truth = way(step), way(norms)
        assert found.keys() == truth.keys()
        same(found.values(), truth.values())


@pytest.mark.parametrize("way", [plainly, lambda f: functools.partial(pr.func.checkpoint, f)])
def test_arguments_have_their_strides_whatever_hooks_made_of_them(way):
    def function(x):
        return (x.as_strided((2, 2), (1, 2)) * x.view(-1)[:4].view(2, 2).exp()).sin().sum()

    x = X.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.mT.contiguous().mT if x.dim() == 2 else x, lambda x: x):
        found = way(function)(x)
    pairs = [torch.autograd.grad(y, x, create_graph=True)[0] for y in (found, function(x))]
    same(*pairs)
    same(*(torch.autograd.grad(g.square().sum(), x) for g in pairs))


def test_around():
    net = mlp()
    model, truth = plainly(net), mlp()(X).square().sum()
    outer = plainly(lambda x: model(x).square().sum())
    same(gradients(net, outer(X)), gradients(net, net(X).square().sum()))
    x = X.clone().requires_grad_()
    for y in (pr.func.checkpoint(model, x), checkpoint(model, x, use_reentrant=False)):
        same(gradients(net, y.square().sum()), gradients(net, net(X).square().sum()))
    same(torch.compile(lambda x: model(x).square().sum(), backend="eager", fullgraph=True)(X), truth)
    functionalized = torch.func.grad(torch.func.functionalize(lambda x: model(x).square().sum()))
    same(functionalized(X), torch.func.grad(lambda x: net(x).square().sum())(X))
    assert len(make_fx(model)(X).graph.nodes) > 5
    same(torch.export.export(model, (X,)).module()(X), net(X))
    tangent = pr.func.checkpoint(lambda x: torch.func.jvp(model, (x,), (X,))[1], x).sum()
    same(torch.autograd.grad(tangent, x), torch.autograd.grad(torch.func.jvp(net, (x,), (X,))[1].sum(), x))


def test_copies():
    net = mlp()
    model = plainly(net)
    truth = model(X)
    assert isinstance(model, nn.Sequential)
    assert [*model.state_dict()] == [*net.state_dict()]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        same(other(X), truth)
        with torch.no_grad():
            other[0].weight.zero_()
        assert len(other.compiled.settings.programs) == 1
    same(model(X), truth)
    assert pickle.loads(pickle.dumps(plainly(torch.sin)))(X).equal(X.sin())


def test_threads_and_processes():
    net, found = mlp(), {}
    compiled = plainly(lambda x: net(x).sum())
    threads = [threading.Thread(target=lambda n=n: found.setdefault(n, compiled(X[:n]))) for n in (1, 2, 3) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same([found[n] for n in (1, 2, 3)], [net(X[:n]).sum() for n in (1, 2, 3)])
    assert len(compiled.settings.programs) == 3
    if hasattr(os, "fork"):
        child = os.fork()
        if child == 0:
            # Without it plain torch hangs, too, in a child whose parent has used several threads.
            torch.set_num_threads(1)
            # Of known sizes: in builds with CUDA torch refuses a child the backward pass that a trace takes.
            with contextlib.suppress(Exception):
                os._exit(0 if torch.allclose(compiled(X[:3]), net(X[:3]).sum()) else 1)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.nightly
def test_the_first_program_of_a_process_may_pool():
    """A decomposition of torch reads a module of Inductor that it does not import."""
    script = """
import torch, primitives as pr
x = torch.rand(1, 1, 4, 4)
torch.testing.assert_close(pr.compile(torch.nn.functional.max_pool2d)(x, 2), torch.nn.functional.max_pool2d(x, 2))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_call_waits_for_a_thread_that_traces_with_its_module():
    net, inside, done, found = mlp(), threading.Event(), threading.Event(), []
    known = plainly(net)
    known(X)

    def slowly(x):
        inside.set()
        done.wait(20)
        return net(x)

    threads = [threading.Thread(target=lambda f=f: found.append(f(X))) for f in (plainly(slowly), known)]
    for thread in threads:
        thread.start()
        inside.wait(20)
    threads[1].join(0.2)
    done.set()
    for thread in threads:
        thread.join()
    same(found, [net(X)] * 2)


def test_a_long_first_call_is_not_silent(monkeypatch, caplog):
    monkeypatch.setattr(_graphs, "_PATIENCE", 0.01)
    monkeypatch.setattr(_graphs, "_said", threading.Lock())

    def slowly(module, fakes):
        time.sleep(0.3)
        return module

    for _ in range(2):
        pr.compile(lambda x: x.sin(), backend=slowly)(X)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "traces and compiles" in warnings[0]
    assert sum("traces and compiles" in message for message in warnings) == 1
    assert sum("compile: value compiled in" in message for message in warnings) == 2, "each that takes as long"


def test_an_error_leaves_nothing():
    fails = [True]

    def function(x):
        if fails[0]:
            raise KeyError("mine")
        return x.sin()

    compiled = plainly(function)
    with pytest.raises(KeyError, match="mine"):
        compiled(X)
    assert not compiled.settings.programs
    fails[0] = False
    same(compiled(X), X.sin())


def test_custom_operators():
    @pr.custom_op("compiled_tests::cube")
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x**3

    cube.def_save_for_backward(lambda inputs, output: inputs.x)
    cube.def_backward(lambda ctx, x, y_bar: {"x": y_bar * 3 * x**2})
    function = plainly(lambda x: cube(x).sum())
    x = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(function(x), x, create_graph=True)
    same(g, 3 * X**2)
    same(torch.autograd.grad(g.sum(), x), 6 * X)


def test_tables_of_custom_operators_are_no_reason_to_compile_again():
    @pr.custom_op("compiled_tests::power")
    def power(x: torch.Tensor, exponent: int) -> torch.Tensor:
        return x**exponent

    step = plainly(lambda x: power(x, 2).sum())
    for exponent in range(3):
        same(step(X), X.square().sum())
        power(X, exponent)
    assert len(step.settings.programs) == 1


def test_checkpoints_of_torch_inside_find_the_parameters_of_the_call():
    net = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)).double()

    def loss(x, **options):
        x = x.clone().requires_grad_()
        y = checkpoint(net, x, **options)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (g.norm(dim=1) - 1).square().mean()

    once = functools.partial(loss, use_reentrant=False)
    plain = functools.partial(checkpoint, net, use_reentrant=False)
    for run, truth in (
        (plainly(once), once),
        (lambda x: pr.func.checkpoint(plain, x).square().sum(), lambda x: net(x).square().sum()),
    ):
        with pr.repair_torch():
            same(gradients(net, run(X)), gradients(net, truth(X)))
    with pytest.raises(pr.LeafError, match="use_reentrant=False"):
        plainly(functools.partial(loss, use_reentrant=True))(X)

    def masked(x):
        mask = torch.zeros(6, dtype=torch.bool)
        mask[1:4] = True
        return x[mask].sin()

    # Computed again, by the backward pass and by a derivative inside, it indexes by the same constant.
    again, x = functools.partial(checkpoint, masked, use_reentrant=False), X.clone().requires_grad_()
    truth = torch.autograd.grad(masked(x).sum(), x)
    same(torch.autograd.grad(plainly(again)(x).sum(), x), truth)
    inside = plainly(lambda x: torch.autograd.grad(again(y := x.clone().requires_grad_()).sum(), y, create_graph=True))
    same(inside(X), truth)


@pytest.mark.parametrize(
    "given, wanted",
    [
        ({"mode": "reduce-overhead"}, {"triton.cudagraphs": True}),
        ({"mode": "max-autotune"}, {"max_autotune": True, "triton.cudagraphs": True}),
        ({"options": {"max-fusion-size": 3}}, {"max_fusion_size": 3}),
        ({"mode": "max-autotune", "options": {"max_autotune": False}}, {"max_autotune": False}),
    ],
)
def test_modes_and_options_reach_inductor(given, wanted, monkeypatch):
    found = []

    def inner(module, fakes, **options):
        known = config.get_config_copy()
        found.append({name: known[name] for name in wanted})
        return lambda values: module(*values)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", inner)
    x = X.clone().requires_grad_()
    same(torch.autograd.grad(pr.compile(torch.sin, **given)(x).sum(), x), X.cos())
    assert found == [wanted, wanted]
    assert all(config.get_config_copy()[name] != value for name, value in wanted.items() if value)


def test_logs_of_torch_show_the_graphs_and_the_code():
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("torch._inductor")
    torch._logging.set_logs(post_grad_graphs=True, output_code=True)
    log.addHandler(handler)
    try:
        with config.patch(force_disable_caches=True):
            same(pr.compile(lambda x: x.sin() * 0.37)(X), X.sin() * 0.37)
    finally:
        log.removeHandler(handler)
        torch._logging.set_logs()
    assert any("torch.ops.aten.sin" in line for line in lines)
    assert any("async_compile" in line for line in lines)


# Tensors of a user's class that a compiled function makes, and returns.


class Labeled(torch.Tensor):
    """As PINA's: made by the constructor, with an attribute that some methods hand on."""

    def __new__(cls, x, labels):
        return super().__new__(cls, x)

    def __init__(self, x, labels):
        self.labels = labels

    def __mul__(self, other):
        return Labeled(super().__mul__(other), self.labels)


class Other(torch.Tensor):
    pass


@pytest.mark.parametrize("made", [Labeled, lambda x, _: x.as_subclass(Other)], ids=["new", "as_subclass"])
def test_subclasses_made_inside(made):
    net = mlp()

    def function(x):
        points = made(x.clone(), ["x"]).requires_grad_()
        gradient = torch.autograd.grad(net(points).sum(), points, create_graph=True)[0]
        tangent = torch.func.jvp(lambda x: net(made(x, ["x"])).sin(), (x,), (x,))[1]
        scaled = points * 2
        scaled[0] = tangent.sum().as_subclass(torch.Tensor)
        return scaled, gradient.square().sum() + tangent.square().sum()

    compiled = plainly(function)
    for _ in range(2):
        found, truth = compiled(X), function(X)
        same([y.as_subclass(torch.Tensor) for y in found], [y.as_subclass(torch.Tensor) for y in truth])
        assert list(map(type, found)) == list(map(type, truth))
        assert vars(found[0]) == vars(truth[0])
        same(*(gradients(net, sum(y.sum() for y in ys).as_subclass(torch.Tensor)) for ys in (found, truth)))


@pytest.mark.parametrize(
    "members", [{"__slots__": ("more",)}, {"__torch_dispatch__": classmethod(lambda *args, **kwargs: NotImplemented)}]
)
def test_subclasses_that_cannot_be_made_inside(members):
    kind = type("Own", (torch.Tensor,), members)
    with pytest.raises(pr.LeafError, match=r"Own must have .*test_surroundings.py.*outside"):
        plainly(lambda x: x.as_subclass(kind).sum())(X)
