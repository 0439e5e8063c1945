"""The conditions of a stand-in for a function of torch on its arguments, and its calls of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from primitives._core.errors import DeviceError, DtypeError, ShapeError
from primitives.decompositions._mode import handles_functions

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["is_plain", "served"]

# Errors before any work: torch answers for such arguments, by its own error or its own result.
_REFUSALS = (ShapeError, DtypeError, DeviceError)


def is_plain(*values: Any) -> bool:
    """Whether every tensor among `values` is one that the primitives take, at a first look."""
    for value in values:
        if isinstance(value, torch.Tensor) and (
            value.layout is not torch.strided
            or value.is_nested
            or is_traceable_wrapper_subclass(value)
            or (type(value) not in (torch.Tensor, torch.nn.Parameter) and handles_functions(type(value)))
        ):
            return False
    return len(values) > 0 and isinstance(values[0], torch.Tensor)


def served(function: Callable[..., Any], *args: Any) -> Any:
    """The result of `function`, or `NotImplemented` if it refuses the arguments."""
    try:
        return function(*args)
    except _REFUSALS:
        return NotImplemented
