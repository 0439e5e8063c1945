"""What no graph can hold is refused before anything is changed, by type and with the user's line."""

from __future__ import annotations

import re

import pytest
import torch
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import primitives as pr
from primitives.core.errors import LeafError, MutationError
from primitives.tracing import TraceError, create_joint, functionalize_mutations, trace_joint
from tests.tracing.test_joint import leaf

ONES = torch.ones(3, dtype=torch.float64)
TRACES = {
    "trace_joint": trace_joint,
    "create_joint": lambda fn, x: make_fx(create_joint(fn))((x,), ONES),
    "functionalize_mutations": lambda fn, x: make_fx(functionalize_mutations(fn))(x),
}
EAGER = {
    "create_joint": lambda fn, x: create_joint(fn)((x,), ONES),
    "functionalize_mutations": lambda fn, x: functionalize_mutations(fn)(x),
}
CALLS = [*(("trace", name) for name in TRACES), *(("eager", name) for name in EAGER)]


def call(kind, name):
    return (TRACES if kind == "trace" else EAGER)[name]


def branches(x):
    return x.sin() if x.sum() > 0 else x


def without_grad(x):
    with torch.no_grad():
        x.mul_(2)
    return x.sin()


def sets_data(x):
    x.data = torch.zeros_like(x)
    return x.sin()


def sets(x):
    with torch.no_grad():
        x.set_(torch.zeros_like(x))
    return x.sin()


def by_numpy(x):
    x.detach().numpy()[:] = 0
    return x.sin()


READS = {
    "branch": branches,
    "item": lambda x: x * x.sum().item(),
    "float": lambda x: x * float(x[0]),
    "numpy": lambda x: x * x.detach().numpy().sum(),
    "array": lambda x: x * x.detach().__array__().sum(),
    "tolist": lambda x: x * x.tolist()[0],
    "tensor": lambda x: x * torch.tensor([x[0]]),
    "new_tensor": lambda x: x * x.new_tensor([[x[0]]])[0],
}
WRITES = {
    "no_grad": without_grad,
    "detach": lambda x: x.detach()[0].zero_() + x.sin(),
    "data": lambda x: x.data.mul_(2) + x.sin(),
    "set data": sets_data,
    "set": sets,
    "set with grad": lambda x: x.set_(torch.zeros_like(x)).sin(),
    "storage": lambda x: (x.untyped_storage().fill_(0), x.sin())[1],
    "in place": lambda x: x.mul_(2).sin(),
}


@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("read", READS)
def test_values_that_python_reads(name, read):
    with pytest.raises(TraceError, match=rf"(?s){name}: .* needs the values.*test_joint_errors\.py:\d+: "):
        TRACES[name](READS[read], leaf(3))


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, name in CALLS if "joint" in name])
@pytest.mark.parametrize("write", WRITES)
def test_writes_that_autograd_does_not_see(kind, name, write):
    x = leaf(3)
    allowed = "functionalize_mutations" if kind == "eager" or name != "trace_joint" else "trace_joint"
    if write == "in place" and name == allowed:
        call(kind, name)(WRITES[write], x)
    else:
        with pytest.raises((MutationError, TraceError)) as caught:
            call(kind, name)(WRITES[write], x)
        assert str(caught.value).startswith(f"{name}: ")
        if (kind, name, write) == ("eager", "create_joint", "set data"):
            assert "primals[0] requires grad" in str(caught.value)
        else:
            assert re.search(r"test_joint_errors\.py:\d+: ", str(caught.value))
    assert torch.equal(x, leaf(3))


def test_other_data_for_what_is_made_inside():
    def fn(x):
        y = x * 2
        y.data = torch.zeros_like(x)
        return y.sin()

    for name, trace in TRACES.items():
        with pytest.raises(MutationError, match=rf"{name}: .*through \.data.*test_joint_errors\.py:\d+: "):
            trace(fn, leaf(3))
    assert torch.equal(functionalize_mutations(fn)(leaf(3))[0], torch.zeros_like(ONES))


def test_memory_that_an_input_leaves_is_not_taken_for_it():
    def fn(x):
        x.data = torch.zeros_like(x)
        return [torch.ones(3, dtype=x.dtype).add_(1) for _ in range(50)]

    x = leaf(3).detach()
    outs, mutated = functionalize_mutations(fn)(x)
    assert all(torch.equal(y, 2 * ONES) for y in outs)
    assert torch.equal(mutated["args[0]"], torch.zeros_like(x))


def test_constants_may_be_read():
    def fn(x):
        return x * torch.arange(3).new_tensor([1.0, 2.0, 3.0]) * constant.tolist()[0] * torch.tensor([1.0]).tolist()[0]

    constant = torch.ones(3, dtype=torch.float64)
    wanted = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert torch.equal(make_fx(create_joint(lambda x: fn(x) * 1.0))((leaf(3),), ONES)((leaf(3),), ONES)[1][0], wanted)
    assert torch.equal(make_fx(functionalize_mutations(fn))(leaf(3).detach())(ONES)[0], wanted)


def redrawn(draw):
    return lambda x: checkpoint(lambda x: draw(x).sin(), x, use_reentrant=False)


def hooked(x):
    y = x * 1
    y.register_hook(lambda bar: bar * torch.rand_like(bar))
    return y


def inside(x):
    y = redrawn(lambda x: torch.nn.functional.dropout(x, 0.5))(x * 1)
    return torch.autograd.grad(y.sum(), x)[0] * x


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, bar):
        return bar * torch.randn(3, dtype=bar.dtype)


RANDOM = {
    "checkpoint": redrawn(lambda x: torch.nn.functional.dropout(x, 0.5)),
    "primitive": redrawn(lambda x: pr.functional.dropout(x, 0.5)),
    "hook": hooked,
    "function": Noisy.apply,
    "gradient inside": inside,
}


@pytest.mark.parametrize("name", ["trace_joint", "create_joint"])
@pytest.mark.parametrize("random", RANDOM)
def test_random_numbers_that_a_backward_pass_draws(name, random):
    match = rf"{name}: .*test_joint_errors\.py:\d+: .*functionalize_rng=True"
    with pytest.raises(TraceError, match=match):
        TRACES[name](RANDOM[random], leaf(3))


def test_random_numbers_that_are_no_danger():
    x, ones = leaf(64), torch.ones(64, dtype=torch.float64)
    for draw in (torch.nn.functional.dropout, pr.functional.dropout):
        graph = trace_joint(lambda x, draw=draw: draw(x, 0.5), x)
        y, (bar,) = graph((x,), ones)
        assert torch.equal(y != 0, bar != 0)
        outs, saved = graph.forward_graph()((x,))
        assert torch.equal(outs != 0, graph.backward_graph()(saved, ones)[0] != 0)
    # Outside a trace torch sets its generator back.
    y, (bar,) = create_joint(RANDOM["checkpoint"])((x,), ones)
    assert torch.equal(y != 0, bar != 0)
    query = leaf(1, 2, 4, 8)
    attend = redrawn(lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    trace_joint(lambda q: attend(q).sum(), query, no_tangents=True)


def test_gradients_that_are_accumulated_inside():
    def fn(x):
        (x * x).sum().backward()
        return x.sin()

    for name, call in (("create_joint", EAGER["create_joint"]), ("trace_joint", trace_joint)):
        with pytest.raises(MutationError, match=rf"{name}: .*\.grad"):
            call(fn, leaf(3))
    with pytest.raises(MutationError, match=r"\.grad of primals\[0\]"):
        trace_joint(fn, leaf(3), functionalize=False)


def test_a_batched_write_to_what_has_no_batch():
    def fn(x):
        total = torch.zeros(3, dtype=x.dtype)
        total[0].add_(x)
        return total

    def batched(x):
        return vmap(fn)(x).sum(0)

    for name in ("trace_joint", "functionalize_mutations"):
        with pytest.raises(MutationError, match=rf"(?s){name}: .*test_joint_errors\.py:\d+: .*"):
            TRACES[name](batched, leaf(3))
    with pytest.raises(MutationError, match=r"(?s)test_joint_errors\.py:\d+: .*vmap"):
        functionalize_mutations(batched)(leaf(3))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_primals_that_are_not_dense():
    w = leaf(3)
    for x in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        with pytest.raises(LeafError, match=re.escape("primals[1]['x'] must be a dense tensor")):
            trace_joint(lambda w, batch: w * 2, w, {"x": x})
        assert functionalize_mutations(lambda x: 2 * x)(x)[1] == {}
        with pytest.raises(MutationError, match=r"sparse.*test_joint_errors\.py:\d+: "):
            functionalize_mutations(lambda x: x.mul_(2))(x)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for function, name in ((functionalize_mutations(torch.sin), "args"), (create_joint(torch.sin), "primals")):
        given = (nested,) if name == "args" else ((nested.requires_grad_(),), None)
        with pytest.raises(LeafError, match=rf"{name}\[0\] must be .*nested"):
            function(*given)
    sparse = torch.eye(3, dtype=torch.float64).to_sparse().requires_grad_()
    with pytest.raises(MutationError, match=r"primals\[0\] requires grad"):
        create_joint(lambda x: without_grad(x).sum(), no_tangents=True)((sparse,))
