"""Dropout as users call it: statistics, seeds, randomness under vmap, in-place writes."""

import pytest
import torch
import torch.nn.functional as F

from perf.ops.dropout import rounds, true_noise
from perf.ops.samples import normal
from primitives.functional import dropout
from primitives.ops.dropout.dropout import dropout_p

MANY = 2**16


pytestmark = pytest.mark.usefixtures("seeded")


def test_known_answers():
    """The published vectors of Random123, of the definition that everything else is held to."""
    ones, pi = (2**32 - 1,) * 4, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert rounds((0,) * 4, (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert rounds(ones, ones[:2]) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert rounds(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.parametrize("offset", [0, 5, 2**32 - 1, 2**40, 2**63 - 3])
def test_noise_is_that_of_the_definition(offset):
    # The longest takes more than one chunk of words.
    for size, *seeds in ((10, 0, -1, 2**31, -(2**63), 2**63 - 1), (2**15 + 9, 3)):
        for seed in seeds:
            y = dropout_p(torch.ones(size), torch.tensor(seed), torch.tensor(offset), 0.5, 0)
            assert torch.equal(y.double(), true_noise((size,), seed, offset, 0.5))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_fresh_seeds_drop_the_share_that_is_asked_for(p):
    """The numbers of a seed are exact, see above; that seeds follow each other says nothing of their numbers."""
    kept = torch.stack([dropout(torch.ones(MANY), p) != 0 for _ in range(3)]).double()
    std = (p * (1 - p)) ** 0.5
    assert ((kept.mean(1) - (1 - p)).abs() < 5 * std / MANY**0.5).all()
    assert (torch.corrcoef(kept) - torch.eye(3)).abs().max() < 5 / MANY**0.5


def test_nothing_is_drawn_where_nothing_is_left_to_chance():
    before = torch.get_rng_state()
    x = normal((3, 4), 1)
    assert dropout(x, 0.0) is x
    assert dropout(x, 0.5, training=False) is x
    assert torch.equal(dropout(x, 1.0), torch.zeros(3, 4).double())
    assert dropout(x[:0], 0.5).shape == (0, 4)
    assert torch.equal(torch.get_rng_state(), before)


def test_in_place_is_what_torch_does():
    """The input itself is returned, written, part of the graph, and differentiated at its new value."""
    x = normal((8, 8), 3).requires_grad_()
    h = x * 2
    seen = h.detach()
    y = dropout(h, 0.5, inplace=True)
    assert y is h
    assert torch.equal(seen, y.detach())
    (x_bar,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(x_bar * x.detach(), y.detach())
    view = torch.ones(4, 6)[:, ::2]
    base = view._base
    assert dropout(view, 0.5, inplace=True) is view
    assert (base[:, 1::2] == 1).all()


def test_in_place_refuses_what_torch_refuses():
    leaf = torch.ones(3, requires_grad=True)
    for call in (dropout, F.dropout):
        for written in (leaf, torch.ones(1).expand(3)):
            with pytest.raises(RuntimeError):
                call(written, 0.5, True, True)
        with pytest.raises(RuntimeError):
            torch.vmap(lambda z, call=call: call(torch.ones(3), 0.5, True, True) * z, randomness="different")(
                torch.ones(2)
            )
    with torch.no_grad():
        assert dropout(leaf, 0.5, inplace=True) is leaf


def same_draws(*calls):
    """Results of calls that begin with the same seed."""
    for call in calls:
        torch.manual_seed(1)
        yield call()


def test_randomness_of_vmap():
    x = torch.ones(5, 32)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(dropout)(x)
    same = torch.vmap(dropout, randomness="same")(x)
    assert torch.equal(same, same[:1].expand(5, 32))
    different = torch.vmap(dropout, randomness="different")(x)
    assert len(different.unique(dim=0)) == 5
    # An input without a batch axis is dropped for each sample too.
    rows = torch.vmap(lambda i: dropout(torch.ones(32)) + 0 * i, randomness="different")(torch.arange(5.0))
    assert len(rows.unique(dim=0)) == 5
    for mode in ("same", "different"):
        call = torch.vmap(dropout, randomness=mode)
        y, y_bar = same_draws(
            lambda call=call: call(x), lambda call=call: torch.func.grad(lambda x, call=call: call(x).sum())(x)
        )
        assert torch.equal(y, y_bar * x)
