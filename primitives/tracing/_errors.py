"""Errors for code that no graph can hold, with the user's line; the user's own lines in stack traces of graph nodes."""

from __future__ import annotations

import contextlib
import functools
import linecache
import pathlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import optree
import torch

from primitives._core.errors import MutationError, TraceError
from primitives.tracing import _torch_private as torch_private

# Words of torch where a graph is recorded, or tensors have no memory, and a value is asked for.
_NO_VALUES = (
    "get value out of a tracing tensor",
    "numpy() is not supported for tensor subclasses",
    "but its data is not allocated yet",
    "Cannot access data pointer of Tensor",
    "invalid python storage",
    "argument of type: <class 'torch.storage.UntypedStorage'>",
)


# Words of functionalization and autograd for writes that they cannot record, and how to write them.
_NO_WRITES = {
    "mutating a non-functional tensor": "a tensor that is not an input is written to. Make it an input; for a module, "
    "use pure_module",
    "leaf Variable that requires grad": "an input that requires grad is written to in place. Return the new value, or "
    "use functionalize_mutations",
    "mutation on a view chain": "what as_strided returns, or a view of it, is written to. Use other views",
}

# Operators that ask for values, and what to use.
_INSTEAD = {
    "linalg_lstsq": "torch.linalg.pinv(A) @ B, by which torch defines the derivatives of the solution",
    "_ctc_loss": "it outside, on what the function returns: torch has no second derivative of it",
}


def values_needed(function: str, what: str, line: str) -> TraceError:
    """The error for a value or memory that only a run has."""
    default = (
        "torch.where instead of a branch or of a mask as an index, and a tensor instead of .item(); return what an "
        "assert is to check"
    )
    advice = next((text for name, text in _INSTEAD.items() if name in what), default)
    return TraceError(
        f"{function}: {what} needs the values or the memory of a tensor, which a graph does not have, at {line}. Use "
        f"{advice}."
    )


@contextlib.contextmanager
def typed_errors(function: str) -> Iterator[None]:
    """Context in which what cannot be traced, or written, raises a typed error with the user's line."""
    try:
        yield
    except (TraceError, MutationError):
        raise
    except (RuntimeError, ValueError, AssertionError) as error:
        line, message = _innermost(reversed([*traceback.walk_tb(error.__traceback__)])), str(error)
        if any(text in message for text in _NO_VALUES) or torch_private.is_data_dependent(error):
            raise values_needed(function, str(getattr(error, "func", "a branch or an operation")), line) from error
        for text, meaning in _NO_WRITES.items():
            if text in message:
                raise MutationError(f"{function}: {meaning}, at {line}. ({message.splitlines()[0]})") from error
        raise


def errors_in_trace(function: str) -> contextlib.AbstractContextManager:
    """`typed_errors` where `make_fx` records, and nothing elsewhere: torch's own errors say enough there."""
    return typed_errors(function) if torch_private.is_tracing() else contextlib.nullcontext()


_PACKAGES = [pathlib.Path(file).parent for file in (torch.__file__, optree.__file__, pathlib.Path(__file__).parent)]
# Files whose lines are not the user's: torch's, ours, Python's but for what is installed in its folder, those of the
# shell of a notebook, and code without a file that libraries make.
_FOREIGN = re.compile(
    f"({'|'.join(re.escape(str(path)) for path in _PACKAGES)})/|{re.escape(sysconfig.get_path('stdlib'))}/"
    r"(?!.*(site|dist)-packages)|.*[/\\](IPython|ipykernel)[/\\]|<(string|frozen|eval)"
)
_is_foreign = functools.cache(_FOREIGN.match)


def frames_of_user(frames: Iterable[tuple[Any, int]]) -> Iterator[traceback.FrameSummary]:
    """Those frames, of pairs of frame and line, that are the user's or a library's."""
    for frame, number in frames:
        code = frame.f_code
        if not _is_foreign(code.co_filename):
            linecache.lazycache(code.co_filename, frame.f_globals)
            # Torch's and this package's many frames are left out before anybody reads their source.
            yield traceback.FrameSummary(code.co_filename, number, code.co_name, lookup_line=False)


def _innermost(frames: Iterable[tuple[Any, int]]) -> str:
    found = next(frames_of_user(frames), None)
    if found is None:
        return "(a line outside Python files)"
    return f"{found.filename}:{found.lineno}" + (f": {found.line}" if found.line else "")


def current_line() -> str:
    """`file:line: source` of the innermost frame of the user that is running."""
    return _innermost(traceback.walk_stack(sys._getframe(1)))


def current_stack() -> str:
    """The frames of the user that are running, as in a traceback."""
    return "".join(traceback.format_list([*frames_of_user(traceback.walk_stack(sys._getframe(1)))][::-1]))
