"""`warm_up` launches what a step launches, and leaves no trace."""

import pytest
import torch

import primitives as pr
from perf.calls import random
from primitives._core.errors import LeafError
from primitives.kernels.runtime.kernel import intercept, observe
from tests.kernels.calls import launched_by

pytestmark = pytest.mark.usefixtures("backend", "on_device")


class Model(torch.nn.Module):
    """Changes all that a module can: running statistics, a buffer and a number that it rebinds, noise, its input."""

    def __init__(self):
        super().__init__()
        self.layers = pr.nn.convert(torch.nn.Sequential(torch.nn.Linear(19, 19), torch.nn.BatchNorm1d(19)))
        self.noise = torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Dropout(0.5))
        self.register_buffer("moved", torch.zeros(2))
        self.calls = 0

    def forward(self, x):
        self.moved, self.calls = self.moved + 1, self.calls + 1
        return self.layers(self.noise(x))


def parts(model, x):
    """Everything that must come back, by name; tensors as copies."""
    state = {f"state {name}": value.clone() for name, value in model.state_dict().items()}
    grads = {f"grad {name}": p.grad.clone() for name, p in model.named_parameters()}
    modes = {f"mode {name}": module.training for name, module in model.named_modules()}
    return {**state, **grads, **modes, "calls": model.calls, "x": x.clone(), "random": torch.random.get_rng_state()}


def same(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def step(model, x, rate=0.1):
    model.noise.eval().train()
    model.layers[0].eval()
    model(x).square().sum().backward()
    torch.optim.SGD(model.parameters(), rate).step()


def prepared():
    model, x = Model(), random(6, 19)
    model(x.clone()).sum().backward()
    return model, x


def test_nothing_changes_and_the_same_step_alone_changes_it_all():
    model, x = prepared()
    before, grads = parts(model, x), [p.grad for p in model.parameters()]
    buffer, version = model.moved, model.layers[0].weight._version
    pr.warm_up(model, (x,))
    assert model.layers[0].weight._version == version
    pr.warm_up(model, (x,), {"rate": 0.2}, step=step)

    def failing(model, x):
        step(model, x)
        raise RuntimeError("at the end")

    with pytest.raises(RuntimeError, match="at the end"):
        pr.warm_up(model, (x,), step=failing)
    after = parts(model, x)
    assert [name for name in before if not same(before[name], after[name])] == []
    assert model.moved is buffer
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    step(model, x)
    after = parts(model, x)
    kept = {name for name in before if same(before[name], after[name])} - {f"mode {name}" for name in ("", "layers")}
    assert all(name.startswith("mode ") for name in kept), kept
    assert not after["mode layers.0"]


def launched(run):
    """Each launch as the compiler sees it."""
    return {
        f"{one.kernel.__name__} {sorted(one.constants.items(), key=str)} "
        f"{[(x.dtype, x.data_ptr() % 16) if isinstance(x, torch.Tensor) else x == 1 for x in one.args]}"
        for one in launched_by(run, observe)
    }


def jvp_step(model, x):
    y, y_dot = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    (y * y_dot).sum().backward()


def test_the_step_finds_every_kernel_that_it_launches():
    model, x = prepared()
    model.noise = torch.nn.Identity()
    plain, warm = (launched(lambda step=step: pr.warm_up(model, (x,), step=step)) for step in (None, jvp_step))
    assert launched(lambda: model(x).backward(torch.ones_like(x))) == plain
    # A derivative that the step does not take stays unknown.
    assert launched(lambda: jvp_step(model, x)) == warm
    assert warm - plain


def test_refusals(monkeypatch):
    model, x = prepared()
    with pytest.raises(TypeError, match="got Tensor"):
        pr.warm_up(x, (model,))
    with pytest.raises(LeafError, match="got Tensor"), intercept(lambda *launch: None):
        pr.warm_up(model.requires_grad_(False), (x,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(pr.BackendError, match="captured"):
        pr.warm_up(model, (x,))


@pytest.mark.gpu
def test_a_graph_captures_the_step(device):
    # A width that no other test has: nothing of it is compiled yet.
    model = torch.nn.Sequential(torch.nn.LayerNorm(1237), torch.nn.Linear(1237, 3), torch.nn.LogSoftmax(1))
    pr.nn.convert(model)
    x, graph = random(5, 1237), torch.cuda.CUDAGraph()
    pr.warm_up(model, (x,))
    with torch.cuda.graph(graph):
        y = model(x)
        y.backward(torch.ones_like(y))
    graph.replay()
    captured = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).backward(torch.ones_like(y))
    for grad, p in zip(captured, model.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad)


def test_arguments_of_any_kind(on_device, device):
    """A history outside stays whole, and what is not a tensor needs no hash."""
    encoder, model = torch.nn.Linear(4, 4).to(device), torch.nn.Linear(4, 4).to(device)
    model.register_buffer("never", torch.full((4,), torch.nan, device=device))
    h = encoder(torch.randn(2, 4, device=device))
    loss = (h * model.never).sum()
    pr.warm_up(model, (h, {1, 2}), step=lambda model, h, _: (model(h) + model.never).sum().backward())
    assert (h.grad_fn, encoder.weight.grad, model.weight.grad) == (h.grad_fn, None, None)
    loss.backward()
    with pytest.raises(LeafError, match="lazy"):
        pr.warm_up(torch.nn.LazyLinear(3), (torch.randn(2, 4),))
