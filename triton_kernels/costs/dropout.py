"""Costs of dropout, which are those of each of its derivatives too, and of stored Philox words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from triton_kernels import launch
from triton_kernels.costs._cost import Account, Cost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def dropout_fwd(x: Tensor, seed: Tensor, offset: Tensor | None, p: float, batch_ndim: int) -> Cost:
    """Cost of `dropout.dropout_fwd` for a contiguous x: x once; every program reads its seeds and offsets."""
    account = Account()
    num_samples = math.prod(x.shape[:batch_ndim])
    account.load(x=x)
    account.store(x.nbytes)
    # With nothing to drop it is a copy.
    if x.numel() and p > 0.0:
        num_cols = x.numel() // num_samples
        plan = launch.plan_dropout(num_samples, num_cols, False, x.element_size(), x.device)
        times = launch.cdiv(num_cols, plan.block_cols) if num_samples > 1 else _programs(1, num_cols, plan)
        account.load_shared(times, seed=seed, offset=offset)
        account.launch()
    return account.cost()


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
