"""`SyncBatchNorm` in several processes, each with a part of the batch, against batch norm of all of it in one."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, vmap

import primitives as pr
from primitives._audit.nestings import nested
from tests.distributed.processes import check_in_processes
from tests.support import assert_close, nestings

SIZES = (3, 2, 0, 1)
C = 3


def all_of(*shape, dtype=torch.float64):
    return (torch.randn(*shape, dtype=torch.float64) * 2 + 5).to(dtype)


def part(x, rank, world):
    """The part of a common batch that is this process's."""
    return x.split([*SIZES[: world - 1], len(x) - sum(SIZES[: world - 1])])[rank]


def assert_same_state(ours, one):
    assert list(ours.state_dict()) == list(one.state_dict())
    for (name, found), expected in zip(ours.state_dict().items(), one.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")


def truth(x, weight, bias, eps=1e-5):
    axes = [0, *range(2, x.dim())]
    var, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    shape = [1, -1] + [1] * (x.dim() - 2)
    return (x - mean) / (var + eps).sqrt() * weight.reshape(shape) + bias.reshape(shape)


def check_derivatives(rank, world, shape, channels_last):
    n = sum(SIZES[:world])
    x, x_dot, c = all_of(n, *shape), all_of(n, *shape), all_of(n, *shape)
    params, dots = (all_of(C), all_of(C)), (all_of(C), all_of(C))
    mine = [part(v, rank, world) for v in (x, x_dot, c)]
    if channels_last:
        mine = [v.contiguous(memory_format=torch.channels_last) for v in mine]
    norm = pr.nn.SyncBatchNorm(C, dtype=torch.float64)

    def ours(x, weight, bias):
        return (mine[2] * functional_call(norm, {"weight": weight, "bias": bias}, (x,)).sin()).sum()

    def expected(x, weight, bias):
        return (c * truth(x, weight, bias).sin()).sum()

    for nesting in nestings(1, 2, 3):
        found = nested(ours, (mine[1], *dots), nesting)(mine[0], *params)
        dist.all_reduce(found)
        assert_close(found, nested(expected, (x_dot, *dots), nesting)(x, *params), what=nesting, order=3)
    # And each number of the first derivatives.
    x_bar, *bars = grad(ours, (0, 1, 2))(mine[0], *params)
    of_all, *of_params = grad(expected, (0, 1, 2))(x, *params)
    assert_close(x_bar, part(of_all, rank, world))
    for mine_of_it, of_param in zip(bars, of_params, strict=True):
        dist.all_reduce(mine_of_it)
        assert_close(mine_of_it, of_param)


@pytest.mark.parametrize("shape, channels_last", [((C,), False), ((C, 2, 3), True)], ids=str)
def test_every_derivative_is_that_of_one_process(shape, channels_last):
    check_in_processes(check_derivatives, shape, channels_last)


@pytest.mark.nightly
def test_every_derivative_in_four_processes_of_which_one_has_no_samples():
    check_in_processes(check_derivatives, (C, 4), False, world=4)


def check_module(rank, world):
    for kind, arguments in {
        "plain": {},
        "average": {"momentum": None},
        "bare": {"affine": False},
        "no state": {"track_running_stats": False},
        "no bias": {"bias": False},
    }.items():
        if kind == "no bias" and "bias" not in (nn.BatchNorm1d.__init__.__kwdefaults__ or ()):
            continue
        one, ours = nn.BatchNorm1d(C, **arguments).double(), pr.nn.SyncBatchNorm(C, **arguments).double()
        assert ours.load_state_dict(one.state_dict())
        for _ in range(2):
            x = all_of(sum(SIZES[:world]), C, 4)
            assert_close(ours(part(x, rank, world)), part(one(x), rank, world), what=kind)
        assert_same_state(ours, one)
        # In evaluation nothing is sent: the other process does not take part.
        if rank == 0 and kind != "no state":
            assert_close(ours.eval()(x), one.eval()(x), what=kind)
    # An empty batch everywhere leaves the statistics as they are.
    norm = pr.nn.SyncBatchNorm(C)
    assert norm(torch.zeros(0, C)).shape == (0, C)
    assert torch.equal(norm.running_var, torch.ones(C))


def check_low_precision(rank, world):
    for dtype in (torch.float16, torch.bfloat16):
        x = all_of(sum(SIZES[:world]), C, 64, dtype=dtype)
        ours, one = pr.nn.SyncBatchNorm(C), nn.BatchNorm1d(C).double()
        mine = part(x, rank, world).requires_grad_()
        y, expected = ours(mine), one(x.double())
        assert y.dtype == dtype
        assert_close(y, part(expected, rank, world).to(dtype))
        assert_close(ours.running_var, one.running_var.float())
        # Of a cotangent of ones nothing is left: what is subtracted is not rounded before.
        y.sum().backward()
        assert mine.grad.abs().max() < 1e-6


def check_groups(rank, world):
    alone = [dist.new_group([r]) for r in range(world)][rank]
    x = all_of(4, C)
    assert_close(pr.nn.SyncBatchNorm(C, process_group=alone).double()(x + rank), nn.BatchNorm1d(C).double()(x + rank))
    pairs = dist.new_group([1, 0])
    y = pr.nn.SyncBatchNorm(C, process_group=pairs).double()(part(x, rank, world))
    assert_close(y, part(nn.BatchNorm1d(C).double()(x), rank, world))


def check_vmap(rank, world):
    x = all_of(4, sum(SIZES[:world]), C)
    norm = pr.nn.SyncBatchNorm(C, track_running_stats=False).double()
    y = vmap(norm)(x.split([SIZES[0], x.shape[1] - SIZES[0]], 1)[rank])
    expected = torch.stack([nn.BatchNorm1d(C).double()(sample) for sample in x])
    assert_close(y, expected.split([SIZES[0], x.shape[1] - SIZES[0]], 1)[rank])


def check_data_parallel(rank, world):
    x = all_of(4, C)
    one = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.Tanh()).double()
    ours = nn.Sequential(nn.Linear(C, C), nn.BatchNorm1d(C), nn.Tanh()).double()
    ours.load_state_dict(one.state_dict())
    model = nn.parallel.DistributedDataParallel(pr.nn.convert_sync_batchnorm(ours))
    # Its gradients are averages over processes; a loss that is a mean over equal parts is one over the whole.
    model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
    one(x).square().mean().backward()
    for mine, theirs in zip(ours.parameters(), one.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad)


def check_all(rank, world, *checks):
    for check in checks:
        check(rank, world)


def test_the_module_is_batch_norm_of_all_samples():
    check_in_processes(check_all, check_module, check_low_precision, check_groups, check_vmap, check_data_parallel)


# A fault of one process is an error in all.


def bare(channels):
    return pr.nn.SyncBatchNorm(channels, affine=False, track_running_stats=False)


def call(rank, world, norms, columns, dtypes, errors, words):
    with pytest.raises(errors[rank], match=words[rank]):
        norms[rank](torch.zeros(2, columns[rank], dtype=dtypes[rank]))


WIDE, DTYPES = "3 in rank 0, 4 in rank 1", "float32 in rank 0, torch.float64 in rank 1"
FLOATS = [torch.float32] * 2
FAULTS = {
    "models differ": ((bare(3), bare(4)), (3, 4), FLOATS, [pr.ShapeError] * 2, [WIDE] * 2),
    "dtypes differ": ((bare(3), bare(3)), (3, 3), [torch.float32, torch.float64], [pr.DtypeError] * 2, [DTYPES] * 2),
    "a wrong input in one process": (
        *((bare(3), bare(3)), (3, 4), FLOATS),
        *([pr.CommunicationError, pr.ShapeError], ["The backend", "3 channels"]),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_differs_between_processes_is_an_error_in_each(fault):
    check_in_processes(call, *FAULTS[fault], wait=5)


def wait_for_nobody(rank, world, seconds):
    norm = pr.nn.SyncBatchNorm(C)
    norm(torch.randn(2, C))
    if rank == 1:
        time.sleep(seconds)
        # Without a word to the others.
        os._exit(0)
    with pytest.raises(
        pr.CommunicationError, match="rank 0 of 2 waited for one that has ended, has not come, or sends"
    ):
        norm(torch.randn(2, C))


@pytest.mark.parametrize("seconds", [0, 2])
def test_a_process_that_is_gone_is_an_error_in_the_others(seconds):
    check_in_processes(wait_for_nobody, seconds, wait=1)


# Conversion, in one process.


class WithActivation(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


def test_convert_sync_batchnorm_takes_every_batch_norm_or_none():
    model = nn.Sequential(nn.BatchNorm1d(2), pr.nn.convert(nn.BatchNorm2d(2)), nn.SyncBatchNorm(2), nn.LayerNorm(2))
    before = [type(m) for m in model]
    for norm, why in ((WithActivation(2), "WithActivation, has a forward"), (nn.LazyBatchNorm1d(), "is lazy")):
        with pytest.raises(TypeError, match=f"^convert_sync_batchnorm: 1, of class .*{why}"):
            pr.nn.convert_sync_batchnorm(nn.Sequential(model, norm))
        assert [type(m) for m in model] == before
    weight, hook = model[0].weight, model[0].register_forward_hook(lambda *_: None)
    assert pr.nn.convert_sync_batchnorm(model, process_group="a group") is model
    assert [type(m) for m in model[:3]] == [pr.nn.SyncBatchNorm] * 3
    assert {m.process_group for m in model[:3]} == {"a group"}
    assert model[0].weight is weight
    assert hook.id in model[0]._forward_hooks
    assert list(pr.nn.converted(model)) == ["0", "1", "2"]
    assert vars(pr.nn.SyncBatchNorm(2)).keys() == vars(nn.SyncBatchNorm(2)).keys()
    assert [type(m) for m in pr.nn.revert(model)[:3]] == [nn.SyncBatchNorm] * 3
    assert type(pr.nn.convert(nn.SyncBatchNorm(2))) is pr.nn.SyncBatchNorm
    with pytest.raises(TypeError, match="convert_sync_batchnorm"):
        pr.nn.convert_sync_batchnorm(3)
