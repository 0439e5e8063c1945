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
def shuffled_programs(seed: int) -> Iterator[list[int]]:
    """Inside, the interpreter visits the programs of every launch in an order of its own; yields the sizes of grids."""
    builder = interpreter.interpreter_builder
    draw = python_random.Random(seed)
    sizes: list[int] = []
    order: list[int] = []

    def set_grid_dim(*dims: int) -> None:
        type(builder).set_grid_dim(builder, *dims)
        sizes.append(math.prod(dims))
        order[:] = draw.sample(range(sizes[-1]), sizes[-1])

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


def check(call: Call) -> None:
    """Run a call as it is, again, and in a shuffled order; scratch and outputs begin as NaN each time."""
    name = call.launcher.__name__
    first = call.run()
    assert_same(first, call.run(), f"{name} differs from run to run")
    with shuffled_programs(seed=1) as sizes:
        again = call.run()
    assert sizes or not first
    assert_same(first, again, f"{name} depends on the order of its programs")


def assert_same(first: list[Tensor], again: list[Tensor], complaint: str) -> None:
    for one, other in zip(first, again, strict=True):
        # As integers: NaN differs from itself.
        same = torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
        assert same, complaint
        assert not one.isnan().any(), f"{complaint}, or leaves NaN in a result"


# Rows of several blocks, of sums that do not fit, and of sweeps by one program or several.
@pytest.mark.parametrize("mode", LAYER_NORM)
@pytest.mark.parametrize("splits", [0, 1, 32], ids=["in registers", "one program per row", "several programs per row"])
def test_layer_norm(mode: str, splits: int, use_limits: Callable[..., None]) -> None:
    if splits:
        use_limits(**short_rows(64, splits))
    check(layer_norm_call(mode, 150 if splits else 40, torch.float32, 2 if splits else 50))


@pytest.mark.parametrize("layout", CHANNEL_LAYOUTS)
def test_batch_norm(layout: str, use_limits: Callable[..., None]) -> None:
    # Several programs share a channel.
    use_limits(channel_tile_bytes=2048 if layout == "features" else 4096)
    for call in batch_norm_calls(layout, samples=200 if layout == "features" else 1)[::3]:
        check(call)


@pytest.mark.parametrize("splits", [0, 1, 32], ids=["in registers", "one program per row", "several programs per row"])
@pytest.mark.parametrize("shape, dim", [((2, 150), 1), ((40, 3), 0)], ids=str)
def test_log_softmax(shape: tuple[int, int], dim: int, splits: int, use_limits: Callable[..., None]) -> None:
    if splits:
        use_limits(**short_rows(64, splits))
    for call in log_softmax_calls(shape, dim)[::4]:
        check(call)


def test_dropout() -> None:
    for call in dropout_calls():
        check(call)


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
    with pytest.raises(AssertionError, match=complaint):
        check(Call(launcher, (random(20, 50),)))


def test_shuffling_visits_every_program_once() -> None:
    builder = interpreter.interpreter_builder
    with shuffled_programs(0) as sizes:
        builder.set_grid_dim(2, 3, 4)
        visited = []
        for x, y, z in ((x, y, z) for x in range(2) for y in range(3) for z in range(4)):
            builder.set_grid_idx(x, y, z)
            visited.append(builder.grid_idx)
    assert sizes == [24]
    assert visited != sorted(visited)
    assert len(set(visited)) == 24
    assert "set_grid_idx" not in vars(builder)
