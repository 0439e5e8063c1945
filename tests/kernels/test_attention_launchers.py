"""Launchers of attention, as `test_every_launcher` has all others, and how many products of matrices they take."""

import pytest
import torch

from perf.calls import Call, random
from perf.ops.attention import Attention
from primitives.kernels.runtime.kernel import INTERPRETED
from tests.kernels.checking import check
from tests.kernels.interpreting import watched

pytestmark = pytest.mark.usefixtures("on_device")


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
def test_attention(make, dtype, use_limits):
    """Several blocks of rows and of keys, the last of each partial, and widths that fill none."""
    use_limits(attention_tile=16)
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
def test_tiles_of_a_causal_problem_that_see_nothing_are_passed_over(sizes, use_limits):
    use_limits(attention_tile=16)
    num_rows, num_keys = sizes
    # Rows past the end see as many keys as if they were there.
    seen = torch.ones(-(-num_rows // 16) * 16, num_keys, dtype=torch.bool).tril()
    tiles = sum(int(part.any()) for rows in seen.split(16) for part in rows.split(16, 1))
    operands = Attention.draw((1, 1, num_rows, 16), num_keys, causal=True)
    check_matmuls(operands.call("fwd"), MATMULS["forward"][0] * tiles)
    check_matmuls(operands.call("bwd", OF_RESULTS), MATMULS["backward"][0] * tiles)
