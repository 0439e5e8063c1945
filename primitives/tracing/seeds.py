"""Generators that a function seeds or brings along, of which its graph would know nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from primitives.tracing.lines import TraceError, current_line

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Seeds"]


class Seeds:
    """What a function does to generators: a graph draws from torch's as it finds it, in each call.

    Args:
        function: Name of the public function, for errors.
        draws_nothing: Whether the state of torch's generator must stay as it is, and not the seed alone.
    """

    def __init__(self, function: str, *, draws_nothing: bool) -> None:
        self._function = function
        self._seed = torch.initial_seed()
        self._before = self._state = None
        if draws_nothing:
            self._before = torch.get_rng_state()
            with unset_fake_temporarily():
                # So that the state differs from that after seeding anew with the same seed.
                torch.rand(1)
            self._state = _state()

    def check_call(self, arguments: Sequence[Any]) -> None:
        """Look at a call of torch's, before it is made."""
        if any(isinstance(x, torch.Generator) for x in arguments):
            raise self._error(f"a generator is passed, at {current_line()}")
        if torch.initial_seed() != self._seed:
            raise self._error(f"torch's generator is seeded, at {current_line()} or before")

    def finish(self, *, failed: bool) -> None:
        """Look at torch's generator once the function has returned, and set it back where that was asked for.

        Args:
            failed: Whether an error is on its way.
        """
        changed = torch.initial_seed() != self._seed or (self._state is not None and _state() != self._state)
        if self._before is not None:
            torch.set_rng_state(self._before)
        if changed and not failed:
            raise self._error("torch's generator is seeded by the function")

    def _error(self, what: str) -> TraceError:
        return TraceError(
            f"{self._function}: {what}, and a graph would not do so. Seed before the graph is called, or make the "
            "random state an input by functionalize_rng."
        )


def _state() -> bytes:
    with unset_fake_temporarily():
        return bytes(torch.get_rng_state().tolist())
