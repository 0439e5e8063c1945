"""Trees of nodes of optree's, and inside them of torch's, where libraries register what their models return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optree
from torch.utils import _pytree as torch_pytree

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["leaves_of_nodes", "mapped_nodes"]


def leaves_of_nodes(tree: Any, namespace: str) -> list[Any]:
    """The leaves of a tree."""
    return torch_pytree.tree_leaves(optree.tree_leaves(tree, namespace=namespace))


def mapped_nodes(function: Callable[[Any], Any], tree: Any, namespace: str) -> Any:
    """The tree, with what `function` makes of each leaf, in their order."""
    return optree.tree_map(lambda part: torch_pytree.tree_map(function, part), tree, namespace=namespace)
