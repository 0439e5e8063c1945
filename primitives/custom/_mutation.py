"""In-place updates: the operator itself is pure and returns the new values; writing them is an operator of its own.

So transforms and compilers see a function of its inputs, and the write happens where torch's own batch norm writes its
running statistics: below every transform, counted in the versions of tensor and views, functionalized by a compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C import _functorch  # type: ignore[attr-defined] - no stub

from primitives.core.errors import MutationError
from primitives.core.statistics import refuse_cotangent, refused_tangent
from primitives.core.write_back import write_back

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from primitives.core.trees.calls import Structure


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
    # What requires grad is not written: this is the pure form.
    written = [leaves[i] for i in structure.mutated if not leaves[i].requires_grad]
    return [x.clone() if any(shares_memory(x, y) for y in written) else x for x in tensors]


def shares_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have one storage, below all transforms."""
    return x is y or torch._C._is_alias_of(_unwrapped(x), _unwrapped(y))  # type: ignore[attr-defined] - no stub


def _unwrapped(x: Tensor) -> Tensor:
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def _extent(x: Tensor) -> tuple[Any, Any]:
    """First byte of a tensor in its storage, and one past its last."""
    first = x.storage_offset() * x.itemsize
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return first, first + (reach * x.itemsize if x.numel() else 0)


def _overlaps(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors may have bytes in common; what is interleaved counts as overlapping."""
    if x is y:
        return True
    if not shares_memory(x, y):
        return False
    (x_first, x_end), (y_first, y_end) = _extent(x), _extent(y)
    return x_first < y_end and y_first < x_end


def write(structure: Structure, leaves: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write the new values into the tensors that the caller owns."""
    write_back([leaves[i] for i in structure.mutated], [value.detach() for value in values])


def check_targets(op_name: str, structure: Structure, leaves: Sequence[Tensor]) -> None:
    """Raise `MutationError` if a tensor that is to be written requires grad, or shares memory with another one."""
    for i in structure.mutated:
        x = leaves[i]
        label = structure.label(i)
        if x.requires_grad and torch.is_grad_enabled():
            raise MutationError(
                f"{op_name}: {label} is updated in place and must not require grad. Pass {label}.detach(), or use "
                "the pure form, `pure`, which returns the new value."
            )
        for j, y in enumerate(leaves):
            if i != j and _overlaps(x, y):
                raise MutationError(
                    f"{op_name}: {label} is updated in place and shares memory with {structure.label(j)}, which would "
                    "see the update or undo it. Pass a clone."
                )


def refuse_cotangents(op_name: str, structure: Structure, cotangents: Sequence[Any]) -> None:
    """Raise `MissingRuleError` for a cotangent of a new value: def_backward has no place for it."""
    for i, cotangent in zip(structure.mutated, cotangents, strict=True):
        if cotangent is not None:
            refuse_cotangent(op_name, f"new {structure.label(i)}")


def refused_tangents(op_name: str, structure: Structure, values: Sequence[Tensor]) -> list[Tensor]:
    """Tangents of the new values that raise when they are used: def_jvp gives none."""
    return [
        refused_tangent(op_name, f"new {structure.label(i)}", value)
        for i, value in zip(structure.mutated, values, strict=True)
    ]
