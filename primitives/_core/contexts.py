"""Contexts that decorate."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch.utils._contextlib import context_decorator

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Decorates"]

_Function = TypeVar("_Function", bound="Callable[..., Any]")


class Decorates:
    """Makes a context a decorator too: each call of the function, and each step of a generator, runs inside."""

    def __call__(self, function: _Function) -> _Function:
        """`function`, run inside the context."""
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{type(self).__name__}: the decorated function must not be asynchronous, got {function.__qualname__}, "
                "whose steps run among those of others. Enter the context inside it, around what does not await."
            )
        return cast("_Function", context_decorator(self._again, function))

    def _again(self) -> Any:
        """The contexts that one call of the function enters."""
        return self
