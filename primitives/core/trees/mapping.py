"""The pytree boundary: public functions take any optree pytree of tensors and map it leaf by leaf."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import optree
import torch

from primitives.core.errors import DtypeError
from primitives.core.trees.overlay import spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["map_tensors"]


def _are_tensors(values: Iterable[Any]) -> bool:
    # A loop, because all() over a generator takes three times as long as the question.
    for value in values:  # noqa: SIM110
        if value is not None and not isinstance(value, torch.Tensor):
            return False
    return True


def map_tensors(
    op_name: str,
    check: Callable[..., None],
    compute: Callable[..., Any],
    tree: Any,
    prefixes: dict[str, Any],
    *,
    namespace: str = "",
    num_results: int | None = None,
) -> Any:
    """Apply `compute(leaf, *values)` to every tensor of `tree`, after `check(label, leaf, *values)` passed for all.

    Args:
        op_name: Name of the public function, for errors.
        check: Raises if a leaf and its values do not go together; `label` names the leaf.
        compute: Result for one leaf.
        tree: Pytree of tensors. `None`s in it stay as they are.
        prefixes: Further arguments by name, each a tensor, `None`, or a tree prefix of `tree`.
        namespace: optree namespace in which custom node types are looked up.
        num_results: Length of the tuple that `compute` returns; `None` where it returns one result.

    Returns:
        The results in the structure of `tree`; with `num_results`, a tuple of that many such trees.

    Raises:
        TreeError: If a prefix does not fit the tree.
        DtypeError: If a leaf, or a value that goes with it, is no tensor.
    """
    if tree is None:
        raise DtypeError(f"{op_name}: input must be a tensor, got NoneType.")
    if isinstance(tree, torch.Tensor):
        values = prefixes.values()
        if _are_tensors(values):
            check("input", tree, *values)
            return compute(tree, *values)
    leaves, treespec = optree.tree_flatten(cast("Any", tree), none_is_leaf=True, namespace=namespace)
    accessors = treespec.accessors()
    options = {"namespace": namespace, "none_is_leaf": True}
    columns = [
        [prefix] * len(leaves)
        if prefix is None or isinstance(prefix, torch.Tensor)
        else spread(op_name, name, prefix, "input", tree, options)
        for name, prefix in prefixes.items()
    ]
    calls = list(zip(leaves, *columns, strict=True))
    for accessor, call in zip(accessors, calls, strict=True):
        if call[0] is None:
            continue
        label = accessor.codify("input")
        if not isinstance(call[0], torch.Tensor):
            raise DtypeError(f"{op_name}: {label} must be a tensor, got {type(call[0]).__name__}.")
        for name, value in zip(prefixes, call[1:], strict=True):
            if value is not None and not isinstance(value, torch.Tensor):
                raise DtypeError(f"{op_name}: {name} must be a tensor, got {type(value).__name__}.")
        check(label, *call)
    results = [None if call[0] is None else compute(*call) for call in calls]
    if num_results is None:
        return treespec.unflatten(results)
    rows = [(None,) * num_results if r is None else r for r in results]
    return tuple(treespec.unflatten([row[i] for row in rows]) for i in range(num_results))
