"""Code that no graph can hold is refused with the user's line; all else gives the results of eager autograd."""

import re
import sysconfig

import pytest
import torch
from torch import distributed, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import primitives as pr
from primitives._core.errors import DeviceError, LeafError, MutationError
from primitives.tracing import (
    TraceError,
    create_joint,
    trace_joint,
)
from tests.compiled.support import plainly
from tests.tracing.test_joint_graph import leaf

ONES = torch.ones(3, dtype=torch.float64)
WEIGHT = leaf(3)
STATISTIC = torch.zeros(3, dtype=torch.float64)
MODULE = nn.BatchNorm1d(3).double()
SUBCLASS = TwoTensor(torch.ones(3), torch.ones(3))
LINE = r"test_joint_errors\.py:\d+: "
TRACES = {
    "trace_joint": lambda fn, x: trace_joint(fn, (x,)),
    "create_joint": lambda fn, x: make_fx(create_joint(fn))((x,), ONES),
    "compile": lambda fn, x: plainly(fn)(x),
}


def branches(x):
    return x.sin() if x.sum() > 0 else x


def sets_data(x):
    y = x * 2
    y.data = torch.zeros_like(x)
    return y.sin()


def redrawn(draw):
    return lambda x: checkpoint(lambda x: draw(x).sin(), x, use_reentrant=False)


def hooked(x):
    y = x * 1
    y.register_hook(lambda bar: bar * torch.rand_like(bar))
    return y


def inside(x):
    y = redrawn(lambda x: dropout(x, 0.5))(x * 1)
    return torch.autograd.grad(y.sum(), x)[0] * x


NO_VALUES, DRAWS = (TraceError, "needs the values"), (TraceError, "draws random numbers")
REFUSED = {
    "branch": (branches, *NO_VALUES),
    "item": (lambda x: x * x.sum().item(), *NO_VALUES),
    "numpy": (lambda x: x * x.detach().numpy().sum(), *NO_VALUES),
    "array": (lambda x: x * x.detach().__array__().sum(), *NO_VALUES),
    "tolist": (lambda x: x * x.tolist()[0], *NO_VALUES),
    "tolist of a number": (lambda x: x.sum().tolist() * x, *NO_VALUES),
    "float": (lambda x: float(x.sum()) * x, *NO_VALUES),
    "text": (lambda x: x * len(f"{x.sum():.3f}"), *NO_VALUES),
    "nonzero": (lambda x: x[x.nonzero()[:, 0]], *NO_VALUES),
    "tensor": (lambda x: x * torch.tensor([x[0]]), *NO_VALUES),
    "new_tensor": (lambda x: x * x.new_tensor([[x[0]]])[0], *NO_VALUES),
    "size": (lambda x: x * x[x > 0].sum(), *NO_VALUES),
    "data": (sets_data, MutationError, "through .data"),
    "checkpoint": (redrawn(lambda x: dropout(x, 0.5)), *DRAWS),
    "primitive in a checkpoint": (redrawn(lambda x: pr.functional.dropout(x, 0.5)), *DRAWS),
    "hook": (hooked, *DRAWS),
    "gradient inside": (inside, *DRAWS),
}
# With real tensors, as `create_joint` is traced here, `make_fx` records a size that depends on values.
OTHERS = {("create_joint", "size"), ("create_joint", "nonzero")}
# Its random numbers are those of a state that is handed on.
OTHERS |= {("compile", case) for case, (_, *refusal) in REFUSED.items() if refusal == [*DRAWS]}


@pytest.mark.parametrize("name, case", [(n, c) for n in TRACES for c in REFUSED if (n, c) not in OTHERS])
def test_what_no_graph_can_hold(name, case):
    fn, error, text = REFUSED[case]
    remedy = "Use torch.where.* assert" if text == NO_VALUES[1] else ""
    with pytest.raises(error, match=rf"(?s)^{name}: .*{re.escape(text)}.*{LINE}.*{remedy}"):
        TRACES[name](fn, leaf(3))


def test_the_line_of_a_library_in_the_folder_of_python():
    scope, file = {}, f"{sysconfig.get_path('stdlib')}/site-packages/library.py"
    exec(compile("def run(x):\n    return x * x.sum().item()", file, "exec"), scope)
    with pytest.raises(pr.TraceError, match=rf"{re.escape(file)}:2"):
        trace_joint(scope["run"], (leaf(3),))


# Tensors from elsewhere.
OUTSIDE = {
    "leaf": (lambda x: x * WEIGHT, LeafError, "a tensor [3] of torch.float64 requires grad"),
    "parameter": (lambda x: MODULE(x[None].expand(2, 3)), MutationError, "a tensor [] of torch.int64 is written"),
    "buffer": (lambda x: (STATISTIC.add_(x.detach()), x.sin())[1], MutationError, "a tensor that is not an input"),
    "by a constant": (
        lambda x: (STATISTIC.add_(1), x.sin())[1],
        MutationError,
        "a tensor [3] of torch.float64 is written",
    ),
    "by a view": (
        lambda x: (STATISTIC[1:].add_(1), x.sin())[1],
        MutationError,
        "a tensor [3] of torch.float64 is written",
    ),
    "subclass": (lambda x: (SUBCLASS.mul_(2), x.sin())[1], MutationError, "a tensor [3] of torch.float32 is written"),
}


@pytest.mark.parametrize("fn, error, text", OUTSIDE.values(), ids=OUTSIDE)
def test_tensors_from_elsewhere(fn, error, text):
    before = [x.clone() for x in (STATISTIC, MODULE.running_mean, SUBCLASS.a)]
    with pytest.raises(error, match=rf"trace_joint: {re.escape(text)}.*{LINE}"):
        trace_joint(fn, (leaf(3),))
    assert all(map(torch.equal, before, (STATISTIC, MODULE.running_mean, SUBCLASS.a)))


def test_random_numbers_that_are_no_danger():
    x, ones = leaf(64), torch.ones(64, dtype=torch.float64)
    for draw in (dropout, pr.functional.dropout):
        graph = trace_joint(lambda x, draw=draw: draw(x, 0.5), (x,))
        outs, saved = graph.forward_graph()((x,))
        assert torch.equal(outs != 0, graph.backward_graph()(saved, ones)[0] != 0)
    # Outside a trace torch sets its generator back.
    y, (bar,) = create_joint(REFUSED["checkpoint"][0])((x,), ones)
    assert torch.equal(y != 0, bar != 0)
    attend = redrawn(lambda q: scaled_dot_product_attention(q, q, q))
    trace_joint(lambda q: attend(q).sum(), (leaf(1, 2, 4, 8),), no_cotangents=True)
    # The generator is not set back.
    torch.manual_seed(5)
    first = torch.rand(3)
    trace_joint(lambda w: (w * torch.rand_like(w)).sum(), (leaf(3),), no_cotangents=True)
    assert not torch.equal(torch.rand(3), first)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_primals_that_are_not_dense():
    w = leaf(3)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for x in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), nested, SUBCLASS):
        with pytest.raises(LeafError, match=re.escape("batch['x'] must be a dense tensor")):
            trace_joint(lambda w, batch: w * 2, (w, {"x": x}))
    sparse = torch.eye(3, dtype=torch.float64).to_sparse().requires_grad_()
    _, (bar,) = create_joint(lambda x: (x.to_dense() * x.to_dense()).sum(), no_cotangents=True)((sparse,))
    assert torch.equal(bar.to_dense(), 2 * torch.eye(3, dtype=torch.float64))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_device_that_is_not_there():
    with pytest.raises(DeviceError, match="there is none"):
        trace_joint(torch.sin, (leaf(3),), device="cuda")


def test_collectives_that_write_in_place():
    def reduces(w, x):
        distributed.all_reduce(x)
        return (w * x).sum()

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(MutationError, match=r"(?s)trace_joint: .*collective.*" + LINE):
            trace_joint(reduces, (leaf(3), torch.ones(3, dtype=torch.float64)))
    finally:
        distributed.destroy_process_group()
