"""Errors with the user's line, where a function of this package runs inside of `make_fx`."""

from __future__ import annotations

import contextlib

from primitives.tracing.errors import typed_errors
from primitives.tracing.torch_private import is_tracing

__all__ = ["errors_in_trace"]


def errors_in_trace(function: str) -> contextlib.AbstractContextManager:
    """Context in which what cannot be traced raises `TraceError` with the user's line; none outside of a trace.

    Args:
        function: Name of the public function, for the message.
    """
    return typed_errors(function) if is_tracing() else contextlib.nullcontext()
