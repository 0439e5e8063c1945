"""Costs of batch norm and its derivatives of first order.

In training a kernel sums over each channel, one merges the sums, and one reads again and writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_kernels import launch
from triton_kernels._channels import ChannelView, view_channels
from triton_kernels._runtime import accumulation_dtype
from triton_kernels.costs._cost import Account, Cost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def batch_norm_train_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batch_ndim: int,
    momentum: float,
    eps: float,
) -> Cost:
    """Cost of `batch_norm.batch_norm_train_fwd`: x for the statistics, and again for the transform."""
    account = Account()
    if not x.numel():
        return account.cost()
    view, acc = view_channels([x], batch_ndim), accumulation_dtype(x.dtype).itemsize
    plan = launch.plan_channel_reduction(view.sizes, view.spatial_inner, view.align, x.element_size(), x.device)
    account.load(x=x)
    # Each program reads one element of its channels again, to sum relative to it; so does the merge, of its mean.
    account.reload(view.num_channels * plan.num_splits * x.element_size(), "x")
    account.reload(view.num_channels * acc)
    _merge(account, view, plan.num_splits, 3, acc)
    account.load_shared(running_mean=running_mean, running_var=running_var)
    account.store(2 * view.num_channels * acc + _nbytes(running_mean, running_var))
    splits = _transform(account, view, x, x=x)
    account.load_shared(splits, weight=weight, bias=bias)
    account.reload(2 * splits * view.num_channels * acc)
    return account.cost()


def batch_norm_train_bwd(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    batch_ndim: int,
    wanted: Sequence[bool],
) -> Cost:
    """Cost of `batch_norm.batch_norm_train_bwd`: y_bar and x for the sums, and again for the transform."""
    want_x, want_weight, want_bias = wanted
    account = Account()
    if not x.numel() or not any(wanted):
        return account.cost()
    products = x if want_x or want_weight else None
    _product_sums(account, y_bar, products, mean, rstd, weight, batch_ndim)
    account.store((want_weight + want_bias) * _channel_bytes(x, batch_ndim, weight))
    if want_x:
        _training_transform(account, x, mean, rstd, batch_ndim, {"weight": weight}, y_bar=y_bar, x=x)
    return account.cost()


def batch_norm_train_jvp(
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    batch_ndim: int,
) -> Cost:
    """Cost of `batch_norm.batch_norm_train_jvp`: x_dot and x for the means, and again for the transform."""
    account = Account()
    if not x.numel():
        return account.cost()
    params = {"weight": weight, "weight_dot": weight_dot, "bias_dot": bias_dot}
    if x_dot is not None:
        _product_sums(account, x_dot, x, mean, rstd, None, batch_ndim, name="x_dot")
    x_read = x if x_dot is not None or weight_dot is not None else None
    _training_transform(account, x, mean, rstd, batch_ndim, params, has_means=x_dot is not None, x_dot=x_dot, x=x_read)
    return account.cost()


def batch_norm_eval_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    batch_ndim: int,
    eps: float,
) -> Cost:
    """Cost of `batch_norm.batch_norm_eval_fwd`: x once."""
    account = Account()
    if x.numel():
        params = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
        account.load_shared(_transform(account, view_channels([x], batch_ndim), x, x=x), **params)
    return account.cost()


def batch_norm_eval_bwd(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    batch_ndim: int,
    eps: float,
    wanted: Sequence[bool],
) -> Cost:
    """Cost of `batch_norm.batch_norm_eval_bwd`: y_bar for x_bar, and y_bar and x for the sums where they are wanted."""
    want_x, want_weight, want_bias, want_mean, want_var = wanted
    account = Account()
    if not x.numel():
        return account.cost()
    if any(wanted[1:]):
        products = x if want_weight or want_var else None
        _product_sums(account, y_bar, products, running_mean, running_var, weight, batch_ndim)
        account.store((want_weight + want_bias) * _channel_bytes(x, batch_ndim, weight))
        account.store(want_mean * running_mean.nbytes + want_var * running_var.nbytes)
    if want_x:
        splits = _transform(account, view_channels([x], batch_ndim), x, y_bar=y_bar)
        account.load_shared(splits, weight=weight, mean=running_mean, rstd=running_var)
    return account.cost()


def batch_norm_eval_jvp(
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    running_mean_dot: Tensor | None,
    running_var_dot: Tensor | None,
    batch_ndim: int,
    eps: float,
) -> Cost:
    """Cost of `batch_norm.batch_norm_eval_jvp`: x_dot once, and x once where it has a factor."""
    account = Account()
    if not x.numel():
        return account.cost()
    x_read = x if weight_dot is not None or running_var_dot is not None else None
    splits = _transform(account, view_channels([x], batch_ndim), x, x_dot=x_dot, x=x_read)
    params = {"weight": weight, "weight_dot": weight_dot, "bias_dot": bias_dot}
    statistics = {"mean": running_mean, "var": running_var, "mean_dot": running_mean_dot, "var_dot": running_var_dot}
    account.load_shared(splits, **params, **statistics)
    return account.cost()


def _product_sums(
    account: Account,
    u: Tensor,
    x: Tensor | None,
    mean: Tensor,
    scale_statistic: Tensor,
    weight: Tensor | None,
    batch_ndim: int,
    name: str = "y_bar",
) -> None:
    """Count the sums of `u`, and of its products with `x` unless that is None, and their merge."""
    view = view_channels([u] if x is None else [u, x], batch_ndim)
    sizes = (view.sizes, view.spatial_inner, view.align, u.element_size())
    plan = launch.plan_channel_reduction(*sizes, u.device, 1 if x is None else 2)
    account.load(**{name: u}, x=x)
    account.load_shared(plan.num_splits, mean=None if x is None else mean)
    account.load_shared(rstd=scale_statistic, weight=weight)
    _merge(account, view, plan.num_splits, 2, accumulation_dtype(u.dtype).itemsize)


def _merge(account: Account, view: ChannelView, num_splits: int, num_sums: int, acc_itemsize: int) -> None:
    account.scratch(num_sums * view.num_channels * num_splits * acc_itemsize)
    account.launch(2)


def _training_transform(
    account: Account,
    out: Tensor,
    mean: Tensor,
    rstd: Tensor,
    batch_ndim: int,
    params: dict[str, Tensor | None],
    *,
    has_means: bool = True,
    **operands: Tensor | None,
) -> None:
    view = view_channels([out, *(tensor for tensor in operands.values() if tensor is not None)], batch_ndim)
    splits = _transform(account, view, out, **operands)
    account.load_shared(splits, mean=mean, rstd=rstd, **params)
    if has_means:
        # The merge writes the two means that the transform takes.
        account.scratch(2 * mean.numel() * mean.element_size())
        account.reload(2 * (splits - 1) * mean.nbytes)


def _transform(account: Account, view: ChannelView, out: Tensor, **operands: Tensor | None) -> int:
    """Count the elementwise kernel; returns how many programs load the parameters of each channel."""
    plan = launch.plan_channel_transform(view.sizes, view.spatial_inner, out.element_size(), out.device)
    account.load(**operands)
    account.store(out.nbytes)
    account.launch()
    return plan.num_splits


def _channel_bytes(x: Tensor, batch_ndim: int, weight: Tensor | None) -> int:
    """Bytes of the cotangent of a parameter."""
    itemsize = accumulation_dtype(x.dtype).itemsize if weight is None else weight.element_size()
    return view_channels([x], batch_ndim).num_channels * itemsize


def _nbytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
