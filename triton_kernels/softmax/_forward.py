"""The forward of log-softmax and softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..rows.launch import RowSums
from ..rows.maps import launch_map, scale_bits
from ..runtime.numbers import TL_DTYPES
from ._log_softmax_kernels import FORWARD, LOGARITHM, MASKED, SHARE


def forward_of(given: Mapping[str, Any]) -> list[Tensor]:
    """Y, and its tangent where x has one: of softmax of `scale * x + mask`, or without a scale of log-softmax.

    x is first rounded to `output_dtype`, if there is one. The probabilities of the tangent are those of x, and not of a
    rounded y. A row of a log-softmax of which all elements are -inf, or one is +inf or NaN, is NaN.
    """
    x, output_dtype = given["x"], given["output_dtype"]
    mask, x_dot, scale = (given.get(name) for name in ("mask", "x_dot", "scale"))
    if mask is not None and mask.dtype == torch.bool:
        # Bytes, because Triton has no pointers to bool of its own.
        mask = mask.view(torch.uint8)
    inputs, names = {"x": x, "x_dot": x_dot, "mask": mask}, ("y",) if x_dot is None else ("y", "y_dot")
    results = {name: torch.empty(x.shape, dtype=output_dtype or x.dtype, device=x.device) for name in names}
    sums = RowSums(1 + len(names), [name for name, tensor in inputs.items() if tensor is not None])
    dtypes = [results["y"].dtype] if x_dot is None else [results["y"].dtype, x_dot.dtype]
    kind = LOGARITHM if scale is None else SHARE if mask is None else MASKED
    constants = {"EPS": kind, "ROUNDED": TL_DTYPES[results["y"].dtype], **scale_bits(scale)}
    outputs = {"y_dot": None, **results}
    launch_map(FORWARD[scale is not None], inputs, outputs, given["dim"], sums, dtypes=dtypes, **constants)
    return [*results.values()]
