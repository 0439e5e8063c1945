"""Views and plans that the launchers of layer norm share, of first and of second order."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from triton_kernels.norms._plan import LAYER_NORM_MAX_SEGMENTS, plan_layer_norm_rows
from triton_kernels.norms._second_plan import plan_layer_norm_second_rows
from triton_kernels.rows.launch import Operands, RowSums, add_partial_rows, launch_rows, num_row_parts
from triton_kernels.rows.map_plan import plan_log_softmax
from triton_kernels.rows.view import channels_last_views, row_view
from triton_kernels.runtime.numbers import accumulation_dtype
from triton_kernels.runtime.views import param_view

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from triton_kernels.rows.launch import Param
    from triton_kernels.rows.plan import RowPlan
    from triton_kernels.runtime.kernel import Kernel

# `grouped` of x whose channels are adjacent in memory.
CHANNELS_LAST = 2


def layer_norm_operands(
    full_size: Mapping[str, Tensor | None],
    params: Mapping[str, Tensor | None],
    statistics: Mapping[str, Tensor | None],
    norm_ndim: int,
    batch_ndim: int,
    grouped: int = 0,
    *,
    has_sums: bool = False,
    has_streams: bool = False,
) -> Operands:
    """Operands, views of them, of a kernel of layer norm; the outputs are set with `_replace`.

    `grouped` parameters have a number for each channel of each group. With `has_sums`, groups of rows that have sums of
    their own are segments, of which there are few otherwise; and with `has_streams` those with random numbers of their
    own.
    """
    x = next(tensor for tensor in full_size.values() if tensor is not None)
    if grouped == CHANNELS_LAST:
        viewed = {name: _of_samples(param, x.shape[:-3], batch_ndim) for name, param in params.items()}
        view, _ = channels_last_views([*full_size.values()])
    else:
        viewed = {name: param_view(param, batch_ndim) for name, param in params.items()}
        has_own_sums = has_sums and math.prod(x.shape[:batch_ndim]) > 1
        differ = has_streams or has_own_sums or any(stride for _, stride in viewed.values())
        most = LAYER_NORM_MAX_SEGMENTS if has_sums else None
        view = row_view([*full_size.values()], norm_ndim, batch_ndim if differ else None, most)
    flat = {name: None if tensor is None else tensor.contiguous() for name, tensor in statistics.items()}
    operands = Operands(view, tuple(full_size), viewed, flat, {}, {}, accumulation_dtype(x.dtype), x.device)
    if not grouped:
        return operands
    return operands._replace(groups=x.shape[-3], run=-x.shape[-2] if grouped == CHANNELS_LAST else x.shape[-1])


def _of_samples(param: Tensor | None, samples: torch.Size, batch_ndim: int) -> Param:
    """`param_view` of a parameter for segments that are samples: where batches have their own, one for each sample."""
    view = param_view(param, batch_ndim)
    if param is None or view[1] == 0 or math.prod(samples[batch_ndim:]) == 1:
        return view
    shape = param.shape[batch_ndim:]
    ones = [1] * (len(samples) - batch_ndim)
    return param_view(param.reshape(*samples[:batch_ndim], *ones, *shape).expand(*samples, *shape), len(samples))


def empty_like_x(x: Tensor, grouped: int) -> Tensor:
    """Memory for a result of the shape of `x`."""
    if grouped != CHANNELS_LAST:
        return x.new_empty(x.shape)
    *samples, groups, channels, positions = x.shape
    strides = [channels, 1, groups * channels]
    size = positions * groups * channels
    for count in reversed(samples):
        strides.insert(0, size)
        size *= count
    return x.new_empty_strided(x.shape, strides)


def plan_rows(operands: Operands, sums: RowSums, num_held: int | None = None) -> RowPlan:
    """Plan of a kernel that holds or sweeps whole rows, `num_held` of them, by default one of each operand."""
    tensors, given = [tensor for tensor in operands.view.tensors if tensor is not None], operands.given()
    itemsize = tensors[0].element_size() if tensors else operands.dtype.itemsize
    num_summed = len(given.intersection(sums.reads))
    sizes = (*operands.sizes(), itemsize, num_held or len(tensors), num_summed, sums.places)
    return plan_layer_norm_rows(*sizes, operands.device, operands.is_aligned(itemsize))


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
        planes = operands._replace(view=view, groups=groups * channels, run=run, planes=channels)
        wanted = sum(1 << number for number, total in enumerate(totals) if total is not None)
        sums = RowSums(len(totals), (*planes.names, *planes.params), wanted)
        num_operands = sum(tensor is not None for tensor in tensors)
        itemsize = next(tensor.element_size() for tensor in tensors if tensor is not None)
        if view.along_rows:
            counts = (num_operands, planes.device, 0, num_operands, wanted.bit_count())
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

    def num_parts(self) -> int:
        """`num_row_parts` of it."""
        return num_row_parts(self.operands, self.plan, self.sums)

    def launch(
        self,
        kernel: Kernel,
        totals: Mapping[str, Tensor | None],
        parts: Sequence[Tensor | None] | None,
        num_groups: int,
        row_parts: Tensor | None,
        statistics: Mapping[str, Tensor | None] = MappingProxyType({}),
        **constants: Any,
    ) -> None:
        """Launch it, and the sums of its results over samples; the arguments are those of `launch_row_sums`.

        More `statistics` are scratch of an earlier kernel.
        """
        outputs = dict(zip(totals, totals.values() if parts is None else parts, strict=True))
        scratch = (*statistics, *outputs) if parts is not None else tuple(statistics)
        given = {**self.operands.statistics, **statistics}
        operands = self.operands._replace(statistics=given, row_outputs=outputs, scratch=scratch)
        launch_rows(kernel, operands, self.plan, self.sums, (), row_parts, **constants)
        if parts is not None:
            add_partial_rows(parts, [*totals.values()], num_groups, self.partial_rows()[1])
