"""Where a function finds a value."""

from __future__ import annotations

import functools
import types
from typing import Any, NamedTuple

from torch import nn

CELL = "a variable of the closure"


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


class Written(NamedTuple):
    """A place that code only writes to."""

    place: Place


def key_of(x: Any) -> Any:
    """What tells from others what a walk meets: places, and objects."""
    if isinstance(x, Written):
        return "written", *key_of(x.place)
    return (id(x.holder), x.key) if isinstance(x, Place) else id(x)
