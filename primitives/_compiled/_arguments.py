"""The arguments of a call: tensors, and the constants of which programs are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import optree
import torch
from torch._C._functorch import is_functorch_wrapped_tensor  # type: ignore[attr-defined] - no stub

from primitives._core.errors import LeafError
from primitives._core.trees.nodes import ARGUMENTS
from primitives.func._values import hidden_in, is_at_home
from primitives.tracing._leaves import Leaves

__all__ = ["hides", "kind_of", "number", "taken_apart", "unhashable"]


def number(x: Any) -> Any:
    """A size as a number; anything else as it is."""
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kinds[type(x)](x) if type(x) in kinds else x


def taken_apart(args: Any, kwargs: dict[str, Any]) -> tuple[Sequence[Any], Any]:
    """The leaves of the arguments, and what tells one tree from another: tensors alone are counted, at once."""
    if not kwargs and all(isinstance(x, torch.Tensor) for x in args):
        return args, len(args)
    return optree.tree_flatten((args, kwargs), namespace=ARGUMENTS)  # type: ignore[arg-type] - any tree


def kind_of(x: Any, is_dynamic: bool) -> Any:
    """What must be the same of a leaf of the arguments where a site serves."""
    if not isinstance(x, torch.Tensor):
        # By its text a zero has its sign, and NaN is equal to itself.
        return type(x), repr(x) if isinstance(x, (float, complex)) else x
    # With others a function may return another tree, write to other buffers, and draw numbers or not.
    return () if is_dynamic or x.is_nested else (x.shape, x.dtype, x.requires_grad)


def unhashable(fn: Any, args: tuple, kwargs: dict[str, Any]) -> LeafError:
    """The error for a constant that no program can be found by."""
    given = Leaves.of_arguments(fn, args, kwargs, ARGUMENTS)
    found = [i for i, x in enumerate(given.values) if type(x).__hash__ is None or isinstance(x, Iterator)]
    what = f"{given.label(found[0])} must be" if found else "each argument must be"
    kind = type(given.values[found[0]]).__name__ if found else "one that has no hash"
    return LeafError(
        f"compile: {what} a tensor, a hashable constant, a dataclass or a container that optree takes apart, got "
        f"{kind}. Pass arrays as tensors, and list(...) of an iterator; register other classes as nodes."
    )


def hides(y: Any, lent: set[int]) -> bool:
    """Whether a result, tensors apart, holds tensors of the trace besides those that are lent."""
    found = [] if isinstance(y, torch.Tensor) else [x for x in hidden_in(y) if id(x) not in lent]
    return isinstance(y, Iterator) or any(not is_at_home(x) or is_functorch_wrapped_tensor(x) for x in found)
