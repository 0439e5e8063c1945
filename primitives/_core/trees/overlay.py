"""Trees laid over one another, and the error that names the first place where they differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import optree
import torch
from optree.utils import total_order_sorted

from primitives._core.errors import TreeError


def align(function: str, name: str, tree: Any, like_name: str, like: Any, options: dict[str, Any]) -> list[Any]:
    """The entry of `tree` at each leaf of `like`; `options` are the namespace and `is_leaf` of both.

    Raises `TreeError`, with the names of the function and the trees, if `tree` has another structure.
    """
    try:
        return [piece for _, piece in _overlaid(like, tree, options)]
    except ValueError:
        requirement = f"{function}: {name} must have the structure of {like_name}"
        raise _error(requirement, {like_name: like, name: tree}, options) from None


def spread(function: str, name: str, prefix: Any, tree_name: str, tree: Any, options: dict[str, Any]) -> list[Any]:
    """One value of `prefix` for each leaf of `tree`, of these `options`; `None` is a value. Raises as `align` does."""
    try:
        pairs = _overlaid(prefix, tree, {"none_is_leaf": True, "namespace": options["namespace"]})
    except ValueError:
        requirement = f"{function}: {name} must be one value or a tree prefix of {tree_name}"
        raise _error(requirement, {name: prefix, tree_name: tree}, {**options, "none_is_leaf": True}) from None
    result: list[Any] = []
    for value, subtree in pairs:
        result += [value] * len(optree.tree_leaves(cast("Any", subtree), **options))
    return result


def key_path(accessor: optree.PyTreeAccessor, root: str) -> str:
    """Key path as code that starts with `root`.

    optree knows the entries of a class that was registered without a path entry type, but not how they are reached:
    a name is taken for an attribute, anything else is a child that has no code.
    """
    code = root
    for entry in accessor:
        if type(entry) is not optree.FlattenedEntry:
            code = entry.codify(code)
        elif isinstance(entry.entry, str) and entry.entry.isidentifier():
            code = f"{code}.{entry.entry}"
        else:
            code = f"{code}<child {entry.entry!r} of {entry.type.__name__}>"
    return code


def _overlaid(prefix: Any, full: Any, options: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Each leaf of `prefix` with what stands in `full` there, in optree's order; raises `ValueError` if none does."""
    if torch.compiler.is_dynamo_compiling():
        return _overlaid_while_tracing(prefix, full, options)
    leaves, treespec = optree.tree_flatten(prefix, **options)
    return list(zip(leaves, treespec.flatten_up_to(full), strict=True))


def _overlaid_while_tracing(prefix: Any, full: Any, options: dict[str, Any]) -> list[tuple[Any, Any]]:
    """`_overlaid` in terms that Dynamo traces: its `flatten_up_to` fails on dataclasses in torch 2.11."""
    if optree.tree_is_leaf(prefix, **options):
        return [(prefix, full)]
    if type(prefix) is not type(full):
        raise ValueError
    if type(prefix) is dict:
        # By hand, as Dynamo folds the flattening of a dict of constants and cannot represent the result.
        if set(prefix) != set(full):
            raise ValueError
        children = [(prefix[key], full[key]) for key in total_order_sorted(prefix)]
    else:
        level, full_level = (optree.tree_flatten_one_level(node, **options) for node in (prefix, full))
        if level[2] != full_level[2]:
            raise ValueError
        children = list(zip(level[0], full_level[0], strict=True))
    return [pair for child in children for pair in _overlaid_while_tracing(*child, options)]


def tracing_predicate(is_leaf: Callable[[Any], bool] | None) -> Callable[[Any], bool]:
    """`is_leaf` for use under Dynamo, where a dict of constants has to be a leaf too.

    Dynamo folds the flattening of such a dict, and cannot represent the result.
    """

    def predicate(node: Any) -> bool:
        return (type(node) is dict and _is_constant(node)) or (is_leaf is not None and is_leaf(node))

    return predicate


def is_leafless(leaf: Any) -> bool:
    """Whether a leaf is one for Dynamo alone (see `tracing_predicate`) and really a dict without leaves."""
    return type(leaf) is dict and all(child is None or is_leafless(child) for child in leaf.values())


def _is_constant(node: Any) -> bool:
    if type(node) is dict:
        return all(_is_constant(child) for child in node.values())
    if type(node) in (tuple, list):
        return all(_is_constant(child) for child in node)
    return node is None or isinstance(node, (int, float, complex, str, bytes, torch.dtype, torch.device))


def _error(requirement: str, trees: dict[str, Any], options: dict[str, Any]) -> TreeError:
    """Says where the second of two trees lacks what the first has, and shows both."""
    specs = [f"{name}: {optree.tree_structure(tree, **options)}" for name, tree in trees.items()]
    differences = [
        f" {difference(next(iter(trees)))}" for difference in optree.prefix_errors(*trees.values(), **options)
    ]
    return TreeError("\n".join([f"{requirement}.{''.join(differences[:1])}", *specs]))
