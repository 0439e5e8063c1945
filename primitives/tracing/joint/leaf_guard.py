"""Writes to inputs that autograd does not see, refused before they land."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from primitives.core.errors import MutationError
from primitives.tracing.errors import refuse_collective
from primitives.tracing.joint.reshaped import ReshapedViews
from primitives.tracing.lines import current_line
from primitives.tracing.memory import memories, overlap, storages
from primitives.tracing.torch_private import is_tracing
from primitives.tracing.watching import WriteWatcher, is_hidden, written_by

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["LeafGuard", "hidden_write"]


def hidden_write(function: str, label: str, line: str) -> MutationError:
    """The error for a write to an input that requires grad, of which autograd does not know."""
    return MutationError(
        f"{function}: {label} requires grad and is written to where autograd does not see it (under no_grad, or "
        f"through detach() or .data), at {line}. Return the new value instead."
    )


class LeafGuard(WriteWatcher):
    """Context that refuses writes to leaves of autograd.

    Args:
        function: Name of the public function, for errors.
        label: Key path of the input at a place.
        inputs: The inputs. Those that require grad are guarded.
    """

    supports_higher_order_operators = True

    def __init__(self, function: str, label: Callable[[int], str], inputs: Sequence[Any]) -> None:
        super().__init__()
        self._function, self._label = function, label
        self._leaves = {i: x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad}
        self._views = ReshapedViews(function)
        # Held, so that no other tensor comes to lie there.
        self._held = {i: storages(x) for i, x in self._leaves.items()}
        # Memory shows what is done to others; for a sparse tensor there is but this.
        self._versions = {i: leaf._version for i, leaf in self._leaves.items() if not self._held[i]}
        self._numbers = {storage._cdata for held in self._held.values() for storage in held}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, so that torch compiles in this context what it compiles elsewhere."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Look at what `func` writes, and run it."""
        kwargs = kwargs or {}
        if is_tracing():
            refuse_collective(self._function, func)
        written = written_by(func, args, kwargs)
        self._views.before(func, args, kwargs, written)
        for x in written:
            if not self._numbers.isdisjoint(memories(x)) and is_hidden(func, x):
                self._check(x)
        result = func(*args, **kwargs)
        self._views.after(func, result)
        return result

    def _check(self, x: Tensor) -> None:
        for i, leaf in self._leaves.items():
            if overlap(x, leaf):
                raise hidden_write(self._function, self._label(i), current_line())

    def check_outputs(self, outputs: Sequence[Any]) -> None:
        """Raise if the history of an output would be made anew in a wrong way.

        Args:
            outputs: The leaves of what the function returns.

        Raises:
            TraceError: If so.
        """
        self._views.check(outputs)

    def check_leaves(self) -> None:
        """Raise if something has happened to a leaf of which no operation is seen.

        Raises:
            MutationError: If so.
        """
        for i, leaf in self._leaves.items():
            if leaf.is_leaf and leaf.grad is not None:
                raise MutationError(
                    f"{self._function}: a backward pass within accumulates gradients in .grad of {self._label(i)}. "
                    "Take them by torch.autograd.grad."
                )
            written = self._versions.get(i, leaf._version) != leaf._version
            if written or memories(leaf) != [storage._cdata for storage in self._held[i]]:
                raise MutationError(
                    f"{self._function}: {self._label(i)} requires grad and was written to where autograd does not "
                    "see it, by other data through .data or, if it is sparse, under no_grad. Return the new value."
                )
