"""Costs of log-softmax and its derivatives of first and second order."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from triton_kernels import launch
from triton_kernels._cost import Account, Cost
from triton_kernels._reduction_view import reduction_view
from triton_kernels._runtime import accumulation_dtype
from triton_kernels.costs._rows import launch_sweeps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class _Sweeps(NamedTuple):
    """What the plan says: whether rows are swept by tiles, by how many programs each, and what partial results take."""

    looped: bool
    num_rows: int
    block_rows: int
    col_splits: int
    itemsize: int


def log_softmax_fwd(x: Tensor, dim: int, dtype: torch.dtype | None) -> Cost:
    """Cost of `log_softmax.log_softmax_fwd`: x once, twice where a row is swept by tiles."""
    out_dtype = dtype or x.dtype
    sweeps = _plan((x,), x, dim, accumulation_dtype(out_dtype))
    return _cost(x.numel() * out_dtype.itemsize, sweeps, 2, x=(x, 1 + sweeps.looped))


def log_softmax_jvp(x_dot: Tensor, y: Tensor, dim: int) -> Cost:
    """Cost of `log_softmax.log_softmax_jvp`: x_dot and y once, x_dot twice where a row is swept by tiles."""
    return _linear("x_dot", x_dot, y, dim, y.dtype)


def log_softmax_bwd(y_bar: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Cost:
    """Cost of `log_softmax.log_softmax_bwd`: y_bar and y once, y_bar twice where a row is swept by tiles."""
    return _linear("y_bar", y_bar, y, dim, input_dtype)


def _linear(name: str, v: Tensor, y: Tensor, dim: int, out_dtype: torch.dtype) -> Cost:
    sweeps = _plan((v, y), y, dim)
    return _cost(y.numel() * out_dtype.itemsize, sweeps, 1, **{name: (v, 1 + sweeps.looped)}, y=(y, 1))


def log_softmax_pairing(y_bar: Tensor, y: Tensor, x_dot: Tensor, dim: int, wanted: Sequence[bool]) -> Cost:
    """Cost of `log_softmax_second_order.log_softmax_pairing`.

    A row that is swept by tiles is read again where a result takes both a sum over an operand and its elements.
    """
    want_y_bar_bar, want_output_bar, want_x_dot_bar = map(bool, wanted)
    if not any(wanted):
        return Account().cost()
    has_y_bar, has_x_dot = want_output_bar or want_x_dot_bar, want_y_bar_bar or want_output_bar
    inputs = [tensor for tensor, there in ((y_bar, has_y_bar), (y, True), (x_dot, has_x_dot)) if there]
    sweeps = _plan(inputs, y, dim, num_outputs=sum(map(bool, wanted)))
    outputs = zip((y_bar, y, x_dot), wanted, strict=True)
    return _cost(
        sum(y.numel() * like.element_size() for like, want in outputs if want),
        sweeps,
        has_y_bar + want_y_bar_bar,
        y_bar=(y_bar, has_y_bar + (sweeps.looped and want_x_dot_bar)),
        y=(y, 1 + (sweeps.looped and want_y_bar_bar and has_y_bar)),
        x_dot=(x_dot, has_x_dot + (sweeps.looped and want_y_bar_bar)),
    )


def log_softmax_bwd_jvp(
    y_bar: Tensor, y: Tensor, y_bar_dot: Tensor | None, y_dot: Tensor | None, dim: int, x_dtype: torch.dtype
) -> Cost:
    """Cost of `log_softmax_second_order.log_softmax_bwd_jvp`: y_bar_dot twice where a row is swept by tiles."""
    if y_bar_dot is None and y_dot is None:
        return Account().cost()
    inputs = [t for t in (None if y_dot is None else y_bar, y, y_bar_dot, y_dot) if t is not None]
    sweeps = _plan(inputs, y, dim)
    return _cost(
        y.numel() * x_dtype.itemsize,
        sweeps,
        (y_dot is not None) + (y_bar_dot is not None),
        y_bar=(y_bar, int(y_dot is not None)),
        y=(y, 1),
        y_bar_dot=(y_bar_dot, 1 + sweeps.looped),
        y_dot=(y_dot, 1),
    )


def _plan(
    inputs: Sequence[Tensor], like: Tensor, dim: int, dtype: torch.dtype | None = None, num_outputs: int = 1
) -> _Sweeps:
    """What is planned for the rows of `inputs`."""
    compute = dtype or accumulation_dtype(functools.reduce(torch.promote_types, [t.dtype for t in inputs]))
    if not like.numel():
        return _Sweeps(False, 0, 1, 1, compute.itemsize)
    # Of strides alone, so that the launcher's view costs no copy here either.
    strided = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in inputs]
    view = reduction_view(strided, torch.empty(like.shape, dtype=like.dtype, device="meta"), dim)
    sizes, rows_adjacent = (view.num_segments, view.num_rows, view.num_cols), "rows" in view.adjacent()
    plan = launch.plan_log_softmax(
        sizes, rows_adjacent, inputs[0].element_size(), compute.itemsize, len(inputs), like.device, num_outputs
    )
    num_rows = view.num_segments * launch.cdiv(view.num_rows, plan.block_rows) * plan.block_rows
    return _Sweeps(plan.looped, num_rows, plan.block_rows, plan.col_splits if plan.looped else 1, compute.itemsize)


def _cost(written: int, sweeps: _Sweeps, num_slots: int, **operands: tuple[Tensor | None, int]) -> Cost:
    """Cost of one kernel that reads each operand as often as it says."""
    account = Account()
    for name, (tensor, passes) in operands.items():
        account.load(passes, **{name: tensor})
    account.store(written)
    if written:
        swept = sum(tensor.nbytes for tensor, passes in operands.values() if tensor is not None and passes > 1)
        parts = (sweeps.num_rows, sweeps.col_splits, num_slots, sweeps.itemsize)
        launch_sweeps(account, *parts, swept, sweeps.block_rows)
    return account.cost()
