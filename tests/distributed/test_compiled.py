"""Compiled functions in several processes: their messages are part of the one graph."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.func import jvp

import primitives as pr
from tests.distributed.processes import check_in_processes
from tests.distributed.test_sharding import D, F, N, gradient, whole
from tests.distributed.test_sync_batch_norm import SIZES, all_of, assert_same_state, part, truth
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
    for axis in (0, 2):
        cut = distribute_tensor(x, mesh, [Shard(axis)]).requires_grad_()
        replicated = distribute_tensor(weight, mesh, [Replicate()])
        y = torch.compile(f, fullgraph=True, backend=backend)(cut, replicated)
        assert y.placements == (Shard(axis),)
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
