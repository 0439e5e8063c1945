"""Attention: widths, layouts, numbers out of range, and how many products of matrices its launchers take.

`test_every_launcher`, `test_operands` and `test_numbers` hold its launchers to what they hold all others to.
"""

import math
from collections.abc import Callable

import pytest
import torch

from perf.calls import Call, random
from perf.ops.attention import Attention
from primitives.kernels.attention.attention import attention_fwd
from primitives.kernels.runtime.kernel import INTERPRETED, observe
from tests.kernels.calls import launched_by
from tests.kernels.interpreting import watched
from tests.kernels.truth import check, check_values

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


def fused(dtype: torch.dtype) -> Attention:
    """Queries, keys and values with others between them, as one projection makes them."""
    names = ("q", "k", "v", "q_dot", "k_dot", "v_dot")
    parts = [random(1, 18, 3, 1, 12, dtype=dtype, seed=n)[:, :, n % 3].transpose(1, 2) for n in range(len(names))]
    return Attention.draw((1, 1, 18, 12), 18, dtype).change(**dict(zip(names, parts, strict=True)))


def broadcast(dtype: torch.dtype) -> Attention:
    """A bias of each key, masked pairs that are those of every head, and dropped ones by the seeds of two samples."""
    noise = {"seed": torch.tensor([3, 5]), "offset": torch.tensor([0, 7]), "dropout_p": 0.3}
    bias, bias_dot = (random(1, 2, 1, 18, dtype=dtype, seed=seed) for seed in range(2))
    mask = random(2, 1, 9, 18) > 0
    return Attention.draw((2, 2, 9, 12), 18, dtype, bias=bias, bias_dot=bias_dot, mask=mask, **noise)


@pytest.mark.parametrize("make", [fused, broadcast])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention(make, dtype):
    """Several blocks of rows and of keys, the last of each partial, and widths that fill none."""
    for call in make(dtype).calls():
        check(call)


@pytest.mark.parametrize("mode", ["jvp", "bwd", "double_backward"])
def test_attention_with_any_operands_absent(mode):
    """All that there can be, of which some is there; the first row sees no key."""
    bias, bias_dot = (random(1, 2, 3, 5, seed=seed) for seed in range(2))
    mask = ((torch.arange(3)[:, None] + torch.arange(5)) % 3 < torch.arange(3)[:, None].clamp(max=2))[None, None]
    noise = {"seed": torch.tensor([3]), "offset": torch.tensor([7]), "dropout_p": 0.3}
    rows = Attention.draw((1, 2, 3, 4), 5, key_heads=1, value_width=6, bias=bias, bias_dot=bias_dot, mask=mask, **noise)
    for call in rows.change(o_dot=rows.o_bar, lse_dot=rows.lse_bar).choices(mode):
        check(call)


# How many products of matrices a tile takes in each mode: what is absent, or not wanted, takes none.
OF_RESULTS, NO_BARS = (True, True, True, False), (False,) * 4
MATMULS: dict[str, tuple[int, str, tuple[bool, ...] | None, tuple[str, ...]]] = {
    "forward": (2, "fwd", None, ()),
    "jvp": (5, "jvp", None, ()),
    "jvp along the values": (2, "jvp", None, ("q_dot", "k_dot")),
    "jvp along the queries": (3, "jvp", None, ("k_dot", "v_dot")),
    "backward": (7, "bwd", OF_RESULTS, ()),
    "backward to the queries": (3, "bwd", (True, False, False, False), ()),
    "backward of lse": (4, "bwd", OF_RESULTS, ("o_bar",)),
    "backward of o and o_dot": (21, "double_backward", (False, False, *OF_RESULTS, *OF_RESULTS), ()),
    "double backward": (20, "double_backward", (True, False, *OF_RESULTS, *NO_BARS), ("o_bar_dot", "o_dot", "lse_dot")),
    "forward over reverse": (23, "double_backward", (False, False, *OF_RESULTS, *NO_BARS), ("o_dot", "lse_dot")),
    "forward over reverse with o_dot": (18, "double_backward", (False, False, *OF_RESULTS, *NO_BARS), ()),
    "forward over reverse along the queries": (
        *(13, "double_backward", (False, False, *OF_RESULTS, *NO_BARS)),
        ("k_dot", "v_dot", "o_bar_dot", "o_dot", "lse_dot"),
    ),
}


def check_matmuls(call: Call, number: int) -> None:
    """Hold a call to its values, and to the products of matrices that its kernels take: the interpreter counts them."""
    with watched() as launches:
        check(call)
    assert not INTERPRETED or sum(one.num_matmuls for one in launches) == number


@pytest.mark.parametrize("mode", MATMULS)
def test_products_of_matrices_of_a_tile(mode):
    number, launcher, output_mask, absent = MATMULS[mode]
    tile = Attention.draw((1, 1, 16, 16), 16)
    given = {"o_dot": tile.o_bar, "lse_dot": tile.lse_bar, **dict.fromkeys(absent)}
    call = tile.change(**given).call(launcher, output_mask)
    check_matmuls(call, number)


@pytest.mark.parametrize("sizes", [(32, 32), (37, 18), (18, 37), (1, 40), (40, 1)], ids=str)
def test_tiles_of_a_causal_problem_that_see_nothing_are_passed_over(sizes):
    num_rows, num_keys = sizes
    # Rows past the end see as many keys as if they were there.
    seen = torch.ones(-(-num_rows // 16) * 16, num_keys, dtype=torch.bool).tril()
    tiles = sum(int(part.any()) for rows in seen.split(16) for part in rows.split(16, 1))
    operands = Attention.draw((1, 1, num_rows, 16), num_keys, causal=True)
    check_matmuls(operands.call("fwd"), MATMULS["forward"][0] * tiles)
    check_matmuls(operands.call("bwd", OF_RESULTS), MATMULS["backward"][0] * tiles)
