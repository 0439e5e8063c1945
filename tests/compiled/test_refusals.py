"""What no program can hold is refused with the line and the remedy."""

import contextlib
import functools
import logging
import types

import numpy as np
import pytest
import torch
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F

import primitives as pr
from tests.compiled.support import data, mlp, plainly, same

X, NET = data(4, 3), mlp()


@pytest.mark.parametrize(
    "function, what, advice",
    [
        (lambda x: torch.linalg.lstsq(x, X[:, :1]).solution, "linalg_lstsq", r"torch.linalg.pinv\(A\) @ B"),
        (lambda x: F.ctc_loss(x[:, None], torch.ones(1, 2).long(), (4,), (2,)), "_ctc_loss", "Use it outside"),
        (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "cond", "Use torch.where"),
        (lambda x: scan(lambda c, x: (c + x, c * x), x[0], x)[1], "scan", "Use a loop"),
    ],
)
def test_operators_without_derivatives_name_those_with(function, what, advice):
    for x in (X, X.clone().requires_grad_()):
        with pytest.raises(pr.TraceError, match=rf"{what}.*at .*test_refusals.py:\d+.*{advice}"):
            plainly(function)(x)


def test_a_backward_pass_inside_names_the_line_and_the_remedy():
    with pytest.raises(pr.TraceError, match=r"backward\(\) is called.*test_refusals.py:\d+.*Return the loss"):
        plainly(lambda x: x.clone().requires_grad_().sum().backward())(X)


class Buffers(torch.nn.Module):
    def __init__(self, write):
        super().__init__()
        self.register_buffer("a", X.sum(0))
        self.register_buffer("b", self.a[:2])
        self.register_buffer("none", None)
        self.write = write

    def forward(self, x):
        self.write(self)
        return x * self.a


def seeded(x):
    torch.manual_seed(0)
    return x * torch.rand(3)


def reseeded(x):
    torch.seed()
    return x * torch.rand(3)


def of_gradients(x):
    return x * HELD.grad


def writes_gradient(x):
    HELD.grad = x.sum(0)
    return x


@pytest.mark.parametrize(
    "function, kind, what",
    [
        (seeded, pr.TraceError, r"torch.manual_seed is called .*test_refusals.py:\d+: torch.manual_seed"),
        (reseeded, pr.TraceError, r"torch.seed is called .*test_refusals.py:\d+: torch.seed"),
        (of_gradients, pr.TraceError, r"\.grad is read .*test_refusals.py:\d+"),
        (writes_gradient, pr.TraceError, r"\.grad is read or written .*test_refusals.py:\d+"),
        (lambda x: NET.requires_grad_(False)(x), pr.TraceError, r"frozen .*test_refusals.py:\d+.*outside, around"),
        (Buffers(lambda net: net.b.add_(1)), pr.MutationError, "the buffer a, the buffer b share memory"),
        (Buffers(lambda net: setattr(net, "none", X)), pr.MutationError, "sets the buffer none of Buffers"),
        (torch.nn.Sequential(torch.nn.LazyLinear(3)), pr.LeafError, "a lazy module .* Call it once"),
        (lambda x: {"x": x}.values(), pr.LeafError, "returns a dict_values, .* in a list"),
        (lambda x: (y for y in [x]), pr.LeafError, "returns a generator"),
        (lambda x: torch.func.vjp(torch.sin, x), pr.LeafError, "returns a function"),
    ],
)
def test_what_would_be_lost(function, kind, what):
    with pytest.raises(kind, match=what):
        plainly(function)(X)


@pytest.mark.parametrize("made", [torch.jit.script, lambda net: torch.jit.trace(net, X)], ids=["script", "trace"])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_modules_of_torchscript(made):
    inner = made(torch.nn.Linear(3, 1).double())
    for function in (inner, torch.nn.Sequential(inner), lambda x: inner(x)):
        with pytest.raises(pr.LeafError, match=r"module of TorchScript .* Use the original module"):
            plainly(function)(X)
    with pytest.raises(pr.LeafError, match="module of TorchScript"):
        plainly(lambda net, x: net(x))(inner, X)


def test_buffers_that_share_memory_may_be_read():
    net = Buffers(lambda net: None)
    same(plainly(net)(X), net(X))


def test_recorded_batches_of_cotangents_are_refused():
    x, compiled = X.clone().requires_grad_(), plainly(lambda x: x.sin())
    rows = torch.eye(X.numel(), dtype=X.dtype).view(-1, *X.shape)
    for options in ({}, {"create_graph": True}):
        with pytest.raises(pr.MissingRuleError, match="jacrev") if options else contextlib.nullcontext():
            (found,) = torch.autograd.grad(compiled(x), x, rows, is_grads_batched=True, **options)
            same(found.sum(0), X.cos())


def test_values_of_constants_may_be_asked():
    def function(x):
        mask = torch.tensor([True, True, False])
        return x * torch.tensor([2.0, 2.0]).tolist()[1] if mask.any() else x

    same(plainly(function)(X), 2 * X)

    def masked(x):
        y = x.clone()
        y[torch.tensor([True, False, True, True]), :2] = y.sum()
        return y[torch.tensor([True, True, False, False])].square().sum()

    x = X.clone().requires_grad_()
    same(torch.autograd.grad(plainly(masked)(x), x), torch.autograd.grad(masked(x), x))

    def traced(f):
        (x_bar,) = torch.autograd.grad(f(x).sin(), x, create_graph=True)
        return torch.autograd.grad(x_bar.square().sum(), x)

    # A gradient of zeros, of the number, at places that are known is a constant that autograd marks.
    def put(x, is_mask):
        places = torch.arange(4) > 2 if is_mask else torch.arange(4) * 0
        moved = torch.func.jvp(lambda x: x.index_put((places,), x[:1], accumulate=True) * 0.5, (x,), (x.cos(),))
        return moved[1].sin().sum()

    for is_mask in (False, True):
        same(*(traced(functools.partial(f, is_mask=is_mask)) for f in (plainly(put), put)))

    batched = torch.vmap(lambda x, mask: x.index_put((mask,), x.new_zeros(())))
    with pytest.raises(RuntimeError, match="not support batching operators"):
        plainly(lambda x: batched(x[:3].expand(2, 3, 3), torch.arange(6).view(2, 3) > 3))(X)

    # The backward pass of `trace` asks for places without repetition where it is differentiated.
    same(traced(plainly(torch.trace)), traced(torch.trace))
    same(plainly(lambda x: x[(torch.arange(4) > 1).nonzero()[:, 0]])(X), X[2:])

    # Torch leaves its look at the classes out in a trace, which it does not see in a transform.
    def of_classes(x):
        return torch.func.jvp(lambda x: F.one_hot(x.argmax(1), num_classes=3) * x.exp(), (x,), (x,))[1]

    same(plainly(of_classes)(X), of_classes(X))

    # It checks signs of variances, which it clamps anyway.
    loss = torch.nn.GaussianNLLLoss()
    same(plainly(loss)(X, X.sin(), X.square()), loss(X, X.sin(), X.square()))

    # It compares the number of samples inside.
    same(plainly(torch.corrcoef)(X), torch.corrcoef(X))
    weights = X[0].abs()
    with pytest.raises(pr.TraceError, match=r"aten.equal.*cov"):
        plainly(lambda x, weights: torch.cov(x, aweights=weights))(X, weights)


HELD = torch.zeros(3, dtype=torch.float64)
CONSTANTS = types.new_class("Constants")()
CONSTANTS.held0 = torch.zeros(3, dtype=torch.float64)


def writes_argument(x):
    return x.mul_(2)


def writes_variable(x):
    HELD.add_(1)
    return x + HELD


def writes_view(x):
    y = x.clone()
    y.view(-1).as_strided((2,), (1,)).mul_(2)
    return y


def writes_view_of_constant(x):
    held = getattr(CONSTANTS, f"held{0}")
    held[:1].add_(x.sum())
    return x * held


@pytest.mark.parametrize(
    "function, what",
    [
        (writes_argument, "writes to x in place, at .*test_refusals.py"),
        (writes_variable, r"writes to captured.*at .*test_refusals.py:\d+: HELD.add_"),
        (writes_view, "what as_strided"),
        (writes_view_of_constant, r"not an input.*at .*test_refusals.py:\d+: held\[:1\].add_"),
    ],
)
def test_writes(function, what):
    with pytest.raises(pr.MutationError, match=what):
        plainly(function)(X.clone())
    assert not HELD.any()


# Torch's own `linearize` gives it.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr")
@pytest.mark.parametrize("f", [torch.nn.Tanh(), lambda x: x * HELD], ids=["result", "operand"])
def test_what_another_trace_inside_has_made(f):
    v, truth = X.cos(), torch.func.linearize(f, X)[1](X.cos())

    def written(x):
        y = x.clone()
        y[0] *= 1  # a write to a view
        return torch.func.linearize(f, y)[1](v)

    refusal = pr.TraceError, r"tensor without values, used in .*primitives.func.linearize"
    if torch.__version__ < (2, 13):  # 2.11 fails an assertion of its own while it words its error
        refusal = RuntimeError, "INTERNAL ASSERT FAILED"
    with pytest.raises(refusal[0], match=refusal[1]):
        plainly(written)(X)
    same(plainly(lambda x: torch.func.linearize(f, x)[1](v))(X), truth)
    same(plainly(lambda x: pr.func.linearize(f, x)[1](v))(X), truth)


def test_memory_before_an_argument_is_not_read():
    """The programs of an argument serve all views of its sizes, wherever these begin."""
    relative = plainly(lambda x: x.as_strided((2, 2), (1, 2)))
    absolute = plainly(lambda x: x.as_strided((2, 2), (1, 2), 1))
    begun, late = torch.arange(8.0), torch.arange(16.0)[3:11]
    same(
        [relative(begun), relative(late), absolute(begun)],
        [x.as_strided((2, 2), (1, 2)) for x in (begun, late, begun[1:])],
    )
    for function in (absolute, lambda x: torch.func.jvp(absolute, (x,), (x,))):
        with pytest.raises(pr.LeafError, match="got a view at 3 of it"):
            function(late)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_arguments():
    with pytest.raises(pr.LeafError, match="must be a tensor, a hashable constant"):
        plainly(lambda x, a: x)(X, np.ones(2))
    with pytest.raises(pr.LeafError, match=r"x.as_subclass\(torch.Tensor\)"):
        plainly(lambda x: x)(X.as_subclass(type("Labels", (torch.Tensor,), {})))
    quantized = torch.quantize_per_tensor(X.float(), 0.1, 0, torch.qint8)
    for x in (X.to_sparse(), X.to_sparse_csr(), torch.nested.nested_tensor([X]), quantized):
        with pytest.raises(pr.LeafError, match="x must be a dense tensor of torch"):
            plainly(lambda x: x.to_dense())(x)
    with pytest.raises(TypeError, match="Pass the function itself"):
        pr.compile(X)
    with pytest.raises(pr.LeafError, match=r"params must be .* got generator. .* list\(...\)"):
        plainly(lambda params, x: sum(p.sum() for p in params) * x)(mlp().parameters(), X)
    with pytest.raises(TypeError, match=r"got fullgraph\. Leave it out"):
        pr.compile(torch.sin, fullgraph=True)
    with pytest.raises(ValueError, match=r"backend must be a function or one of .*aot_eager.*, got 'aot'"):
        pr.compile(torch.sin, backend="aot")
    with pytest.raises(ValueError, match="mode must be one of"):
        pr.compile(torch.sin, mode="fast")
    hidden = type(
        "Hidden", (), {"__call__": lambda self, x: x * getattr(self, f"w{1}"), "w1": X.clone().requires_grad_()}
    )()
    with pytest.raises(pr.LeafError, match="requires grad and is not an input"):
        plainly(hidden)(X)


def test_table_graphs_and_log(caplog):
    net = mlp()
    step = plainly(lambda x: net(x).sum())
    with caplog.at_level(logging.INFO, "primitives.compile"):
        step(X).backward()
    lines = repr(step).splitlines()
    assert len(lines) == 4
    assert "2 programs" in lines[0]
    assert lines[2].startswith("value, forward")
    assert lines[2].endswith("1")
    assert lines[3].startswith("value, backward")
    assert "0.weight" in step.graphs["value"].primal_names
    assert any("value, backward" in record.message for record in caplog.records)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_function_that_compiles_again_and_again_says_so_once(dynamic, caplog):
    compiled = plainly(lambda x, k: x * k, dynamic=dynamic)
    for k in range(12):
        compiled(X, float(k))
    # On a busy machine the first call is said to take long, too.
    warnings = [message for message in caplog.messages if "different calls" in message]
    assert len(warnings) == 1
    assert "k was 6.0 and is 7.0" in warnings[0]
    assert ("use dynamic=True" in warnings[0]) is not dynamic
    assert "\n" not in warnings[0]
