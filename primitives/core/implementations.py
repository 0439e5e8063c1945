"""Which implementation of an operator runs, and what it may return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from primitives.core import backend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from primitives.core.spec import Spec

__all__ = ["runner"]

_are_tensors = frozenset([torch.Tensor]).issuperset


def runner(spec: Spec, implementations: Mapping[str, Callable]) -> Callable[..., Any]:
    """`(*args) -> outputs`, by the implementation for the backend in force.

    What it returns is held to the schema here, since the fast path has no dispatcher that would. A kernel that returns
    `None` leaves the call to the reference.
    """
    count, returns_list = len(spec.outputs), spec.returns_list

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
        if out is None and count and implementation is not implementations["reference"]:
            out = implementations["reference"](*args)
        return _conformed(spec, out)

    return run


def _conformed(spec: Spec, out: Any) -> Any:
    """Outputs as the dispatcher returns them: a tensor, a tuple of as many as the schema names, a list, or nothing.

    Raises:
        TypeError: If they are anything else.
    """
    count = len(spec.outputs)
    if count == 0 and out is None:
        return None
    if count == 1 and not spec.returns_list and isinstance(out, torch.Tensor):
        return out
    if isinstance(out, (tuple, list)) and all(isinstance(x, torch.Tensor) for x in out):
        if spec.returns_list:
            return list(out)
        if len(out) == count != 1:
            return tuple(out)
    wanted = "a list of tensors" if spec.returns_list else "a tensor" if count == 1 else f"a tuple of {count} tensors"
    found = type(out).__name__
    if isinstance(out, (tuple, list)):
        found = f"a {found} of {', '.join(type(x).__name__ for x in out) or 'nothing'}"
    raise TypeError(f"{spec.name}: an implementation must return {wanted}, got {'None' if out is None else found}.")
