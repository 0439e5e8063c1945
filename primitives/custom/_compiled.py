"""Calls of custom operators as a compiler sees them. The first one imports this: it takes Dynamo, slow to load.

Dynamo cannot hash treespecs. It takes the whole call as one opaque function, which is then traced with fake tensors;
what the compiler's backend gets is the operator.
"""

from __future__ import annotations

from typing import Any

import torch._dynamo
from torch.utils._pytree import tree_map

from primitives.custom._rules import operators

# Stand for None, which Dynamo (up to torch 2.13) takes neither as an argument nor as a result of an opaque function. It
# takes strings as arguments alone, and numbers as results. Nor does it make namedtuples of results: they are lists of
# NAMED, the position of their class in _CLASSES, and their entries.
NAMED = -0x6E616D65_64747570
_CLASSES: list[type] = []
ABSENT, ABSENT_RESULT = "primitives.custom: None", -0x6E6F6E65_6E6F6E65


def call(qualified_name: str, form: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call an operator, or its pure form, by name: nothing but trees of tensors and constants goes through Dynamo."""
    return _shown(_traced(qualified_name, form, _replaced(args, None, ABSENT), _replaced(kwargs, None, ABSENT)))


@torch._dynamo.nonstrict_trace
def _traced(qualified_name: str, form: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    function = getattr(operators[qualified_name], form)
    return _hidden(function(*_replaced(args, ABSENT, None), **_replaced(kwargs, ABSENT, None)))


def _replaced(tree: Any, old: Any, new: Any) -> Any:
    """`tree` with `new` for `old`."""
    return tree_map(lambda leaf: new if type(leaf) is type(old) and leaf == old else leaf, tree)


def _hidden(tree: Any) -> Any:
    """A result as Dynamo takes it from an opaque function."""
    if tree is None:
        return ABSENT_RESULT
    if type(tree) is dict:
        return {key: _hidden(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([_hidden(value) for value in tree])
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        if type(tree) not in _CLASSES:
            _CLASSES.append(type(tree))
        return [NAMED, _CLASSES.index(type(tree)), *map(_hidden, tree)]
    return tree


def _shown(tree: Any) -> Any:
    """The function that `_hidden` hid; Dynamo traces this."""
    if type(tree) is int and tree == ABSENT_RESULT:
        return None
    if type(tree) is dict:
        return {key: _shown(value) for key, value in tree.items()}
    if type(tree) is list:
        if len(tree) > 1 and type(tree[0]) is int and tree[0] == NAMED:
            return _CLASSES[tree[1]](*[_shown(value) for value in tree[2:]])
        return [_shown(value) for value in tree]
    if type(tree) is tuple:
        return tuple([_shown(value) for value in tree])
    return tree
