"""Launches that norms share: views of their tensors, and the forward, the jvp and the vjp of a table of kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..rows.launch import (
    NO_SUMS,
    Operands,
    Param,
    ParamLayout,
    RowSums,
    add_partial_rows,
    launch_row_sums,
    launch_rows,
    num_row_parts,
    sums_scratch,
)
from ..rows.plan import RowPlan, plan_log_softmax
from ..rows.view import channels_last_views, row_view
from ..runtime.kernel import Kernel
from ..runtime.numbers import accumulation_dtype, noise_numbers
from ..runtime.views import device_guard, param_view, per_stream
from ._plan import LAYER_NORM_MAX_SEGMENTS, plan_layer_norm_params, plan_layer_norm_rows, plan_layer_norm_second_rows

# Tensors by name, None where one is absent.
Tensors = Mapping[str, Tensor | None]


class Norm(NamedTuple):
    """What is normalized: how many dims, how many of the first have parameters of their own, about which center.

    Attributes:
        norm_ndim: Trailing dims that are normalized.
        batch_ndim: Leading dims along which the parameters differ.
        centered: Whether the mean is subtracted.
        layout: That of the parameters; other than per column, x is `[*batch, *rest, groups, channels, positions]`.
        seed: Of noise that is drawn, `[*batch]`; None for none.
        p: Share of the noise that is 0.
    """

    norm_ndim: int
    batch_ndim: int
    centered: bool = True
    layout: ParamLayout = ParamLayout.PER_COLUMN
    seed: Tensor | None = None
    p: float = 0.0

    def param_shape(self, x: Tensor) -> tuple[int, ...]:
        """Shape of the parameters."""
        return (*x.shape[: self.batch_ndim], *(x.shape[-3:-1] if self.layout else x.shape[x.dim() - self.norm_ndim :]))

    def empty_like(self, x: Tensor) -> Tensor:
        """Memory for a result of the shape of `x`."""
        if self.layout != ParamLayout.CHANNELS_LAST:
            return x.new_empty(x.shape)
        *samples, groups, channels, positions = range(x.dim())
        order = (*samples, positions, groups, channels)
        return torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device)

    def statistics(self, mean: Tensor, rstd: Tensor) -> dict[str, Tensor | None]:
        """Those that kernels read."""
        return {"mean": mean if self.centered else None, "rstd": rstd}

    def sums(self, places: int, reads: Sequence[str], num_anchors: int = 0) -> RowSums:
        """All sums of a row, or without a mean every second one, from the second on; only a mean needs an anchor."""
        return RowSums(
            places, reads, None if self.centered else 0b1010 & (1 << places) - 1, num_anchors * self.centered
        )

    def operands(self, full_size: Tensors, params: Tensors, statistics: Tensors, has_sums: bool = False) -> Operands:
        """Operands, views of them, of a kernel; the outputs are set with `_replace`.

        With `has_sums`, groups of rows that have sums of their own are segments, of which there are few otherwise; and
        so are those that have random numbers of their own.
        """
        x = next(tensor for tensor in full_size.values() if tensor is not None)
        seed = self.seed if self.p else None
        has_streams = seed is not None and seed.numel() > 1
        if self.layout == ParamLayout.CHANNELS_LAST:
            viewed = {name: _of_samples(param, x.shape[:-3], self.batch_ndim) for name, param in params.items()}
            view, _ = channels_last_views([*full_size.values()])
        else:
            viewed = {name: param_view(param, self.batch_ndim) for name, param in params.items()}
            has_own_sums = has_sums and math.prod(x.shape[: self.batch_ndim]) > 1
            differ = has_streams or has_own_sums or any(stride for _, stride in viewed.values())
            most = LAYER_NORM_MAX_SEGMENTS if has_sums else None
            view = row_view([*full_size.values()], self.norm_ndim, self.batch_ndim if differ else None, most)
        flat = {name: None if tensor is None else tensor.contiguous() for name, tensor in statistics.items()}
        operands = Operands(view, tuple(full_size), viewed, flat, {}, {}, accumulation_dtype(x.dtype), x.device)
        if self.layout:
            run = x.shape[-2 if self.layout == ParamLayout.CHANNELS_LAST else -1]
            operands = operands._replace(groups=x.shape[-3], run=run, layout=self.layout)
        seeds, stride = per_stream(seed)
        last_dropped, scale_low, scale_high = (0, 0, 0) if seed is None else noise_numbers(self.p)
        noise = {
            "seed_segment_stride": stride if has_streams else 0,
            "num_stream_rows": view.num_rows if has_streams else 0,
            "last_dropped": last_dropped,
            "scale_low": scale_low,
            "scale_high": scale_high,
        }
        return operands._replace(seeds=seeds, noise=noise)


def _of_samples(param: Tensor | None, samples: Sequence[int], batch_ndim: int) -> Param:
    """`param_view` of a parameter for segments that are samples: where batches have their own, one for each sample."""
    view = param_view(param, batch_ndim)
    if param is None or view[1] == 0 or math.prod(samples[batch_ndim:]) == 1:
        return view
    shape = param.shape[batch_ndim:]
    ones = [1] * (len(samples) - batch_ndim)
    return param_view(param.reshape(*samples[:batch_ndim], *ones, *shape).expand(*samples, *shape), len(samples))


def plan_rows(operands: Operands, sums: RowSums, num_held: int | None = None) -> RowPlan:
    """Plan of a kernel that holds or sweeps whole rows, `num_held` of them, by default one of each operand."""
    tensors, given = [tensor for tensor in operands.view.tensors if tensor is not None], operands.given()
    itemsize = tensors[0].element_size() if tensors else operands.dtype.itemsize
    num_summed = len(given.intersection(sums.reads))
    sizes = (*operands.sizes(), itemsize, num_held or len(tensors), num_summed, sums.places)
    return plan_layer_norm_rows(*sizes, operands.device, operands.is_aligned(itemsize))


def forward(
    kernels: Mapping[tuple[bool, Any], Kernel], norm: Norm, full_size: Tensors, params: Tensors, outputs: Tensors,
    eps: float, then: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fill the outputs, and return mean, empty of a norm that is not centered, and rstd.

    Args:
        kernels: By whether the norm is centered, and by what follows x_hat.
        norm: The norm.
        full_size: What is normalized, x first, then the tangents of the same.
        params: Parameters and their tangents.
        outputs: Results of full size.
        eps: Added to the variance.
        then: What follows x_hat.
    """
    x, *others = full_size.values()
    assert x is not None  # noqa: S101 - for the type
    row_shape = x.shape[: x.dim() - norm.norm_ndim]
    rstd = x.new_empty(row_shape, dtype=accumulation_dtype(x.dtype))
    mean = rstd.new_empty(row_shape if norm.centered else 0)
    if x.numel() == 0:
        # Rows without columns: the empty sum and, as in torch, an undefined variance.
        return mean.zero_(), rstd.fill_(math.nan)
    num_values = len(full_size) // 2
    moves = any(tangent is not None for tangent in others[num_values - 1 :])
    operands = norm.operands(full_size, params, {})
    operands = operands._replace(outputs=outputs, row_outputs=norm.statistics(mean, rstd))
    sums = norm.sums(4 if moves else 2, operands.names, num_values)
    with device_guard(x):
        plan = plan_rows(operands, sums, 2 * num_values if moves else num_values)
        launch_rows(kernels[norm.centered, then], operands, plan, sums, EPS=eps)
    return mean, rstd


def jvp(
    kernel: Kernel, norm: Norm, full_size: Tensors, params: Tensors, statistics: tuple[Tensor, Tensor],
    outputs: Tensors, silu: bool = False,
) -> None:  # fmt: skip
    """Fill the outputs, tangents, of what was normalized, first of `full_size`, and of its tangents."""
    x, *tangents = full_size.values()
    assert x is not None  # noqa: S101 - for the type
    if x.numel() == 0:
        return
    # Without SiLU, a weight multiplies the tangent of x alone, and bias_dot stands alone.
    moves = any(tangent is not None for tangent in tangents)
    takes_x = silu or moves or params["weight_dot"] is not None
    params = {**params, "weight": params["weight"] if silu or moves else None}
    read = norm.statistics(*statistics) if takes_x else {"mean": None, "rstd": None}
    operands = norm.operands(full_size, params, read)
    sums = norm.sums(2, operands.names) if moves else NO_SUMS
    plan = plan_rows(operands, sums)
    operands = (operands if takes_x else operands.only(["bias_dot"]))._replace(outputs=outputs)
    with device_guard(x):
        launch_rows(kernel, operands, plan, sums)


class Backward(NamedTuple):
    """Kernels of a vjp: of rows alone, of rows with the sums over them, and of planes, if groups have any."""

    rows: Kernel
    sums: Kernel
    planes: Kernel | None = None


def backward(
    kernels: Backward, norm: Norm, full_size: Tensors, params: Tensors, statistics: tuple[Tensor, Tensor],
    outputs: Tensors, output_mask: Sequence[bool], silu: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Fill the outputs, cotangents of rows, and return those of weight and bias, empty where they are not wanted.

    They are in the dtype of the weight, or in that of sums without one. `full_size` has y_bar, then what was
    normalized, then what is added to its cotangent.
    """
    value, (y_bar, x, *_) = [*full_size][1], full_size.values()
    assert x is not None and y_bar is not None  # noqa: S101, PT018 - for the type
    weight, want_rows = params["weight"], any(output is not None for output in outputs.values())
    param_dtype = accumulation_dtype(x.dtype) if weight is None else weight.dtype
    bars = [x.new_empty(norm.param_shape(x), dtype=param_dtype) if want else None for want in output_mask]
    weight_bar, bias_bar = (x.new_empty(0) if bar is None else bar for bar in bars)
    if x.numel() == 0:
        return weight_bar.zero_(), bias_bar.zero_()
    # Without SiLU the weight enters cotangents of rows alone.
    params = {**params, "weight": weight if want_rows or silu else None}
    read, itemsize = norm.statistics(*statistics), x.element_size()
    has_planes = any(output_mask) and norm.layout != ParamLayout.PER_COLUMN
    has_sums = any(output_mask) and not has_planes
    operands, plan, row_plan = norm.operands(full_size, params, read, has_sums), None, None
    if has_sums:
        options = (x.device, operands.is_aligned(itemsize), operands.seeds is not None)
        plan = plan_layer_norm_params(*operands.sizes(), itemsize, *options)
    # Of long rows, and of groups, the cotangents of rows and the sums are written one after the other.
    is_apart = plan is None or plan.looped
    rows, swept_size, sums = operands, 0, norm.sums(2, ("y_bar", value, "weight", "bias"))
    if want_rows and is_apart:
        rows = norm.operands(full_size, params, read)._replace(outputs=outputs)
        row_plan = plan_rows(rows, sums, 2)
        swept_size = num_row_parts(rows, row_plan, sums)
    taken = ["y_bar", *[value] * (silu or bars[0] is not None), *["weight", "bias"] * silu]
    planes = Planes.of(operands.only(taken), bars, norm.batch_ndim) if has_planes else None
    plane_size, partial = (0, operands.partial_rows(plan)) if planes is None else planes.scratch()
    num_groups = math.prod(x.shape[: norm.batch_ndim])
    sizes = (num_groups, swept_size, plane_size)
    parts, (swept_parts, plane_parts) = sums_scratch(statistics[1], *partial, bars, *sizes)
    totals = {"weight_part": bars[0], "bias_part": bars[1]}
    with device_guard(x):
        if row_plan is not None:
            launch_rows(kernels.rows, rows, row_plan, sums, parts=swept_parts)
        if planes is not None and kernels.planes is not None:
            planes.launch(kernels.planes, totals, parts, num_groups, plane_parts)
        if plan is not None and (is_apart or not want_rows):
            operands = operands.only(taken)._replace(outputs=dict.fromkeys(outputs), seeds=None)
            launch_row_sums(kernels.sums, operands, plan, totals, parts, num_groups)
        elif plan is not None:
            operands = operands._replace(outputs=outputs)
            launch_row_sums(kernels.sums, operands, plan, totals, parts, num_groups, sums)
    return weight_bar, bias_bar


class Planes(NamedTuple):
    """A launch of a kernel that sums the planes of a group norm: what a sample has of one channel.

    Of channels_last these are adjacent, as the rows of a softmax over an axis that is not the last one, and planned so.
    """

    operands: Operands
    plan: RowPlan
    sums: RowSums
    num_samples: int

    @classmethod
    def of(cls, operands: Operands, totals: Sequence[Tensor | None], batch_ndim: int) -> Planes:
        """Planes of the rows `[*samples, groups, channels, positions]`, for those of the totals that are not None.

        A parameter has a number for each of the planes of a sample.
        """
        tensors = operands.view.tensors
        *samples, groups, channels, run = next(tensor for tensor in tensors if tensor is not None).shape
        differ = any(stride for _, stride in operands.params.values())
        if operands.view.period:
            _, view = channels_last_views(tensors)
        else:
            view = row_view(tensors, 1, batch_ndim if differ else None)
        per_channel = {"groups": groups * channels, "layout": ParamLayout.PER_CHANNEL, "run": run}
        planes = operands._replace(view=view, planes=channels, **per_channel)
        bits = sum(1 << number for number, total in enumerate(totals) if total is not None)
        sums = RowSums(len(totals), (*planes.names, *planes.params), bits)
        num_operands = sum(tensor is not None for tensor in tensors)
        itemsize = next(tensor.element_size() for tensor in tensors if tensor is not None)
        if view.along_rows:
            counts = (num_operands, planes.device, 0, num_operands, bits.bit_count())
            sizes = (planes.sizes(), True, itemsize, planes.dtype.itemsize)
            plan = plan_log_softmax(*sizes, *counts, planes.is_aligned(itemsize))
        elif num_operands <= 2:
            plan = plan_rows(planes, sums)
        else:
            sizes = (*planes.sizes(), itemsize, num_operands)
            plan = plan_layer_norm_second_rows(*sizes, planes.device, planes.is_aligned(itemsize))
        return cls(planes, plan, sums, math.prod(samples))

    def partial_rows(self) -> tuple[int, int]:
        """How many partial rows it leaves, one of each sample, and their columns, which are channels."""
        num_segments, num_rows, _ = self.operands.sizes()
        return self.num_samples, num_segments * num_rows // self.num_samples

    def scratch(self) -> tuple[int, tuple[int, int]]:
        """`num_row_parts` of it, and its partial rows."""
        return num_row_parts(self.operands, self.plan, self.sums), self.partial_rows()

    def launch(
        self, kernel: Kernel, totals: Tensors, parts: Sequence[Tensor | None] | None, num_groups: int,
        row_parts: Tensor | None, statistics: Tensors = MappingProxyType({}), **constants: Any,
    ) -> None:  # fmt: skip
        """Launch it, and the sums of its results over samples; the arguments are those of `launch_row_sums`.

        More `statistics` are results of an earlier kernel.
        """
        outputs = dict(zip(totals, totals.values() if parts is None else parts, strict=True))
        given = {**self.operands.statistics, **statistics}
        operands = self.operands._replace(statistics=given, row_outputs=outputs)
        launch_rows(kernel, operands, self.plan, self.sums, (), row_parts, **constants)
        if parts is not None:
            add_partial_rows(parts, [*totals.values()], num_groups, self.partial_rows()[1])
