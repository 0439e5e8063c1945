"""Types of what public functions take and return."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["PyTree"]

PyTree = TypeVar("PyTree")
"""A tensor, or a pytree of tensors: what comes out is of the type of what goes in."""
