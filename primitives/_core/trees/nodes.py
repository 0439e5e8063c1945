"""Trees of nodes of optree's, of torch's, where libraries register what their models return, and of dataclasses."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterable
from typing import Any

import optree
import torch
from torch.utils import _pytree as torch_pytree

# Namespaces in which nodes of torch and dataclasses are nodes, too; among results, all objects that hold tensors.
ARGUMENTS, RESULTS = "primitives.arguments", "primitives.results"
# Functions may go through a dict of arguments in its order, which optree forgets unless told. The context never ends.
_in_order = contextlib.ExitStack()
_in_order.enter_context(optree.dict_insertion_ordered(True, namespace=ARGUMENTS))


def leaves_of_nodes(tree: Any, namespace: str) -> list[Any]:
    """The leaves of a tree."""
    return torch_pytree.tree_leaves(optree.tree_leaves(tree, namespace=namespace))


def mapped_nodes(function: Callable[[Any], Any], tree: Any, namespace: str) -> Any:
    """The tree, with what `function` makes of each leaf, in their order."""
    return optree.tree_map(lambda part: torch_pytree.tree_map(function, part), tree, namespace=namespace)


def flattened(tree: Any, namespace: str) -> tuple[list[Any], optree.PyTreeSpec]:
    """Leaves and structure in `ARGUMENTS` or `RESULTS`."""
    leaves, treespec = optree.tree_flatten(tree, namespace=namespace)
    return flattened(tree, namespace) if registered(leaves, namespace) else (leaves, treespec)


def registered(leaves: Iterable[Any], namespace: str) -> bool:
    """Whether some of these leaves are nodes, now that they are registered."""
    kinds = {type(x) for x in leaves if not isinstance(x, _WHOLE) and _is_node(x, namespace)}
    for kind in kinds:
        node = torch_pytree.SUPPORTED_NODES.get(kind)
        to, back = (_attributes, _of_attributes(kind)) if node is None else _of_torch(node, kind)
        # Another thread may have been faster.
        with contextlib.suppress(ValueError):
            optree.register_pytree_node(kind, to, back, namespace=namespace)
    return bool(kinds)


def _is_node(x: Any, namespace: str) -> bool:
    if type(x) in torch_pytree.SUPPORTED_NODES:
        return True
    is_plain = not isinstance(x, (dict, list, tuple))
    is_record = dataclasses.is_dataclass(x) or isinstance(x, _RECORDS)
    return is_plain and (is_record or (namespace == RESULTS and _holds_tensors(x, 4)))


# Batches and settings of other kinds, none of which has a hash.
_RECORDS = (types.SimpleNamespace, argparse.Namespace, collections.UserDict)
_WHOLE = (torch.Tensor, torch.nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)


def _holds_tensors(x: Any, depth: int) -> bool:
    if depth == 0 or isinstance(x, _WHOLE):
        return isinstance(x, torch.Tensor)
    if not isinstance(x, (list, tuple)):
        x = (x if isinstance(x, dict) else getattr(x, "__dict__", {})).values()
    return any(_holds_tensors(y, depth - 1) for y in x)


def _attributes(x: Any) -> tuple[list[Any], Any, tuple[str, ...]]:
    fields = dataclasses.fields(x) if dataclasses.is_dataclass(x) else ()
    own = [field.name for field in fields if hasattr(x, field.name)]
    names = (*dict.fromkeys([*own, *getattr(x, "__dict__", ())]),)
    return [getattr(x, name) for name in names], names, names


def _of_attributes(kind: type) -> Callable[[Any, Iterable[Any]], Any]:
    def made(names: Any, values: Iterable[Any]) -> Any:
        x = (types.SimpleNamespace if issubclass(kind, types.SimpleNamespace) else object).__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(x, name, value)
        return x

    return made


@dataclasses.dataclass
class _Context:
    """What torch knows of a node, which optree wants hashable."""

    value: Any

    def __hash__(self) -> int:
        return hash(repr(self.value))


def _of_torch(node: Any, kind: type) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def flatten(x: Any) -> tuple[Any, Any]:
        values, context = node.flatten_fn(x)
        return values, _Context(context)

    if kind is torch.Size:
        # Torch makes a tuple of it.
        return flatten, lambda _, values: torch.Size(values)
    return flatten, lambda context, values: node.unflatten_fn([*values], context.value)
