"""Whether the repair is on, for this thread or for the process, and the questions that each call asks."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _functorch  # type: ignore[attr-defined] - no stub

from primitives._core.autograd import tangents_possible, unpack_dual

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["carries_tangent", "is_active", "is_repairing", "is_traced", "process", "repairing", "this_thread"]


class _Process:
    """Whether `repair_torch()` holds for every thread."""

    is_repaired = False


class _Thread(threading.local):
    """How many `with repair_torch():` this thread is in, and the operators whose formulas it runs, with their level."""

    num_contexts = 0
    running: frozenset[tuple[str, int]] = frozenset()


process, this_thread = _Process(), _Thread()


def is_active() -> bool:
    """Whether operators that this thread calls are repaired."""
    return process.is_repaired or this_thread.num_contexts > 0


def carries_tangent(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor among the arguments, or in a list among them, has a tangent at this level."""
    if not tangents_possible():
        return False
    for value in (*args, *kwargs.values()):
        for x in value if isinstance(value, (list, tuple)) else (value,):
            if unpack_dual(x)[1] is not None:
                return True
    return False


def _level() -> int:
    top = _functorch.peek_interpreter_stack()
    return 0 if top is None else top.level()


def is_repairing(name: str) -> bool:
    """Whether the formula of this operator runs at this level: a call of the operator in it means torch's own."""
    return bool(this_thread.running) and (name, _level()) in this_thread.running


@contextlib.contextmanager
def repairing(name: str) -> Iterator[None]:
    """Context in which the formula of an operator runs: without autocast, which casts none of torch's own kernels."""
    previous = this_thread.running
    this_thread.running = previous | {(name, _level())}
    try:
        with contextlib.ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        this_thread.running = previous


def is_traced() -> bool:
    """Whether a mode sees the operators that run: a tracer, or fake tensors."""
    return torch._C._len_torch_dispatch_stack() > 0
