"""Random numbers that a recorded backward pass would draw: other ones than the forward pass did.

Outside a trace `torch.utils.checkpoint` sets the generator back before it computes a region again. No graph can, so
what a region drew and what it draws again would differ, and so would the gradient.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

from primitives.tracing.errors import TraceError
from primitives.tracing.lines import current_line
from primitives.tracing.random.operations import arguments_of, draws_nothing, is_random
from primitives.tracing.random.rng import innermost_replay
from primitives.tracing.recompute import replaying_checkpoints
from primitives.tracing.torch_private import is_tracing

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["draws_refused", "replays_refused"]


class _DrawsRefused(TorchDispatchMode):
    """Context in which a random operation raises."""

    supports_higher_order_operators = True

    def __init__(self, function: str) -> None:
        super().__init__()
        self._function = function

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        # Operators of higher order have no schema; those that they call arrive here by themselves.
        if hasattr(func, "_schema") and is_random(func) and not draws_nothing(arguments_of(func, args, kwargs)):
            raise TraceError(
                f"{self._function}: the backward pass draws random numbers by {func}, at {current_line()}, and a graph "
                "cannot give it those of the forward pass, as checkpoint needs them. Make the state explicit: "
                "functionalize_rng=True in trace_joint, or functionalize_rng around the function that is traced."
            )
        return func(*args, **kwargs)


def draws_refused(function: str) -> contextlib.AbstractContextManager:
    """Context for a backward pass: in a trace without an explicit random state, nothing is drawn in it."""
    is_free = not is_tracing() or innermost_replay() is not None
    return contextlib.nullcontext() if is_free else _DrawsRefused(function)


def replays_refused(function: str) -> contextlib.AbstractContextManager:
    """Context for a forward pass: in a trace, no checkpointed region of it draws numbers when it is computed again."""
    if not is_tracing():
        return contextlib.nullcontext()

    def replay() -> Callable[[], Any] | None:
        explicit = innermost_replay()
        if explicit is not None or not is_tracing():
            return explicit
        return lambda: _DrawsRefused(function)

    return replaying_checkpoints(replay)
