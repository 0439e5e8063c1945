"""Activation checkpointing under an explicit random state: what is recomputed draws the same numbers again.

`torch.utils.checkpoint` saves and restores torch's generators, which an explicit state leaves alone. It offers no
place to save anything else without the caller's help, so the two names by which it looks up its machinery are
exchanged while such a state is in force.
"""

from __future__ import annotations

import contextlib
import threading
import types
from typing import TYPE_CHECKING, Any

from torch.utils import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Replay = Callable[[], contextlib.AbstractContextManager]

__all__ = ["replaying_checkpoints"]

_lock = threading.Lock()
_depth = 0
_FRAME, _REENTRANT = "_CheckpointFrame", "CheckpointFunction"
_originals = {name: getattr(checkpoint, name) for name in (_FRAME, _REENTRANT)}


@contextlib.contextmanager
def replaying_checkpoints(make_replay: Callable[[], Replay | None]) -> Iterator[None]:
    """Context in which checkpointed regions recompute inside what `make_replay()` returned at their start.

    Args:
        make_replay: Called at the start of a region; returns a function that makes the context in which to recompute
            it, or None where there is nothing to restore (in a thread without an explicit state).
    """
    global _depth  # noqa: PLW0603 - the exchanged names are those of the process
    with _lock:
        _depth += 1
        if _depth == 1:
            setattr(checkpoint, _FRAME, _frame_maker(make_replay))
            setattr(checkpoint, _REENTRANT, types.SimpleNamespace(apply=_reentrant_maker(make_replay)))
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                for name, original in _originals.items():
                    setattr(checkpoint, name, original)


def _frame_maker(make_replay: Callable[[], Replay | None]) -> Callable[..., Any]:
    def make_frame(recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        replay = make_replay()

        def recompute_inside(*inputs: Any) -> Any:
            with contextlib.nullcontext() if replay is None else replay():
                return recompute(*inputs)

        return _originals[_FRAME](recompute_inside, *args, **kwargs)

    return make_frame


def _reentrant_maker(make_replay: Callable[[], Replay | None]) -> Callable[..., Any]:
    def apply(function: Callable[..., Any], *args: Any) -> Any:
        replay, num_calls = make_replay(), 0

        def run(*inputs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            # The first call is the forward pass.
            with contextlib.nullcontext() if replay is None or num_calls == 1 else replay():
                return function(*inputs)

        return _originals[_REENTRANT].apply(run, *args)

    return apply
