"""Tuples and lists that every call takes apart; torch saves and differentiates tensors, not lists of them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# Position among the entries, and length, of each list.
Lengths = tuple[tuple[int, int], ...]


def tuple_getter(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple]:
    """`values -> tuple of the values at indices`, for what runs in every call."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return (lambda values: (values[indices[0]],)) if indices else lambda _: ()


def tuple_maker(kind: type) -> Callable[[Iterable[Any]], Any]:
    """`values -> kind(*values)` for a namedtuple `kind` and as many values as it has fields, uncounted."""
    return functools.partial(tuple.__new__, kind)


def in_places(function: Callable[..., Any], values: Sequence[Any], places: Sequence[int]) -> Callable[..., Any]:
    """`function(*values)` as a function of the values at these places, given all others."""

    def run(*own: Any) -> Any:
        given = list(values)
        for i, value in zip(places, own, strict=True):
            given[i] = value
        return function(*given)

    return run


def flatten(entries: Sequence[Any], lists: Sequence[int]) -> tuple[list, Lengths]:
    """The entries with the lists at the positions `lists` replaced by their elements, and what `regroup` takes."""
    if len(lists) == 1:
        (i,) = lists
        return [*entries[:i], *entries[i], *entries[i + 1 :]], ((i, len(entries[i])),)
    flat: list[Any] = []
    for i, entry in enumerate(entries):
        if i in lists:
            flat += entry
        else:
            flat.append(entry)
    return flat, tuple((i, len(entries[i])) for i in lists)


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
