"""Particular to attention: widths, tangents that lie otherwise, numbers out of range.

`test_every_launcher`, `test_operands` and `test_numbers` hold its launchers to what they hold all others to.
"""

import math
from collections.abc import Callable

import pytest
import torch

from perf.calls import random
from perf.ops.attention import Attention
from primitives.kernels.attention.attention import attention_fwd
from primitives.kernels.runtime.kernel import observe
from tests.kernels.calls import launched_by
from tests.kernels.truth import check_values

INF = math.inf
pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture(autouse=True)
def small_tiles(use_limits: Callable[..., None]) -> None:
    """Several blocks of rows and keys of few of both."""
    use_limits(attention_tile=16)


# Of queries with keys, and of values: those that fill a power of two, and those that do not.
WIDTHS = [(1, 80), (8, 40), (40, 1), (64, 72), (72, 64), (80, 8), (128, 256), (256, 128)]


@pytest.mark.parametrize("width, value_width", WIDTHS)
def test_widths(width, value_width):
    dtype = torch.float16 if width > value_width else torch.float32
    heads = Attention.draw((1, 2, 5, width), 18, dtype, 1, value_width, scale=width**-0.5, causal=value_width == 72)
    for call in heads.calls("fwd", "double_backward"):
        check_values(call)


@pytest.mark.parametrize("width, dtype", [(257, torch.float16), (129, torch.float64)])
def test_the_reference_has_widths_whose_tiles_fit_nowhere(width, dtype):
    wide = Attention.draw((1, 1, 2, width), 2, dtype)
    assert all(call.launcher(*call.args) is None for call in wide.calls())
    *args, _, _, _ = wide.call("fwd").args
    assert attention_fwd(*(x if x is None else x[..., :128] for x in args), 1.0, False, 0.0) is not None


# Keys as an input of theirs might lie: of all samples, windows of a sequence, turned around, with others between them.
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": lambda: random(1, 1, 18, 8).expand(2, 2, 18, 8),
    "windows": lambda: random(2, 2, 25).unfold(-1, 8, 1),
    "turned": lambda: random(2, 2, 8, 18).transpose(-2, -1),
    "sliced": lambda: random(2, 2, 18, 16)[..., ::2],
    "rows apart": lambda: random(2, 18, 3, 2, 8)[:, :, 1].transpose(1, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tangents_lie_otherwise_than_what_they_are_tangents_of(layout):
    k = LAYOUTS[layout]()
    heads = Attention.draw((2, 2, 3, 8), 18)
    bias, bias_dot = random(2, 2, 18, 3).transpose(-2, -1), random(2, 2, 3, 18, seed=8)
    before = k.clone()
    heads = heads.change(k=k, k_dot=random(*k.shape, seed=7), bias=bias, bias_dot=bias_dot)
    for call in heads.calls("jvp", "double_backward"):
        check_values(call)
    assert torch.equal(k, before)


def test_a_bias_keeps_the_axes_along_which_it_is_broadcast():
    """Where no one stride serves its batch it is copied, but not for each pair: that would be rows times keys."""
    heads = Attention.draw((2, 3, 2, 17, 8), 18, bias=random(2, 1, 1, 1, 18), mask=random(1, 3, 1, 17, 1) > -1)
    (launch,) = launched_by(lambda: check_values(heads.call("fwd")), observe)
    sizes = [launch.named[name].untyped_storage().nbytes() for name in ("bias_ptr", "mask_ptr")]
    assert sizes == [2 * 3 * 18 * 4, 2 * 3 * 17]


@pytest.mark.parametrize("dtype, low", [(torch.float32, -100.0), (torch.float64, -800.0)])
# The interpreter computes in numpy, which mentions the overflow that a GPU passes over.
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_scores_out_of_range_and_rows_that_see_no_key(dtype, low):
    """The exponential of such a score overflows where it is taken of a key past the end, whose score is 0."""
    mask = torch.ones(1, 2, 5, 18, dtype=torch.bool)
    mask[0, 0, 1], mask[0, 0, 2, :17], mask[0, 1, 3, 1:] = False, False, False
    bias = torch.full((1, 2, 5, 18), low, dtype=dtype)
    bias[0, 1, 2], bias[0, 0, 3, :17] = -INF, -INF
    heads = Attention.draw((1, 2, 5, 8), 18, dtype, bias=bias, bias_dot=random(1, 2, 5, 18, dtype=dtype))
    for operands in (heads, heads.change(mask=mask), heads.change(causal=True)):
        o, lse = check_values(operands.call("fwd"))
        assert (o[lse == -INF] == 0).all()
        # Of such scores the last digits are rounded off, and with them those of all that follows.
        for call in operands.calls("jvp", "double_backward"):
            assert all(result.isfinite().all() for result in call.results())


def test_what_the_scores_of_a_row_share_costs_the_tangent_no_digits():
    """As time does in a model that is modulated by it: p * 100, rounded, has an error of half the result."""
    bias_dot = 100 + 0.5 * random(1, 2, 9, 40, dtype=torch.bfloat16).round()
    bias = torch.zeros(1, 2, 9, 40, dtype=torch.bfloat16)
    heads = Attention.draw((1, 2, 9, 16), 40, torch.bfloat16, bias=bias, bias_dot=bias_dot)
    check_values(heads.change(q_dot=None, k_dot=None, v_dot=None).call("jvp"))
