"""Launchers of second-order batch norm in training: derivatives of its backward and of its jvp.

`x: [*batch, N, C, *spatial]` is normalized per channel over `N` and the spatial axes. The backward and the jvp are the
partial derivatives of the pairing of a cotangent with a tangent of y, `L = <y_bar, y_dot>`. Per channel, with u~ for an
operand minus its mean, `x_hat = x~ * rstd` and

    A = mean(x_dot * x_hat),  B = mean(y_bar * x_hat),  D = mean(y_bar_dot * x_hat)
    P(u) = rstd * (u~ - x_hat * mean(u * x_hat)),  S = mean(y_bar * P(x_dot)) = rstd * (mean(y_bar~ * x_dot~) - A * B)
    scale = weight * rstd,  alpha = rstd * (weight_dot - scale * A),  beta = -scale * rstd * B

the gradient of `L`, with the tangent of the vjp's results along (y_bar_dot, x_dot, weight_dot) beside it, is

    y_bar_bar  = scale * x_dot~ + alpha * x~ + bias_dot
    x_dot_bar  = scale * y_bar~ + beta * x~
    x_bar      = alpha * y_bar~ + beta * x_dot~ - rstd * (alpha * B + beta * A + scale * S) * x~
    x_bar_dot  = x_bar + scale * (y_bar_dot~ - D * x_hat)
    weight_bar = sum(y_bar * P(x_dot)) = n * S,  weight_bar_dot = weight_bar + n * D

No term assumes that the mean square of `x_hat` is 1, so eps enters through rstd alone. One kernel reads each operand
once and sums, one merges the sums into the coefficients and the per-channel results, one reads each operand once more
and writes. The mean of `y_bar~ * x_dot~` is a difference of means: two operands whose means are both large against
their spread lose digits there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triton_kernels._batch_norm_second_kernels import (
    batch_norm_second_merge_kernel,
    batch_norm_second_sums_kernel,
    batch_norm_second_transform_kernel,
)
from triton_kernels._batch_norm_steps import channel_grid, new_channels, tile_options
from triton_kernels._channels import new_output, param_pair_view, readable, view_channels
from triton_kernels._runtime import device_guard, param_view, split_scratch
from triton_kernels.launch import cdiv, plan_channel_merge, plan_channel_second_reduction, plan_channel_second_transform
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from triton_kernels._channels import ChannelView

__all__ = ["batch_norm_bwd_jvp", "batch_norm_pairing"]

# Rows of the scratch: partial sums per split, and coefficients.
_NUM_SUMS = 7
_NUM_COEFFICIENTS = 7


class _Operands(NamedTuple):
    """Full-size operands, in the order of the kernels' arguments; None where one is absent or not read."""

    y_bar: Tensor | None
    x: Tensor | None
    x_dot: Tensor | None
    y_bar_dot: Tensor | None

    def only(self, *needed: bool) -> _Operands:
        return _Operands(*(tensor if need else None for tensor, need in zip(self, needed, strict=True)))

    def readable(self, batch_ndim: int) -> _Operands:
        return _Operands(*(None if tensor is None else readable(tensor, batch_ndim) for tensor in self))

    def present(self) -> list[Tensor]:
        return [tensor for tensor in self if tensor is not None]


class _Params(NamedTuple):
    """Per-channel operands."""

    weight: Tensor | None
    weight_dot: Tensor | None
    bias_dot: Tensor | None
    mean: Tensor
    rstd: Tensor


class _Wanted(NamedTuple):
    """Which results to compute; with a `y_bar_dot`, x_bar, weight_bar and bias_bar are those of the jvp."""

    y_bar_bar: bool = False
    x_bar: bool = False
    x_dot_bar: bool = False
    weight_bar: bool = False
    weight_dot_bar: bool = False
    bias_dot_bar: bool = False
    bias_bar: bool = False

    @property
    def full_size(self) -> tuple[bool, ...]:
        return self[:3]

    @property
    def per_channel(self) -> tuple[bool, ...]:
        return self[3:]


@tunable
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
) -> tuple[Tensor, ...]:
    """Gradient of the pairing of a cotangent with a tangent of the output of batch norm in training.

    Args:
        y_bar: Cotangent of `y`, shape of `x`.
        x: Input, `[*batch, N, C, *spatial]`.
        weight: Scale `[*batch, C]`; None is 1.
        mean: As the forward returned it.
        rstd: As the forward returned it.
        x_dot: Tangent of `x`; None is 0, as for the other two.
        weight_dot: Tangent of the weight.
        bias_dot: Tangent of the bias.
        batch_ndim: Number of leading batch axes.
        wanted: Which of the six results to compute; only what these take is read.

    Returns:
        `(y_bar_bar, x_bar, weight_bar, x_dot_bar, weight_dot_bar, bias_dot_bar)`. Those of full size have dtype and
        layout of `x`, the others are `[*batch, C]` in the dtype of the weight, or of `x` without one. What the pairing
        does not depend on has a gradient of zeros.
    """
    want_y_bar, want_x, want_weight, want_x_dot, want_weight_dot, want_bias_dot = map(bool, wanted)
    out = _derivatives(
        x,
        _Operands(y_bar, x, x_dot, None),
        _Params(weight, weight_dot, bias_dot, mean, rstd),
        _Wanted(want_y_bar, want_x, want_x_dot, want_weight, want_weight_dot, want_bias_dot),
        batch_ndim,
    )
    y_bar_bar, x_bar, x_dot_bar, weight_bar, weight_dot_bar, bias_dot_bar, _ = out
    return y_bar_bar, x_bar, weight_bar, x_dot_bar, weight_dot_bar, bias_dot_bar


@tunable
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
) -> tuple[Tensor, ...]:
    """Tangents of the cotangents that `batch_norm_train_bwd` computes.

    Args:
        y_bar: Cotangent of `y`, shape of `x`.
        x: Input, `[*batch, N, C, *spatial]`.
        weight: Scale `[*batch, C]`; None is 1.
        mean: As the forward returned it.
        rstd: As the forward returned it.
        y_bar_dot: Tangent of `y_bar`; None is 0, as for the other two.
        x_dot: Tangent of `x`.
        weight_dot: Tangent of the weight.
        batch_ndim: Number of leading batch axes.
        wanted: Which of the three results to compute; only what these take is read.

    Returns:
        `(x_bar_dot, weight_bar_dot, bias_bar_dot)`, the first in dtype and layout of `x`, the others `[*batch, C]` in
        the dtype of the weight, or of `x` without one.
    """
    want_x, want_weight, want_bias = map(bool, wanted)
    out = _derivatives(
        x,
        _Operands(y_bar, x, x_dot, y_bar_dot),
        _Params(weight, weight_dot, None, mean, rstd),
        _Wanted(x_bar=want_x, weight_bar=want_weight, bias_bar=want_bias),
        batch_ndim,
    )
    _, x_bar_dot, _, weight_bar_dot, _, _, bias_bar_dot = out
    return x_bar_dot, weight_bar_dot, bias_bar_dot


def _derivatives(x: Tensor, operands: _Operands, params: _Params, want: _Wanted, batch_ndim: int) -> list[Tensor]:
    """All results in the order of `_Wanted`."""
    dtype = x.dtype if params.weight is None else params.weight.dtype
    full = [new_output(x, batch_ndim) if wanted else None for wanted in want.full_size]
    small = [new_channels(x, batch_ndim, dtype) if wanted else None for wanted in want.per_channel]
    if x.numel() == 0:
        for sums in small:
            if sums is not None:
                sums.zero_()
    elif any(want):
        operands = operands.readable(batch_ndim)
        has_alpha = operands.x_dot is not None or params.weight_dot is not None
        summed = _summed(operands, want, has_alpha)
        coefficients = _merge_sums(summed, x, params, small, any(want.full_size), batch_ndim)
        if coefficients is not None:
            transformed = _transformed(operands, want, has_alpha)
            _transform(transformed, params, coefficients, full, has_alpha, batch_ndim)
    return [x.new_empty(0) if out is None else out for out in (*full, *small)]


def _summed(operands: _Operands, want: _Wanted, has_alpha: bool) -> _Operands:
    """The operands whose sums the wanted results take."""
    has_x_dot, has_y_bar_dot = operands.x_dot is not None, operands.y_bar_dot is not None
    x_bar_of_y_bar = want.x_bar and has_alpha
    x_dot = has_x_dot and (want.y_bar_bar or want.x_bar or want.weight_bar)
    y_bar_products = x_bar_of_y_bar or want.x_dot_bar or want.weight_dot_bar or (want.weight_bar and has_x_dot)
    y_bar_dot_products = has_y_bar_dot and (want.x_bar or want.weight_bar)
    return operands.only(
        y_bar_products or want.bias_dot_bar,
        y_bar_products or x_dot or y_bar_dot_products,
        x_dot,
        y_bar_dot_products or want.bias_bar,
    )


def _transformed(operands: _Operands, want: _Wanted, has_alpha: bool) -> _Operands:
    """The operands that have a factor in one of the wanted results of full size."""
    from_alpha = has_alpha and (want.x_bar or want.y_bar_bar)
    return operands.only(
        want.x_dot_bar or (want.x_bar and has_alpha),
        want.x_dot_bar or from_alpha or (want.x_bar and operands.y_bar_dot is not None),
        want.y_bar_bar or want.x_bar,
        want.x_bar,
    )


def _strides_of(operands: _Operands, view: ChannelView, first: int) -> list[int]:
    """Strides of all operands, which are the tensors of `view` from number `first` on; any for absent ones."""
    indices = iter(range(first, len(view.strides)))
    numbers = [0 if tensor is None else next(indices) for tensor in operands]
    return [stride for number in numbers for stride in view.kernel_strides(number)]


def _merge_sums(
    operands: _Operands,
    x: Tensor,
    params: _Params,
    outputs: Sequence[Tensor | None],
    coefficients_wanted: bool,
    batch_ndim: int,
) -> Tensor | None:
    """Fill the per-channel `outputs`; returns the coefficients of the transform if they are wanted."""
    # Without a sum to take, the coefficients still depend on the parameters; the view then only counts channels.
    view = view_channels(operands.present() or [readable(x, batch_ndim)], batch_ndim)
    plan = plan_channel_second_reduction(view.sizes, view.spatial_inner, view.align, x.element_size(), x.device)
    merge = plan_channel_merge(view.num_channels, plan.num_splits, x.device)
    num_rows = view.num_channels
    # The coefficients come first: where the rest starts then does not change with the number of splits, and with it
    # the alignment that Triton compiles for.
    num_sums = num_rows * _NUM_SUMS * plan.num_splits
    coefficients, partials = split_scratch(params.mean, num_rows * _NUM_COEFFICIENTS, num_sums)
    mean, rstd, statistic_stride = param_pair_view(params.mean, params.rstd, batch_ndim)
    weight, weight_stride = param_view(params.weight, batch_ndim)
    weight_dot, weight_dot_stride = param_view(params.weight_dot, batch_ndim)
    with device_guard(x):
        if operands.present():
            batch_norm_second_sums_kernel[channel_grid(view, plan)](
                *operands,
                mean,
                partials,
                *view.extents(),
                statistic_stride,
                *_strides_of(operands, view, 0),
                READ_AGAIN=coefficients_wanted,
                **tile_options(view, plan),
            )
        batch_norm_second_merge_kernel[(cdiv(num_rows, merge.block_channels),)](
            partials,
            coefficients if coefficients_wanted else None,
            rstd,
            weight,
            weight_dot,
            *outputs,
            num_rows,
            plan.num_splits,
            view.num_reduced,
            statistic_stride,
            weight_stride,
            weight_dot_stride,
            HAS_Y_BAR=operands.y_bar is not None,
            HAS_X=operands.x is not None,
            HAS_X_DOT=operands.x_dot is not None,
            HAS_Y_BAR_DOT=operands.y_bar_dot is not None,
            NUM_CHANNELS=view.sizes[2],
            BLOCK_ROWS=merge.block_channels,
            BLOCK_SPLITS=merge.block_splits,
            num_warps=merge.num_warps,
        )
    return coefficients if coefficients_wanted else None


def _transform(
    operands: _Operands,
    params: _Params,
    coefficients: Tensor,
    outputs: Sequence[Tensor | None],
    has_alpha: bool,
    batch_ndim: int,
) -> None:
    """Fill the `outputs` of full size."""
    out = next(output for output in outputs if output is not None)
    view = view_channels([out, *operands.present()], batch_ndim)
    plan = plan_channel_second_transform(view.sizes, view.spatial_inner, out.element_size(), out.device)
    mean, mean_stride = param_view(params.mean, batch_ndim)
    bias_dot, bias_dot_stride = param_view(params.bias_dot, batch_ndim)
    with device_guard(out):
        batch_norm_second_transform_kernel[channel_grid(view, plan)](
            *outputs,
            *operands,
            mean,
            bias_dot,
            coefficients,
            *view.extents(),
            view.num_channels,
            mean_stride,
            bias_dot_stride,
            *view.kernel_strides(0),
            *_strides_of(operands, view, 1),
            HAS_ALPHA=has_alpha,
            **tile_options(view, plan),
        )
