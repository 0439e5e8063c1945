"""Tables of decompositions: plain-torch, differentiable functions that stand for an operator.

The dispatch of core looks here when a primitive has no rule for the mode that is asked for: in the table for forward
mode first (if that is the mode), then in the general one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch._ops import OpOverload, OpOverloadPacket

from primitives._core.errors import MissingRuleError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "OverloadPattern",
    "decomposition_table",
    "decomposition_table_for_jvp",
    "forget_decompositions",
    "get_decomposition",
    "overloads_of",
    "patterns_by_callable",
    "register_decomposition",
    "register_decomposition_for_jvp",
    "registered_overloads",
]

_Function = TypeVar("_Function", bound="Callable[..., Any]")

decomposition_table: dict[OpOverload, Callable[..., Any]] = {}
"""Decompositions by operator overload, for every purpose."""

decomposition_table_for_jvp: dict[OpOverload, Callable[..., Any]] = {}
"""Decompositions by operator overload that forward mode prefers to the general ones."""


# Where Python finds the functions and methods that call ATen operators directly.
_ATEN_HOLDERS = (torch._C._VariableFunctions, torch._C._nn, torch._C._linalg, torch._C.TensorBase)  # type: ignore[attr-defined] - no stub


class OverloadPattern(NamedTuple):
    """The form of calls that mean one overload. Schemas are read once: a compiler traces no schema."""

    overload: OpOverload
    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    required: tuple[str, ...]
    tensors: tuple[str, ...]
    numbers: tuple[str, ...]

    @classmethod
    def of(cls, overload: OpOverload) -> OverloadPattern:
        """The pattern of `overload`, out of its schema."""
        arguments = overload._schema.arguments
        types = {argument.name: str(argument.type) for argument in arguments}
        return cls(
            overload,
            tuple(a.name for a in arguments if not a.kwarg_only),
            tuple(a.name for a in arguments if a.kwarg_only),
            tuple(a.name for a in arguments if not a.has_default_value()),
            tuple(name for name, kind in types.items() if kind == "Tensor"),
            tuple(name for name, kind in types.items() if "Tensor" not in kind),
        )

    def accepts(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether the names of these arguments, and which of them are tensors, can mean this overload."""
        if len(args) > len(self.positional):
            return False
        given = dict(zip(self.positional, args))  # noqa: B905 - the rest has defaults or comes by keyword
        for name, value in kwargs.items():
            if name in given or not (name in self.positional or name in self.keyword_only):
                return False
            given[name] = value
        if any(name not in given for name in self.required):
            return False
        return not any(name in given and not isinstance(given[name], torch.Tensor) for name in self.tensors)

    def takes_tensor_as_number(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a tensor stands where this overload has a number; another that accepts the call then comes first."""
        given = {**dict(zip(self.positional, args)), **kwargs}  # noqa: B905 - as above
        return any(name in given and isinstance(given[name], torch.Tensor) for name in self.numbers)


patterns_by_callable: dict[Any, tuple[OverloadPattern, ...]] = {}
"""For every callable by which Python reaches a registered operator: the operator's overloads, registered or not.

The operator itself, its overloads, and for ATen's the functions of torch and the methods of `torch.Tensor`.
"""

_overloads_by_name: dict[Any, tuple[OpOverload, ...]] = {}


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


def registered_overloads(op: Any, caller: str) -> tuple[OpOverload, ...]:
    """Those overloads of `op` that have a decomposition in any table; what a compiler can trace of `overloads_of`.

    Raises:
        MissingRuleError: If there is none.
        TypeError: If `op` is not an operator.
    """
    if isinstance(op, (list, tuple)):
        return tuple(overload for entry in op for overload in registered_overloads(entry, caller))
    named = _overloads_by_name.get(op)
    found = (
        () if named is None else tuple(o for o in named if o in decomposition_table or o in decomposition_table_for_jvp)
    )
    if not found:
        raise _missing(overloads_of(op, caller), "register_decomposition")
    return found


def _enter_names(op: Any, overloads: Sequence[OpOverload]) -> None:
    for overload in overloads:
        packet = overload.overloadpacket
        family = overloads_of(packet)
        patterns = tuple(map(OverloadPattern.of, family))
        namespace, name = packet._qualified_op_name.split("::")
        holders = _ATEN_HOLDERS if namespace == "aten" else ()
        for spelling in (packet, *[getattr(holder, name) for holder in holders if hasattr(holder, name)]):
            patterns_by_callable[spelling] = patterns
        _overloads_by_name[packet] = tuple(family)
        for member, pattern in zip(family, patterns, strict=True):
            patterns_by_callable[member] = (pattern,)
            _overloads_by_name[member] = (member,)
    if not isinstance(op, (list, tuple, OpOverload, OpOverloadPacket)):
        _overloads_by_name[op] = tuple(overloads)


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
        _enter_names(op, overloads)
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
    raise _missing(
        overloads, "register_decomposition_for_jvp or register_decomposition" if for_jvp else "register_decomposition"
    )


def _missing(overloads: Sequence[OpOverload], decorator: str) -> MissingRuleError:
    mode = "forward mode" if "jvp" in decorator else "differentiation"
    return MissingRuleError(
        f"{', '.join(str(overload) for overload in overloads)}: no decomposition is registered for {mode}. "
        f"Add one with {decorator}."
    )
