"""Which dtypes have derivatives."""

from __future__ import annotations

import torch


def has_derivatives(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can be differentiated: floating point and complex ones."""
    return dtype.is_floating_point or dtype.is_complex
