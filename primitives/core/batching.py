"""Vocabulary of vmap rules: which arguments carry a batch axis, and how to bring it to the front."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BatchInfo", "to_front"]


class BatchInfo(NamedTuple):
    """What a vmap rule is told beside its arguments.

    Attributes:
        size: Length of the batch axis.
        axes: One entry per argument, by name: position of its batch axis, or `None` where it has none; a list of
            these for a list of tensors.
        randomness: What random operations do: `"error"`, `"same"` or `"different"`.
    """

    size: int
    axes: tuple
    randomness: str = "error"

    def is_batched(self, *names: str) -> bool:
        """Whether any of the named arguments carries the batch axis."""
        return any(getattr(self.axes, name) is not None for name in names)


def to_front(x: Tensor | None, axis: int | None, size: int) -> Tensor | None:
    """`x` with its batch axis first; an unbatched tensor is expanded (stride 0, no copy), `None` stays `None`."""
    if x is None:
        return None
    return x.expand(size, *x.shape) if axis is None else x.movedim(axis, 0)
