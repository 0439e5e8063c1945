"""Batching: vmap over every subset of arguments equals the loop, for the ops and their derivative primitives."""

import pytest
import torch
from torch.func import grad, jvp, vmap

import primitives as pr
from perf.ops import FAMILIES
from perf.ops.attention import MASKED_ATTENTION
from tests.call_properties import BATCH, alone_and_together, check_vmap_of_call, distinct
from tests.properties import second_order
from tests.support import assert_close, subsets

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
