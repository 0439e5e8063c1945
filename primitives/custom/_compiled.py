"""Calls of custom operators as a compiler sees them. The first one imports this: it takes Dynamo, slow to load.

Dynamo cannot hash treespecs. It takes the whole call as one opaque function, which is then traced with fake tensors;
what the compiler's backend gets is the operator.
"""

from __future__ import annotations

from typing import Any

import torch._dynamo

from primitives.custom._operator import find

# Stand for None, which Dynamo (up to torch 2.13) takes neither as an argument nor as a result of an opaque function. It
# takes strings as arguments alone, and numbers as results.
ABSENT, ABSENT_RESULT = "primitives.custom: None", -0x6E6F6E65_6E6F6E65


def call(qualified_name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call an operator by name, so that no object but trees of tensors and constants goes through Dynamo."""
    result = _traced_call(qualified_name, _replaced(args, None, ABSENT), _replaced(kwargs, None, ABSENT))
    return _replaced(result, ABSENT_RESULT, None)


def call_pure(qualified_name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """`call` for the pure form."""
    result = _traced_pure_call(qualified_name, _replaced(args, None, ABSENT), _replaced(kwargs, None, ABSENT))
    return _replaced(result, ABSENT_RESULT, None)


@torch._dynamo.nonstrict_trace
def _traced_call(qualified_name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    result = find(qualified_name)(*_replaced(args, ABSENT, None), **_replaced(kwargs, ABSENT, None))
    return _replaced(result, None, ABSENT_RESULT)


@torch._dynamo.nonstrict_trace
def _traced_pure_call(qualified_name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    result = find(qualified_name).pure(*_replaced(args, ABSENT, None), **_replaced(kwargs, ABSENT, None))
    return _replaced(result, None, ABSENT_RESULT)


def _replaced(tree: Any, old: Any, new: Any) -> Any:
    """`tree` with `new` for `old` in Python's own containers; elsewhere `None`s are no arguments of their own."""
    if isinstance(tree, torch.Tensor):
        return tree
    if type(tree) is type(old) and tree == old:
        return new
    if type(tree) is dict:
        return {key: _replaced(value, old, new) for key, value in tree.items()}
    if type(tree) is list:
        return [_replaced(value, old, new) for value in tree]
    if type(tree) is tuple:
        return tuple([_replaced(value, old, new) for value in tree])
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*[_replaced(value, old, new) for value in tree])
    return tree
