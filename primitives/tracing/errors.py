"""What no graph can hold, as errors with the user's line."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from primitives.core.errors import MutationError
from primitives.tracing import torch_private
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


class TraceError(RuntimeError):
    """A function does something that no graph can hold; the message names the line."""


# What functionalization and autograd say of writes that they cannot record, and how to write them.
_NO_WRITES = {
    "mutating a non-functional tensor": "a tensor that is not an input is written to. Make it an input; for a module, "
    "use functional_call",
    "leaf Variable that requires grad": "an input that requires grad is written to in place. Return the new value, or "
    "use functionalize_mutations",
    "Could not find a token for effect": "a collective writes in place. Use those of "
    "torch.distributed._functional_collectives",
}


def values_needed(function: str, what: str, line: str) -> TraceError:
    """The error for a value or memory that only a run has."""
    return TraceError(
        f"{function}: {what} needs the values or the memory of a tensor, which a graph does not have, at {line}. Use "
        "torch.where instead of a branch, and a tensor instead of .item()."
    )


@contextlib.contextmanager
def typed_errors(function: str) -> Iterator[None]:
    """Context in which what cannot be traced, or written, raises a typed error with the user's line."""
    try:
        yield
    except (TraceError, MutationError):
        raise
    except (RuntimeError, ValueError, AssertionError) as error:
        line, message = line_of_error(error.__traceback__), str(error)
        if isinstance(error, torch_private.DATA_DEPENDENT) or any(text in message for text in _NO_VALUES):
            raise values_needed(function, str(getattr(error, "func", "a branch or an operation")), line) from error
        for text, meaning in _NO_WRITES.items():
            if text in message:
                raise MutationError(f"{function}: {meaning}, at {line}. ({message.splitlines()[0]})") from error
        raise


def errors_in_trace(function: str) -> contextlib.AbstractContextManager:
    """`typed_errors` where `make_fx` records, and nothing elsewhere: torch's own errors say enough there."""
    return typed_errors(function) if torch_private.is_tracing() else contextlib.nullcontext()
