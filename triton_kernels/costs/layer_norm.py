"""Costs of layer norm and its derivatives of first order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_kernels import launch
from triton_kernels.costs._cost import Account, Cost, operands_of
from triton_kernels.costs._rows import add_partial_rows, launch_sweeps, load_params, param_itemsize, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# Of P(x_dot) * weight + x_hat * weight_dot + bias_dot.
_JVP_TERMS = {"y_dot": [("x_dot", ("x", "weight")), ("weight_dot", ("x",)), ("bias_dot", ())]}


def layer_norm_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, norm_ndim: int, batch_ndim: int, eps: float
) -> Cost:
    """Cost of `layer_norm.layer_norm_fwd`: x once, twice where a row is swept by tiles."""
    account = Account()
    if not x.numel():
        return account.cost()
    rows = rows_of([x], norm_ndim, batch_ndim, segmented=weight is not None or bias is not None)
    plan = launch.plan_layer_norm_rows(rows.all_rows, rows.num_cols, rows.itemsize, False, x.device)
    account.load(2 if plan.looped else 1, x=x)
    load_params(account, rows, plan.block_rows, 1, weight=weight, bias=bias)
    account.store(x.nbytes + 2 * rows.stat_bytes)
    launch_sweeps(account, rows.all_rows, plan.col_splits, 2, rows.stat_itemsize, x.nbytes * plan.looped)
    return account.cost()


def layer_norm_jvp(
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    norm_ndim: int,
    batch_ndim: int,
) -> Cost:
    """Cost of `layer_norm.layer_norm_jvp`: x and x_dot once, twice where a row is swept by tiles."""
    account = Account()
    if not x.numel():
        return account.cost()
    given = {"x": x, "weight": weight, "x_dot": x_dot, "weight_dot": weight_dot, "bias_dot": bias_dot}
    taken = operands_of(_JVP_TERMS, {"y_dot": True}, given)
    params = {name: given[name] for name in ("weight", "weight_dot", "bias_dot") if name in taken}
    rows = rows_of([x, x_dot], norm_ndim, batch_ndim, segmented=bool(params))
    plan = launch.plan_layer_norm_rows(rows.all_rows, rows.num_cols, rows.itemsize, True, x.device)
    if "x" in taken:
        # Without x_dot there are no means to sweep the row for.
        account.load(2 if plan.looped and x_dot is not None else 1, x=x, x_dot=x_dot)
        # Every program loads the statistics of its row, in both sweeps where those are launches of their own.
        loads = plan.col_splits * (2 if plan.col_splits > 1 and x_dot is not None else 1)
        account.load_shared(loads, mean=mean, rstd=rstd)
    load_params(account, rows, plan.block_rows, 1, **params)
    account.store(x.nbytes)
    num_slots = 2 if x_dot is not None else 0
    swept = x.nbytes + x_dot.nbytes if plan.looped and x_dot is not None else 0
    launch_sweeps(account, rows.all_rows, plan.col_splits, num_slots, rows.stat_itemsize, swept)
    return account.cost()


def layer_norm_bwd(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    norm_ndim: int,
    batch_ndim: int,
    wanted: Sequence[bool],
) -> Cost:
    """Cost of `layer_norm.layer_norm_bwd`: y_bar and x once, and again for each kernel that a row needs beyond one."""
    want_x, want_weight, want_bias = wanted
    num_sums = int(want_weight) + int(want_bias)
    account = Account()
    if not x.numel() or not any(wanted):
        return account.cost()
    weight_read = weight if want_x else None
    rows = rows_of(
        [y_bar, x],
        norm_ndim,
        batch_ndim,
        segmented=weight_read is not None or num_sums > 0,
        max_segments=launch.LAYER_NORM_MAX_SEGMENTS if num_sums else None,
    )
    fused = False
    if num_sums:
        plan = launch.plan_layer_norm_params(rows.num_segments, rows.num_rows, rows.num_cols, rows.itemsize, x.device)
        fused = want_x and not plan.looped
        account.load(y_bar=y_bar)
        if fused or want_weight:
            account.load(x=x)
            col_blocks = launch.cdiv(rows.num_cols, plan.block_cols) if plan.looped else 1
            account.load_shared(col_blocks, mean=mean, rstd=rstd)
        if fused:
            account.load_shared(rows.group_segments * plan.num_splits, weight=weight_read)
        account.launch()
        add_partial_rows(account, rows, rows.num_segments * plan.num_splits, num_sums)
    if want_x and not fused:
        sizes = (rows.num_rows, rows.num_cols)
        own = launch.plan_layer_norm_rows(*sizes, rows.itemsize, True, x.device, rows.num_segments)
        sweeps = 2 if own.looped else 1
        account.load(sweeps, y_bar=y_bar, x=x)
        account.load_shared(own.col_splits * (2 if own.col_splits > 1 else 1), mean=mean, rstd=rstd)
        num_programs = rows.group_segments * launch.cdiv(rows.num_rows, own.block_rows)
        account.load_shared(sweeps * num_programs, weight=weight_read)
        swept = (sweeps - 1) * (y_bar.nbytes + x.nbytes)
        launch_sweeps(account, rows.all_rows, own.col_splits, 2, rows.stat_itemsize, swept)
    account.store(want_x * x.nbytes + num_sums * rows.num_groups * rows.num_cols * param_itemsize(rows, weight))
    return account.cost()
