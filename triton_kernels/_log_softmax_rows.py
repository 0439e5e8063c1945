"""Launches that the launchers of log-softmax share, of first and of second order."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from triton_kernels import launch
from triton_kernels._log_softmax_kernels import log_softmax_pairing_kernel
from triton_kernels._row_launch import Operands, RowSums, launch_rows
from triton_kernels._row_view import reduction_view
from triton_kernels._runtime import accumulation_dtype, device_guard

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from triton_kernels._kernel import Kernel


def launch_log_softmax(
    kernel: Kernel,
    inputs: Mapping[str, Tensor | None],
    outputs: Mapping[str, Tensor | None],
    dim: int,
    sums: RowSums,
    writes: Collection[str] | None = None,
    dtypes: Sequence[torch.dtype] = (),
    statistics: Mapping[str, Tensor | None] | None = None,
    row_outputs: Mapping[str, Tensor | None] | None = None,
    num_results: int = 0,
    **constants: Any,
) -> None:
    """Launch a kernel over rows along `dim`, unless there is nothing to write.

    Args:
        kernel: The kernel.
        inputs: Operands by name; None for one that is absent.
        outputs: Results by name; None for one that is not wanted.
        dim: Reduced dim.
        sums: What is summed over a row.
        writes: Inputs that are read again to write a row that is swept; None for all.
        dtypes: Dtypes whose numbers the arithmetic has to hold; those of the inputs if empty.
        statistics: Numbers of the rows that are read, by name.
        row_outputs: Numbers of the rows that are written, by name; None for one that is not wanted.
        num_results: For how many outputs to plan, if it takes the registers of more than there are.
        **constants: Further constants of the kernel.
    """
    statistics, row_outputs = statistics or {}, row_outputs or {}
    wanted = [tensor for tensor in outputs.values() if tensor is not None]
    first = next(tensor for tensor in (*wanted, *inputs.values()) if tensor is not None)
    if not (wanted or row_outputs) or not first.numel():
        return
    view = reduction_view([*inputs.values()], first, dim)
    dtypes = dtypes or [tensor.dtype for tensor in inputs.values() if tensor is not None]
    dtype = accumulation_dtype(functools.reduce(torch.promote_types, dtypes))
    operands = Operands(view, tuple(inputs), {}, statistics, outputs, row_outputs, dtype, first.device)
    itemsizes = [tensor.element_size() for tensor in view.tensors if tensor is not None]
    plan = launch.plan_log_softmax(
        (view.num_segments, view.num_rows, view.num_cols),
        view.along_rows,
        max(itemsizes),
        dtype.itemsize,
        len(itemsizes),
        operands.device,
        max(len(wanted), num_results, 1),
        len(sums.reads),
        sums.places if sums.wanted is None else sums.wanted,
        view.is_aligned(min(itemsizes)),
    )
    with device_guard(first):
        launch_rows(kernel, operands, plan, sums, writes, **constants)


def launch_pairing(
    y_bar: Tensor | None, y: Tensor, x_dot: Tensor | None, dim: int, outputs: Sequence[Tensor | None]
) -> None:
    """Launch what writes the wanted ones of y_bar_bar, output_bar and x_dot_bar; only what they take is read."""
    y_bar_bar, output_bar, x_dot_bar = outputs
    takes_y_bar, takes_x_dot = (output_bar is not None or out is not None for out in (x_dot_bar, y_bar_bar))
    inputs = {"y_bar": y_bar if takes_y_bar else None, "y": y, "x_dot": x_dot if takes_x_dot else None}
    summed = ["y_bar"] * takes_y_bar + ["y", "x_dot"] * (y_bar_bar is not None)
    writes = ["y"] * takes_y_bar + ["x_dot"] + ["y_bar"] * (x_dot_bar is not None)
    sums = RowSums(2, summed, takes_y_bar + (y_bar_bar is not None))
    named = {"y_bar_bar": y_bar_bar, "output_bar": output_bar, "x_dot_bar": x_dot_bar}
    launch_log_softmax(log_softmax_pairing_kernel, inputs, named, dim, sums, writes)
