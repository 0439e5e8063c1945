"""The gates of `test_every_launcher` let nothing through: one fault for each thing that they hold."""

# Compile-time constants are upper case, as in the kernels of the package.
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from perf.calls import Call, random
from perf.ops.attention import Attention
from perf.ops.layer_norm import LayerNorm
from tests.kernels import truth
from tests.kernels.checking import check, check_order
from tests.kernels.interpreting import OutOfBoundsError
from tests.kernels.truth import Exact
from triton_kernels import costs
from triton_kernels.attention import _first_kernels, _tiles
from triton_kernels.costs import Cost
from triton_kernels.rows import kernel as rows
from triton_kernels.rows import tiles
from triton_kernels.runtime.kernel import Kernel

NUM_ROWS, NUM_COLS = 6, 1000
NUM_BYTES = NUM_ROWS * NUM_COLS * 4


def _center_rows(
    x_ptr,
    y_ptr,
    num_cols,
    shift,
    SCALE: tl.constexpr,
    READS: tl.constexpr,
    STORES: tl.constexpr,
    LANES: tl.constexpr,
    APART: tl.constexpr,
    ATOMIC: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    """`x - mean(x)` of a row per program, with as many mistakes as its flags ask for."""
    row, cols = tl.program_id(0) * num_cols, tl.arange(0, BLOCK_COLS)
    mask = cols < num_cols
    for _ in tl.static_range(READS):
        # As a mask that was forgotten: the lanes past the end are read, and thrown away.
        x = tl.where(mask, tl.load(x_ptr + row + cols, mask=cols < LANES, other=0.0), 0.0)
    y = (x - tl.sum(x, axis=0) / num_cols) * SCALE
    for _ in tl.static_range(STORES):
        tl.store(y_ptr + row * APART + shift + cols, y, mask=mask)
    if ATOMIC:
        tl.atomic_add(y_ptr + cols, y, mask=mask)


_center_kernel = Kernel(_center_rows)


def center(x: Tensor, y: Tensor | None = None, launches: int = 1, **flags: Any) -> Tensor:
    y = torch.empty_like(x) if y is None else y
    flags = {"SCALE": 1, "READS": 1, "STORES": 1, "LANES": NUM_COLS, "APART": 1, "ATOMIC": False, **flags}
    # Scratch is only held.
    shift, _ = flags.pop("shift", 0), flags.pop("scratch", None)
    for _ in range(launches):
        _center_kernel[(len(x),)](x, y, NUM_COLS, shift, BLOCK_COLS=1024, **flags)
    return y


# An act of a launcher, and the complaint; none where it does what it declares.
LAUNCHERS: dict[str, tuple[Callable[[Tensor], Tensor], str | None]] = {
    "nothing wrong": (center, None),
    "another value": (lambda x: center(x, SCALE=42), "result 0 .* is off by"),
    "a load without a mask": (lambda x: center(x, LANES=1024), "loads outside of x_ptr: .* to 6023"),
    "a store past the end": (lambda x: center(x, shift=1), "stores outside of y_ptr"),
    "an operand read twice": (lambda x: center(x, READS=2), "loads 48000 bytes of x, 24000 declared"),
    "a result written twice": (lambda x: center(x, STORES=2), "writes a result twice"),
    "a result left out": (lambda x: center(x, STORES=0), "writes 0"),
    "an atomic operation": (lambda x: center(x, ATOMIC=True), "reads|writes|moves"),
    "one launch too many": (lambda x: center(x, launches=2), "1 launches are declared"),
    "a pass over a result": (lambda x: center(x).mul_(1.0), "runs mul_ beside"),
    "a copy of a result": (lambda x: center(x).clone(), "1 copies, 0 declared"),
    "a second scratch tensor": (
        lambda x: center(x, scratch=[x.new_empty(2, 8), x.new_empty(3)]),
        r"2 scratch tensors, \[\(2, 8\), \(3,\)\], beside its results",
    ),
}


def centered(x: Tensor) -> list[Exact]:
    return [Exact(x.double() - x.double().mean(1, keepdim=True), x.dtype)]


@pytest.mark.parametrize("launcher, complaint", LAUNCHERS.values(), ids=LAUNCHERS)
def test_faults_are_caught(launcher, complaint, monkeypatch):
    def launch(x: Tensor) -> Tensor:
        return launcher(x)

    cost = Cost(NUM_BYTES, NUM_BYTES, 2 * NUM_BYTES, 0, 1, loads=(("x", NUM_BYTES),))
    monkeypatch.setattr(costs, "cost_of", lambda launcher, x: cost)
    monkeypatch.setattr(truth, "expected", lambda call: centered(*call.args))
    call = Call(launch, (random(NUM_ROWS, NUM_COLS),))
    if complaint is None:
        check(call)
        return
    with pytest.raises(AssertionError, match=complaint):
        check(call)


@triton.jit
def _one_product_more(q, k, bias, KEYS_FIRST: tl.constexpr, SCALE: tl.constexpr, DTYPE: tl.constexpr):
    again = _tiles.scores_of(q, k, bias, KEYS_FIRST, SCALE, DTYPE)
    return _tiles.scores_of(q, k, bias, KEYS_FIRST, SCALE, DTYPE) + 0.0 * again


@triton.jit
def _products_with_what_is_absent(
    q, q_dot, k, k_dot, bias_dot, KEYS_FIRST: tl.constexpr, SCALE: tl.constexpr, DTYPE: tl.constexpr
):
    k_dot = 0.0 * k if k_dot is None else k_dot
    return _tiles.scores_dot_of(q, q_dot, k, k_dot, bias_dot, KEYS_FIRST, SCALE, DTYPE)


@triton.jit
def _all_keys(start_row, num_keys, BLOCK_ROWS: tl.constexpr, CAUSAL: tl.constexpr):
    return num_keys


@pytest.mark.parametrize(
    "name, fault, complaint",
    [
        ("scores_of", _one_product_more, "multiplies 9 tiles, 6 declared"),
        ("scores_dot_of", _products_with_what_is_absent, "multiplies 12 tiles, 9 declared"),
        ("last_key", _all_keys, "multiplies 8 tiles, 6 declared"),
    ],
)
def test_products_of_matrices_that_nobody_asks_for_are_caught(name, fault, complaint, monkeypatch, use_limits):
    # Three tiles of four see something.
    use_limits(attention_tile=16)
    operands = Attention.draw((1, 1, 32, 16), 32, causal=True).change(k_dot=None, v_dot=None)
    call = operands.call("jvp" if name == "scores_dot_of" else "fwd")
    check(call)
    monkeypatch.setattr(_first_kernels, name, fault)
    with pytest.raises(AssertionError, match=complaint):
        check(call)


@triton.jit
def _params_of_each_row(
    ptrs, strides, segment, cols, col_mask, READS: tl.constexpr, DTYPE: tl.constexpr, ALIGN: tl.constexpr, *rest
):
    each = tl.broadcast_to(col_mask, (8, cols.shape[0]))
    return tiles.load_params(ptrs, strides, segment, cols, each, READS, DTYPE, ALIGN, *rest)


def test_parameters_that_are_loaded_for_each_row_of_a_program_are_caught(monkeypatch):
    call = LayerNorm.draw((8, 200)).call("fwd")
    check(call)
    monkeypatch.setattr(rows, "load_params", _params_of_each_row)
    with pytest.raises(AssertionError, match="moves 25664 bytes, 14464 declared"):
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
