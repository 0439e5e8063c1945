"""Hard use: many threads, many steps, interrupts, files, other processes, deterministic algorithms."""

import copy
import gc
import os
import pathlib
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import primitives as pr
from perf.ops import CASES
from tests.support import assert_close

OPS = {op.name: op for op in CASES}


class Scaled(nn.Module):
    """Converted by a function that is registered for it."""

    def forward(self, x):
        return 2.0 * torch.softmax(x, -1)


def scaled(module, x):
    return 2.0 * pr.functional.softmax(x, -1)


def made():
    torch.manual_seed(0)
    layers = [nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.LayerNorm(6), Scaled()]
    return nn.Sequential(*layers, nn.LogSoftmax(-1)).double()


X = torch.linspace(-1.0, 1.0, 36, dtype=torch.float64).reshape(3, 2, 6).sin()


@pytest.fixture
def model():
    pr.nn.register_converter(Scaled, scaled)
    yield pr.nn.convert(made())
    pr.nn.register_converter(Scaled, None)


def doubled(module, args, output):
    return 2.0 * output


def stepped(model):
    y = model(X)
    return y, torch.autograd.grad(y.square().sum(), list(model.parameters()))


ELSEWHERE = """
import importlib, sys, torch
own = importlib.import_module(sys.argv.pop())
found = {}
def work(index):
    for op in own.OPS.values():
        found[op.name, index] = own.gradient(op)
own.hammer(work)
for name, index in found:
    torch.testing.assert_close(found[name, index], found[name, 0])
model, program, data, out = sys.argv[1:]
model = torch.load(model, weights_only=False)
x, y = torch.load(data)
torch.testing.assert_close(torch.export.load(program).module()(x), y)
torch.save((own.stepped(model), list(own.pr.nn.converted(model)), model.state_dict()), out)
"""


@pytest.mark.filterwarnings("ignore")
def test_another_process_makes_first_calls_in_many_threads_and_loads_models(model, tmp_path):
    assert len(pr.nn.converted(model)) == 5
    model[3].register_forward_hook(doubled)
    torch.save(model, tmp_path / "model")
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    frozen = copy.deepcopy(model).eval()
    torch.export.save(torch.export.export(frozen, (X,)), tmp_path / "program.pt2")
    torch.save((X, frozen(X)), tmp_path / "data")
    expected = stepped(model)
    tangent = torch.func.jvp(frozen, (X,), (X,))[1]
    for twin in twins:
        assert_close(torch.func.jvp(copy.deepcopy(twin).eval(), (X,), (X,))[1], tangent)
        torch.testing.assert_close(stepped(twin), expected)
    paths = [str(tmp_path / name) for name in ("model", "program.pt2", "data", "out")]
    # By the name that pytest gave this file, which the pickled classes have; its folder is on the path here.
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ELSEWHERE, *paths, __name__]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, **path})
    found, converted, state = torch.load(paths[-1])
    torch.testing.assert_close(found, expected)
    assert converted == list(pr.nn.converted(model))
    plain = made()
    plain.load_state_dict(state)
    torch.testing.assert_close(dict(plain.state_dict()), dict(model.state_dict()))


def hammer(work, count=8):
    """Run `work(index)` in many threads at once, and raise what any of them raised."""
    barrier, pool, interval = threading.Barrier(count), ThreadPoolExecutor(count), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for done in [pool.submit(lambda index=index: (barrier.wait(), work(index))) for index in range(count)]:
            done.result(60)
    finally:
        sys.setswitchinterval(interval)
        pool.shutdown(wait=False)


def gradient(op):
    """The cotangent of the smallest sample; torch's forward mode has one level for all threads, and no lock."""
    inputs = op.inputs(op.tiny, torch.float64, torch.device("cpu"))
    first = next(iter(op.perturbable(op.tiny)))
    x = inputs[first].requires_grad_()
    y = op.of([first], inputs, op.tiny)(x)
    return torch.autograd.grad(y.square().sum(), x)[0]


def test_conversions_and_overrides_in_many_threads():
    before = nn.functional.layer_norm
    expected = made()(X)
    models = [made() for _ in range(8)]

    def work(index):
        for _ in range(3):
            assert_close(pr.nn.convert(models[index])(X), expected)
            assert_close(pr.nn.revert(models[index])(X), expected)
            with pr.repair_torch():
                assert_close(models[index](X), expected)

    hammer(work)
    assert nn.functional.layer_norm is before


def held():
    """Number of objects, and of tensors among them, and of pages of memory where the system says that."""
    gc.collect()
    objects, memory = gc.get_objects(), pathlib.Path("/proc/self/statm")
    pages = int(memory.read_text().split()[1]) if memory.exists() else 0
    return len(objects), sum(issubclass(type(x), torch.Tensor) for x in objects), pages


def trained(model, compiler=None):
    """A step of training with a tangent in the loss and a penalty on the gradient."""
    optimizer, buffers = torch.optim.Adam(model.parameters(), 1e-3), dict(model.named_buffers())

    def loss(x):
        y, slope = torch.func.jvp(
            lambda x: torch.func.functional_call(model, (dict(model.named_parameters()), buffers), (x,)), (x,), (X,)
        )
        return (slope - y).square().mean() + model(x).square().mean()

    first = loss if compiler is None else torch.compile(loss, backend=compiler)

    def step():
        optimizer.zero_grad()
        first(X).backward()
        x = X.clone().requires_grad_()
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0].square().sum().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize(
    "compiler, steps", [(None, 20), *(pytest.param(b, 10_000, marks=pytest.mark.nightly) for b in (None, "inductor"))]
)
def test_steps_leave_nothing_behind(model, compiler, steps):
    # What was there before, a million objects, is left out of the count.
    gc.freeze()
    step = trained(model, compiler)
    for _ in range(10):
        step()
    objects, tensors, pages = held()
    for _ in range(steps):
        step()
    now = held()
    assert now[0] - objects < steps // 2
    assert now[1] <= tensors
    assert now[2] <= 1.02 * pages


@pytest.mark.parametrize("place", ["value", "compiled"])
def test_an_interrupted_first_call_leaves_an_operator_that_works(place):
    calls = []

    @pr.custom_op(f"hard_use::interrupted_{place}", differentiate="reference")
    def op(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return x.sin()

    def gradient():
        x = X.clone().requires_grad_()
        return torch.autograd.grad(function(x).sum(), x)[0]

    function = torch.compile(op, backend="aot_eager", fullgraph=True) if place == "compiled" else op
    with pytest.raises(KeyboardInterrupt):
        gradient()
    torch.testing.assert_close(gradient(), X.cos())


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_aot_inductor_goes_to_another_process(model, tmp_path):
    model.eval()
    path = torch._inductor.aoti_compile_and_package(
        torch.export.export(model, (X,)), package_path=str(tmp_path / "model.pt2")
    )
    torch.save((X, model(X)), tmp_path / "data")
    script = """
import sys, torch, primitives
model, (x, y) = torch._inductor.aoti_load_package(sys.argv[1]), torch.load(sys.argv[2])
torch.testing.assert_close(model(x), y)
"""
    subprocess.run([sys.executable, "-c", script, path, str(tmp_path / "data")], check=True, timeout=120)
