"""Dropout and Philox kernels: bit for bit what the reference and the definition say."""

import pytest
import torch

from perf.calls import Call, random
from perf.ops.dropout import true_noise, true_words
from primitives.kernels.dropout import dropout
from primitives.kernels.dropout._plan import DropoutPlan
from primitives.kernels.dropout.philox import philox_words
from primitives.ops.dropout.dropout import dropout_p
from primitives.ops.dropout.philox import philox_p
from tests.kernels.calls import far_apart, need_memory
from tests.kernels.truth import check_values

pytestmark = pytest.mark.usefixtures("on_device")

SEED, OFFSET = -(2**45) + 3, 2**34 - 2


def stream():
    """Seed and offset as tensors."""
    return torch.tensor(SEED), torch.tensor(OFFSET)


def check(x, p, seed=None, offset=None, batch_ndim=0):
    """The launcher and the reference agree in every bit and in their strides."""
    seed, offset = stream() if seed is None else (seed, offset)
    expected, y = dropout_p(x, seed, offset, p, batch_ndim), dropout.dropout_fwd(x, seed, offset, p, batch_ndim)
    assert torch.equal(y, expected)
    assert y.stride() == expected.stride()
    return y


# More axes than the kernel has (a copy), attention heads, channels last, rows that begin inside a Philox block.
VIEWS = {
    "a number": lambda **_: random(),
    "contiguous": lambda **dtype: random(3, 5, 7, **dtype),
    "transposed": lambda **dtype: random(6, 4, **dtype).T,
    "sliced": lambda **dtype: random(4, 6, **dtype)[:, ::2],
    "heads": lambda **dtype: random(2, 3, 4, 8, **dtype).transpose(1, 2),
    "channels last": lambda **dtype: random(2, 3, 5, 7, **dtype).permute(0, 3, 1, 2),
    "odd rows": lambda **dtype: random(5, 9, **dtype)[:, :7],
    "expanded": lambda **dtype: random(1, 4, 1, **dtype).expand(3, 4, 5),
    "five axes": lambda **dtype: random(2, 3, 2, 3, 4, **dtype).permute(4, 1, 3, 0, 2),
}


@pytest.mark.parametrize("view", VIEWS)
def test_bits_of_the_reference(view):
    # bfloat16 is truncated in the interpreter, not rounded: the records have it.
    for dtype, p in ((torch.float32, 0.1), (torch.float64, 0.5), (torch.float16, 0.75), (torch.float32, 1.0)):
        check(VIEWS[view](dtype=dtype), p)
    x = VIEWS[view]()
    if x.dim():
        seeds = torch.arange(x.shape[0]) * 2**33 - 1
        for seed, offset in ((seeds, seeds.flip(0)), (seeds, None), (seeds, stream()[1].expand(x.shape[0]))):
            check_values(Call(dropout.dropout_fwd, (x, seed, offset, 0.4, 1)))


@pytest.mark.parametrize("count", [1, 7, 2048, 2049])
def test_words_of_the_definition(count):
    expected = torch.tensor(true_words(SEED, OFFSET, count))
    assert torch.equal(philox_words(*stream(), (count,)), expected)
    assert torch.equal(philox_p(*stream(), (count,)), expected)


def test_several_streams():
    seeds, offsets = torch.tensor([[3, -3], [2**40, 0]]).T, torch.tensor(5).expand(2, 2)
    words = philox_words(seeds, offsets, (3, 5))
    assert torch.equal(words, philox_p(seeds, offsets, (3, 5)))
    assert words[0, 1].flatten().tolist() == true_words(2**40, 5, 15)
    grid = torch.arange(6).reshape(2, 3)
    check(random(3, 2, 4, 6, seed=4).transpose(0, 1), 0.4, grid, grid, 2)


def test_results_do_not_depend_on_the_plan(monkeypatch):
    """Tiles of every shape draw the same numbers."""
    x = random(2, 6, 8, seed=2).permute(1, 0, 2)
    y = check(x, 0.5)
    for rows, cols in ((1, 4), (2, 8), (4, 16)):
        plan = DropoutPlan(rows, cols, 1)
        monkeypatch.setattr(dropout, "plan_dropout", lambda *args, plan=plan: plan)
        assert torch.equal(dropout.dropout_fwd(x, *stream(), 0.5, 0), y)


def test_threshold_and_scale_are_exact():
    """Of the words that are drawn, exactly those below p * 2**32 drop their elements; the scale has all 53 bits."""
    words = sorted(true_words(7, 0, 40))
    x = torch.ones(40, dtype=torch.float64)
    for number, p in [(i, words[i] / 2**32) for i in (0, 1, 20, 39)]:
        for function in (dropout.dropout_fwd, dropout_p):
            y = function(x, torch.tensor(7), None, p, 0)
            assert (y == 0).sum() == number
            assert set(y.tolist()) <= {0.0, 1 / (1 - p)}
    assert (dropout.dropout_fwd(x, torch.tensor(7), None, (words[20] + 1) / 2**32, 0) == 0).sum() == 21


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_not_finite_is_multiplied_as_in_torch():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -1.0]).repeat(8)
    seed, _ = stream()
    y, expected = dropout.dropout_fwd(x, seed, None, 0.5, 0), dropout_p(x, seed, None, 0.5, 0)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    assert y[3::4].signbit().all()


def test_offsets_carry_into_the_high_word():
    """Elements on either side of block 2**32 are those of one stream."""
    x, start = torch.ones(64, dtype=torch.float64), 2**32 - 8
    y = dropout.dropout_fwd(x, stream()[0], torch.tensor(start), 0.5, 0)
    assert torch.equal(y, true_noise((64,), SEED, start, 0.5))


@pytest.mark.usefixtures("only_the_last_programs")
@pytest.mark.parametrize("num_samples", [1, 4])
def test_elements_past_31_bits_have_numbers_of_their_own(num_samples, poisoned_memory):
    """The end of 2**31 + 64 elements of each sample, of which only the last pages exist."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    count, tail = 2**31 + 64, 64
    need_memory((num_samples + 1) * count * 2)
    x = torch.empty((num_samples - 1) * 8 + count, dtype=torch.float16).as_strided((num_samples, count), (8, 1))
    x[-1, -tail:] = 1.0
    seeds = torch.arange(num_samples) + 5
    y = (
        dropout.dropout_fwd(x, seeds, None, 0.5, 1)
        if num_samples > 1
        else dropout.dropout_fwd(x[0], seeds[0], None, 0.5, 0)[None]
    )
    expected = true_noise((tail,), seeds[-1].item(), (count - tail) // 4, 0.5)
    assert torch.equal(y[-1, -tail:], expected.half())


@pytest.mark.parametrize("strides", [(2**30, 1), (1, 2**30)])
def test_rows_further_apart_than_31_bits_count(strides):
    check(far_apart(random(3, 3, dtype=torch.float16), strides), 0.3)
