"""Costs of the second-order derivatives of batch norm: sums, their merge, and a transform that reads again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_kernels import launch
from triton_kernels._channels import view_channels
from triton_kernels._runtime import accumulation_dtype
from triton_kernels.costs._cost import Account, Cost, operands_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from triton_kernels.costs._cost import Terms

_FULL_SIZE = ("y_bar", "x", "x_dot", "y_bar_dot")
_NUM_COEFFICIENTS = 7

# What the sums take, and what the transform does, for each result; see `batch_norm_second_order` for the formulas.
_PAIRING_SUMS = {
    "y_bar_bar": [("x_dot", ("x",))],
    "x_bar": [("x_dot", ("y_bar", "x")), ("weight_dot", ("y_bar", "x"))],
    "weight_bar": [("x_dot", ("y_bar", "x"))],
    "x_dot_bar": [(None, ("y_bar", "x"))],
    "weight_dot_bar": [(None, ("y_bar", "x"))],
    "bias_dot_bar": [(None, ("y_bar",))],
}
_PAIRING_TRANSFORM = {
    "y_bar_bar": [("x_dot", ("x",)), ("weight_dot", ("x",)), ("bias_dot", ())],
    "x_bar": [("x_dot", ("y_bar", "x")), ("weight_dot", ("y_bar", "x", "x_dot"))],
    "x_dot_bar": [(None, ("y_bar", "x"))],
}
_BWD_JVP_SUMS = {
    "x_bar": [("y_bar_dot", ("x",)), ("x_dot", ("y_bar", "x")), ("weight_dot", ("y_bar", "x"))],
    "weight_bar": [("y_bar_dot", ("x",)), ("x_dot", ("y_bar", "x"))],
    "bias_bar": [("y_bar_dot", ())],
}
_BWD_JVP_TRANSFORM = {"x_bar": [("y_bar_dot", ("x",)), ("x_dot", ("y_bar", "x")), ("weight_dot", ("y_bar", "x"))]}


def batch_norm_pairing(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    batch_ndim: int,
    wanted: Sequence[bool],
) -> Cost:
    """Cost of `batch_norm_second_order.batch_norm_pairing`."""
    given = {"y_bar": y_bar, "x": x, "x_dot": x_dot, "weight": weight, "weight_dot": weight_dot, "bias_dot": bias_dot}
    return _derivatives(_PAIRING_SUMS, _PAIRING_TRANSFORM, wanted, given, x, mean, rstd, batch_ndim)


def batch_norm_bwd_jvp(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    y_bar_dot: Tensor | None,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    batch_ndim: int,
    wanted: Sequence[bool],
) -> Cost:
    """Cost of `batch_norm_second_order.batch_norm_bwd_jvp`."""
    given = {"y_bar": y_bar, "x": x, "y_bar_dot": y_bar_dot, "x_dot": x_dot, "weight": weight, "weight_dot": weight_dot}
    return _derivatives(_BWD_JVP_SUMS, _BWD_JVP_TRANSFORM, wanted, given, x, mean, rstd, batch_ndim)


def _derivatives(
    sum_terms: Terms,
    transform_terms: Terms,
    wanted: Sequence[bool],
    given: Mapping[str, Tensor | None],
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    batch_ndim: int,
) -> Cost:
    account = Account()
    if not x.numel() or not any(wanted):
        return account.cost()
    want = dict(zip(sum_terms, map(bool, wanted), strict=True))
    acc = accumulation_dtype(x.dtype).itemsize
    summed = {name: given[name] for name in _FULL_SIZE if name in operands_of(sum_terms, want, given)}
    tensors = [tensor for tensor in summed.values() if tensor is not None]
    view = view_channels(tensors or [x], batch_ndim)
    plan = launch.plan_channel_second_reduction(view.sizes, view.spatial_inner, view.align, x.element_size(), x.device)
    if summed:
        account.load(**summed)
        account.load_shared(plan.num_splits, mean=mean)
        account.scratch(_num_sums(set(summed)) * view.num_channels * plan.num_splits * acc)
        account.launch()
    account.load_shared(rstd=rstd, weight=given["weight"], weight_dot=given["weight_dot"])
    account.launch()
    param_itemsize = (x if given["weight"] is None else given["weight"]).element_size()
    per_channel = [name for name, flag in want.items() if flag and name not in transform_terms]
    account.store(len(per_channel) * view.num_channels * param_itemsize)

    results = {name: want[name] for name in transform_terms}
    if any(results.values()):
        taken = operands_of(transform_terms, results, given)
        transformed = {name: given[name] for name in _FULL_SIZE if name in taken}
        view = view_channels([x, *(tensor for tensor in transformed.values() if tensor is not None)], batch_ndim)
        plan = launch.plan_channel_second_transform(view.sizes, view.spatial_inner, x.element_size(), x.device)
        account.load(**transformed)
        account.load_shared(plan.num_splits, mean=mean, bias_dot=given.get("bias_dot"))
        account.scratch(_NUM_COEFFICIENTS * view.num_channels * acc)
        account.reload(_NUM_COEFFICIENTS * (plan.num_splits - 1) * view.num_channels * acc)
        account.store(sum(results.values()) * x.nbytes)
        account.launch()
    return account.cost()


def _num_sums(summed: set[str]) -> int:
    """Sums that are written: of each operand, of its product with x, and of y_bar with x_dot."""
    single = summed - {"x"}
    return len(single) * (2 if "x" in summed else 1) + ({"y_bar", "x_dot"} <= single)
