"""Softmax with a mask: its derivatives, what takes no part, and rows of which nothing does."""

import pytest
import torch
from torch.testing import assert_close

import primitives as pr
from primitives.testing import check_rules
from tests.support import data

softmax = pr.functional.softmax
INF = torch.inf


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_an_added_mask_has_derivatives_of_two_orders(dtype, scale):
    """The record has a mask that is constant, since it is an argument of none of the derivatives."""

    def masked(x, mask):
        return softmax(x, 1, scale=scale, mask=mask)

    check_rules(masked, (data(2, 3, 4).to(dtype), data(2, 3, 4, seed=1).to(dtype)), compile=False)


MASKS = {"of keys": (2, 1, 1, 5), "of pairs": (4, 5), "of samples": (2, 1, 4, 5), "of rows": (2, 3, 4, 1), "one": ()}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_masks_are_broadcast_and_rows_without_a_position_are_zero(kind, shape, device):
    """Values and both derivatives are those of torch in rows that have a position, and 0 in all others."""
    x, v = data(2, 3, 4, 5).to(device), data(2, 3, 4, 5, seed=1).to(device)
    seen = data(*shape, seed=2).to(device) > -0.3
    seen.view(-1, shape[-1] if shape else 1)[0] = False
    mask = seen if kind == "boolean" else torch.where(seen, data(*shape, seed=3).to(device), -INF)
    added = torch.where(seen, 0.0, -INF) if kind == "boolean" else mask
    has_any = added.expand(x.shape).amax(-1, keepdim=True) > -INF
    assert not has_any.all()
    # Masked elements may be anything.
    spoilt = torch.where(seen.expand(x.shape), x, torch.tensor([INF, -INF, torch.nan, 1e300, 0.0]).to(x))

    def ours(x):
        return softmax(x, -1, scale=0.5, mask=mask)

    def theirs(x):
        return torch.where(has_any, (0.5 * x + torch.where(has_any, added, 0.0)).softmax(-1), 0.0)

    def all_of(function, x):
        def tangent(x):
            return torch.func.jvp(function, (x,), (v,))[1]

        def gradient(x):
            return torch.func.grad(lambda x: (function(x) ** 2 * v).sum())(x)

        return function(x), tangent(x), gradient(x), torch.func.jvp(gradient, (x,), (v,))[1], tangent(gradient(x))

    assert_close(all_of(ours, x), all_of(theirs, x))
    assert_close(ours(spoilt), theirs(x))
    assert ours(x).is_contiguous()
    for dim, turned in ((1, (0, 3, 1, 2)), (0, (3, 0, 1, 2))):
        of_turned = mask.expand(x.shape).permute(turned) if shape else mask
        y = softmax(x.permute(turned), dim, scale=0.5, mask=of_turned)
        assert y.is_contiguous()
        assert_close(y, theirs(x).permute(turned))


def test_a_mask_is_a_prefix_of_a_tree():
    x = {"a": data(2, 3), "b": (data(4, 3), data(3))}
    mask = {"a": torch.tensor([[True], [False]]), "b": data(3)}
    y = softmax(x, -1, mask=mask)
    assert_close(y["a"], torch.stack([x["a"][0].softmax(0), torch.zeros(3).double()]))
    assert_close(y["b"][0], (x["b"][0] + mask["b"]).softmax(1))
    assert_close(y["b"][1], (x["b"][1] + mask["b"]).softmax(0))
