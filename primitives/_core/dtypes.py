"""Which dtypes have derivatives."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["has_derivatives"]


def has_derivatives(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can be differentiated: floating point and complex ones."""
    return dtype.is_floating_point or dtype.is_complex
