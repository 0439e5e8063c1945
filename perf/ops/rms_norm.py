"""RMS norm, on the primitives and kernels of layer norm."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from perf.calls import EPS
from perf.ops.layer_norm import LAYER_NORM, LayerNorm, true_row_norm


def _rms_norm(functional: Any, x: Tensor, weight: Any = None, norm_ndim: int = 1) -> Tensor:
    return functional.rms_norm(x, x.shape[x.dim() - norm_ndim :], weight, EPS)


RMS_NORM = LAYER_NORM.sibling(
    "rms_norm",
    ("x", "weight"),
    call=_rms_norm,
    truth=functools.partial(true_row_norm, centered=False),
    operands=functools.partial(LayerNorm.of, centered=False),
    num_params=1,
)
