"""Costs of dropout, which are those of each of its derivatives too, and of stored Philox words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from triton_kernels import launch
from triton_kernels._cost import Account, Cost
from triton_kernels._dropout_axes import NUM_AXES, adjacent_axis, merged_axes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def dropout_fwd(x: Tensor, seed: Tensor, offset: Tensor | None, p: float, batch_ndim: int) -> Cost:
    """Cost of `dropout.dropout_fwd`: x once; every program reads its seeds and offsets."""
    account = Account()
    account.load(x=x)
    account.store(x.nbytes)
    # With nothing to drop it is a copy.
    if x.numel() and p > 0.0:
        account.load_shared(_seed_loads(x, batch_ndim), seed=seed, offset=offset)
        account.launch()
    return account.cost()


def _seed_loads(x: Tensor, batch_ndim: int) -> float:
    """How often the seed of a sample is loaded: by each of its tiles, or for each row of a tile if it is one row."""
    y = torch.empty_like(x, device="meta")
    axes, sample_axes = merged_axes(x, y, batch_ndim)
    if len(axes) > NUM_AXES:
        # x is copied first.
        y = torch.empty(x.shape, device="meta")
        axes, sample_axes = merged_axes(y, y, batch_ndim)
    outer, inner, rows, cols = axes
    adjacent = {
        adjacent_axis(rows, cols, (rows.x_stride, cols.x_stride)),
        adjacent_axis(rows, cols, (rows.y_stride, cols.y_stride)),
    }
    along_rows = 1 not in adjacent and 2 in adjacent
    plan = launch.plan_dropout(rows.size, cols.size, along_rows, x.element_size(), x.device)
    programs = _programs(rows.size, cols.size, plan)
    num_loads = rows.size * launch.cdiv(cols.size, plan.block_cols) if sample_axes == 1 else programs
    return outer.size * inner.size * num_loads / math.prod(x.shape[:batch_ndim])


def philox_words(seed: Tensor, offset: Tensor, size: Sequence[int]) -> Cost:
    """Cost of `philox.philox_words`: the words, and what every program reads of seeds and offsets."""
    account = Account()
    num_words = math.prod(size)
    account.store(8 * seed.numel() * num_words)
    if seed.numel() and num_words:
        plan = launch.plan_philox(num_words, seed.device)
        account.load_shared(_programs(1, num_words, plan), seed=seed, offset=offset)
        account.launch()
    return account.cost()


def _programs(num_rows: int, num_cols: int, plan: launch.DropoutPlan) -> int:
    return launch.cdiv(num_rows, plan.block_rows) * launch.cdiv(num_cols, plan.block_cols)
