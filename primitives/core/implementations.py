"""Which implementation of an operator runs, and what it may return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from primitives.core import backend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from primitives.core.primitive import Primitive

__all__ = ["runner"]

_are_tensors = frozenset([torch.Tensor]).issuperset


def runner(op: Primitive, implementations: Mapping[str, Callable]) -> Callable[..., Any]:
    """`(*args) -> outputs`, by the implementation for the backend in force.

    What it returns is held to the schema here, since a plain call has no dispatcher that would. A kernel that returns
    `None` leaves the call to the reference.
    """
    count, returns_list = len(op.output_names), op.returns_list

    def run(*args: Any) -> Any:
        implementation = implementations[backend.selected]
        out = implementation(*args)
        kind = type(out)
        if returns_list:
            # A copy: the list is the caller's, who may change it.
            if kind is list and _are_tensors(map(type, out)):
                return [*out]
        elif count == 1:
            if kind is torch.Tensor:
                return out
        elif kind is tuple and len(out) == count and _are_tensors(map(type, out)):
            return out
        if out is None and count and implementation is not op.rule("reference"):
            implementation = op.rule("reference")
            out = implementation(*args)
        return _conformed(op, out)

    return run


def _conformed(op: Primitive, out: Any) -> Any:
    """Outputs as the dispatcher returns them: a tensor, a tuple of as many as the schema names, a list, or nothing.

    Raises:
        TypeError: If they are anything else.
    """
    count = len(op.output_names)
    if count == 0 and out is None:
        return None
    if count == 1 and not op.returns_list and isinstance(out, torch.Tensor):
        return out
    if isinstance(out, (tuple, list)) and all(isinstance(x, torch.Tensor) for x in out):
        if op.returns_list:
            return list(out)
        if len(out) == count != 1:
            return tuple(out)
    wanted = "a list of tensors" if op.returns_list else "a tensor" if count == 1 else f"a tuple of {count} tensors"
    raise TypeError(f"{op.name}: an implementation must return {wanted}, got {_described(out)}.")


def _described(out: Any) -> str:
    if isinstance(out, (tuple, list)):
        return f"a {type(out).__name__} of {', '.join(type(x).__name__ for x in out) or 'nothing'}"
    return "None" if out is None else type(out).__name__
