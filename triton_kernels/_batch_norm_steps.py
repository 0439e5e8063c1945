"""The three steps that the rules of batch norm are made of: statistics, sums of products, transform.

Each takes tensors of any layout, and allocates, plans and launches for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from triton_kernels._batch_norm_kernels import (
    batch_norm_product_sums_kernel,
    batch_norm_product_sums_merge_kernel,
    batch_norm_statistics_kernel,
    batch_norm_statistics_merge_kernel,
    batch_norm_transform_kernel,
)
from triton_kernels._channels import ChannelView, new_output, param_pair_view, readable, view_channels
from triton_kernels._runtime import TL_DTYPES, accumulation_dtype, device_guard, float64_bits, param_view, split_scratch
from triton_kernels.launch import ChannelPlan, cdiv, plan_channel_merge, plan_channel_reduction, plan_channel_transform

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def channel_shape(x: Tensor, batch_ndim: int) -> torch.Size:
    """Shape `[*batch, C]` of statistics and parameters."""
    return x.shape[:batch_ndim] + x.shape[batch_ndim + 1 : batch_ndim + 2]


def new_channels(x: Tensor, batch_ndim: int, dtype: torch.dtype) -> Tensor:
    """Uninitialized `[*batch, C]`."""
    return torch.empty(channel_shape(x, batch_ndim), dtype=dtype, device=x.device)


def statistics(
    x: Tensor,
    outputs: Sequence[Tensor | None],
    running: tuple[Tensor | None, Tensor | None],
    batch_ndim: int,
    momentum: float,
    eps: float,
) -> None:
    """Fill `outputs` (mean, rstd, new running mean, new running variance) from non-empty `x` and the `running` pair."""
    x = readable(x, batch_ndim)
    view = view_channels([x], batch_ndim)
    running_mean, running_var, running_stride = param_pair_view(*running, batch_ndim)
    plan = plan_channel_reduction(view.sizes, view.spatial_inner, view.align, x.element_size(), x.device)
    merge = plan_channel_merge(view.num_channels, plan.num_splits, x.device)
    shape = (view.num_channels, 3, plan.num_splits)
    partials = torch.empty(shape, dtype=accumulation_dtype(x.dtype), device=x.device)
    with device_guard(x):
        batch_norm_statistics_kernel[channel_grid(view, plan)](
            x, partials, *view.extents(), *view.kernel_strides(0), **tile_options(view, plan)
        )
        batch_norm_statistics_merge_kernel[(cdiv(view.num_channels, merge.block_channels),)](
            partials,
            running_mean,
            running_var,
            *outputs,
            view.num_channels,
            plan.num_splits,
            view.num_reduced,
            running_stride,
            *float64_bits(momentum),
            EPS=eps,
            NUM_CHANNELS=view.sizes[2],
            BLOCK_ROWS=merge.block_channels,
            BLOCK_SPLITS=merge.block_splits,
            num_warps=merge.num_warps,
        )


def product_sums(
    u: Tensor,
    x: Tensor,
    mean: Tensor,
    scale_statistic: Tensor,
    weight: Tensor | None,
    outputs: Sequence[Tensor | None],
    products_wanted: bool,
    batch_ndim: int,
    read_again: tuple[bool, bool],
    eps: float | None = None,
    *,
    means_wanted: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Fill `outputs`, the last four of `batch_norm_product_sums_merge_kernel`, from the sums of `u` and `u * x_hat`.

    `read_again` says of `u` and of `x` whether a transform follows that reads them.

    Returns:
        The first two, the means of `u` and of `u * x_hat`, where a transform follows that takes them: scratch, out of
        one allocation with that of the sums.
    """
    if x.numel() == 0:
        for output in outputs:
            if output is not None:
                output.zero_()
        return None, None
    tensors = [readable(u, batch_ndim)]
    if products_wanted:
        tensors.append(readable(x, batch_ndim))
    view = view_channels(tensors, batch_ndim)
    mean_view, scale_view, statistic_stride = param_pair_view(mean, scale_statistic, batch_ndim)
    weight, weight_stride = param_view(weight, batch_ndim)
    sizes = (view.sizes, view.spatial_inner, view.align, u.element_size())
    plan = plan_channel_reduction(*sizes, u.device, len(tensors))
    merge = plan_channel_merge(view.num_channels, plan.num_splits, x.device)
    # Without batch axes the transform takes flat means.
    mean_shape = channel_shape(x, batch_ndim) if batch_ndim else view.num_channels
    shapes = ([mean_shape] * 2 if means_wanted else []) + [view.num_channels * 2 * plan.num_splits]
    *scratch, partials = split_scratch(x, *shapes, dtype=accumulation_dtype(x.dtype))
    means = (scratch[0], scratch[1]) if means_wanted else (None, None)
    with device_guard(x):
        batch_norm_product_sums_kernel[channel_grid(view, plan)](
            tensors[0],
            tensors[1] if products_wanted else None,
            mean_view,
            partials,
            *view.extents(),
            statistic_stride,
            *view.kernel_strides(0),
            *view.kernel_strides(-1),
            U_READ_AGAIN=read_again[0],
            X_READ_AGAIN=read_again[1],
            **tile_options(view, plan),
        )
        batch_norm_product_sums_merge_kernel[(cdiv(view.num_channels, merge.block_channels),)](
            partials,
            scale_view,
            weight,
            *means,
            *outputs,
            view.num_channels,
            plan.num_splits,
            view.num_reduced,
            statistic_stride,
            weight_stride,
            EPS=eps,
            NUM_CHANNELS=view.sizes[2],
            BLOCK_ROWS=merge.block_channels,
            BLOCK_SPLITS=merge.block_splits,
            num_warps=merge.num_warps,
        )
    return means


def transform(
    x: Tensor,
    batch_ndim: int,
    mean: Tensor,
    scale_statistic: Tensor,
    *,
    eps: float | None = None,
    x_read: Tensor | None = None,
    u: Tensor | None = None,
    weight: Tensor | None = None,
    slope: Tensor | None = None,
    default_slope: float = 0.0,
    shift: Tensor | None = None,
    u_center: Tensor | None = None,
    tilt: Tensor | None = None,
) -> Tensor:
    """Result of `batch_norm_transform_kernel` in dtype and layout of `x`; `x_read` is what it reads of `x`, if it does.

    `default_slope` stands for an absent `slope`. Without `eps` the scale statistic is rstd and `tilt` a mean of
    products, otherwise a variance and its tangent.
    """
    out = new_output(x, batch_ndim)
    if x.numel() == 0:
        return out
    tensors = [out]
    tensors += [readable(tensor, batch_ndim) for tensor in (u, x_read) if tensor is not None]
    view = view_channels(tensors, batch_ndim)
    strides = [view.kernel_strides(index) for index in range(len(tensors))]
    mean_view, scale_view, statistic_stride = param_pair_view(mean, scale_statistic, batch_ndim)
    u_center, tilt, term_stride = param_pair_view(u_center, tilt, batch_ndim)
    weight, weight_stride = param_view(weight, batch_ndim)
    slope, slope_stride = param_view(slope, batch_ndim)
    shift, shift_stride = param_view(shift, batch_ndim)
    plan = plan_channel_transform(view.sizes, view.spatial_inner, x.element_size(), x.device)
    with device_guard(x):
        batch_norm_transform_kernel[channel_grid(view, plan)](
            out,
            None if u is None else tensors[1],
            None if x_read is None else tensors[-1],
            mean_view,
            scale_view,
            weight,
            slope,
            shift,
            u_center,
            tilt,
            *view.extents(),
            statistic_stride,
            weight_stride,
            slope_stride,
            shift_stride,
            term_stride,
            *strides[0],
            *strides[0 if u is None else 1],
            *strides[0 if x_read is None else -1],
            EPS=eps,
            DEFAULT_SLOPE=default_slope,
            TILT_IS_VAR_DOT=eps is not None,
            ACC_DTYPE=TL_DTYPES[accumulation_dtype(x.dtype)],
            **tile_options(view, plan),
        )
    return out


def channel_grid(view: ChannelView, plan: ChannelPlan) -> tuple[int, int]:
    return view.sizes[0] * cdiv(view.sizes[2], plan.block_channels), plan.num_splits


def tile_options(view: ChannelView, plan: ChannelPlan) -> dict[str, int]:
    return {
        "NUM_CHANNELS": view.sizes[2],
        "ALIGN": view.align,
        "SPATIAL_INNER": view.spatial_inner,
        "BLOCK_SAMPLES": plan.block_samples,
        "BLOCK_SPATIAL": plan.block_spatial,
        "BLOCK_CHANNELS": plan.block_channels,
        "NUM_STAGES": plan.num_stages,
        "num_warps": plan.num_warps,
    }
