"""Derivatives of higher order: every nesting of forward and reverse mode against nested modes of the plain formula."""

import pytest
import torch
from torch.func import grad, jvp

from perf.ops import CASES
from perf.ops.attention import CAUSAL_ATTENTION, MASKED_ATTENTION
from tests.properties import check_nesting
from tests.support import assert_close, like, nestings

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def positions_of(case, word, turn):
    """Which arguments a word differentiates in: None for all at once, else one position for each letter.

    One argument by the outer levels, the input or the same by the inner ones: in order three these take turns, in order
    four the words do. `tests/test_rules.py` has each set of arguments in order two.
    """
    order, count = len(word), len(case.perturbable(case.tiny))
    if order == 3 and not case.family:
        others = [(0, 0, 0), *((other, inner, other) for other in range(1, count) for inner in (0, other))]
        yield others[turn % len(others)]
    # Rules beyond second order are those of the op with these primitives, by another formula.
    if order == 4 and turn % 2 and not case.family:
        yield 0, 0, 0, 0
    if order == 3:
        yield None


# From the third order on both backends differentiate the references, by day a word of order four for most ops.
NESTINGS = [
    pytest.param(
        *(case, word, positions),
        id=f"{case.name}-{word}",
        marks=[pytest.mark.in_turns(i + j), *[pytest.mark.nightly] * (len(word) > 3 and (i + j + j // 8) % 16 != 5)],
    )
    for i, case in enumerate(CASES)
    for j, word in enumerate(nestings(3, 4))
    if (positions := [*positions_of(case, word, i + j + j // 8)])
]
# Nightly those that the other takes by day: what the options change is the same in all.
NESTINGS += [
    pytest.param(case, word, [None], id=f"{name}-{word}", marks=[pytest.mark.nightly] * ((i + j) % 2))
    for i, (name, case) in enumerate({"causal": CAUSAL_ATTENTION, "masked": MASKED_ATTENTION}.items())
    for j, word in enumerate(nestings(3))
]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("case, word, positions", NESTINGS)
def test_every_nesting(case, word, positions, device):
    for each in positions:
        check_nesting(case, device, word, each)


@every_case
def test_a_product_of_a_loss_by_a_number(case, device):
    """Torch makes a float64 tangent of its float32 cotangent."""
    inputs = case.inputs(case.small, torch.float32, device)
    x, x_dot = inputs["x"], like(inputs["x"], seed=3)

    def loss(x):
        return (0.5 * case.of(["x"], inputs, case.small)(x).sin().sum()).exp()

    product = jvp(grad(loss), (x,), (x_dot,))[1]
    assert_close(product.float(), grad(lambda x: jvp(loss, (x,), (x_dot,))[1])(x), order=2)
