"""Lists of tensors in a schema, laid out flat: torch saves and differentiates tensors, not lists of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Lengths", "flatten", "regroup"]

# Position among the entries, and length, of each list.
Lengths = tuple[tuple[int, int], ...]


def flatten(entries: Sequence[Any], lists: Sequence[int]) -> tuple[list, Lengths]:
    """The entries with the lists at the positions `lists` replaced by their elements, and what `regroup` takes."""
    if len(lists) == 1:
        (i,) = lists
        return [*entries[:i], *entries[i], *entries[i + 1 :]], ((i, len(entries[i])),)
    flat: list[Any] = []
    lengths = []
    done = 0
    for i in lists:
        flat += entries[done:i]
        flat += entries[i]
        lengths.append((i, len(entries[i])))
        done = i + 1
    flat += entries[done:]
    return flat, tuple(lengths)


def regroup(flat: Sequence[Any], lengths: Lengths) -> list[Any]:
    """Undo `flatten`, or group other values as it grouped its entries."""
    entries: list[Any] = []
    start = 0
    for i, length in lengths:
        stop = start + i - len(entries)
        entries += flat[start:stop]
        start = stop + length
        entries.append(list(flat[stop:start]))
    entries += flat[start:]
    return entries
