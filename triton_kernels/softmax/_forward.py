"""The forward of log-softmax and softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from triton_kernels.rows.launch import RowSums
from triton_kernels.rows.maps import launch_map, scale_bits
from triton_kernels.softmax._log_softmax_kernels import log_softmax_fwd_kernel

if TYPE_CHECKING:
    from torch import Tensor


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
    launch_map(log_softmax_fwd_kernel, inputs, {"y_dot": None, **results}, dim, sums, dtypes=dtypes, **constants)
    return [*results.values()]
