"""The pytree boundary: public functions take any optree pytree of tensors and map it leaf by leaf."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import optree
import torch

from primitives.core.errors import DtypeError, TreeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["map_tensors"]


def _broadcast(op_name: str, argument: str, prefix: Any, tree: Any, num_leaves: int, namespace: str) -> list:
    """One value of `prefix` per leaf of `tree`."""
    if prefix is None or isinstance(prefix, torch.Tensor):
        return [prefix] * num_leaves
    options: dict[str, Any] = {"none_is_leaf": True, "namespace": namespace}
    errors = optree.prefix_errors(prefix, tree, **options)
    if errors:
        trees = [optree.tree_structure(t, **options) for t in (prefix, tree)]
        raise TreeError(
            f"{op_name}: {argument} must be a tensor or a tree prefix of input. {errors[0](argument)}\n"
            f"{argument}: {trees[0]}\ninput: {trees[1]}"
        )
    return optree.broadcast_prefix(prefix, tree, **options)


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
    columns = [_broadcast(op_name, name, p, tree, len(leaves), namespace) for name, p in prefixes.items()]
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
