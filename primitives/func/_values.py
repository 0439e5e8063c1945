"""What tells values of Python from others."""

from __future__ import annotations

import enum
import numbers
import operator
from typing import Any

import torch

MISSING = object()
# With all numbers, those of numpy too, the constants: programs are told apart by what they print.
_NUMBERS = frozenset({bool, int, float, complex, str, bytes, range, type(None), torch.device, torch.dtype})


def is_constant(x: Any) -> bool:
    if isinstance(x, tuple):
        return all(map(is_constant, x))
    return type(x) in _NUMBERS or isinstance(x, (numbers.Number, enum.Enum))


def serves(x: Any, y: Any) -> bool:
    """Whether a value may stand for another: entries of tuples are places of their own."""
    if type(x) is not type(y):
        return False
    return repr(x) == repr(y) if is_constant(y) else isinstance(x, tuple) and len(x) == len(y)


def number_of(x: Any) -> Any:
    """What tells a value from another, where no place does: that of a constant, the identity of an object."""
    if is_constant(x):
        return type(x), repr(x)
    return None if isinstance(x, torch.Tensor) else tuple(map(number_of, x)) if isinstance(x, tuple) else id(x)


def numbers_of(values: dict[Any, Any], names: set[str] | None) -> list[Any]:
    """What tells the entries of a dictionary from others: those of these names."""
    return [(key, number_of(x)) for key, x in values.items() if names is None or key in names]


def items_of(x: Any) -> list[tuple[Any, Any]]:
    """Keys or numbers of the entries of a container, and what they are."""
    return [*(x.items() if isinstance(x, dict) else enumerate(x))]


def has_other_values(x: Any, y: Any) -> bool:
    """Whether a tensor or a constant is an entry of one of two containers, and not of the other."""
    x, y = dict(items_of(x)), dict(items_of(y))
    pairs = [(x.get(key, MISSING), y.get(key, MISSING)) for key in x | y]
    return any(a is not b and (isinstance(z, torch.Tensor) or is_constant(z)) for a, b in pairs for z in (a, b))


def are_same(x: list[Any], y: list[Any]) -> bool:
    return len(x) == len(y) and all(map(operator.is_, x, y))
