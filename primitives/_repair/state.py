"""Whether the repair is on, for this thread or for the process, and the questions that each call asks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch._subclasses.functional_tensor import FunctionalTensor

from primitives._core.autograd import tangents_possible, unpack_dual
from primitives._core.fast_path import PLAIN_TYPES

__all__ = [
    "carries_tangent",
    "is_active",
    "is_repairing",
    "process",
    "repairing",
    "this_thread",
    "without_subclass",
]


class _Thread(threading.local):
    """How many `with repair_torch():` this thread is in, and the operators whose formulas it runs, with their level."""

    num_contexts = 0
    running: frozenset[tuple[str, int]] = frozenset()


# Whether `repair_torch()` holds for every thread.
process, this_thread = SimpleNamespace(is_repaired=False), _Thread()


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
    """Context in which the formula of an operator runs: without autocast, which casts none of torch's own kernels.

    As in C++, no `__torch_function__` of a subclass (PINA's LabelTensor) takes part, and `without_subclass` no method.
    """
    previous = this_thread.running
    this_thread.running = previous | {(name, _level())}
    try:
        with contextlib.ExitStack() as stack, torch._C.DisableTorchFunctionSubclass():
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        this_thread.running = previous


def without_subclass(value: Any) -> Any:
    """A tensor as one of torch's own class, but for those that the dispatcher knows: DTensors. Inside `repairing`."""
    if not isinstance(value, torch.Tensor):
        return value
    levels = [value]
    while _functorch.is_functorch_wrapped_tensor(levels[-1]):
        levels.append(_functorch.get_unwrapped(levels[-1]))
    # What a trace computes may be of a user's class, too.
    is_traced = isinstance(levels[-1], FunctionalTensor)
    if {*map(type, levels)} <= {*PLAIN_TYPES, FunctionalTensor}:
        return value
    if torch._C._dispatch_keys(levels[-1]).has("Python") and not is_traced:
        return value
    # Unlike one of `as_subclass`, the tangent of a view is a view.
    return torch.Tensor.view_as(value, value)
