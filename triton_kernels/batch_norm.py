"""Launchers of batch norm: forward, vjp and jvp, with the statistics of the batch or with running statistics.

`x: [*batch, N, C, *spatial]` is normalized per channel over `N` and the spatial axes; parameters and statistics are
`[*batch, C]`. With `x_hat = (x - mean) * rstd` and means over the elements of a channel, the derivative of `x_hat` in a
direction `u` is

    P(u) = rstd * (u - mean(u) - x_hat * mean(u * x_hat))       (training: mean and rstd follow x)
    P(u) = rstd * (u - mean_dot - x_hat * rstd / 2 * var_dot)   (evaluation: they are arguments)

P of training is symmetric, so every rule is `weight * P(u) + x_hat * slope + shift`, which one kernel computes:

    forward   slope = weight, shift = bias, no u
    jvp       u = x_dot, slope = weight_dot, shift = bias_dot
    vjp       u = y_bar; weight_bar = sum(y_bar * x_hat), bias_bar = sum(y_bar)

Training reads x once for its statistics (u and x for the two means of a derivative) and once for the transform. All
launchers take float16, bfloat16, float32 and float64, mixed as they come; absent and unwanted tensors come back empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_kernels._batch_norm_steps import (
    channel_shape,
    new_channels,
    product_sums,
    statistics,
    transform,
)
from triton_kernels._channels import new_output, readable
from triton_kernels._runtime import accumulation_dtype
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "batch_norm_eval_bwd",
    "batch_norm_eval_fwd",
    "batch_norm_eval_jvp",
    "batch_norm_train_bwd",
    "batch_norm_train_fwd",
    "batch_norm_train_jvp",
]


@tunable
def batch_norm_train_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batch_ndim: int,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Batch norm with the statistics of `x`.

    Args:
        x: Input, `[*batch, N, C, *spatial]`.
        weight: Scale `[*batch, C]`; None is 1.
        bias: Shift `[*batch, C]`; None is 0.
        running_mean: Running mean `[*batch, C]`; not written.
        running_var: Running unbiased variance `[*batch, C]`; not written.
        batch_ndim: Number of leading batch axes.
        momentum: Weight of the new statistics in the running ones.
        eps: Added to the variance.

    Returns:
        `y` in dtype and layout of `x`; mean and rstd `[*batch, C]` in the accumulation dtype; the new running mean
        and variance in the dtypes of the old. Without elements, mean and rstd are 0 and the running statistics stay.
    """
    acc_dtype = accumulation_dtype(x.dtype)
    running = (running_mean, running_var)
    if x.numel() == 0:
        mean, rstd = (x.new_zeros(channel_shape(x, batch_ndim), dtype=acc_dtype) for _ in range(2))
        kept_mean, kept_var = (x.new_empty(0) if old is None else old.clone() for old in running)
        return new_output(x, batch_ndim), mean, rstd, kept_mean, kept_var

    mean, rstd = (new_channels(x, batch_ndim, acc_dtype) for _ in range(2))
    updated = [None if old is None else new_channels(x, batch_ndim, old.dtype) for old in running]
    x_read = readable(x, batch_ndim)
    statistics(x_read, (mean, rstd, *updated), running, batch_ndim, momentum, eps)
    y = transform(x, batch_ndim, mean, rstd, x_read=x_read, slope=weight, default_slope=1.0, shift=bias)
    new_running_mean, new_running_var = (_or_empty(new, x) for new in updated)
    return y, mean, rstd, new_running_mean, new_running_var


@tunable
def batch_norm_train_bwd(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    batch_ndim: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Cotangents of `x`, weight and bias for batch norm with the statistics of `x`.

    Args:
        y_bar: Cotangent of `y`, shape of `x`.
        x: Input, `[*batch, N, C, *spatial]`.
        weight: Scale `[*batch, C]`; None is 1.
        mean: As the forward returned it.
        rstd: As the forward returned it.
        batch_ndim: Number of leading batch axes.
        wanted: Which of the three cotangents to compute.

    Returns:
        `x_bar` in dtype and layout of `x`; `weight_bar` and `bias_bar` `[*batch, C]` in the dtype of the weight, or of
        `x` without one.
    """
    x_wanted, weight_wanted, bias_wanted = wanted
    dtype = accumulation_dtype(x.dtype) if weight is None else weight.dtype
    weight_bar = new_channels(x, batch_ndim, dtype) if weight_wanted else None
    bias_bar = new_channels(x, batch_ndim, dtype) if bias_wanted else None
    x_read, y_bar = readable(x, batch_ndim), readable(y_bar, batch_ndim)
    u_center = tilt = None
    if any(wanted):
        outputs = (weight_bar, bias_bar, None, None)
        products_wanted, read_again = x_wanted or weight_wanted, (x_wanted, x_wanted)
        u_center, tilt = product_sums(
            y_bar, x_read, mean, rstd, weight, outputs, products_wanted, batch_ndim, read_again, means_wanted=x_wanted
        )
    x_bar = None
    if x_wanted:
        x_bar = transform(
            x, batch_ndim, mean, rstd, x_read=x_read, u=y_bar, weight=weight, u_center=u_center, tilt=tilt
        )
    return _or_empty(x_bar, x), _or_empty(weight_bar, x), _or_empty(bias_bar, x)


@tunable
def batch_norm_train_jvp(
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    batch_ndim: int,
) -> Tensor:
    """Tangent of batch norm with the statistics of `x`.

    Args:
        x: Input, `[*batch, N, C, *spatial]`.
        weight: Scale `[*batch, C]`; None is 1.
        mean: As the forward returned it.
        rstd: As the forward returned it.
        x_dot: Tangent of `x`; None is 0, as for the other two.
        weight_dot: Tangent of the weight.
        bias_dot: Tangent of the bias.
        batch_ndim: Number of leading batch axes.

    Returns:
        `y_dot` in dtype and layout of `x`.
    """
    u_center = tilt = None
    x_read = readable(x, batch_ndim)
    if x_dot is not None:
        x_dot = readable(x_dot, batch_ndim)
        outputs, read_again = (None,) * 4, (True, True)
        u_center, tilt = product_sums(
            x_dot, x_read, mean, rstd, None, outputs, True, batch_ndim, read_again, means_wanted=True
        )
    return transform(
        x,
        batch_ndim,
        mean,
        rstd,
        x_read=None if x_dot is None and weight_dot is None else x_read,
        u=x_dot,
        weight=weight,
        slope=weight_dot,
        shift=bias_dot,
        u_center=u_center,
        tilt=tilt,
    )


@tunable
def batch_norm_eval_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    batch_ndim: int,
    eps: float,
) -> Tensor:
    """Batch norm with given statistics.

    Args:
        x: Input, `[*batch, N, C, *spatial]`.
        weight: Scale `[*batch, C]`; None is 1.
        bias: Shift `[*batch, C]`; None is 0.
        running_mean: Mean `[*batch, C]`.
        running_var: Variance `[*batch, C]`.
        batch_ndim: Number of leading batch axes.
        eps: Added to the variance.

    Returns:
        `y` in dtype and layout of `x`.
    """
    return transform(
        x,
        batch_ndim,
        running_mean,
        running_var,
        eps=eps,
        x_read=x,
        slope=weight,
        default_slope=1.0,
        shift=bias,
    )


@tunable
def batch_norm_eval_bwd(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    batch_ndim: int,
    eps: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of all arguments of batch norm with given statistics.

    Args:
        y_bar: Cotangent of `y`, shape of `x`.
        x: Input, `[*batch, N, C, *spatial]`.
        weight: Scale `[*batch, C]`; None is 1.
        running_mean: Mean `[*batch, C]`.
        running_var: Variance `[*batch, C]`.
        batch_ndim: Number of leading batch axes.
        eps: Added to the variance.
        wanted: Which of the five cotangents to compute.

    Returns:
        `x_bar` in dtype and layout of `x`; `weight_bar` and `bias_bar` in the dtype of the weight, or of `x` without
        one; `running_mean_bar` and `running_var_bar` in the dtypes of the statistics; all but the first `[*batch, C]`.
    """
    x_wanted, weight_wanted, bias_wanted, mean_wanted, var_wanted = wanted
    dtype = accumulation_dtype(x.dtype) if weight is None else weight.dtype
    sums = (
        new_channels(x, batch_ndim, dtype) if weight_wanted else None,
        new_channels(x, batch_ndim, dtype) if bias_wanted else None,
        new_channels(x, batch_ndim, running_mean.dtype) if mean_wanted else None,
        new_channels(x, batch_ndim, running_var.dtype) if var_wanted else None,
    )
    if any(wanted[1:]):
        products_wanted = weight_wanted or var_wanted
        read_again = (x_wanted, False)
        product_sums(y_bar, x, running_mean, running_var, weight, sums, products_wanted, batch_ndim, read_again, eps)
    x_bar = None
    if x_wanted:
        x_bar = transform(x, batch_ndim, running_mean, running_var, eps=eps, u=y_bar, weight=weight)
    weight_bar, bias_bar, mean_bar, var_bar = (_or_empty(bar, x) for bar in sums)
    return _or_empty(x_bar, x), weight_bar, bias_bar, mean_bar, var_bar


@tunable
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
) -> Tensor:
    """Tangent of batch norm with given statistics.

    Args:
        x: Input, `[*batch, N, C, *spatial]`.
        weight: Scale `[*batch, C]`; None is 1.
        running_mean: Mean `[*batch, C]`.
        running_var: Variance `[*batch, C]`.
        x_dot: Tangent of `x`; None is 0, as for the other four.
        weight_dot: Tangent of the weight.
        bias_dot: Tangent of the bias.
        running_mean_dot: Tangent of the mean.
        running_var_dot: Tangent of the variance.
        batch_ndim: Number of leading batch axes.
        eps: Added to the variance.

    Returns:
        `y_dot` in dtype and layout of `x`.
    """
    return transform(
        x,
        batch_ndim,
        running_mean,
        running_var,
        eps=eps,
        x_read=x if weight_dot is not None or running_var_dot is not None else None,
        u=x_dot,
        weight=weight,
        slope=weight_dot,
        shift=bias_dot,
        u_center=running_mean_dot,
        tilt=running_var_dot,
    )


def _or_empty(tensor: Tensor | None, x: Tensor) -> Tensor:
    return x.new_empty(0) if tensor is None else tensor
