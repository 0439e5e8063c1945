"""Tensors inside leaves: in objects that optree does not take apart, and that a transform would pass by unseen."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import types
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from primitives.core.errors import LeafError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["find_tensor", "refuse_opaque"]

# Deep enough for an object in a list of an object; a leaf may be the root of a whole program.
_DEPTH = 5
_ATOMS = (str, bytes, int, float, complex, type(None), type, types.ModuleType, torch.dtype, torch.device, torch.Size)


def _slots(x: Any) -> Iterator[tuple[str, Any]]:
    for name in {name for base in type(x).__mro__ for name in _names(base.__dict__.get("__slots__", ()))}:
        if not name.startswith("__") and hasattr(x, name):
            yield f".{name}", getattr(x, name)


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_assigned(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _captured(x: Any) -> Iterator[tuple[str, Any]]:
    """What a function keeps alive."""
    if isinstance(x, functools.partial):
        yield from {"func": x.func, "args": x.args, "keywords": x.keywords}.items()
    elif isinstance(x, (types.MethodType, types.BuiltinMethodType)):
        yield "self", x.__self__
    elif isinstance(x, types.FunctionType):
        cells = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents) for name, cell in cells if _is_assigned(cell))


def _children(x: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(x, torch.nn.Module):
        yield from ((f".{name}", y) for name, y in (*x.named_parameters(), *x.named_buffers()))
    if isinstance(x, dict):
        yield from ((f"[{key!r}]", y) for key, y in dict.items(x))
    elif isinstance(x, (list, tuple, set, frozenset, collections.deque)):
        yield from ((f"[{i}]", y) for i, y in enumerate(x))
    elif type(x) in _pytree.SUPPORTED_NODES:
        children, _ = _pytree.SUPPORTED_NODES[type(x)].flatten_fn(x)
        yield from ((f"[{i}]", y) for i, y in enumerate(children))
    yield from ((f".{name}", y) for name, y in getattr(x, "__dict__", {}).items())
    yield from _slots(x)


def find_tensor(
    x: Any, *, through_functions: bool, wanted: Callable[[torch.Tensor], bool] = lambda _: True
) -> str | None:
    """Where in `x` a tensor is, as code to append to a name; `None` if none is found.

    Args:
        x: Anything.
        through_functions: Whether to look into what functions capture.
        wanted: Which tensors count.
    """
    level: list[tuple[str, Any]] = [("", x)]
    seen: set[int] = set()
    for _ in range(_DEPTH):
        following: list[tuple[str, Any]] = []
        for path, value in level:
            if isinstance(value, torch.Tensor):
                if wanted(value):
                    return path
            elif not isinstance(value, _ATOMS) and id(value) not in seen:
                seen.add(id(value))
                is_function = callable(value) and not isinstance(value, torch.nn.Module)
                if through_functions:
                    following += [(f"{path}<{name}>", y) for name, y in _captured(value)]
                if through_functions or not is_function:
                    following += [(path + step, y) for step, y in _children(value)]
        level = following
    return None


def refuse_opaque(
    function: str, leaves: Sequence[Any], label: Callable[[int], str], *, through_functions: bool = False
) -> None:
    """Raise if a leaf is no tensor and holds one: it would be a constant, and its tensors not part of the function.

    Args:
        function: Name of the public function, for the message.
        leaves: The leaves.
        label: Key path of the leaf at a place, as code.
        through_functions: Whether they are outputs, for which what functions capture counts too.

    Raises:
        LeafError: If there is such a leaf; among outputs, for an iterator too.
    """
    for i, x in enumerate(leaves):
        if isinstance(x, (torch.Tensor, *_ATOMS)):
            continue
        if through_functions and isinstance(x, collections.abc.Iterator):
            raise LeafError(
                f"{function}: {label(i)} must be a tensor, a constant or a container that optree takes apart, got an "
                f"iterator, {type(x).__name__}, which computes when it is asked. Make a list of it."
            )
        path = find_tensor(x, through_functions=through_functions)
        if path is None:
            continue
        name, kind = label(i), type(x).__name__
        advice = (
            "For a module, use functional_call."
            if isinstance(x, torch.nn.Module)
            else f"Use a tuple, dict or named tuple, or register {kind} by optree.register_pytree_node(..., "
            "namespace=optree.registry.__GLOBAL_NAMESPACE)."
            if not inspect.isroutine(x)
            else "Pass the tensor itself."
        )
        raise LeafError(
            f"{function}: {name} must be a tensor, a constant or a container that optree takes apart, got a {kind} "
            f"with a tensor inside, {name}{path}. {advice}"
        )
