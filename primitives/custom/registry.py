"""The custom operators of this process, by qualified name."""

from __future__ import annotations

from typing import Any

__all__ = ["find", "operators"]

operators: dict[str, Any] = {}
"""Every `CustomOp` by qualified name."""


def find(qualified_name: str) -> Any:
    """The custom operator of that name."""
    return operators[qualified_name]
