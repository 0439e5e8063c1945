"""The gates of `test_every_launcher` let nothing through: one fault for each thing that they hold."""

# Compile-time constants are upper case, as in the kernels of the package.
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from perf.calls import Call, random
from primitives.kernels.runtime.kernel import Kernel
from tests.kernels import truth
from tests.kernels.checking import check, check_order
from tests.kernels.interpreting import OutOfBoundsError
from tests.kernels.truth import Exact

NUM_ROWS, NUM_COLS = 6, 1000


def _center_rows(
    x_ptr,
    y_ptr,
    num_cols,
    shift,
    SCALE: tl.constexpr,
    STORES: tl.constexpr,
    LANES: tl.constexpr,
    APART: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """`x - mean(x)` of a row per program, with as many mistakes as its flags ask for."""
    row, cols = tl.program_id(0) * num_cols, tl.arange(0, BLOCK_COLS)
    mask = cols < num_cols
    # As a mask that was forgotten: the lanes past the end are read, and thrown away.
    x = tl.where(mask, tl.load(x_ptr + row + cols, mask=cols < LANES, other=0.0), 0.0)
    y = (x - tl.sum(x, axis=0) / num_cols) * SCALE
    if STORES:
        tl.store(y_ptr + row * APART + shift + cols, y, mask=mask)


_center_kernel = Kernel(_center_rows)


def center(x: Tensor, y: Tensor | None = None, shift: int = 0, **flags: Any) -> Tensor:
    y = torch.empty_like(x) if y is None else y
    flags = {"SCALE": 1, "STORES": True, "LANES": NUM_COLS, "APART": 1, **flags}
    _center_kernel[(len(x),)](x, y, NUM_COLS, shift, BLOCK_COLS=1024, **flags)
    return y


# An act of a launcher, and the complaint; none where it is right.
LAUNCHERS: dict[str, tuple[Callable[[Tensor], Tensor], str | None]] = {
    "nothing wrong": (center, None),
    "another value": (lambda x: center(x, SCALE=42), "result 0 .* is off by"),
    "a load without a mask": (lambda x: center(x, LANES=1024), "loads outside of x_ptr: .* to 6023"),
    "a store past the end": (lambda x: center(x, shift=1), "stores outside of y_ptr"),
    "a result left out": (lambda x: center(x, STORES=False), "result 0"),
}


def centered(x: Tensor) -> list[Exact]:
    return [Exact(x.double() - x.double().mean(1, keepdim=True), x.dtype)]


@pytest.mark.parametrize("launcher, complaint", LAUNCHERS.values(), ids=LAUNCHERS)
def test_faults_are_caught(launcher, complaint, monkeypatch):
    def launch(x: Tensor) -> Tensor:
        return launcher(x)

    monkeypatch.setattr(truth, "expected", lambda call: centered(*call.args))
    call = Call(launch, (random(NUM_ROWS, NUM_COLS),))
    if complaint is None:
        check(call)
        return
    with pytest.raises(AssertionError, match=complaint):
        check(call)


def test_a_race_is_caught():
    call = Call(lambda x: center(x, torch.empty(NUM_COLS), APART=0), (random(NUM_ROWS, NUM_COLS),))
    with pytest.raises(AssertionError, match="depends on the order"):
        check_order(call, call.results())


def test_neighbors_of_a_view_are_out_of_bounds():
    """Elements of a view are within bounds, the gaps between them and what lies before and behind them are not."""
    whole = random(NUM_ROWS, NUM_COLS)
    for y, shift in ((whole[:, ::2], 1), (whole[2:], -1), (whole[:2], 2 * NUM_COLS)):
        with pytest.raises(OutOfBoundsError, match="stores outside of y_ptr"):
            center(random(1, NUM_COLS), y, shift=shift)
