"""Contexts that decorate, and code that no compiler looks into."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch._C._dynamo import eval_frame  # type: ignore[attr-defined] - no stub
from torch.utils._contextlib import context_decorator

_Function = TypeVar("_Function", bound="Callable[..., Any]")
_NEVER = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def run_as_written(function: _Function) -> _Function:
    """`function`, which Dynamo compiles neither by itself nor in parts.

    Where a graph breaks inside a transform, Dynamo runs the frame as it is written, and tries each function that it
    calls. `torch.compiler.disable` would cost every call a microsecond, and the import of the compiler.
    """
    eval_frame.set_code_exec_strategy(function.__code__, _NEVER)
    return function


class _NeedsCall(type):
    """The class of contexts that are written like functions: one that was not called says how to write it."""

    def __enter__(cls) -> None:
        raise TypeError(f"{cls.__name__}: a context manager must be called, as in `with {cls.__name__}(...):`.")

    def __exit__(cls, *exc_info: object) -> None:
        """Never reached: Python looks for it before it enters."""


class Decorates(metaclass=_NeedsCall):
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
