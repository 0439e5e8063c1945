"""What no graph can hold, as errors with the user's line."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from primitives.core.errors import MutationError
from primitives.tracing import torch_private as internals
from primitives.tracing.lines import line_of_error

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["TraceError", "errors_in_trace", "typed_errors", "values_needed"]

# What torch says where a graph is recorded, or tensors have no memory, and a value is asked for.
_NO_VALUES = (
    "get value out of a tracing tensor",
    "numpy() is not supported for tensor subclasses",
    "but its data is not allocated yet",
    "Cannot access data pointer of Tensor",
    "invalid python storage",
    "argument of type: <class 'torch.storage.UntypedStorage'>",
)
_TO_NO_BATCH = (
    "under vmap, a value with a batch axis is written to a tensor that has none",
    "Make it an input with a batch axis, or write out of place.",
)
_ADVICE = {
    "leaf Variable that requires grad is being used in an in-place operation": (
        "an input that requires grad is written to in place, which autograd allows for no leaf",
        "Return the new value, or use functionalize_mutations.",
    ),
    "Cannot view a tensor with shape": (
        "a tensor has other strides where it is functionalized, after a write to a view of it, and cannot be viewed",
        "Use contiguous() before reshape, or write out of place.",
    ),
    "doesn't match the broadcast shape": _TO_NO_BATCH,
    "has more elements than `self`": _TO_NO_BATCH,
}


class TraceError(RuntimeError):
    """A function does something that no graph can hold; the message names the line."""


def values_needed(function: str, what: str, line: str) -> TraceError:
    """The error for a value or memory that only a run has."""
    return TraceError(
        f"{function}: {what} needs the values or the memory of a tensor, which a graph does not have, at {line}. Use "
        "torch.where instead of a branch, and a tensor instead of .item()."
    )


def _typed(function: str, error: RuntimeError | ValueError) -> RuntimeError | None:
    """The error to raise instead of one of torch's; `None` if that one says enough."""
    if isinstance(error, (TraceError, MutationError)):
        return None
    line, message = line_of_error(error.__traceback__), str(error)
    if isinstance(error, internals.DATA_DEPENDENT):
        what = getattr(error, "func", None)
        return values_needed(function, "a branch or a size" if what is None else str(what), line)
    if any(text in message for text in _NO_VALUES):
        return values_needed(function, "an operation", line)
    for text, (what, advice) in _ADVICE.items():
        if text in message:
            return MutationError(f"{function}: {what}, at {line}. {advice} ({message.splitlines()[0]})")
    return None


@contextlib.contextmanager
def typed_errors(function: str) -> Iterator[None]:
    """Context in which what cannot be traced, or written, raises a typed error with the user's line."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        typed = _typed(function, error)
        if typed is None:
            raise
        raise typed from error


def errors_in_trace(function: str) -> contextlib.AbstractContextManager:
    """`typed_errors` where `make_fx` records, and nothing elsewhere: torch's own errors say enough there."""
    return typed_errors(function) if internals.is_tracing() else contextlib.nullcontext()
