"""Costs of the second-order derivatives of layer norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_kernels import launch
from triton_kernels._cost import Account, Cost, operands_of
from triton_kernels.costs._rows import add_partial_rows, launch_sweeps, load_params, rows_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from triton_kernels._cost import Terms
    from triton_kernels.costs._rows import Rows

_FULL_SIZE = ("y_bar", "x", "y_bar_dot", "x_dot")
_PARAMS = ("weight", "weight_dot", "bias_dot")
# Means that programs which share a row leave each other room for.
_NUM_MEANS = 7

# Derivatives of L = <y_bar, P(x_dot) * weight + x_hat * weight_dot + bias_dot>.
_PAIRING_TERMS = {
    "y_bar_bar": [("x_dot", ("x", "weight")), ("weight_dot", ("x",)), ("bias_dot", ())],
    "x_bar": [("x_dot", ("y_bar", "x", "weight")), ("weight_dot", ("y_bar", "x"))],
    "weight_bar": [("x_dot", ("y_bar", "x"))],
    "x_dot_bar": [(None, ("y_bar", "x", "weight"))],
    "weight_dot_bar": [(None, ("y_bar", "x"))],
    "bias_dot_bar": [(None, ("y_bar",))],
}
# Derivatives of L + <y_bar_dot, y>.
_BWD_JVP_TERMS = {
    "x_bar": [("y_bar_dot", ("x", "weight")), ("x_dot", ("y_bar", "x", "weight")), ("weight_dot", ("y_bar", "x"))],
    "weight_bar": [("y_bar_dot", ("x",)), ("x_dot", ("y_bar", "x"))],
    "bias_bar": [("y_bar_dot", ())],
}
_SUMS = ("weight_bar", "weight_dot_bar", "bias_dot_bar", "bias_bar")


def layer_norm_pairing(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    norm_ndim: int,
    batch_ndim: int,
    wanted: Sequence[bool],
) -> Cost:
    """Cost of `layer_norm_second_order.layer_norm_pairing`."""
    given = {"y_bar": y_bar, "x": x, "x_dot": x_dot, "weight": weight, "weight_dot": weight_dot, "bias_dot": bias_dot}
    return _differentiate(_PAIRING_TERMS, wanted, given, mean, rstd, norm_ndim, batch_ndim)


def layer_norm_bwd_jvp(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    y_bar_dot: Tensor | None,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    norm_ndim: int,
    batch_ndim: int,
    wanted: Sequence[bool],
) -> Cost:
    """Cost of `layer_norm_second_order.layer_norm_bwd_jvp`."""
    given = {"y_bar": y_bar, "x": x, "y_bar_dot": y_bar_dot, "x_dot": x_dot, "weight": weight, "weight_dot": weight_dot}
    return _differentiate(_BWD_JVP_TERMS, wanted, given, mean, rstd, norm_ndim, batch_ndim)


def _differentiate(
    terms: Terms,
    wanted: Sequence[bool],
    given: dict[str, Tensor | None],
    mean: Tensor,
    rstd: Tensor,
    norm_ndim: int,
    batch_ndim: int,
) -> Cost:
    """One kernel for all where the sums fit in it; else one for rows and, for the sums, one that reads again."""
    x, weight = given["x"], given["weight"]
    if x is None:
        raise TypeError("costs of layer norm: x must be a tensor, got None")
    # What no given tangent moves is zero and no kernel's business.
    want = {
        name: bool(flag) and any(factor is None or given[factor] is not None for factor, _ in terms[name])
        for name, flag in zip(terms, wanted, strict=True)
    }
    account = Account()
    if not x.numel() or not any(want.values()):
        return account.cost()
    sums = {name: flag and name in _SUMS for name, flag in want.items()}
    row_results = {name: flag and name not in _SUMS for name, flag in want.items()}
    num_sums = sum(sums.values())
    taken = operands_of(terms, want, given)
    rows = rows_of(
        [x, *(given[name] for name in _FULL_SIZE if name in taken)],
        norm_ndim,
        batch_ndim,
        segmented=num_sums > 0 or any(name in taken for name in _PARAMS),
        max_segments=launch.LAYER_NORM_MAX_SEGMENTS if num_sums else None,
    )
    sizes = (rows.num_segments, rows.num_rows, rows.num_cols, rows.itemsize)
    plan = launch.plan_layer_norm_second(*sizes, num_sums > 0, x.device)
    num_splits = plan.num_splits
    stats = {"mean": mean, "rstd": rstd}
    if num_sums and not plan.fused:
        columns = launch.plan_layer_norm_second_columns(*sizes, x.device)
        num_splits = columns.num_splits
        summed, taken = operands_of(terms, sums, given), operands_of(terms, row_results, given)
        _count_columns(account, rows, columns, {name: given[name] for name in _FULL_SIZE if name in summed}, stats)
        if "x_dot" in summed:
            # The kernel over rows finds the two means of x_dot that the one over columns takes.
            taken |= {"x", "x_dot"}
    if taken:
        _count_rows(account, rows, plan, {name: given[name] for name in taken}, row_results, stats)
    add_partial_rows(account, rows, rows.num_segments * num_splits, num_sums)
    param_size = rows.num_groups * rows.num_cols * (x if weight is None else weight).element_size()
    account.store(sum(row_results.values()) * x.nbytes + num_sums * param_size)
    return account.cost()


def _count_columns(
    account: Account,
    rows: Rows,
    columns: launch.LayerNormColumnPlan,
    operands: Mapping[str, Tensor | None],
    stats: Mapping[str, Tensor],
) -> None:
    """Count the kernel that owns columns and sums over rows."""
    account.load(**operands)
    col_blocks = launch.cdiv(rows.num_cols, columns.block_cols)
    if "x" in operands:
        account.load_shared(col_blocks, **stats)
    if "x_dot" in operands:
        account.scratch(2 * rows.stat_bytes)
        account.reload((col_blocks - 1) * 2 * rows.stat_bytes)
    account.launch()


def _count_rows(
    account: Account,
    rows: Rows,
    plan: launch.LayerNormSecondPlan,
    operands: Mapping[str, Tensor | None],
    results: Mapping[str, bool],
    stats: Mapping[str, Tensor],
) -> None:
    """Count the kernel that owns whole rows."""
    # Where a row is swept by tiles, one sweep is for the means of what is projected.
    has_means = "x_dot" in operands or any(results.get(name) for name in ("x_bar", "x_dot_bar"))
    sweeps = 2 if plan.rows.looped and any(results.values()) and has_means else 1
    col_splits = plan.rows.col_splits if plan.rows.looped else 1
    account.load(sweeps, **{name: operands[name] for name in _FULL_SIZE if name in operands})
    if "x" in operands:
        account.load_shared(col_splits * (2 if col_splits > 1 and has_means else 1), **stats)
    params = {name: operands[name] for name in _PARAMS if name in operands}
    if plan.rows.looped:
        bias_dot = params.pop("bias_dot", None)
        load_params(account, rows, 1, sweeps, **params)
        load_params(account, rows, 1, 1, bias_dot=bias_dot)
    else:
        # Programs keep their parameters, and there are as many as splits.
        account.load_shared(rows.group_segments * plan.num_splits, **params)
    full_size = [tensor for name in _FULL_SIZE if (tensor := operands.get(name)) is not None]
    swept = (sweeps - 1) * sum(tensor.nbytes for tensor in full_size)
    launch_sweeps(account, rows.all_rows, col_splits, _NUM_MEANS if has_means else 0, rows.stat_itemsize, swept)
