"""Tables of decompositions: plain-torch, differentiable functions that stand for an operator.

The dispatch of core looks here when a primitive has no rule for the mode that is asked for: in the table for forward
mode first (if that is the mode), then in the general one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._ops import OpOverload, OpOverloadPacket

from primitives._core.errors import MissingRuleError

_Function = TypeVar("_Function", bound="Callable[..., Any]")

decomposition_table: dict[OpOverload, Callable[..., Any]] = {}
"""Decompositions by operator overload, for every purpose."""

decomposition_table_for_jvp: dict[OpOverload, Callable[..., Any]] = {}
"""Decompositions by operator overload that forward mode prefers to the general ones."""


def overloads_of(op: Any, caller: str = "register_decomposition") -> list[OpOverload]:
    """Every overload that `op` names: an overload, a packet of them, a primitive, or a sequence of these."""
    if isinstance(op, OpOverload):
        return [op]
    if isinstance(op, OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    if isinstance(getattr(op, "overload", None), OpOverload):
        return [op.overload]
    if isinstance(op, (list, tuple)):
        return [overload for entry in op for overload in overloads_of(entry, caller)]
    raise TypeError(
        f"{caller}: expected an operator overload, an operator, a primitive, or a sequence of them, "
        f"got {type(op).__name__}."
    )


def _register(
    table: dict[OpOverload, Callable[..., Any]], caller: str, op: Any, allow_existing: bool
) -> Callable[[_Function], _Function]:
    # Torch differentiates no operator that writes its result somewhere.
    overloads = [o for o in overloads_of(op, caller) if not any(a.is_out for a in o._schema.arguments)]
    if not overloads:
        raise TypeError(f"{caller}: {op} writes its results into out= arguments; register the operator without them.")

    def decorator(decomposition: _Function) -> _Function:
        existing = [str(overload) for overload in overloads if overload in table]
        if existing and not allow_existing:
            raise ValueError(
                f"{caller}: {', '.join(existing)} already has a decomposition; pass allow_existing=True to replace it."
            )
        table.update(dict.fromkeys(overloads, decomposition))
        return decomposition

    return decorator


def register_decomposition(op_or_ops: Any, *, allow_existing: bool = False) -> Callable[[_Function], _Function]:
    """Decorator that enters a function into `decomposition_table`.

    Args:
        op_or_ops: An operator overload (`torch.ops.aten.trace.default`), an operator with all its overloads but those
            with `out=` (`torch.ops.aten.trace`), a `Primitive`, or a sequence of these.
        allow_existing: Whether an operator that has a decomposition gets the new one.

    Returns:
        The decorator; it returns the function unchanged.

    Raises:
        ValueError: If an operator has a decomposition already and `allow_existing` is false; none is registered then.
        TypeError: If `op_or_ops` is not an operator.

    Example:
        >>> import torch, primitives as pr
        >>> torch.library.define("docstrings::twice", "(Tensor x) -> Tensor")
        >>> @pr.decompositions.register_decomposition(torch.ops.docstrings.twice)
        ... def twice(x):
        ...     return 2 * x
        >>> pr.decompositions.get_decomposition(torch.ops.docstrings.twice) is twice
        True
    """
    return _register(decomposition_table, "register_decomposition", op_or_ops, allow_existing)


def register_decomposition_for_jvp(op_or_ops: Any, *, allow_existing: bool = False) -> Callable[[_Function], _Function]:
    """Decorator that enters a function into `decomposition_table_for_jvp`; see `register_decomposition`.

    Example:
        >>> import torch, primitives as pr
        >>> torch.library.define("docstrings::thrice", "(Tensor x) -> Tensor")
        >>> @pr.decompositions.register_decomposition_for_jvp(torch.ops.docstrings.thrice)
        ... def thrice(x):
        ...     return 3 * x
        >>> pr.decompositions.get_decomposition(torch.ops.docstrings.thrice, for_jvp=True) is thrice
        True
    """
    return _register(decomposition_table_for_jvp, "register_decomposition_for_jvp", op_or_ops, allow_existing)


def forget_decompositions(op: Any) -> None:
    """Take the decompositions of `op` out of both tables, if it has any."""
    for overload in overloads_of(op):
        for table in (decomposition_table, decomposition_table_for_jvp):
            table.pop(overload, None)


def get_decomposition(op: Any, *, for_jvp: bool = False) -> Callable[..., Any]:
    """The decomposition of `op`.

    Args:
        op: An operator overload, a `Primitive`, or an operator with a single overload that is registered.
        for_jvp: Whether to look in the table for forward mode before the general one.

    Returns:
        A differentiable function of the operator's arguments.

    Raises:
        MissingRuleError: If there is none, naming the operator.
        TypeError: If `op` is not an operator.

    Example:
        >>> import torch, primitives as pr
        >>> std = pr.decompositions.get_decomposition(torch.ops.aten.std.correction)
        >>> std(torch.tensor([1.0, 3.0]), correction=0)
        tensor(1.)
    """
    overloads = overloads_of(op, "get_decomposition")
    for table in (decomposition_table_for_jvp, decomposition_table) if for_jvp else (decomposition_table,):
        for overload in overloads:
            if overload in table:
                return table[overload]
    raise MissingRuleError(
        f"{', '.join(map(str, overloads))}: no decomposition is registered for "
        f"{'forward mode' if for_jvp else 'differentiation'}. Add one with "
        f"{'register_decomposition_for_jvp or ' * for_jvp}register_decomposition."
    )
