"""Vocabulary of vmap rules: which arguments carry a batch axis, and how to bring it to the front."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["BatchInfo", "legacy_vmap_kernel", "to_front"]


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


def legacy_vmap_kernel(op: Callable[..., Any]) -> Callable[..., Any]:
    """Kernel of `op` for torch's older vmap, under which batches of cotangents run (`is_grads_batched`): `torch.vmap`.

    Torch's own kernel for that dispatch key loops over the batch, and refuses lists of tensors.
    """

    def kernel(*args: Any) -> Any:
        leaves, treespec = tree_flatten(args)
        level, front = _innermost_batch(leaves)
        axes = [0 if x is not y else None for x, y in zip(leaves, front, strict=True)]
        outputs = torch.vmap(op, tree_unflatten(axes, treespec))(*tree_unflatten(front, treespec))
        return tree_map(lambda y: torch._add_batch_dim(y, 0, level), outputs)

    return kernel


def _innermost_batch(leaves: Sequence[Any]) -> tuple[int, list[Any]]:
    """The innermost level of the older vmap that any tensor belongs to, and the leaves with its axis at the front."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    while level > 0:
        front = [_without_level(x, level) if isinstance(x, torch.Tensor) else x for x in leaves]
        if any(x is not y for x, y in zip(leaves, front, strict=True)):
            return level, front
        level -= 1
    raise AssertionError("no argument is batched")


def _without_level(x: Tensor, level: int) -> Tensor:
    """`x` with its batch axis of this level at the front, or `x` itself if it has none."""
    one, two = (torch._remove_batch_dim(x, level, size, 0) for size in (1, 2))
    # Torch expands a tensor without that axis to the size it is told.
    return one if one.shape[0] == two.shape[0] else x
