"""The user's own lines: in tracebacks of errors, and in the stack traces of graph nodes."""

from __future__ import annotations

import functools
import linecache
import pathlib
import re
import sys
import sysconfig
import traceback
from typing import TYPE_CHECKING, Any

import optree
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

__all__ = ["current_line", "current_stack", "is_users", "line_of_error", "user_part"]

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
_NO_LINE = "(a line outside Python files)"
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line \d+.*\n(?:    .*\n?)?', re.MULTILINE)


@functools.cache
def is_users(filename: str) -> bool:
    """Whether a file is the user's, or a library's, and not torch's, Python's or of this package."""
    installed = "site-packages" in filename and not filename.startswith(_FOREIGN)
    return installed or not (filename.startswith(_FOREIGN) or filename.startswith(_GENERATED))


def _running() -> Iterator[Any]:
    """The frames of the user that are running, the innermost first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def current_line() -> str:
    """`file:line: source` of the innermost frame of the user that is running."""
    frame = next(_running(), None)
    return _described(frame, frame.f_lineno) if frame is not None else _NO_LINE


def line_of_error(trace: TracebackType | None) -> str:
    """`file:line: source` of the innermost frame of the user in the traceback of an error."""
    found = [entry for entry in traceback.walk_tb(trace) if is_users(entry[0].f_code.co_filename)]
    return _described(*found[-1]) if found else _NO_LINE


def _described(frame: Any, number: int) -> str:
    source = linecache.getline(frame.f_code.co_filename, number, frame.f_globals).strip()
    return f"{frame.f_code.co_filename}:{number}" + (f": {source}" if source else "")


def current_stack() -> str:
    """The frames of the user that are running, as in a traceback."""
    # By hand, as `traceback` would read the source of every other frame too.
    return "".join(reversed([_formatted(frame, frame.f_lineno) for frame in _running()]))


def _formatted(frame: Any, number: int) -> str:
    filename = frame.f_code.co_filename
    source = linecache.getline(filename, number, frame.f_globals).strip()
    line = f'  File "{filename}", line {number}, in {frame.f_code.co_name}\n'
    return line + (f"    {source}\n" if source else "")


@functools.lru_cache(maxsize=4096)
def user_part(stack_trace: str) -> str:
    """Those frames of a formatted stack trace that are the user's."""
    frames = [match[0] for match in _FRAME.finditer(stack_trace) if is_users(match["file"])]
    return "".join(frame if frame.endswith("\n") else f"{frame}\n" for frame in frames)
