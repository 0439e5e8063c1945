"""The steps that the rules of batch norm are made of: sums over channels, and the transform.

Each takes tensors of any layout, and allocates, plans and launches for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.arithmetic import cdiv
from ..runtime.kernel import UNFUSED
from ..runtime.numbers import TL_DTYPES, accumulation_dtype, float64_bits
from ..runtime.views import device_guard, param_view, split_scratch
from ._channels import ChannelView, new_output, output_format, param_pair_view, readable, view_channels
from ._plan import ChannelPlan, plan_channel_merge, plan_channel_sums, plan_channel_transform
from ._sum_kernels import batch_norm_merge_kernel, batch_norm_statistics_kernel, batch_norm_sums_kernel
from ._transform_kernels import batch_norm_transform_kernel


class Operands(NamedTuple):
    """Full-size operands, in the order of the kernels' arguments; None where one is absent or not read."""

    y_bar: Tensor | None = None
    x: Tensor | None = None
    x_dot: Tensor | None = None
    y_bar_dot: Tensor | None = None

    def only(self, *needed: bool) -> Operands:
        """Those that are needed."""
        return Operands(*(tensor if need else None for tensor, need in zip(self, needed, strict=True)))

    def readable(self, batch_ndim: int) -> Operands:
        """The same with a channel view of each."""
        return Operands(*(None if tensor is None else readable(tensor, batch_ndim) for tensor in self))

    def present(self) -> list[Tensor]:
        """Those that are there."""
        return [tensor for tensor in self if tensor is not None]

    def sums(self, statistics: bool) -> int:
        """Bits of the sums that there are of these, or of x with its statistics (see `batch_norm_sums_kernel`)."""
        y_bar, x, x_dot, y_bar_dot = (tensor is not None for tensor in self)
        found = (y_bar, y_bar and x, x_dot, x_dot and x, y_bar and x_dot, y_bar_dot, y_bar_dot and x)
        return sum(is_there << place for place, is_there in enumerate((*found, *[statistics] * 3)))


class Params(NamedTuple):
    """Per-channel operands; with an `eps`, scale_statistic is a variance, otherwise rstd."""

    mean: Tensor
    scale_statistic: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    weight_dot: Tensor | None = None
    bias_dot: Tensor | None = None
    mean_dot: Tensor | None = None
    var_dot: Tensor | None = None


class Results(NamedTuple):
    """Whether each result is wanted, or what came out: four of the transform, six of the merge, one of the sums."""

    y: Any = False
    y_dot: Any = False
    x_bar: Any = False
    x_bar_dot: Any = False
    weight_bar: Any = False
    bias_bar: Any = False
    mean_bar: Any = False
    var_bar: Any = False
    weight_bar_dot: Any = False
    bias_bar_dot: Any = False
    residual_bar: Any = False


class Relu(NamedTuple):
    """Operands that the end of a residual block adds to a norm, None where it is absent: in memory as the results.

    `y` is the output of a ReLU behind the norm, for its derivatives; `follows` says that there is one behind the value.
    """

    y: Tensor | None = None
    residual: Tensor | None = None
    residual_dot: Tensor | None = None
    follows: bool = False

    def beside(self, x: Tensor, batch_ndim: int) -> Relu:
        """The same in the layout of outputs for `x`."""
        layout = output_format(x, batch_ndim)
        y, residual, residual_dot = (None if v is None else v.contiguous(memory_format=layout) for v in self[:3])
        return Relu(y, residual, residual_dot, self.follows)

    def present(self) -> list[Tensor]:
        """Those that are there."""
        return [tensor for tensor in self[:3] if tensor is not None]


# Rows of the means (see `batch_norm_merge_kernel`).
_NUM_MEANS = 6
# Which of the results come from a merge.
_BARS = slice(4, 10)
_NO_RELU = Relu()


class Sums(NamedTuple):
    """Partial results of a launch of the sums, `[6, channels]` for a merge to fill or None, and the plan of the sums.

    A merge is launched on `grid`, with `numbers` about the partial results, constants and warps.
    """

    partials: Tensor
    means: Tensor | None
    plan: ChannelPlan
    numbers: tuple[int, ...]
    grid: tuple[int]
    options: dict[str, int]


def channel_shape(x: Tensor, batch_ndim: int) -> torch.Size:
    """Shape `[*batch, C]` of statistics and parameters."""
    return x.shape[:batch_ndim] + x.shape[batch_ndim + 1 : batch_ndim + 2]


def new_channels(x: Tensor, batch_ndim: int, dtype: torch.dtype) -> Tensor:
    """Uninitialized `[*batch, C]`."""
    return torch.empty(channel_shape(x, batch_ndim), dtype=dtype, device=x.device)


def derivatives(
    x: Tensor, operands: Operands, params: Params, want: Results, batch_ndim: int, dtype: torch.dtype | None = None,
    eps: float | None = None, relu: Relu = _NO_RELU,
) -> Results:  # fmt: skip
    """The wanted results, empty tensors for the others; `dtype` is that of cotangents of weight and bias.

    Of the operands only those are read that the wanted results take. With `eps`, the statistics are given: a mean and a
    variance, to which it is added. The cotangent of a residual is what passes the ReLU: the sums write it, and the
    transform reads that.
    """
    dtypes = (dtype, dtype, params.mean.dtype, params.scale_statistic.dtype, dtype, dtype)
    bars = [
        new_channels(x, batch_ndim, kind or x.dtype) if is_asked else None
        for is_asked, kind in zip(want[_BARS], dtypes, strict=True)
    ]
    outputs, summed, masked = [None] * 4, None, new_output(x, batch_ndim) if want.residual_bar else None
    if x.numel() == 0:
        for bar in bars:
            if bar is not None:
                bar.zero_()
    else:
        relu = relu.beside(x, batch_ndim)
        if relu.y is not None and operands.y_bar is not None:
            operands = operands._replace(y_bar=operands.y_bar.contiguous(memory_format=output_format(x, batch_ndim)))
        operands = operands.readable(batch_ndim)
        to_sum = _summed(operands, params, want, eps is not None)
        if masked is not None:
            to_sum = to_sum._replace(y_bar=operands.y_bar)
        if to_sum.present() or any(want[_BARS]):
            follows, has_means = any(want[:4]), any(want[:4]) and eps is None
            flags = {"with_means": has_means, "read_again": follows and masked is None, "x_read_again": has_means}
            gate = None if to_sum.y_bar is None else relu.y
            summed = sums(x, to_sum, params.mean, batch_ndim, relu=gate, masked=masked, **flags)
            if has_means or any(want[_BARS]):
                merge_sums(summed, params, bars, batch_ndim, eps)
        if masked is not None:
            operands, relu = operands._replace(y_bar=masked), _NO_RELU
    if any(want[:4]):
        transformed = _transformed(operands, params, want, eps is not None)
        outputs = transform(x, transformed, params, want[:4], batch_ndim, eps=eps, summed=summed, relu=relu)
    return Results(*(x.new_empty(0) if out is None else out for out in (*outputs, *bars, masked)))


def forward(
    x: Tensor, x_dot: Tensor | None, params: tuple[Tensor | None, ...], running: tuple[Tensor | None, Tensor | None],
    batch_ndim: int, momentum: float, eps: float, has_tangent: bool, relu: Relu = _NO_RELU,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`(y, mean, rstd, new_running_mean, new_running_var, y_dot)`, the last one empty without a tangent."""
    acc_dtype = accumulation_dtype(x.dtype)
    if x.numel() == 0:
        mean, rstd = (x.new_zeros(channel_shape(x, batch_ndim), dtype=acc_dtype) for _ in range(2))
        updated = [None if old is None else old.clone() for old in running]
        y, y_dot = new_output(x, batch_ndim), new_output(x, batch_ndim) if has_tangent else None
    else:
        mean, rstd = (new_channels(x, batch_ndim, acc_dtype) for _ in range(2))
        updated = [None if old is None else new_channels(x, batch_ndim, old.dtype) for old in running]
        operands, output_mask = Operands(x=x, x_dot=x_dot).readable(batch_ndim), (True, has_tangent, False, False)
        summed = sums(x, operands, None, batch_ndim, with_means=x_dot is not None, read_again=True)
        merge_statistics(summed, (mean, rstd, *updated), running, batch_ndim, momentum, eps)
        given, relu = Params(mean, rstd, *params), relu.beside(x, batch_ndim)
        y, y_dot, _, _ = transform(x, operands, given, output_mask, batch_ndim, summed=summed, relu=relu)
    y, new_mean, new_var, y_dot = (x.new_empty(0) if out is None else out for out in (y, *updated, y_dot))
    return y, mean, rstd, new_mean, new_var, y_dot


def _summed(operands: Operands, params: Params, want: Results, statistics_given: bool) -> Operands:
    """The operands whose sums the wanted results take."""
    if statistics_given:
        return operands.only(any(want[_BARS]), want.weight_bar or want.var_bar, False, False)
    has_x_dot, has_y_bar_dot = operands.x_dot is not None, operands.y_bar_dot is not None
    has_alpha = has_x_dot or params.weight_dot is not None
    x_dot = has_x_dot and (want.y_dot or want.x_bar_dot or want.weight_bar_dot)
    y_bar_products = (want.x_bar_dot and has_alpha) or (want.weight_bar_dot and has_x_dot)
    y_bar_products = y_bar_products or want.x_bar or want.weight_bar
    y_bar_dot_products = has_y_bar_dot and (want.x_bar_dot or want.weight_bar_dot)
    return operands.only(
        y_bar_products or want.bias_bar,
        y_bar_products or x_dot or y_bar_dot_products,
        x_dot,
        y_bar_dot_products or want.bias_bar_dot,
    )


def _transformed(operands: Operands, params: Params, want: Results, statistics_given: bool) -> Operands:
    """The operands that have a factor in one of the wanted results of full size."""
    has_alpha = operands.x_dot is not None or params.weight_dot is not None
    if statistics_given:
        has_alpha = params.weight_dot is not None or params.var_dot is not None
    from_alpha = has_alpha and (want.x_bar_dot or want.y_dot)
    of_x_bar = want.x_bar and not statistics_given
    return operands.only(
        want.x_bar or (want.x_bar_dot and has_alpha),
        want.y or of_x_bar or from_alpha or (want.x_bar_dot and operands.y_bar_dot is not None),
        want.y_dot or want.x_bar_dot,
        want.x_bar_dot,
    )


def sums(
    x: Tensor, operands: Operands, mean: Tensor | None, batch_ndim: int, *, with_means: bool, read_again: bool,
    x_read_again: bool = True, relu: Tensor | None = None, masked: Tensor | None = None,
) -> Sums:  # fmt: skip
    """Sum non-empty `operands` like `x` that have a channel view, as `batch_norm_sums_kernel` does.

    Without a mean it is for the statistics. `with_means` says whether a transform takes the means of the sums, the
    others whether it reads the operands, and x, again. `relu` masks y_bar, and `masked` is filled with what is left.
    """
    tensors = operands.present() or [readable(x, batch_ndim)]
    view = view_channels(tensors, batch_ndim)
    itemsize = max(tensor.element_size() for tensor in tensors)
    sizes = (view.sizes, view.spatial_inner, view.align, itemsize)
    plan = plan_channel_sums(*sizes, x.device, len(tensors) + (relu is not None), mean is None)
    merge = plan_channel_merge(view.num_channels, plan.most_splits, x.device)
    bits = operands.sums(mean is None)
    # The means come first: where the rest starts then does not change with the number of parts, and with it the
    # alignment that Triton compiles for.
    shapes = [_NUM_MEANS * view.num_channels] if with_means else []
    shapes.append(bits.bit_count() * view.num_channels * plan.num_splits)
    *means, partials = split_scratch(x, *shapes, dtype=accumulation_dtype(x.dtype))
    mean, mean_stride = param_view(mean, batch_ndim)
    # Where tiles span channels that lie apart, threads add positions of theirs up in each step.
    lie_apart = any(channel != 1 for _, _, channel, _ in view.strides)
    unfused = UNFUSED if lie_apart and not view.spatial_inner else {}
    if any(operand is not None for operand in operands):
        with device_guard(x):
            batch_norm_sums_kernel[(plan.num_blocks, plan.num_splits)](
                *operands, relu, masked, mean, partials, *view.extents(), mean_stride, *_strides_of(operands, view, 0),
                REPEATS=plan.repeats, RUN=plan.run, NUM_STAGES=plan.num_stages, SUMS=bits, READ_AGAIN=read_again,
                X_READ_AGAIN=x_read_again, **_tile_options(view, plan), **unfused,
            )  # fmt: skip
    return Sums(
        partials,
        means[0] if means else None,
        plan,
        (view.num_channels, plan.num_splits, view.num_reduced),
        (cdiv(view.num_channels, merge.block_channels),),
        {
            "SUMS": bits,
            "NUM_CHANNELS": view.sizes[2],
            "BLOCK_ROWS": merge.block_channels,
            "BLOCK_SPLITS": merge.block_splits,
            "num_warps": merge.num_warps,
        },
    )


def merge_statistics(
    summed: Sums, outputs: Sequence[Tensor | None], running: tuple[Tensor | None, Tensor | None], batch_ndim: int,
    momentum: float, eps: float,
) -> None:  # fmt: skip
    """Fill `outputs` (mean, rstd, new running mean, new running variance) and the means of the sums."""
    running_mean, running_var, running_stride = param_pair_view(*running, batch_ndim)
    (mean, rstd, *updated), means, numbers = outputs, summed.means, (*summed.numbers, running_stride)
    tensors = (summed.partials, mean, rstd, means, running_mean, running_var, *updated)
    with device_guard(summed.partials):
        batch_norm_statistics_kernel[summed.grid](
            *tensors, *numbers, *float64_bits(momentum), EPS=eps, **summed.options
        )


def merge_sums(
    summed: Sums, params: Params, outputs: Sequence[Tensor | None], batch_ndim: int, eps: float | None
) -> None:
    """Fill `outputs`, the last six pointers of `batch_norm_merge_kernel`, and the means of the sums."""
    _, rstd, statistic_stride = param_pair_view(params.mean, params.scale_statistic, batch_ndim)
    weight, weight_stride = param_view(params.weight, batch_ndim)
    tensors = (summed.partials, summed.means, rstd, weight, *outputs)
    numbers = (*summed.numbers, statistic_stride, weight_stride)
    with device_guard(summed.partials):
        batch_norm_merge_kernel[summed.grid](*tensors, *numbers, EPS=eps, **summed.options)


def transform(
    x: Tensor, operands: Operands, params: Params, output_mask: Sequence[bool], batch_ndim: int, *,
    eps: float | None = None, summed: Sums | None = None, relu: Relu = _NO_RELU,
) -> list[Tensor | None]:  # fmt: skip
    """The wanted ones of y, y_dot, x_bar and x_bar_dot (see `batch_norm_transform_kernel`), in dtype and layout of `x`.

    Operands are what has a factor in one of them, and tensors of `relu` lie as these. Statistics that are given come
    with an `eps`, others with sums, but where there is nothing to sum.
    """
    outputs = [new_output(x, batch_ndim) if want else None for want in output_mask]
    if x.numel() == 0:
        return outputs
    out = next(output for output in outputs if output is not None)
    view = view_channels([out, *operands.present()], batch_ndim)
    mean, scale_statistic, statistic_stride = param_pair_view(params.mean, params.scale_statistic, batch_ndim)
    mean_dot, var_dot, statistic_dot_stride = param_pair_view(params.mean_dot, params.var_dot, batch_ndim)
    views = [param_view(param, batch_ndim) for param in params[2:6]]
    count = len(operands.present()) + len(relu.present()) + sum(output_mask)
    plan = plan_channel_transform(view.sizes, view.spatial_inner, view.align, x.element_size(), x.device, count)
    reduced = plan if summed is None else summed.plan
    # A small tensor fills no wave.
    num_splits, num_resident = reduced.num_splits, min(reduced.num_resident, plan.num_blocks * reduced.num_splits)
    num_parts = cdiv(cdiv(plan.num_tiles, num_splits), plan.part_tiles)
    num_waves = cdiv(plan.num_blocks * num_splits, num_resident)
    with device_guard(x):
        batch_norm_transform_kernel[(num_waves * num_resident * num_parts,)](
            *outputs, *operands, *relu[:3], mean, scale_statistic, *(param for param, _ in views),
            None if summed is None else summed.means, mean_dot, var_dot, view.num_channels, *view.extents(),
            plan.num_blocks, num_splits, num_resident, num_parts, plan.part_tiles, statistic_stride,
            *(stride for _, stride in views), statistic_dot_stride, *view.kernel_strides(0),
            *_strides_of(operands, view, 1), EPS=eps, ACC_DTYPE=TL_DTYPES[accumulation_dtype(x.dtype)],
            RELU=relu.follows, **_tile_options(view, plan),
        )  # fmt: skip
    return outputs


def _strides_of(operands: Operands, view: ChannelView, first: int) -> list[int]:
    """Strides of all operands, which are the tensors of `view` from number `first` on; any for absent ones."""
    indices = iter(range(first, len(view.strides)))
    numbers = [0 if tensor is None else next(indices) for tensor in operands]
    return [stride for number in numbers for stride in view.kernel_strides(number)]


def _tile_options(view: ChannelView, plan: ChannelPlan) -> dict[str, Any]:
    return {
        "NUM_CHANNELS": view.sizes[2],
        "ALIGN": view.align,
        "SPATIAL_INNER": view.spatial_inner,
        "BLOCK_SAMPLES": plan.block_samples,
        "BLOCK_SPATIAL": plan.block_spatial,
        "BLOCK_CHANNELS": plan.block_channels,
        "num_warps": plan.num_warps,
    }
