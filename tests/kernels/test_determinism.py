"""Results are bitwise the same in every run and in every order in which a GPU may run the programs of a launch."""

# Compile-time constants are upper case, as in the kernels of the package.
# ruff: noqa: N803

from __future__ import annotations

import contextlib
import math
import random as python_random
from typing import TYPE_CHECKING

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.calls import (
    CHANNEL_LAYOUTS,
    LAYER_NORM,
    REDUCED_LAYOUTS,
    ROW_LAYOUTS,
    STRIDED_CHANNELS,
    Call,
    batch_norm_calls,
    dropout_calls,
    layer_norm_call,
    log_softmax_calls,
    short_rows,
)
from tests.kernels.layer_norm_truth import random

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


@contextlib.contextmanager
def reordered_programs(reorder: Callable[[int], list[int]]) -> Iterator[list[int]]:
    """Inside, the interpreter visits the programs of every launch in another order; yields the sizes of grids.

    Args:
        reorder: From a number of programs to their numbers, in the order in which they are visited.
    """
    builder = interpreter.interpreter_builder
    sizes: list[int] = []
    order: list[int] = []

    def set_grid_dim(*dims: int) -> None:
        type(builder).set_grid_dim(builder, *dims)
        sizes.append(math.prod(dims))
        order[:] = reorder(sizes[-1])

    def set_grid_idx(x: int, y: int, z: int) -> None:
        _, height, depth = builder.grid_dim
        program = order[(x * height + y) * depth + z]
        type(builder).set_grid_idx(builder, program // (height * depth), program // depth % height, program % depth)

    # Attributes of the one instance, in front of the methods of its class.
    builder.set_grid_dim, builder.set_grid_idx = set_grid_dim, set_grid_idx
    try:
        yield sizes
    finally:
        del builder.set_grid_dim, builder.set_grid_idx


def backwards(count: int) -> list[int]:
    return list(range(count))[::-1]


def shuffled(seed: int) -> Callable[[int], list[int]]:
    draw = python_random.Random(seed)
    return lambda count: draw.sample(range(count), count)


def check(call: Call, seeds: tuple[int, ...] = (1, 2)) -> list[int]:
    """Run a call as it is, backwards and in shuffled orders; scratch and outputs begin as NaN each time.

    Returns the sizes of its grids.
    """
    name = call.launcher.__name__
    first = call.run()
    complaint = f"{name} leaves NaN in a result"
    assert not any(result.isnan().any() for result in first), complaint
    launched: list[int] = []
    for reorder in (backwards, *map(shuffled, seeds)):
        with reordered_programs(reorder) as sizes:
            again = call.run()
        assert sizes or not first
        if not same_bits(first, again):
            # What also differs in the same order does so from run to run.
            repeats = same_bits(first, call.run())
            pytest.fail(f"{name} {'depends on the order of its programs' if repeats else 'differs from run to run'}")
        launched += sizes
    return launched


def same_bits(first: list[Tensor], again: list[Tensor]) -> bool:
    # As integers: NaN differs from itself.
    return all(
        torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
        for one, other in zip(first, again, strict=True)
    )


# Every layout and plan meets float32 or bfloat16, and the modes and calls of it both in turns.
DTYPES = (torch.float32, torch.bfloat16)
SPLITS = pytest.mark.parametrize(
    "splits", [0, 1, 32], ids=["in registers", "one program per row", "several programs per row"]
)


# Rows of several blocks, of sums that do not fit, and of sweeps by one program or several.
@pytest.mark.parametrize("mode", LAYER_NORM)
@SPLITS
def test_layer_norm(mode: str, splits: int, use_limits: Callable[..., None]) -> None:
    if splits:
        use_limits(**short_rows(32, splits))
    turn = LAYER_NORM.index(mode) + (splits == 1)
    dtype = DTYPES[turn % 2]
    sizes = check(layer_norm_call(mode, 75 if splits else 20, dtype, 2 if splits else 50), seeds=(turn,))
    # Each mode and each plan meets one of the others.
    sizes += check(layer_norm_call(mode, 40, dtype, 1 if splits else 30, ROW_LAYOUTS[1 + turn % 3]), seeds=(turn,))
    assert max(sizes) >= 2


TILE_BYTES = {"channels first": 2048, "channels last": 4096, "features": 4096}


@pytest.mark.parametrize("layout", CHANNEL_LAYOUTS)
@pytest.mark.parametrize("turn", [0, 1])
def test_batch_norm(
    layout: str, turn: int, use_limits: Callable[..., None], use_processors: Callable[[int], None]
) -> None:
    # Several programs share a channel, and no more than it takes.
    use_processors(1)
    use_limits(channel_tile_bytes=TILE_BYTES[layout], channel_transform_programs=4)
    samples = 150 if layout == "features" else 1
    sizes = []
    for number, call in enumerate(batch_norm_calls(layout, samples, DTYPES[turn])):
        if number % 2 == turn:
            sizes += check(call, seeds=(number,))
    assert max(sizes) >= 4


@pytest.mark.parametrize("layout", STRIDED_CHANNELS)
def test_batch_norm_of_groups_and_strides(
    layout: str, use_limits: Callable[..., None], use_processors: Callable[[int], None]
) -> None:
    use_processors(1)
    use_limits(channel_tile_bytes=4096, channel_transform_programs=4)
    turn = list(STRIDED_CHANNELS).index(layout)
    sizes = []
    for number, call in enumerate(batch_norm_calls(layout, None, DTYPES[turn % 2])):
        if number % 3 == turn:
            sizes += check(call, seeds=(number,))
    assert max(sizes) >= 4


# Rows whose columns are adjacent, and two segments of rows that are adjacent themselves.
@SPLITS
@pytest.mark.parametrize("shape, dim", [((2, 75), 1), ((2, 12, 3), 1)], ids=str)
def test_log_softmax(shape: tuple[int, int], dim: int, splits: int, use_limits: Callable[..., None]) -> None:
    if splits:
        use_limits(**short_rows(32, splits))
    calls = [log_softmax_calls(shape, dim, dtype) for dtype in DTYPES]
    # Half of them here and the other half with the other dim or plan, in both dtypes.
    for number in range((len(shape) + (splits == 1)) % 2, len(calls[0]), 2):
        check(calls[number // 2 % 2][number], seeds=(number,))


# A third of the calls meets each plan.
@SPLITS
@pytest.mark.parametrize("layout", REDUCED_LAYOUTS[1:])
def test_log_softmax_of_strides(layout: str, splits: int, use_limits: Callable[..., None]) -> None:
    if splits:
        use_limits(**short_rows(64, splits))
    turn = (REDUCED_LAYOUTS.index(layout) + splits) % 3
    for number, call in enumerate(log_softmax_calls((2, 75), 1, DTYPES[turn % 2], layout)):
        if number % 3 == turn:
            check(call, seeds=(number,))


def test_dropout() -> None:
    for number, (narrow, wide) in enumerate(zip(dropout_calls(torch.bfloat16), dropout_calls(), strict=True)):
        check(wide if number % 2 else narrow, seeds=(number,))


# What must be caught.


@triton.jit
def _racing_kernel(x_ptr, out_ptr, num_cols, BLOCK_COLS: tl.constexpr):
    """Add a row to the output without anybody's leave: the order of the additions is that of the programs."""
    cols = tl.arange(0, BLOCK_COLS)
    mask = cols < num_cols
    row = tl.load(x_ptr + tl.program_id(0) * num_cols + cols, mask=mask)
    tl.store(out_ptr + cols, tl.load(out_ptr + cols, mask=mask) + row, mask=mask)


@triton.jit
def _overwriting_kernel(x_ptr, out_ptr, num_cols, BLOCK_COLS: tl.constexpr):
    """Store a row where every other program stores its own."""
    cols = tl.arange(0, BLOCK_COLS)
    row = tl.load(x_ptr + tl.program_id(1) * num_cols + cols, mask=cols < num_cols)
    tl.store(out_ptr + cols, row, mask=cols < num_cols)


def _column_sums(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[1])
    _racing_kernel[(len(x),)](x, out, x.shape[1], BLOCK_COLS=64)
    return out


def _last_row(x: Tensor) -> Tensor:
    out = torch.empty(x.shape[1])
    _overwriting_kernel[(1, len(x))](x, out, x.shape[1], BLOCK_COLS=64)
    return out


def _partly_written(x: Tensor) -> Tensor:
    out = torch.empty(x.shape[1] + 1)
    _overwriting_kernel[(1, 1)](x, out, x.shape[1], BLOCK_COLS=64)
    return out


@pytest.mark.parametrize(
    "launcher, complaint",
    [
        (_column_sums, "depends on the order"),
        (_last_row, "depends on the order"),
        (_partly_written, "NaN in a result"),
    ],
)
def test_races_are_caught(launcher: Callable[[Tensor], Tensor], complaint: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception), match=complaint):
        check(Call(launcher, (random(20, 50),)))


@pytest.mark.parametrize("reorder", [backwards, shuffled(0)], ids=["backwards", "shuffled"])
def test_every_program_is_visited_once(reorder: Callable[[int], list[int]]) -> None:
    builder = interpreter.interpreter_builder
    with reordered_programs(reorder) as sizes:
        builder.set_grid_dim(2, 3, 4)
        visited = []
        for x, y, z in ((x, y, z) for x in range(2) for y in range(3) for z in range(4)):
            builder.set_grid_idx(x, y, z)
            visited.append(builder.grid_idx)
    assert sizes == [24]
    assert visited != sorted(visited)
    assert len(set(visited)) == 24
    assert "set_grid_idx" not in vars(builder)
