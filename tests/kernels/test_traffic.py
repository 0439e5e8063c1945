"""The meter of global memory traffic and the bounds of arguments, and what the gates built on them must reject."""

# Compile-time constants are upper case, as in the kernels of the package.
# ruff: noqa: N803

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.bounds import OutOfBoundsError, bounds_checked
from tests.kernels.layer_norm_truth import random
from tests.kernels.traffic import Traffic, check_cost, measure_traffic
from triton_kernels.costs import Cost

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@triton.jit
def _touch_kernel(x_ptr, y_ptr, num_cols, BLOCK_COLS: tl.constexpr):
    cols = tl.arange(0, BLOCK_COLS)
    x = tl.load(x_ptr + cols, mask=cols < num_cols, other=0.0)
    x += tl.load(x_ptr)
    tl.store(y_ptr + cols, x, mask=cols < num_cols)


@triton.jit
def _descriptor_kernel(x_ptr, y_ptr, num_cols, BLOCK_COLS: tl.constexpr):
    x_desc = tl.make_tensor_descriptor(x_ptr, [num_cols], [1], [BLOCK_COLS])
    y_desc = tl.make_tensor_descriptor(y_ptr, [num_cols], [1], [BLOCK_COLS])
    y_desc.store([0], x_desc.load([0]))


@triton.jit
def _atomic_kernel(x_ptr, num_cols, BLOCK_COLS: tl.constexpr):
    cols = tl.arange(0, BLOCK_COLS)
    tl.atomic_add(x_ptr + cols, 1.0, mask=cols < num_cols)


def test_meter_counts_active_lanes() -> None:
    x, y = torch.zeros(10), torch.zeros(10)
    with measure_traffic() as traffic:
        _touch_kernel[(1,)](x, y, 10, BLOCK_COLS=16)
        _touch_kernel[(2,)](x, y, 4, BLOCK_COLS=16)
    assert traffic.num_launches == 2
    # The second launch has two programs; each program reads the first element twice.
    assert traffic.loaded(x) == (4 * (11 + 2 * 5), 4 * 10)
    assert traffic.stored(y) == (4 * (10 + 2 * 4), 4 * 10)
    assert traffic.stored(x) == traffic.loaded(y) == (0, 0)
    assert traffic.moved() == traffic.moved(x, y)


def test_meter_counts_descriptors_and_atomics() -> None:
    x, y = torch.ones(8, dtype=torch.float32), torch.zeros(8)
    with measure_traffic() as traffic:
        _descriptor_kernel[(1,)](x, y, 8, BLOCK_COLS=16)
    assert torch.equal(x, y)
    assert traffic.loaded(x).total == traffic.stored(y).total == 32
    with measure_traffic() as traffic:
        _atomic_kernel[(1,)](x, 6, BLOCK_COLS=8)
    assert traffic.loaded(x).total == traffic.stored(x).total == 24


def test_meter_restores_the_interpreter() -> None:
    x = torch.zeros(4)
    with measure_traffic() as traffic:
        pass
    _touch_kernel[(1,)](x, x.clone(), 4, BLOCK_COLS=4)
    assert traffic.num_launches == 0


# What the gate must not let through: the same result by more traffic than it takes.


@triton.jit
def _center_kernel(x_ptr, y_ptr, num_cols, READS: tl.constexpr, STORES: tl.constexpr, BLOCK_COLS: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK_COLS)
    mask = cols < num_cols
    x = tl.load(x_ptr + row * num_cols + cols, mask=mask, other=0.0)
    mean = tl.sum(x, axis=0) / num_cols
    for _ in tl.static_range(READS - 1):
        x = tl.load(x_ptr + row * num_cols + cols, mask=mask, other=0.0)
    for _ in tl.static_range(STORES):
        tl.store(y_ptr + row * num_cols + cols, x - mean, mask=mask)


def center(x: Tensor, reads: int = 1, stores: int = 1, launches: int = 1) -> tuple[Traffic, Tensor]:
    y = torch.empty_like(x)
    with measure_traffic() as traffic:
        for part in range(launches):
            rows = slice(part * len(x) // launches, (part + 1) * len(x) // launches)
            grid = (rows.stop - rows.start,)
            _center_kernel[grid](x[rows], y[rows], x.shape[1], READS=reads, STORES=stores, BLOCK_COLS=1024)
    return traffic, y


CENTER_COST = Cost(bytes_read=24000, bytes_written=24000, bytes_moved=48000, bytes_reread=0, launches=1)


def test_gate_accepts_what_is_declared() -> None:
    x = random(6, 1000)
    traffic, y = center(x)
    check_cost(traffic, CENTER_COST, [x], [y])


@pytest.mark.parametrize(
    "waste, complaint",
    [({"reads": 2}, "bytes are moved"), ({"stores": 2}, "written twice"), ({"launches": 2}, "2 launches")],
    ids=str,
)
def test_gate_rejects_waste(waste: dict[str, int], complaint: str) -> None:
    x = random(6, 1000)
    traffic, y = center(x, **waste)
    with pytest.raises(AssertionError, match=complaint):
        check_cost(traffic, CENTER_COST, [x], [y])


def test_gate_rejects_an_operand_that_is_not_declared() -> None:
    x, other = random(6, 1000), random(1000)
    with measure_traffic() as traffic:
        y = torch.empty_like(x)
        _center_kernel[(6,)](x, y, 1000, READS=1, STORES=1, BLOCK_COLS=1024)
        _touch_kernel[(1,)](other, other, 1000, BLOCK_COLS=1024)
    with pytest.raises(AssertionError, match="bytes of operands"):
        check_cost(traffic, dataclasses.replace(CENTER_COST, launches=2), [x, other], [y])


# Accesses outside of the arguments, of which no value and no count of bytes tells.


@triton.jit
def _copy_kernel(x_ptr, y_ptr, num_cols, x_stride, shift, LOADS: tl.constexpr, STORES: tl.constexpr):
    cols = tl.arange(0, 16)
    mask = cols < num_cols
    # As a mask that was forgotten: the lanes past the end are read, and thrown away.
    x = tl.where(mask, tl.load(x_ptr + shift + cols * x_stride, mask=cols < LOADS), 0.0)
    tl.store(y_ptr + cols, x, mask=cols < STORES)


def copy(x: Tensor, shift: int = 0, loads: int = 10, stores: int = 10) -> Tensor:
    y = torch.empty(10, dtype=x.dtype)
    _copy_kernel[(1,)](x, y, 10, x.stride(0), shift, LOADS=loads, STORES=stores)
    return y


@pytest.mark.parametrize("tensor", [lambda: random(10), lambda: random(10, 3)[:, 1], lambda: random(1).expand(10)])
def test_elements_of_arguments_are_within_bounds(tensor: Callable[[], Tensor]) -> None:
    x = tensor()
    assert torch.equal(copy(x), x)


WITH_GAPS = random(20)[::2]
ACCESSES = {
    "loads past the end": (lambda: copy(random(10), loads=16), "_copy_kernel loads outside of x_ptr: .* at 10 to 15"),
    "loads before the start": (lambda: copy(random(12)[2:], shift=-2), "loads outside of x_ptr: .* at -2 to -1"),
    "loads of gaps": (lambda: copy(WITH_GAPS, shift=1), "loads outside of x_ptr: .* 10 elements at 1 to 19"),
    "loads of another row": (lambda: copy(random(2, 10)[0], loads=16), "loads outside of x_ptr: .* 6 elements"),
    "stores past the end": (
        lambda: copy(random(16), stores=11),
        "_copy_kernel stores outside of y_ptr: .* at 10 to 10",
    ),
    "an atomic operation": (
        lambda: _atomic_kernel[(1,)](random(5), 6, BLOCK_COLS=8),
        "_atomic_kernel loads and stores outside of x_ptr",
    ),
}


@pytest.mark.parametrize("access, complaint", ACCESSES.values(), ids=ACCESSES)
def test_accesses_out_of_bounds_are_caught(access: Callable[[], Tensor], complaint: str) -> None:
    with pytest.raises(OutOfBoundsError, match=complaint):
        access()


def test_meter_sees_addresses_and_keeps_bounds() -> None:
    x = random(10)
    with measure_traffic() as traffic, bounds_checked():
        y = copy(x)
        with pytest.raises(OutOfBoundsError, match="y_ptr"):
            copy(random(16), stores=11)
    assert traffic.loaded(x) == traffic.stored(y) == (40, 40)


@triton.jit
def _select_kernel(x_ptr, y_ptr, out_ptr, num_cols, BLOCK_COLS: tl.constexpr):
    cols = tl.arange(0, BLOCK_COLS)
    pointers = tl.where(cols % 2 == 0, x_ptr + cols, y_ptr + cols)
    tl.store(out_ptr + cols, tl.load(pointers, mask=cols < num_cols), mask=cols < num_cols)


def test_lanes_of_one_access_may_belong_to_several_arguments() -> None:
    x, y, out = random(10), random(10, seed=1), torch.empty(10)
    _select_kernel[(1,)](x, y, out, 10, BLOCK_COLS=16)
    assert torch.equal(out[::2], x[::2])
    assert torch.equal(out[1::2], y[1::2])
    with pytest.raises(OutOfBoundsError, match=r"loads outside of y_ptr: of a tensor \(9,\) .* 1 elements at 9 to 9"):
        _select_kernel[(1,)](x, y[:9], out, 10, BLOCK_COLS=16)
