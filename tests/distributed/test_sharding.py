"""DTensor: calls that are cut along an axis, against the same calls of one process; values, derivatives, messages."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.func import jvp
from torch.nn.parallel import DistributedDataParallel

import primitives as pr
from tests.distributed.processes import check_in_processes
from tests.support import assert_close

F = pr.functional
# In two processes parts of the first and last axis differ in size.
N, C, D = 5, 6, 7


def arguments():
    """Tensors that functions take beside x, of which every process has the whole."""
    labels = torch.randint(0, D, (N, C))
    labels[0, 1] = -100
    made = {name: torch.randn(size, dtype=torch.float64) for name, size in (("by_column", D), ("by_channel", C))}
    return {**made, "var": made["by_channel"].square() + 1, "labels": labels, "vocabulary": torch.randn(10, D).double()}


# By name: a function of x [5, 6, 7], the axes along which nothing is sent, and those along which statistics are. Along
# the others what a call lacks is brought together. docs/how-to/distributed.md has this as a table.
CASES = {
    "layer_norm": (lambda x, a: F.layer_norm(x, (D,), a["by_column"], a["by_column"]), (0, 1), (2,)),
    "add_rms_norm": (lambda x, a: F.add_rms_norm(x, x + x, (D,), a["by_column"])[0], (0, 1), ()),
    "group_norm": (lambda x, a: F.group_norm(x, 2, a["by_channel"]), (0, 1), ()),
    "instance_norm": (lambda x, a: F.instance_norm(x.movedim(1, 0)), (1,), (2,)),
    "batch_norm": (lambda x, a: F.batch_norm(x, None, None, a["by_channel"], None, True), (1,), (0, 2)),
    "evaluation": (lambda x, a: F.batch_norm(x, a["by_channel"], a["var"], a["by_channel"]), (0, 1, 2), ()),
    "softmax": (lambda x, a: F.softmax(x, -1), (0, 1), (2,)),
    "log_softmax": (lambda x, a: F.log_softmax(x, 1), (0, 2), (1,)),
    "cross_entropy": (
        lambda x, a: F.cross_entropy(x.movedim(-1, 1), a["labels"], reduction="none", label_smoothing=0.1),
        (0, 1),
        (2,),
    ),
    "attention": (lambda x, a: F.scaled_dot_product_attention(*[x.unsqueeze(0)] * 3), (0,), ()),
    "causal attention": (lambda x, a: F.scaled_dot_product_attention(*[x.unsqueeze(0)] * 3, is_causal=True), (0,), ()),
    "linear_cross_entropy": (
        lambda x, a: F.linear_cross_entropy(x[:, 0], a["vocabulary"], a["labels"][:, 0], reduction="none"),
        (0,),
        (),
    ),
}


def value(f, x, x_dot, a):
    return (f(x, a),)


def gradient(f, x, x_dot, a):
    x = x.detach().requires_grad_()
    given = {k: v.detach().requires_grad_() if v.is_floating_point() and k != "var" else v for k, v in a.items()}
    wanted = (x, *[v for v in given.values() if v.requires_grad])
    return [g for g in torch.autograd.grad(f(x, given).sin().sum(), wanted, allow_unused=True) if g is not None]


def tangent(f, x, x_dot, a):
    with forward_ad.dual_level():
        return (forward_ad.unpack_dual(f(forward_ad.make_dual(x, x_dot), a)).tangent,)


def second(f, x, x_dot, a):
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(f(x, a).sin().sum(), x, create_graph=True)
    return torch.autograd.grad((g * x_dot).sum(), x)


MODES = (value, gradient, tangent, second)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def check_case(mesh, f, a, x, x_dot, placements, sends, gathers=False, modes=MODES):
    a_cut = {name: distribute_tensor(v, mesh, [Replicate()] * mesh.ndim) for name, v in a.items()}
    x_cut, x_dot_cut = (distribute_tensor(v, mesh, placements) for v in (x, x_dot))
    for mode in modes:
        with CommDebugMode() as messages:
            found = mode(f, x_cut, x_dot_cut, a_cut)
        sent = {str(op) for op, count in messages.get_comm_counts().items() if count}
        assert sends or not sent, (mode.__name__, placements, sent)
        assert gathers or not any("gather" in op or "all_to_all" in op for op in sent), (mode.__name__, sent)
        for y, expected in zip(found, mode(f, x, x_dot, a), strict=True):
            assert_close(whole(y), expected, order=2, what=f"{mode.__name__}, {placements}")


def check_cases(rank, world, takes_turns):
    mesh, a = init_device_mesh("cpu", (world,)), arguments()
    x, x_dot = torch.randn(2, N, C, D, dtype=torch.float64)
    for i, (name, (f, free, summed)) in enumerate(CASES.items()):
        for axis in range(3):
            gathers = axis not in (*free, *summed)
            if gathers and name == "instance_norm" and torch.__version__ < (2, 13):
                continue  # DTensor refuses to fold the axes
            # Where tensors are brought together every mode runs the whole operator: by day one of them.
            modes = MODES[i % 4 :][:1] if gathers and takes_turns else MODES
            try:
                check_case(mesh, f, a, x, x_dot, [Shard(axis)], axis not in free, gathers, modes)
            except Exception as error:
                raise AssertionError(f"{name}, along {axis}: {error}") from error


def check_mesh_of_two_axes(rank, world):
    mesh, a = init_device_mesh("cpu", (2, 2)), arguments()
    x, x_dot = torch.randn(2, N, C, D, dtype=torch.float64)
    for name in ("layer_norm", "softmax", "batch_norm"):
        f, free, summed = CASES[name]
        # DTensor flattens no rows of which parts differ in size.
        check_case(mesh, f, a, x, x_dot, [Shard(free[0]), Shard(summed[-1])], sends=True, gathers=True)
    check_case(mesh, CASES["layer_norm"][0], a, x, x_dot, [Shard(0), Shard(1)], sends=False)
    # Of five samples the fourth process has none.
    mesh = init_device_mesh("cpu", (4,))
    check_case(mesh, CASES["layer_norm"][0], a, x, x_dot, [Shard(0)], sends=False)
    parts = distribute_tensor(x[..., :5], mesh, [Shard(2)])
    assert_close(whole(F.softmax(parts, -1)), F.softmax(x[..., :5], -1))


@pytest.mark.parametrize("takes_turns", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_calls_are_cut_along_free_axes_without_a_message_and_exchange_statistics_along_others(takes_turns):
    check_in_processes(check_cases, takes_turns)


@pytest.mark.nightly
def test_a_mesh_of_two_axes():
    check_in_processes(check_mesh_of_two_axes, world=4)


def check_others(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    x = torch.randn(N, C, D, dtype=torch.float64)
    rows = distribute_tensor(x, mesh, [Shard(0)])
    # Axes that may not be cut are brought together: the keys of attention, and dropout, which counts elements.
    y = F.scaled_dot_product_attention(*[distribute_tensor(x.unsqueeze(0), mesh, [Shard(2)])] * 3)
    assert_close(whole(y), F.scaled_dot_product_attention(*[x.unsqueeze(0)] * 3))
    assert y.placements == (Shard(2),)
    assert F.dropout(rows).placements == (Replicate(),)
    with torch.inference_mode():
        assert F.layer_norm(rows, (D,)).placements == (Shard(0),)
    # Which cotangents are asked for is part of the call.
    q, k = rows.unsqueeze(0).requires_grad_(), (rows.unsqueeze(0) + 1).requires_grad_()
    for causal in (True, False):
        y = F.scaled_dot_product_attention(q, k, k, is_causal=causal).sin().sum()
        both = torch.autograd.grad(y, (q, k), retain_graph=True)
        for one, of_both in zip((q, k), both, strict=True):
            assert_close(whole(torch.autograd.grad(y, one, retain_graph=True)[0]), whole(of_both))
    # The mean of a loss is a sum of terms.
    labels = torch.randint(0, D, (N,))
    loss = F.cross_entropy(rows[:, 0], distribute_tensor(labels, mesh, [Shard(0)]))
    assert loss.placements == (Partial(),)
    assert_close(whole(loss), F.cross_entropy(x[:, 0], labels))
    # A module whose state is DTensor, too.
    one, cut = pr.nn.BatchNorm1d(C).double(), pr.nn.BatchNorm1d(C).double()
    for name, state in [*cut.named_parameters(), *cut.named_buffers()]:
        replicated = distribute_tensor(state.detach(), mesh, [Replicate()])
        setattr(cut, name, nn.Parameter(replicated) if isinstance(state, nn.Parameter) else replicated)
    assert_close(whole(cut(rows)), one(x))
    for name, buffer in one.named_buffers():
        assert torch.allclose(whole(getattr(cut, name)), buffer), name


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.up = pr.nn.LayerNorm(D), nn.Linear(D, 2 * D)
        self.down, self.last = nn.Linear(2 * D, D), pr.nn.RMSNorm(D)

    def forward(self, x):
        return self.last(x + self.down(self.up(self.first(x)).tanh()))


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [whole(p.grad) for p in model.parameters()]


def check_models(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    one, x = Block().double(), torch.randn(4, C, D, dtype=torch.float64)
    expected = gradients(one, one(x).square().mean())
    model = copy.deepcopy(one)
    plan = {
        "first": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "last": SequenceParallel(),
    }
    parallelize_module(model, mesh, plan)
    loss = whole(model(distribute_tensor(x, mesh, [Shard(1)])).square().mean())
    for ours, theirs in zip(gradients(model, loss), expected, strict=True):
        assert_close(ours, theirs)
    model = copy.deepcopy(one)
    fully_shard(model.last, mesh=mesh)
    fully_shard(model, mesh=mesh)
    half = x.tensor_split(world)[rank]
    for ours, theirs in zip(gradients(model, model(half).square().mean()), expected, strict=True):
        assert_close(ours, theirs)


class Step(nn.Module):
    """A network and its derivative along x; the gradient of the latter is wrong in torch, by the layer norm."""

    def __init__(self, norm):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, D), norm, nn.Linear(D, 1))

    def forward(self, x):
        y, y_dot = jvp(self.net, (x,), (x,))
        return y + y_dot


def check_torch_repaired(rank, world):
    mesh, a = init_device_mesh("cpu", (world,)), arguments()
    x, x_dot = torch.randn(2, N, C, D, dtype=torch.float64)
    ours, rows = Step(pr.nn.LayerNorm(D)).double(), torch.randn(4, D, dtype=torch.float64)
    theirs = Step(nn.LayerNorm(D)).double()
    theirs.load_state_dict(ours.state_dict())
    expected = gradients(ours, ours(rows).square().mean())
    wrappers = {"DDP": DistributedDataParallel, "FSDP2": lambda net: fully_shard(net, mesh=mesh)}
    with pr.repair_torch():
        check_case(
            mesh, lambda x, a: nn.functional.layer_norm(x, (D,), a["by_column"]), a, x, x_dot, [Shard(0)], sends=True
        )
        for name, wrap in wrappers.items():
            net = wrap(copy.deepcopy(theirs))
            found = gradients(net, net(rows.tensor_split(world)[rank]).square().mean())
            for gradient_found, truth in zip(found, expected, strict=True):
                assert_close(gradient_found, truth, order=2, what=name)


def check_all(rank, world):
    check_others(rank, world)
    check_models(rank, world)


def test_modules_and_models_of_dtensors():
    check_in_processes(check_all)


def test_repaired_torch_under_ddp_fsdp2_and_dtensors():
    check_in_processes(check_torch_repaired)
