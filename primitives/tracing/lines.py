"""The user's own lines: in tracebacks of errors, and in the stack traces of graph nodes."""

from __future__ import annotations

import linecache
import pathlib
import re
import sysconfig
import traceback
from typing import TYPE_CHECKING, Any

import optree
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

__all__ = ["TraceError", "current_line", "current_stack", "is_users", "line_of_error", "user_part"]

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
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line \d+.*\n(?:    .*\n?)?', re.MULTILINE)


class TraceError(RuntimeError):
    """A function does something that no graph can hold; the message names the line."""


def is_users(filename: str) -> bool:
    """Whether a file is the user's, or a library's, and not torch's, Python's or of this package."""
    installed = "site-packages" in filename and not filename.startswith(_FOREIGN)
    return installed or not (filename.startswith(_FOREIGN) or filename.startswith(_GENERATED))


def _innermost(frames: Iterable[tuple[Any, int]]) -> str:
    found = ""
    for frame, number in frames:
        filename = frame.f_code.co_filename
        if is_users(filename):
            source = linecache.getline(filename, number, frame.f_globals).strip()
            found = f"{filename}:{number}" + (f": {source}" if source else "")
    return found or "(a line outside Python files)"


def line_of_error(trace: TracebackType | None) -> str:
    """`file:line: source` of the innermost frame of the user in the traceback of an error."""
    return _innermost(traceback.walk_tb(trace))


def current_line() -> str:
    """`file:line: source` of the innermost frame of the user that is running."""
    return _innermost(reversed(list(traceback.walk_stack(None))))


def current_stack() -> str:
    """The frames of the user that are running, as in a traceback."""
    frames = [(frame, number) for frame, number in traceback.walk_stack(None) if is_users(frame.f_code.co_filename)]
    # By hand, as `traceback` would read the source of every other frame too.
    return "".join(_formatted(frame, number) for frame, number in reversed(frames))


def _formatted(frame: Any, number: int) -> str:
    filename = frame.f_code.co_filename
    source = linecache.getline(filename, number, frame.f_globals).strip()
    line = f'  File "{filename}", line {number}, in {frame.f_code.co_name}\n'
    return line + (f"    {source}\n" if source else "")


def user_part(stack_trace: str) -> str:
    """Those frames of a formatted stack trace that are the user's."""
    frames = [match[0] for match in _FRAME.finditer(stack_trace) if is_users(match["file"])]
    return "".join(frame if frame.endswith("\n") else f"{frame}\n" for frame in frames)
