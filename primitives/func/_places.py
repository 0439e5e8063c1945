"""Where a function finds a value, and where values lead."""

from __future__ import annotations

import collections
import functools
import gc
import inspect
import types
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from primitives.func._code import is_of_users
from primitives.func._values import is_a, is_constant, items_of

CELL = "a variable of the closure"
# No version counts the entries of these, nor the order of the last, which `move_to_end` changes.
UNCOUNTED = (list, set, collections.deque, collections.OrderedDict)
CONTAINERS = (dict, *UNCOUNTED)


class Place(NamedTuple):
    """Where a function finds a value.

    A cell, a key, an attribute of a module or a class, a slot, the defaults of a function, the arguments of a partial
    one, or an entry of the tuple in a place.
    """

    holder: Any
    key: Any

    def get(self) -> Any:
        """The value; `None` where there is none."""
        # Not `contextlib.suppress`, which takes a microsecond in every call of a compiled function.
        try:
            return self.holder.cell_contents if self.key is CELL else self._items()[self.key]
        except (ValueError, LookupError, TypeError, AttributeError):
            return None

    def put(self, value: Any) -> None:
        """Exchange the value."""
        if self.key is CELL:
            self.holder.cell_contents = value
        elif isinstance(self.holder, Place):
            old = self._items()
            entries = [*old[: self.key], value, *old[self.key + 1 :]]
            # Classes of tuples may take other arguments.
            make = type(old) if hasattr(old, "n_sequence_fields") else functools.partial(tuple.__new__, type(old))
            self.holder.put(make(entries))
        elif isinstance(self.holder, (types.FunctionType, type)):
            setattr(self.holder, self.key, value)
        elif isinstance(self.key, types.MemberDescriptorType):
            self.key.__set__(self.holder, value)
        elif isinstance(self.holder, functools.partial):
            self.holder.__setstate__((self.holder.func, value, self.holder.keywords, vars(self.holder)))  # type: ignore[attr-defined] - no stub
        elif isinstance(self.holder, dict):
            # A user's may refuse it.
            dict.__setitem__(self.holder, self.key, value)
        else:
            self._items()[self.key] = value

    def _items(self) -> Any:
        if isinstance(self.holder, Place):
            return self.holder.get()
        if isinstance(self.holder, (types.FunctionType, functools.partial)):
            return {self.key: getattr(self.holder, self.key)}
        if isinstance(self.key, types.MemberDescriptorType):
            return {self.key: getattr(self.holder, self.key.__name__)}
        return vars(self.holder) if isinstance(self.holder, (nn.Module, type)) else self.holder

    @property
    def outermost(self) -> Place:
        """The place that is exchanged, also where a tuple is made anew."""
        return self.holder.outermost if isinstance(self.holder, Place) else self


def key_of(x: Any) -> Any:
    """What tells from others what a walk meets: places, and objects."""
    return (id(x.holder), x.key) if is_a(x, Place) else id(x)


def next_of(x: Any) -> list[Any]:
    """Where a container, or what stands for something else, leads."""
    if is_a(x, functools.partial):
        has_tensors = any(is_a(arg, (torch.Tensor, tuple)) and not is_constant(arg) for arg in x.args)
        return [x.func, *([Place(x, "args")] if has_tensors else x.args), x.keywords]
    if is_a(x, types.MethodType):
        return [x.__self__, x.__func__]
    if is_a(x, CONTAINERS):
        return _entries(x)
    if is_a(x, (tuple, frozenset)):
        return list(x)
    if is_a(x, types.MappingProxyType):
        return gc.get_referents(x)
    if is_a(x, (weakref.ref, *weakref.ProxyTypes)):
        # A method of what a proxy stands for.
        return [x() if is_a(x, weakref.ref) else x.__init__.__self__]
    wrapped = getattr(x, "__wrapped__", None) if callable(x) and not is_a(x, type) else None
    call = inspect.getattr_static(type(x), "__call__", None) if has_attributes(x) else None
    return [each for each in (wrapped, call) if each is not None]


def _entries(x: Any) -> list[Any]:
    """Entries of a container, by their places where these hold tensors."""
    pairs = [(key, value) for key, value in items_of(x) if not is_constant(value)]
    if is_a(x, set):
        return [value for _, value in pairs]
    return [Place(x, key) if is_a(value, (torch.Tensor, tuple)) else value for key, value in pairs]


def has_attributes(x: Any) -> bool:
    """Whether `x` is an object of a class of somebody's, in whose attributes a function may find values."""
    no_objects = torch.Tensor, type, types.ModuleType, types.MethodType, functools.partial
    has_any = is_a(getattr(x, "__dict__", None), dict) or is_of_users(type(x))
    # Operators fill tables of their own.
    is_ours = str(type(x).__module__).startswith(("primitives.custom.", "primitives._core.", "torch._", "logging"))
    return has_any and not (is_ours or is_a(x, no_objects))
