"""In-place updates: the operator itself is pure and returns the new values; writing them is an operator of its own.

So transforms and compilers see a function of its inputs, and the write happens where torch's own batch norm writes its
running statistics: below every transform, counted in the versions of tensor and views, functionalized by a compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from primitives.core.errors import MutationError
from primitives.core.statistics import refuse_cotangent, refused_tangent
from primitives.core.write_back import write_back

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from primitives.custom._structure import Structure


def check_names(op_name: str, mutates: Sequence[str], positional: Sequence[str]) -> None:
    """Raise `TypeError` or `ValueError` unless `mutates` is a sequence of names of positional arguments."""
    if isinstance(mutates, str):
        raise TypeError(f"{op_name}: mutates must be a sequence of names, got {mutates!r}; write ({mutates!r},).")
    for name in mutates:
        if name not in positional:
            raise ValueError(f"{op_name}: mutates names {name!r}, which is none of the arguments {list(positional)}.")


def with_copies(structure: Structure, leaves: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of a call with copies in the place of those that are updated, and the copies."""
    if not structure.mutated:
        return leaves, []
    leaves = list(leaves)
    for i in structure.mutated:
        leaves[i] = leaves[i].clone()
    return leaves, [leaves[i] for i in structure.mutated]


def without_written(structure: Structure, leaves: Sequence[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """`tensors` to be saved, with copies of what the call will write: the backward pass must find it unchanged."""
    if not structure.mutated:
        return tensors
    # What requires grad is not written: this is the pure form.
    written = {id(leaves[i]) for i in structure.mutated if not leaves[i].requires_grad}
    return [x.clone() if id(x) in written else x for x in tensors]


def write(structure: Structure, leaves: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write the new values into the tensors that the caller owns."""
    write_back([leaves[i] for i in structure.mutated], [value.detach() for value in values])


def check_targets(op_name: str, structure: Structure, leaves: Sequence[Tensor]) -> None:
    """Raise `MutationError` if a tensor that is to be written requires grad, or is written twice."""
    seen: dict[int, int] = {}
    for i in structure.mutated:
        x = leaves[i]
        label = structure.label(i)
        if x.requires_grad and torch.is_grad_enabled():
            raise MutationError(
                f"{op_name}: {label} is updated in place and must not require grad. Pass {label}.detach(), or use "
                "the pure form, `pure`, which returns the new value."
            )
        if id(x) in seen:
            raise MutationError(
                f"{op_name}: {label} is the same tensor as {structure.label(seen[id(x)])}, and both are updated."
            )
        seen[id(x)] = i


def refuse_cotangents(op_name: str, structure: Structure, bars: Sequence[Any]) -> None:
    """Raise `MissingRuleError` for a cotangent of a new value: def_backward has no place for it."""
    for i, bar in zip(structure.mutated, bars, strict=True):
        if bar is not None:
            refuse_cotangent(op_name, f"new {structure.label(i)}")


def refused_tangents(op_name: str, structure: Structure, values: Sequence[Tensor]) -> list[Tensor]:
    """Tangents of the new values that raise when they are used: def_jvp gives none."""
    return [
        refused_tangent(op_name, f"new {structure.label(i)}", value)
        for i, value in zip(structure.mutated, values, strict=True)
    ]
