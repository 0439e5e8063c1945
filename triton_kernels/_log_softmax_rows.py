"""Launches that the launchers of log-softmax and softmax share, of first and of second order."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from triton_kernels import launch
from triton_kernels._log_softmax_kernels import (
    log_softmax_bwd_jvp_kernel,
    log_softmax_fwd_kernel,
    log_softmax_pairing_kernel,
)
from triton_kernels._row_launch import Operands, RowSums, launch_rows
from triton_kernels._row_view import reduction_view
from triton_kernels._runtime import accumulation_dtype, device_guard, float64_bits

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
        sums: The terms that are summed over a row.
        writes: Inputs that are read again to write a row that is swept; None for all.
        dtypes: Dtypes whose numbers the arithmetic has to hold; those of the inputs if empty.
        statistics: Numbers of the rows that are read, by name.
        row_outputs: Numbers of the rows that are written, by name; None for one that is not wanted.
        num_results: For how many outputs to plan, if it takes the registers of more than there are.
        **constants: Further constants of the kernel.
    """
    numbers = {name: None if one is None else one.contiguous() for name, one in (statistics or {}).items()}
    row_outputs = row_outputs or {}
    wanted = [tensor for tensor in outputs.values() if tensor is not None]
    first = next(tensor for tensor in (*wanted, *inputs.values()) if tensor is not None)
    if not (wanted or row_outputs) or not first.numel():
        return
    view = reduction_view([*inputs.values()], first, dim, may_repeat="mask" in inputs)
    dtypes = dtypes or [tensor.dtype for tensor in inputs.values() if tensor is not None]
    dtype = accumulation_dtype(functools.reduce(torch.promote_types, dtypes))
    operands = Operands(view, tuple(inputs), {}, numbers, outputs, row_outputs, dtype, first.device)
    itemsizes = [tensor.element_size() for tensor in view.tensors if tensor is not None]
    plan = launch.plan_log_softmax(
        (view.num_segments, view.num_rows, view.num_cols),
        view.along_rows,
        max(itemsizes),
        dtype.itemsize,
        len(itemsizes),
        operands.device,
        max(len(wanted), num_results),
        len(sums.reads),
        sums.places if sums.wanted is None else sums.wanted,
        view.is_aligned(min(itemsizes)),
    )
    if "mask" in inputs:
        constants["mask_repeats"] = view.repeats
    with device_guard(first):
        launch_rows(kernel, operands, plan, sums, writes, **constants)


def scale_bits(scale: float | None) -> dict[str, int | None]:
    """A factor as the kernels take it; None for none, and for 1."""
    low, high = (None, None) if scale in (None, 1.0) else float64_bits(scale)
    return {"scale_low": low, "scale_high": high}


def forward_of(
    x: Tensor,
    mask: Tensor | None,
    x_dot: Tensor | None,
    dim: int,
    output_dtype: torch.dtype | None,
    scale: float | None = None,
) -> list[Tensor]:
    """Y, and its tangent if there is one of x: of softmax with a scale, else of log-softmax."""
    if mask is not None and mask.dtype == torch.bool:
        # Bytes, because Triton has no pointers to bool of its own.
        mask = mask.view(torch.uint8)
    inputs, names = {"x": x, "x_dot": x_dot, "mask": mask}, ("y",) if x_dot is None else ("y", "y_dot")
    results = {name: torch.empty(x.shape, dtype=output_dtype or x.dtype, device=x.device) for name in names}
    sums = RowSums(1 + len(names), [name for name, tensor in inputs.items() if tensor is not None])
    dtypes = [results["y"].dtype] if x_dot is None else [results["y"].dtype, x_dot.dtype]
    constants = {"LOG": scale is None, **scale_bits(scale)}
    launch_log_softmax(
        log_softmax_fwd_kernel, inputs, {"y_dot": None, **results}, dim, sums, dtypes=dtypes, **constants
    )
    return [*results.values()]


def launch_pairing(
    y_bar: Tensor | None,
    y: Tensor,
    x_dot: Tensor | None,
    dim: int,
    wanted: Sequence[bool],
    scale: float | None = None,
    x_dtype: torch.dtype | None = None,
) -> list[Any]:
    """The wanted ones of y_bar_bar, output_bar and x_dot_bar, None for the others; only what they take is read.

    With a scale they are those of softmax, else of log-softmax. The last one has `x_dtype`, if it is given, else each
    the dtype of y_bar, y and x_dot, or of y where one of these is absent.
    """
    dtypes = [(y if like is None else like).dtype for like in (y_bar, y, x_dot)]
    dtypes[2] = x_dtype or dtypes[2]
    outputs = [
        torch.empty(y.shape, dtype=dtype, device=y.device) if want else None
        for dtype, want in zip(dtypes, wanted, strict=True)
    ]
    y_bar_bar, output_bar, x_dot_bar = outputs
    is_log = scale is None
    takes_y_bar, takes_x_dot = (output_bar is not None or out is not None for out in (x_dot_bar, y_bar_bar))
    # Products with y_bar are sums of softmax alone.
    sums_x_dot = y_bar_bar is not None if is_log else takes_x_dot
    writes_y = takes_y_bar if is_log else y_bar_bar is not None or x_dot_bar is not None
    writes_y_bar = x_dot_bar is not None if is_log else takes_y_bar
    inputs = {"y_bar": y_bar if takes_y_bar else None, "y": y, "x_dot": x_dot if takes_x_dot else None}
    summed = ["y_bar"] * takes_y_bar + ["y"] * (sums_x_dot or not is_log) + ["x_dot"] * sums_x_dot
    writes = ["y"] * writes_y + ["x_dot"] + ["y_bar"] * writes_y_bar
    sums = RowSums(2, summed, takes_y_bar + sums_x_dot)
    named = {"y_bar_bar": y_bar_bar, "output_bar": output_bar, "x_dot_bar": x_dot_bar}
    constants = {"LOG": is_log, **scale_bits(scale)}
    launch_log_softmax(log_softmax_pairing_kernel, inputs, named, dim, sums, writes, **constants)
    return outputs


def pairing_of(
    y_bar: Tensor, y: Tensor, x_dot: Tensor, dim: int, wanted: Sequence[bool], scale: float | None = None
) -> tuple[Tensor, ...]:
    """The wanted results of `launch_pairing`; the others have no elements."""
    outputs = launch_pairing(y_bar, y, x_dot, dim, wanted, scale)
    return tuple([y.new_empty(0) if out is None else out for out in outputs])


def bwd_jvp_of(
    y_bar: Tensor,
    y: Tensor,
    y_bar_dot: Tensor | None,
    y_dot: Tensor | None,
    dim: int,
    x_dtype: torch.dtype,
    scale: float | None = None,
) -> Tensor:
    """The tangent of x_bar for those of y_bar and y; of softmax with a scale, else of log-softmax."""
    if y_bar_dot is None and y_dot is None:
        return torch.zeros(y.shape, dtype=x_dtype, device=y.device)
    x_bar_dot = torch.empty(y.shape, dtype=x_dtype, device=y.device)
    inputs = {"y_bar": None if y_dot is None else y_bar, "y": y, "y_bar_dot": y_bar_dot, "y_dot": y_dot}
    present = [name for name, tensor in inputs.items() if tensor is not None]
    if scale is None:
        summed = [name for name in present if name.startswith("y_bar")]
        sums, writes, num_results = RowSums(2, summed, len(summed)), ("y", "y_bar_dot", "y_dot"), 1
    else:
        # Both sums take products of all tensors: in as many registers as two results.
        num_results = 1 if y_dot is None else 2
        sums, writes = RowSums(2, present, num_results), tuple(inputs)
    constants = {"LOG": scale is None, "num_results": num_results, **scale_bits(scale)}
    launch_log_softmax(log_softmax_bwd_jvp_kernel, inputs, {"x_bar_dot": x_bar_dot}, dim, sums, writes, **constants)
    return x_bar_dot
