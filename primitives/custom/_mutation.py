"""In-place updates: the operator itself is pure and returns the new values; writing them is an operator of its own.

So transforms and compilers see a function of its inputs, and the write happens where torch's own batch norm writes its
running statistics: below every transform, counted in the versions of tensor and views, functionalized by a compiler.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C import _functorch  # type: ignore[attr-defined] - no stub

from primitives._core.errors import MutationError
from primitives._core.write_back import spans_overlap
from primitives.custom.trees.calls import Structure


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
    # A tensor that requires grad is never written to: this is the pure form.
    written = [leaves[i] for i in structure.mutated if not leaves[i].requires_grad]
    return [x.clone() if any(shares_memory(x, y) for y in written) else x for x in tensors]


def shares_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have one storage, below all transforms."""
    return x is y or torch._C._is_alias_of(_unwrapped(x), _unwrapped(y))  # type: ignore[attr-defined] - no stub


def _unwrapped(x: Tensor) -> Tensor:
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


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
            if i != j and (x is y or (shares_memory(x, y) and spans_overlap(x, y))):
                raise MutationError(
                    f"{op_name}: {label} is updated in place and shares memory with {structure.label(j)}, which would "
                    "see the update or undo it. Pass a clone."
                )
