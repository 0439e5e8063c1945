"""Views and plans that the launchers of layer norm share, of first and of second order."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from triton_kernels import launch
from triton_kernels._row_launch import Operands, RowSums
from triton_kernels._row_view import row_view
from triton_kernels._runtime import accumulation_dtype, param_view

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from triton_kernels.launch import RowPlan


def layer_norm_operands(
    full_size: Mapping[str, Tensor | None],
    params: Mapping[str, Tensor | None],
    statistics: Mapping[str, Tensor | None],
    norm_ndim: int,
    batch_ndim: int,
    *,
    has_sums: bool = False,
    has_streams: bool = False,
) -> Operands:
    """Operands, views of them, of a kernel of layer norm; the outputs are set with `_replace`.

    With `has_sums`, groups of rows that have sums of their own are segments, of which there are few otherwise; and with
    `has_streams` those with random numbers of their own.
    """
    viewed = {name: param_view(param, batch_ndim) for name, param in params.items()}
    x = next(tensor for tensor in full_size.values() if tensor is not None)
    differ = any(stride for _, stride in viewed.values()) or (
        has_streams or (has_sums and math.prod(x.shape[:batch_ndim]) > 1)
    )
    most = launch.LAYER_NORM_MAX_SEGMENTS if has_sums else None
    view = row_view([*full_size.values()], norm_ndim, batch_ndim if differ else None, most)
    flat = {name: None if tensor is None else tensor.contiguous() for name, tensor in statistics.items()}
    return Operands(view, tuple(full_size), viewed, flat, {}, {}, accumulation_dtype(x.dtype), x.device)


def plan_rows(operands: Operands, sums: RowSums, num_held: int | None = None) -> RowPlan:
    """Plan of a kernel that holds or sweeps whole rows, `num_held` of them, by default one of each operand."""
    tensors, given = [tensor for tensor in operands.view.tensors if tensor is not None], operands.given()
    itemsize = tensors[0].element_size() if tensors else operands.dtype.itemsize
    num_summed = len(given.intersection(sums.reads))
    sizes = (*operands.sizes(), itemsize, num_held or len(tensors), num_summed, sums.places)
    return launch.plan_layer_norm_rows(*sizes, operands.device, operands.is_aligned(itemsize))
