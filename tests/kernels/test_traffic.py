"""The meter of global memory traffic, and what the byte gate built on it must reject."""

# Compile-time constants are upper case, as in the kernels of the package.
# ruff: noqa: N803

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.layer_norm_truth import random
from tests.kernels.traffic import Traffic, check_cost, measure_traffic
from triton_kernels.costs import Cost

if TYPE_CHECKING:
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
