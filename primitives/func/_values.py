"""What tells values of Python from others."""

from __future__ import annotations

import array
import enum
import functools
import gc
import itertools
import numbers
import operator
import sys
import types
from collections.abc import Collection, ItemsView, Set, ValuesView
from typing import Any

import torch
from torch._C._dynamo.guards import dict_version

from primitives.func._code import is_of_users
from primitives.tracing._torch_private import FakeTensor, FunctionalTensor

MISSING = object()
_MANY_BYTES = 4096
# With all numbers, those of numpy too, the constants: programs are told apart by what they print.
_NUMBERS = frozenset({bool, int, float, complex, str, bytes, range, type(None), torch.device, torch.dtype})
_count = itertools.count()
# Python 3.13.0 tells nobody of attributes that are written (CPython issue 125608): each call looks at all of them.
_HAS_VERSIONS = sys.version_info[:3] != (3, 13, 0)


def version_of(x: dict[Any, Any]) -> int:
    """A number that grows when a dictionary is written to."""
    return dict_version(x) if _HAS_VERSIONS else next(_count)


def is_a(x: Any, kinds: Any) -> bool:
    """Whether `x` is of a class, by that which it has: asked by `isinstance`, an object may lie or raise."""
    return issubclass(type(x), kinds)


def is_at_home(x: Any) -> bool:
    """Whether it is a tensor, and not what another thread traces with in its place."""
    return isinstance(x, torch.Tensor) and not isinstance(x, (FakeTensor, FunctionalTensor))


def _parts(x: Any) -> list[Any]:
    """With what it holds, if it is a tuple, and what tuples in it hold."""
    found = [x]
    for y in found:
        found += y if is_a(y, tuple) else ()
    return found


def is_constant(x: Any) -> bool:
    """Whether it is a number, a text or the like, or a tuple of such."""
    kinds = tuple, numbers.Number, enum.Enum
    return type(x) in _NUMBERS or all(type(y) in _NUMBERS or is_a(y, kinds) for y in _parts(x))


def is_small_array(x: Any) -> bool:
    """Whether `x` is an array which is compared in each call."""
    is_array = is_a(x, (bytearray, array.array)) or hasattr(type(x), "__array_interface__")
    return is_array and memoryview(x).nbytes <= _MANY_BYTES


def serves(x: Any, y: Any) -> bool:
    """Whether a value may stand for another: entries of tuples are places of their own."""
    if type(x) is not type(y):
        return False
    return number_of(x) == number_of(y) if is_constant(y) else is_a(x, tuple) and len(x) == len(y)


def number_of(x: Any) -> Any:
    """What tells a value from another, where no place does: that of a constant, the identity of an object."""
    if type(x) in _NUMBERS:
        return type(x), hex(x) if type(x) is int else repr(x)
    return [_number_of(y) for y in _parts(x)]


def _number_of(x: Any) -> Any:
    if is_a(x, tuple):
        return type(x), len(x)
    if not is_constant(x):
        return None if is_a(x, torch.Tensor) else id(x)
    # A class of a user's may print anything, and decimals of an int are limited.
    kind: Any = next(each for each in type(x).__mro__ if each in _NUMBERS or not is_of_users(each))
    return type(x), hex(x) if is_a(x, int) else kind.__repr__(x)


def numbers_of(values: dict[Any, Any], names: set[str] | None) -> list[Any]:
    """What tells the entries of a dictionary from others: those of these names."""
    return [(key, number_of(x)) for key, x in values.items() if names is None or key in names]


def renumbered(x: Any, numbers: dict[int, Any]) -> Any:
    """Numbers of values, with others for identities of objects."""
    if is_a(x, (list, tuple)):
        return [renumbered(y, numbers) for y in x]
    return numbers.get(x, x) if type(x) is int else x


def items_of(x: Any) -> list[tuple[Any, Any]]:
    """Keys or numbers of the entries of a container, and what they are."""
    return [*(x.items() if is_a(x, dict) else enumerate(x))]


def has_other_values(x: Any, y: Any) -> bool:
    """Whether an entry of one of two containers, but an object of a library without tensors, is none of the other."""
    x, y = dict(items_of(x)), dict(items_of(y))
    pairs = [(x.get(key, MISSING), y.get(key, MISSING)) for key in x | y]
    return any(a is not b and any(_is_value(z) for z in (a, b)) for a, b in pairs)


def has_changed(x: Any, y: Any) -> bool:
    """Whether `y` has taken the place of `x`, which a trace has not put there itself, as of functions of `fx.wrap`."""
    return x is not y and not hasattr(x, "_Patcher__fx_already_patched")


def _is_value(x: Any) -> bool:
    return is_constant(x) or is_a(x, Collection) or is_of_users(type(x)) or bool(hidden_in(x))


def hidden_in(x: Any, depth: int = 4) -> list[Any]:
    """Tensors in what no tree goes into: functions and methods, sets, and views of dictionaries."""
    if isinstance(x, torch.Tensor) or depth == 0 or isinstance(x, (torch.nn.Module, type)):
        return [x] * isinstance(x, torch.Tensor)
    if isinstance(x, types.FunctionType):
        x = [y for cell in x.__closure__ or () for y in gc.get_referents(cell)]
    elif isinstance(x, functools.partial):
        x = [x.func, *x.args, *x.keywords.values()]
    elif isinstance(x, types.MethodType):
        x = [x.__self__]
    elif not isinstance(x, (list, tuple, Set, ItemsView, ValuesView)):
        x = [*(x if isinstance(x, dict) else getattr(x, "__dict__", {})).values()]
    return [z for y in x for z in hidden_in(y, depth - 1)]


def are_same(x: list[Any], y: list[Any]) -> bool:
    return len(x) == len(y) and all(map(operator.is_, x, y))
