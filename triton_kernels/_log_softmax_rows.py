"""The forward of log-softmax and softmax, and the tables of their derivatives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from triton_kernels import _log_softmax_kernels, _softmax_kernels
from triton_kernels._row_launch import RowSums
from triton_kernels._row_maps import Part, RowMapKernels, derivative_kernel, launch_map, scale_bits

if TYPE_CHECKING:
    from torch import Tensor

LOG_SOFTMAX = RowMapKernels(
    derivative_kernel(vars(_log_softmax_kernels)),
    "y",
    pairing=(
        Part((1,), ("y", "x_dot"), ("x_dot",)),
        Part((0,), ("y_bar",), ("y", "x_dot")),
        Part((0,), ("y_bar",), ("y_bar", "y")),
    ),
    bwd_jvp=(Part((1,), ("y_bar_dot",), ("y", "y_bar_dot")), Part((0,), ("y_bar",), ("y", "y_dot"))),
)
SOFTMAX = RowMapKernels(
    derivative_kernel(vars(_softmax_kernels)),
    "y",
    pairing=(
        Part((1,), ("y", "x_dot"), ("y", "x_dot")),
        Part((0, 1), ("y_bar", "y", "x_dot"), ("y_bar", "x_dot")),
        Part((0,), ("y_bar", "y"), ("y_bar", "y")),
    ),
    bwd_jvp=(
        Part((1,), ("y", "y_bar_dot"), ("y", "y_bar_dot")),
        Part((0, 1), ("y_bar", "y", "y_dot"), ("y_bar", "y", "y_dot")),
    ),
)


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
    launch_map(
        _log_softmax_kernels.log_softmax_fwd_kernel,
        inputs,
        {"y_dot": None, **results},
        dim,
        sums,
        dtypes=dtypes,
        **constants,
    )
    return [*results.values()]
