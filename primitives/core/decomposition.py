"""Tables of decompositions: plain-torch, differentiable functions that stand for an operator.

The dispatch of core looks here when a primitive has no rule for the mode that is asked for: in the table for forward
mode first (if that is the mode), then in the general one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._ops import OpOverload, OpOverloadPacket

from primitives.core.errors import MissingRuleError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "decomposition_table",
    "decomposition_table_for_jvp",
    "get_decomposition",
    "overloads_of",
    "register_decomposition",
    "register_decomposition_for_jvp",
]

decomposition_table: dict[OpOverload, Callable] = {}
"""Decompositions by operator overload, for every purpose."""

decomposition_table_for_jvp: dict[OpOverload, Callable] = {}
"""Decompositions by operator overload that forward mode prefers to the general ones."""


def overloads_of(op: Any) -> list[OpOverload]:
    """Every overload that `op` names: an overload, a packet of them, a primitive, or a sequence of these."""
    if isinstance(op, OpOverload):
        return [op]
    if isinstance(op, OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    if isinstance(getattr(op, "overload", None), OpOverload):
        return [op.overload]
    if isinstance(op, (list, tuple)):
        return [overload for entry in op for overload in overloads_of(entry)]
    raise TypeError(
        "register_decomposition: expected an operator overload, an operator, a primitive, or a sequence of them, "
        f"got {type(op).__name__}."
    )


def _out_names(overload: OpOverload) -> list[str]:
    return [argument.name for argument in overload._schema.arguments if argument.is_out]


def _with_out(decomposition: Callable, names: list[str]) -> Callable:
    """`decomposition` for an out= overload: compute the results, then write them where they are wanted."""

    def decompose_out(*args: Any, **kwargs: Any) -> Any:
        targets = [kwargs.pop(name) for name in names]
        results = decomposition(*args, **kwargs)
        values = results if isinstance(results, tuple) else (results,)
        for target, value in zip(targets, values, strict=True):
            if target.shape != value.shape:
                target.resize_(value.shape)
            target.copy_(value)
        return targets[0] if len(targets) == 1 else tuple(targets)

    return decompose_out


def _register(table: dict, caller: str, op: Any, allow_existing: bool) -> Callable[[Callable], Callable]:
    overloads = overloads_of(op)

    def decorator(decomposition: Callable) -> Callable:
        existing = [str(overload) for overload in overloads if overload in table]
        if existing and not allow_existing:
            raise ValueError(
                f"{caller}: {', '.join(existing)} already has a decomposition; pass allow_existing=True to replace it."
            )
        for overload in overloads:
            names = _out_names(overload)
            table[overload] = _with_out(decomposition, names) if names else decomposition
        return decomposition

    return decorator


def register_decomposition(op_or_ops: Any, *, allow_existing: bool = False) -> Callable[[Callable], Callable]:
    """Decorator that enters a function into `decomposition_table`.

    Args:
        op_or_ops: An operator overload (`torch.ops.aten.trace.default`), an operator with all its overloads
            (`torch.ops.aten.trace`), a `Primitive`, or a sequence of these. For an `out=` overload the function is
            called without the out arguments, and its results are written to them.
        allow_existing: Whether an operator that has a decomposition gets the new one.

    Returns:
        The decorator; it returns the function unchanged.

    Raises:
        ValueError: If an operator has a decomposition already and `allow_existing` is false; none is registered then.
        TypeError: If `op_or_ops` is no operator.
    """
    return _register(decomposition_table, "register_decomposition", op_or_ops, allow_existing)


def register_decomposition_for_jvp(op_or_ops: Any, *, allow_existing: bool = False) -> Callable[[Callable], Callable]:
    """Decorator that enters a function into `decomposition_table_for_jvp`; otherwise as `register_decomposition`.

    Args:
        op_or_ops: As for `register_decomposition`.
        allow_existing: As for `register_decomposition`.

    Returns:
        The decorator; it returns the function unchanged.

    Raises:
        ValueError: As for `register_decomposition`.
        TypeError: As for `register_decomposition`.
    """
    return _register(decomposition_table_for_jvp, "register_decomposition_for_jvp", op_or_ops, allow_existing)


def get_decomposition(op: Any, *, for_jvp: bool = False) -> Callable:
    """The decomposition of `op`.

    Args:
        op: An operator overload, a `Primitive`, or an operator with a single overload that is registered.
        for_jvp: Whether to look in the table for forward mode before the general one.

    Returns:
        A differentiable function of the operator's arguments.

    Raises:
        MissingRuleError: If there is none, naming the operator.
    """
    tables: Sequence[dict] = (decomposition_table_for_jvp, decomposition_table) if for_jvp else (decomposition_table,)
    overloads = overloads_of(op)
    for table in tables:
        found = [overload for overload in overloads if overload in table and not _out_names(overload)]
        if found:
            return table[found[0]]
    # An out= overload is asked for by name alone.
    for table in tables:
        if len(overloads) == 1 and overloads[0] in table:
            return table[overloads[0]]
    mode = "forward mode" if for_jvp else "differentiation"
    decorator = "register_decomposition_for_jvp or register_decomposition" if for_jvp else "register_decomposition"
    raise MissingRuleError(
        f"{', '.join(str(overload) for overload in overloads)}: no decomposition is registered for {mode}. "
        f"Add one with {decorator}."
    )
