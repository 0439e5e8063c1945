"""The structures of an operator, interned: equal ones are one, and each has a number."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import warnings
from typing import Any, cast

import optree
import torch
from torch import Tensor

from primitives._core.errors import LeafError, TreeError
from primitives.custom.trees.calls import Signature, Structure

# A static argument that changes with every call makes a structure, and a compiled graph, for every call.
MANY_STRUCTURES = 1000

_SYMBOLIC: tuple[tuple[type, Any], ...] = ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool))


_TOLD_APART_BY_EQUALITY = {int, bool, str, bytes, type(None), torch.dtype, torch.device}


class _ByNumber(dict):
    """Structures by number; asking for an unknown one raises."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __missing__(self, number: int) -> Structure:
        raise TreeError(
            f"{self._name}: structure {number} is unknown in this process. A graph that was exported in another one "
            "needs one call of the operator with the same trees and static arguments first."
        )


class StructureTable:
    """The structures of one operator, by number and by content."""

    def __init__(self, name: str, signature: Signature, namespace: str) -> None:
        self._name = name
        self._signature = signature
        self.namespace = namespace
        self.by_number: dict[int, Structure] = _ByNumber(name)
        self._by_content: dict[Any, Structure] = {}
        # Of calls with tensors and dicts of tensors alone: the structure, and for each dict its keys in optree's order.
        self._plain: dict[Any, tuple[Structure, list]] = {}
        self._lock = threading.Lock()

    def flatten(self, args: tuple[Any, ...], static: dict[str, Any]) -> tuple[list[Tensor], Structure]:
        """The tensors of a call, and its structure."""
        if static:
            static = {name: _concrete(value) for name, value in static.items()}
        try:
            static_key = tuple(map(content, static.values())) if static else ()
            for arg in args:
                if not isinstance(arg, torch.Tensor):
                    break
            else:
                # No tree at all: as cheap as it can be.
                structure = self._by_content.get((len(args), static_key))
                if structure is not None:
                    return list(args), structure
            found = self._of_plain_call(args, static_key)
            if found is not None:
                return found
            leaves, treespec = optree.tree_flatten(cast("Any", args), namespace=self.namespace)
            tensors: list[Any] = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            if len(tensors) < len(leaves):
                leaves = [_concrete(leaf) for leaf in leaves]
                other_key = tuple(None if isinstance(leaf, torch.Tensor) else content(leaf) for leaf in leaves)
            else:
                other_key = ()
            key = (treespec, _order(args, self.namespace), other_key, static_key)
            structure = self._by_content.get(key)
        except TypeError:
            self._refuse_unhashable(args, static)
            raise
        return tensors, structure or self._intern(args, treespec, leaves, static, key)

    def _of_plain_call(
        self, args: tuple[Any, ...], static_key: tuple[Any, ...]
    ) -> tuple[list[Tensor], Structure] | None:
        """The result of `flatten` for a known call with tensors and dicts of tensors: a treespec takes longer."""
        # The keys of a dict, `None` for a tensor, and for anything else what no known call has.
        keys = [None if isinstance(arg, torch.Tensor) else tuple(arg) if type(arg) is dict else ... for arg in args]
        known = self._plain.get((*keys, static_key))
        if known is None:
            return None
        structure, entries = known
        tensors: list[Tensor] = []
        for arg, names in zip(args, entries, strict=True):
            if names is None:
                tensors.append(arg)
            else:
                tensors += [arg[name] for name in names]
        for x in tensors:
            if not isinstance(x, torch.Tensor):
                return None
        return tensors, structure

    def _intern(
        self, args: tuple[Any, ...], treespec: Any, leaves: list, static: dict[str, Any], key: Any
    ) -> Structure:
        template = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if None not in template:
            raise LeafError(f"{self._name}: the positional arguments must hold a tensor, got none.")
        for name, value in static.items():
            if any(isinstance(leaf, torch.Tensor) for leaf in optree.tree_leaves(value)):
                raise LeafError(
                    f"{self._name}: {name} is keyword-only, hence static, and must hold no tensor; make it a "
                    "positional argument of the function."
                )
        # The same in every process, as far as the values print alike: an exported graph may be run elsewhere.
        text = repr((str(treespec), *key[1:])).encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
        with self._lock:
            if key in self._by_content:
                return self._by_content[key]
            while number in self.by_number:
                number += 1
            structure = Structure(self._signature, number, treespec, template, static)
            self.by_number[number] = structure
            self._by_content[key] = structure
            if structure.is_flat:
                self._by_content[(len(args), key[-1])] = structure
            elif all(
                isinstance(x, torch.Tensor) for arg in args for x in (arg.values() if type(arg) is dict else [arg])
            ):
                pairs = zip(args, treespec.children(), strict=True)
                entries = [child.entries() if type(arg) is dict else None for arg, child in pairs]
                keys = [tuple(arg) if type(arg) is dict else None for arg in args]
                self._plain[(*keys, key[-1])] = structure, entries
            count = len(self.by_number)
        if count == MANY_STRUCTURES:
            warnings.warn(
                f"{self._name}: called with {count} different structures. A number that changes from call to call is "
                "better passed as a tensor: every value of a static argument is kept, and compiled for itself.",
                stacklevel=4,
            )
        return structure

    def _refuse_unhashable(self, args: tuple[Any, ...], static: dict[str, Any]) -> None:
        """Raise for the first value that is not hashable."""
        leaves, treespec = optree.tree_flatten(cast("Any", args), namespace=self.namespace)
        paths = map(self._signature.label, treespec.accessors())
        named = [
            *[(f"static argument {name}", value) for name, value in static.items()],
            *zip(paths, leaves, strict=True),
        ]
        for label, value in named:
            try:
                hash(value)
            except TypeError:
                is_array = hasattr(value, "__array__")
                remedy = "pass a tuple, or register its class with optree if it holds tensors"
                raise LeafError(
                    f"{self._name}: {label} must be hashable, as everything but tensors, got {type(value).__name__}; "
                    f"{'pass a tensor: torch.from_numpy' if is_array else remedy}."
                ) from None


def _order(tree: Any, namespace: str) -> tuple[Any, ...]:
    """The keys of all dicts as they stand there: treespecs agree whatever their order is, and a function goes by it."""
    keys: list[Any] = []
    stack = [tree]
    while stack:
        tree = stack.pop()
        if isinstance(tree, dict):
            keys += tree
            children: Any = tree.values()
        elif isinstance(tree, (tuple, list)):
            children = tree
        else:
            is_leaf = tree is None or optree.tree_is_leaf(cast("Any", tree), namespace=namespace)
            children = () if is_leaf else optree.tree_flatten_one_level(cast("Any", tree), namespace=namespace)[0]
        stack += [child for child in children if not isinstance(child, torch.Tensor)]
    return tuple(keys)


def _concrete(value: Any) -> Any:
    """A compiler's symbolic numbers as the numbers they stand for; the compiler then guards them."""
    for symbolic, number in _SYMBOLIC:
        if isinstance(value, symbolic):
            return number(value)
    if isinstance(value, tuple):
        concrete = [_concrete(entry) for entry in value]
        if any(new is not old for new, old in zip(concrete, value, strict=True)):
            return type(value)(*concrete) if hasattr(value, "_fields") else tuple(concrete)
    return value


def content(value: Any) -> Any:
    """A key that tells apart what Python's equality does not: 1, 1.0 and True, 0.0 and -0.0; and NaN equals NaN."""
    kind = type(value)
    if kind in _TOLD_APART_BY_EQUALITY:
        return kind, value
    if isinstance(value, float):
        return kind, value.hex()
    if isinstance(value, complex):
        return kind, value.real.hex(), value.imag.hex()
    if isinstance(value, tuple):
        return kind, *map(content, value)
    if isinstance(value, frozenset):
        return kind, frozenset(map(content, value))
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        hash(value)  # A scalar of numpy, not an array.
        return kind, value.dtype, value.tobytes()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # One that is not frozen may change behind a structure that keeps it, and then stands for nothing but itself.
        itself = None if kind.__dataclass_params__.frozen else value
        hash(value)
        return kind, itself, *[content(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return kind, value
