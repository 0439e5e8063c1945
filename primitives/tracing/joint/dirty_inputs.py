"""In-place writes by the forward pass of a custom autograd function.

Gradients are off inside such a forward pass, so a write looks there as if autograd did not see it. If the function
marks what it wrote as dirty, autograd does: after the call, the tensor has the function for its history. Whether that
is so can be told only then.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.autograd.function import Function

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["DirtyInputs"]


class _Pending(NamedTuple):
    """A write: the frame that calls the function, the instruction it is at, and the history of what is written to."""

    caller: Any
    instruction: int
    root: Tensor
    history: Any
    error: Exception


def _frames() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _forward_codes(function: type = Function) -> Iterator[Any]:
    for subclass in function.__subclasses__():
        forward = subclass.__dict__.get("forward")
        if forward is not None:
            yield getattr(inspect.unwrap(getattr(forward, "__func__", forward)), "__code__", None)
        yield from _forward_codes(subclass)


class DirtyInputs:
    """Writes of which it is not known yet whether autograd sees them."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []

    def expect(self, x: Tensor, error: Exception) -> bool:
        """Whether a custom function is about to write to `x`, and may mark it.

        Args:
            x: The input, or a view of the same memory.
            error: What `settle` is to raise if it was not marked.
        """
        codes = set(_forward_codes()) - {None}
        forward = next((frame for frame in _frames() if frame.f_code in codes), None)
        if forward is None or forward.f_back is None:
            return False
        # The history of a view is made anew after every write to its memory, seen or not.
        root = x if x._base is None else x._base
        self._pending.append(_Pending(forward.f_back, forward.f_back.f_lasti, root, root.grad_fn, error))
        return True

    def settle(self, *, at_end: bool = False) -> None:
        """Look at the functions that have returned.

        Args:
            at_end: Whether all have.

        Raises:
            Exception: What was given to `expect`, for a write that autograd has not seen.
        """
        if not self._pending:
            return
        running = set() if at_end else {(id(frame), frame.f_lasti) for frame in _frames()}
        pending, self._pending = self._pending, []
        for entry in pending:
            if (id(entry.caller), entry.instruction) in running:
                self._pending.append(entry)
            elif entry.root.grad_fn is entry.history:
                raise entry.error
