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


def _users(frames: Iterable[tuple[Any, int]]) -> Iterator[tuple[str, int, str, str]]:
    """File, line, function and source of those frames that are the user's."""
    for frame, number in frames:
        code = frame.f_code
        if _is_users(code.co_filename):
            source = linecache.getline(code.co_filename, number, frame.f_globals).strip()
            yield code.co_filename, number, code.co_name, source


def _described(found: tuple[str, int, str, str] | None) -> str:
    if found is None:
        return "(a line outside Python files)"
    filename, number, _, source = found
    return f"{filename}:{number}" + (f": {source}" if source else "")


def current_line() -> str:
    """`file:line: source` of the innermost frame of the user that is running."""
    return _described(next(_users(traceback.walk_stack(sys._getframe(1))), None))


def line_of_error(trace: TracebackType | None) -> str:
    """`file:line: source` of the innermost frame of the user in the traceback of an error."""
    return _described(next(_users(reversed([*traceback.walk_tb(trace)])), None))


def current_stack() -> str:
    """The frames of the user that are running, as in a traceback."""
    # By hand, as `traceback` would read the source of every other frame too.
    frames = [
        f'  File "{filename}", line {number}, in {name}\n' + (f"    {source}\n" if source else "")
        for filename, number, name, source in _users(traceback.walk_stack(sys._getframe(1)))
    ]
    return "".join(reversed(frames))
