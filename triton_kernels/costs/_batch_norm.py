"""Bytes that the kernels of batch norm move: the arguments of a launch say them, each by its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from triton_kernels._cost import Account, Tensors

_OPERANDS = ("y_bar", "x", "x_dot", "y_bar_dot")
# The names that launchers have for what kernels take beside.
_RELU = {"relu": "y", "residual": "residual", "residual_dot": "residual_dot"}
_STATISTICS = ("mean", "scale_statistic")
_PARAMS = ("weight", "bias", "weight_dot", "bias_dot", "mean_dot", "var_dot")
_BARS = ("weight_bar", "bias_bar", "mean_bar", "var_bar", "weight_bar_dot", "bias_bar_dot")


def _count_sums(account: Account, named: Mapping[str, Any], grid: tuple[int, ...], tensors: Tensors) -> None:
    """Operands once, the cotangent of a residual, and partial results."""
    account.load(**{name: named[name] for name in _OPERANDS}, y=named["relu"])
    _store(account, named, ("masked",))
    _load_channels(account, {"mean": named["mean"]}, grid[1], tensors)
    account.scratch(named["partials"].nbytes)


def _count_statistics(account: Account, named: Mapping[str, Any], grid: tuple[int, ...], tensors: Tensors) -> None:
    """The first mean again, the running statistics, and what is made of all."""
    account.reload(named["mean"].nbytes)
    _load_channels(account, {name: named[name] for name in ("running_mean", "running_var")}, 1, tensors)
    _store(account, named, ("mean", "rstd", "new_running_mean", "new_running_var"))
    if named["means"] is not None:
        account.write(2 * named["mean"].nbytes)


def _count_merge(account: Account, named: Mapping[str, Any], grid: tuple[int, ...], tensors: Tensors) -> None:
    """Statistic and weight, the bars, and means for the transform."""
    _load_channels(account, {name: named[name] for name in ("scale_statistic", "weight")}, 1, tensors)
    _store(account, named, _BARS)
    if named["means"] is not None:
        sums = named["SUMS"]
        num_means = 1 + 2 * (sums & 1) + 2 * (sums >> 2 & 1) + (sums >> 5 & 1)
        account.write(num_means * named["num_rows"] * named["means"].element_size())


def _count_transform(account: Account, named: Mapping[str, Any], grid: tuple[int, ...], tensors: Tensors) -> None:
    """Operands once, the results, and parameters and means for each program."""
    there = {name: named[name] for name in (*_OPERANDS, *_RELU) if named[name] is not None}
    for name, tensor in there.items():
        if name == "y_bar" and id(tensor) in tensors.returned:
            # The result of the sums for it.
            account.write(tensor.nbytes)
        else:
            account.load(**{_RELU.get(name, name): tensor})
    _store(account, named, ("y", "y_dot", "x_bar", "x_bar_dot"))
    times = grid[0] / named["num_blocks"]
    _load_channels(account, {name: named[name] for name in _STATISTICS + _PARAMS}, times, tensors)
    if named["means"] is not None:
        num_means = sum(count for name, count in zip(_OPERANDS, (2, 0, 2, 1), strict=True) if named[name] is not None)
        num_means += named["x_bar_dot"] is not None
        account.reload(round(num_means * times * named["num_rows"] * named["means"].element_size()))


def _load_channels(account: Account, operands: Mapping[str, Tensor | None], times: float, tensors: Tensors) -> None:
    for name, tensor in operands.items():
        if tensor is None:
            continue
        if id(tensor) in tensors.given:
            account.load_often(name, tensor, round(times * tensor.nbytes))
        else:
            # A result of an earlier kernel.
            account.reload(round(times * tensor.nbytes))


def _store(account: Account, named: Mapping[str, Any], names: tuple[str, ...]) -> None:
    account.store(sum(named[name].nbytes for name in names if named[name] is not None))


COUNTS = {
    "batch_norm_sums_kernel": _count_sums,
    "batch_norm_statistics_kernel": _count_statistics,
    "batch_norm_merge_kernel": _count_merge,
    "batch_norm_transform_kernel": _count_transform,
}
