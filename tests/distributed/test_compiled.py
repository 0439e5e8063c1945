"""Compiled functions in several processes: their messages are part of the one graph."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.func import jvp

import primitives as pr
from tests.distributed.processes import check_in_processes
from tests.distributed.test_sharding import D, F, N, gradient, whole
from tests.distributed.test_sync_batch_norm import SIZES, all_of, assert_same_state, part, truth
from tests.nested_losses import penalty
from tests.support import assert_close

C = 3


def check_sync_batch_norm(rank, world, backend):
    x, c = all_of(sum(SIZES[:world]), C, 4), all_of(sum(SIZES[:world]), C, 4)
    norm, one = pr.nn.SyncBatchNorm(C).double(), nn.BatchNorm1d(C).double()
    mine, whole = part(x, rank, world).clone().requires_grad_(), x.clone().requires_grad_()
    compiled = torch.compile(norm, fullgraph=True, backend=backend)
    (part(c, rank, world) * compiled(mine).sin()).sum().backward()
    (c * one(whole).sin()).sum().backward()
    assert_close(mine.grad, part(whole.grad, rank, world))
    assert_same_state(norm, one)
    tangent = torch.compile(lambda x, t: jvp(norm, (x,), (t,))[1], fullgraph=True, backend=backend)
    given = [part(v, rank, world).contiguous() for v in (x, c)]
    expected = jvp(lambda v: truth(v, one.weight, one.bias), (x,), (c,))[1]
    assert_close(tangent(*given), part(expected, rank, world))


def check_sharding(rank, world, backend):
    mesh, weight = init_device_mesh("cpu", (world,)), torch.randn(D, dtype=torch.float64)
    x = torch.randn(N, 6, D, dtype=torch.float64)

    def f(x, weight):
        return F.layer_norm(x, (D,), weight).sin()

    expected = gradient(lambda x, a: f(x, weight), x, None, {})
    # Along the last axis statistics are sent.
    cut = distribute_tensor(x, mesh, [Shard(2)]).requires_grad_()
    y = torch.compile(f, fullgraph=True, backend=backend)(cut, distribute_tensor(weight, mesh, [Replicate()]))
    assert y.placements == (Shard(2),)
    (found,) = torch.autograd.grad(y.sin().sum(), cut)
    assert_close(whole(found), expected[0])


def check_both(rank, world, backend):
    torch._inductor.config.compile_threads = 1
    check_sync_batch_norm(rank, world, backend)
    check_sharding(rank, world, backend)


def test_one_graph():
    check_in_processes(check_both, "aot_eager")


@pytest.mark.nightly
def test_inductor():
    check_in_processes(check_both, "inductor", time_out=300)


def check_here(rank, world):
    """`primitives.compile` inside DDP and FSDP, whose hooks see the gradients; around them it refuses."""
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(C, 4), pr.nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(2 * world, C, dtype=torch.float64)

    def loss(model, x):
        return penalty(model, x) / len(x)

    expected = torch.autograd.grad(loss(one, x), list(one.parameters()), materialize_grads=True)
    compiled, mine = pr.compile(one, backend="eager"), x.tensor_split(world)[rank]
    parallel = nn.parallel.DistributedDataParallel(compiled, find_unused_parameters=True)
    seen = []
    parallel.register_comm_hook(
        None, lambda state, bucket: (seen.append(bucket.index()), allreduce_hook(None, bucket))[1]
    )
    loss(parallel, mine).backward()
    assert seen
    for p, g in zip(one.parameters(), expected, strict=True):
        assert_close(torch.zeros_like(p) if p.grad is None else p.grad, g)
    with pytest.raises(pr.LeafError, match="Compile what is inside"):
        pr.compile(lambda x: loss(parallel, x), backend="eager")(mine)
    expected = torch.autograd.grad(one(x).square().mean(), list(one.parameters()), materialize_grads=True)
    one.zero_grad()
    fully_shard(one, mesh=init_device_mesh("cpu", (world,)))
    # It gathers the parameters around the forward pass, which is what is compiled.
    pr.compile(one, backend="eager")(mine).square().mean().backward()
    for p, g in zip(one.parameters(), expected, strict=True):
        assert_close(torch.zeros_like(g) if p.grad is None else p.grad.full_tensor(), g)
    with pytest.raises(pr.LeafError, match="a model in FSDP"):
        pr.compile(lambda x: loss(one, x), backend="eager")(mine)


def test_primitives_compile():
    check_in_processes(check_here)
