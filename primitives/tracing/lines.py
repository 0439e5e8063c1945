"""The user's own lines: in tracebacks of errors, and in the stack traces of graph nodes."""

from __future__ import annotations

import functools
import linecache
import pathlib
import sys
import sysconfig
import traceback
from typing import TYPE_CHECKING, Any

import optree
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

__all__ = ["current_line", "current_stack", "line_of_error"]

_FOREIGN = tuple(
    f"{path}/"
    for path in (
        pathlib.Path(torch.__file__).parent,
        pathlib.Path(optree.__file__).parent,
        pathlib.Path(__file__).resolve().parent.parent,
        sysconfig.get_path("stdlib"),
    )
)
# Code that has no file, but that of a prompt or a doctest, is made by libraries.
_GENERATED = ("<string>", "<frozen", "<eval")


@functools.cache
def _is_users(filename: str) -> bool:
    """Whether a file is the user's, or a library's, and not torch's, Python's or of this package."""
    installed = "site-packages" in filename and not filename.startswith(_FOREIGN)
    return installed or not (filename.startswith(_FOREIGN) or filename.startswith(_GENERATED))


def _users(frames: Iterable[tuple[Any, int]]) -> Iterator[traceback.FrameSummary]:
    """Those frames that are the user's."""
    for frame, number in frames:
        code = frame.f_code
        if _is_users(code.co_filename):
            linecache.lazycache(code.co_filename, frame.f_globals)
            # Torch's and this package's many frames are left out before anybody reads their source.
            yield traceback.FrameSummary(code.co_filename, number, code.co_name, lookup_line=False)


def _innermost(frames: Iterable[tuple[Any, int]]) -> str:
    found = next(_users(frames), None)
    if found is None:
        return "(a line outside Python files)"
    return f"{found.filename}:{found.lineno}" + (f": {found.line}" if found.line else "")


def current_line() -> str:
    """`file:line: source` of the innermost frame of the user that is running."""
    return _innermost(traceback.walk_stack(sys._getframe(1)))


def line_of_error(trace: TracebackType | None) -> str:
    """`file:line: source` of the innermost frame of the user in the traceback of an error."""
    return _innermost(reversed([*traceback.walk_tb(trace)]))


def current_stack() -> str:
    """The frames of the user that are running, as in a traceback."""
    return "".join(traceback.format_list([*_users(traceback.walk_stack(sys._getframe(1)))][::-1]))
