"""Where operators are registered with torch, and how their schemas are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NAMESPACE", "library", "list_names", "names"]

NAMESPACE = "primitives"

# Operators live as long as their library object does: one per namespace, for the life of the process.
_libraries: dict[str, torch.library.Library] = {}


def library(namespace: str) -> torch.library.Library:
    """The library object that the operators of `namespace` are defined in."""
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return _libraries[namespace]


def list_names(names: Sequence[str], entries: Sequence[Any]) -> list[str]:
    """Names of the entries of a schema that are lists of tensors.

    Raises:
        ValueError: If a list of tensors may be `None`: autograd would not know how many tensors it has.
    """
    for name, entry in zip(names, entries, strict=True):
        if str(entry.type).startswith("Optional[List[") and "Tensor" in str(entry.type):
            raise ValueError(f"{name}: a list of tensors must not be optional; pass an empty list, got {entry.type}.")
    return [
        n
        for n, entry in zip(names, entries, strict=True)
        if str(entry.type).startswith("List[") and "Tensor" in str(entry.type)
    ]


def names(entries: Sequence[Any], unnamed: str) -> list[str]:
    """Names of the entries of a schema; those without one are called `unnamed`, numbered if there are several."""
    return [entry.name or (unnamed if len(entries) == 1 else f"{unnamed}{i}") for i, entry in enumerate(entries)]
