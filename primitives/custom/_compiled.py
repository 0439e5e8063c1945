"""Calls of custom operators as a compiler sees them. The first one imports this: it takes Dynamo, slow to load.

Dynamo cannot hash treespecs. It takes the whole call as one opaque function, which is then traced with fake tensors;
what the compiler's backend gets is the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch._dynamo
from torch.utils._pytree import tree_map

from primitives._core.contexts import run_as_written
from primitives.custom._rules import operators

# Stand for None, which Dynamo (up to torch 2.13) takes neither as an argument nor as a result of an opaque function. It
# takes strings as arguments alone, and numbers as results. Nor does it make namedtuples of results: they are lists of
# NAMED, the position of their class in _CLASSES, and their entries.
NAMED = -0x6E616D65_64747570
_CLASSES: list[type] = []
ABSENT, ABSENT_RESULT = "primitives.custom: None", -0x6E6F6E65_6E6F6E65


def call(qualified_name: str, form: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call an operator, or its pure form, by name: nothing but trees of tensors and constants goes through Dynamo."""
    return _shown(_traced(qualified_name, form, _mapped(_without_none, args), _mapped(_without_none, kwargs)))


# Where the graph breaks at the call, nothing is traced in it: the operator would be sent here again, and again.
@torch._dynamo.nonstrict_trace
@run_as_written
def _traced(qualified_name: str, form: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    function = getattr(operators[qualified_name], form)
    return _mapped(_hidden, function(*tree_map(_with_none, args), **tree_map(_with_none, kwargs)))


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree, in which `function` replaces each part that is not a plain container.

    Of `tree_map` Dynamo keeps no guard of the order of a dict.
    """
    if type(tree) is dict:
        return {key: _mapped(function, value) for key, value in tree.items()}
    if type(tree) is list:
        return [_mapped(function, value) for value in tree]
    return tuple([_mapped(function, value) for value in tree]) if type(tree) is tuple else function(tree)


def _without_none(tree: Any) -> Any:
    return tree_map(lambda leaf: ABSENT if leaf is None else leaf, tree)


def _with_none(leaf: Any) -> Any:
    return None if type(leaf) is str and leaf == ABSENT else leaf


def _hidden(tree: Any) -> Any:
    """A result as Dynamo takes it from an opaque function."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        if type(tree) not in _CLASSES:
            _CLASSES.append(type(tree))
        return [NAMED, _CLASSES.index(type(tree)), *[_mapped(_hidden, entry) for entry in tree]]
    return ABSENT_RESULT if tree is None else tree


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
