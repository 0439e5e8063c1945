"""Types of what public functions take and return."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

from torch import Tensor

PyTree = TypeVar("PyTree")
"""A tensor, or a pytree of tensors: what comes out is of the type of what goes in."""

Prefix: TypeAlias = "Tensor | Any"
"""A tensor, or a tree prefix of the argument that is a `PyTree`; a node is of any class that optree knows."""
