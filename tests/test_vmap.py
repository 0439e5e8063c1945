"""Batching: vmap over every subset of arguments equals the loop, for the ops and their derivative primitives."""

import dataclasses

import pytest
import torch
from torch.func import grad, jvp, vmap

import primitives as pr
from perf.ops import CASES, FAMILIES
from perf.ops.attention import MASKED_ATTENTION
from perf.ops.samples import LAYOUTS
from tests.call_properties import BATCH, alone_and_together, batched, check_vmap_of_call, distinct
from tests.properties import second_order
from tests.support import assert_close, subsets

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
every_family = pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.name)


def calls(case, device):
    """Calls of all orders, in float64, one for each subset of perturbed arguments."""
    names = case.perturbable(case.small)
    chosen = [some for some in subsets(names) if len(names) < 4 or len(some) in (1, len(names))]
    return distinct(c for some in chosen for c in second_order(case, case.small, torch.float64, device, some)[1])


@every_family
def test_primitives_for_every_mask(case, device):
    """Each set of wanted cotangents and of present tangents, batched over two of the arguments in turns, and all."""
    for turn, call in enumerate(calls(case, device)):
        *alone, together = alone_and_together(call)
        check_vmap_of_call(call, 0, {alone[turn % len(alone)], alone[turn // 2 % len(alone)], together})


@every_family
def test_absent_arguments(case, device):
    """Without parameters there are fewer tensors that could carry the batch axis."""
    for absent in {sample.absent for sample in case.samples if sample.absent}:
        sample = dataclasses.replace(case.small, absent=(*case.small.absent, *absent))
        for call in second_order(case, sample, torch.float64, device, case.perturbable(sample))[1]:
            check_vmap_of_call(call, 0, alone_and_together(call)[-1:])


@every_case
def test_vmap_of_vmap(case, device):
    """The inner and the outer level batch different arguments, some of them both."""
    inputs = case.inputs(case.small, torch.float64, device)
    names = case.differentiable
    values, everything = [inputs[name] for name in names], tuple(range(len(names)))
    function = case.of(names, inputs, case.small)
    alone = [(i,) for i in everything]
    for inner in [*alone, everything]:
        for outer in [*alone, everything]:
            inner_dims = tuple(0 if i in inner else None for i in everything)
            outer_dims = tuple(1 if i in inner and i in outer else 0 if i in outer else None for i in everything)
            twice = [v if d is None else batched(v, d) for v, d in zip(values, inner_dims, strict=True)]
            twice = [v if d is None else batched(v, d) for v, d in zip(twice, outer_dims, strict=True)]
            actual = vmap(vmap(function, inner_dims), outer_dims)(*twice)
            for row in range(BATCH):
                selected = [v if d is None else v.select(d, row) for v, d in zip(twice, outer_dims, strict=True)]
                for column in range(BATCH):
                    single = [v if d is None else v[column] for v, d in zip(selected, inner_dims, strict=True)]
                    assert_close(actual[row, column], function(*single), what=f"inner {inner}, outer {outer}")


@every_case
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_batched_arguments(case, layout, device):
    """The batch axis anywhere in memory, expanded too."""
    sample = dataclasses.replace(case.small, layout=layout)
    inputs = case.inputs(sample, torch.float32, device)
    stack = case.inputs(dataclasses.replace(sample, shape=(*sample.shape, BATCH)), torch.float32, device)["x"]
    function = case.of(["x"], inputs, sample)
    rows = [function(x) for x in stack.unbind(-1)]
    assert_close(vmap(function, -1, -1)(stack), torch.stack(rows, -1))
    assert vmap(function, -1, -1)(stack[..., :0]).shape == stack[..., :0].shape


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0)], ids=["seeds", "masks", "both"])
def test_third_derivatives_of_attention_for_batched_masks_and_seeds(in_dims, device):
    """These differentiate the reference, which sees the batch, where a primitive would have folded it away."""
    q, k, v = (MASKED_ATTENTION.inputs(MASKED_ATTENTION.small, torch.float64, device)[name] for name in ("x", "k", "v"))

    def third(seed, mask):
        def of(q):
            return pr.functional.attention(q, k, v, mask=mask, dropout_p=0.4, seed=seed).sin().sum()

        return jvp(lambda q: jvp(grad(of), (q,), (v.sum() * q,))[1], (q,), (q.cos(),))[1]

    full = torch.arange(BATCH, device=device), torch.tensor([[True, True, False, True], [False, True, True, True]])
    args = [x.to(device) if d == 0 else x[0].to(device) for x, d in zip(full, in_dims, strict=True)]
    actual = vmap(third, in_dims)(*args)
    for i in range(BATCH):
        assert_close(actual[i], third(*[x if d is None else x[i] for x, d in zip(args, in_dims, strict=True)]), order=3)
