"""Where operators are registered with torch."""

from __future__ import annotations

import torch

__all__ = ["NAMESPACE", "library"]

NAMESPACE = "primitives"

# Operators live as long as their library object does: one per namespace, for the life of the process.
_libraries: dict[str, torch.library.Library] = {}


def library(namespace: str) -> torch.library.Library:
    """The library object that the operators of `namespace` are defined in."""
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return _libraries[namespace]
