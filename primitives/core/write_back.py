"""The one place that writes into a tensor a caller owns: an operator that every transform knows how to treat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from primitives.core.primitive import NAMESPACE, library

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["write_back"]

_library = library(NAMESPACE)
_library.define("write_back(Tensor(a!)[] targets, Tensor[] values) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


def _write_back(targets: list[Tensor], values: list[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def _write_back_fake(targets: list[Tensor], values: list[Tensor]) -> None:
    pass


def _write_back_vmap(info: Any, in_dims: tuple, targets: list[Tensor], values: list[Tensor]) -> tuple[None, None]:
    target_axes, value_axes = in_dims
    # Everything is checked before anything is written.
    if any(t is None and v is not None for t, v in zip(target_axes, value_axes, strict=True)):
        raise RuntimeError(
            "vmap: the new running statistics differ from sample to sample, but the tensor that they are to be written "
            "to has no batch axis. Use primitives.functional.pure_batch_norm, which returns them, or pass "
            "running statistics with a batch axis."
        )
    fronts = [t if axis is None else t.movedim(axis, 0) for t, axis in zip(targets, target_axes, strict=True)]
    aligned = [
        v.expand_as(front) if axis is None else v.movedim(axis, 0)
        for v, axis, front in zip(values, value_axes, fronts, strict=True)
    ]
    write_back(fronts, aligned)
    return None, None


_library.impl("write_back", _write_back, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::write_back", _write_back_fake, lib=_library)
torch.library.register_vmap(f"{NAMESPACE}::write_back", _write_back_vmap, lib=_library)
_overload = torch.ops.primitives.write_back.default


def write_back(targets: list[Tensor], values: list[Tensor]) -> None:
    """Copy each of `values` into its target, in place.

    `Tensor.copy_` inside `torch.func.grad` refuses to write what a transform wrapped into a tensor from outside it. As
    an operator, the write happens below the transforms, as it does in torch's own batch norm; a compiler functionalizes
    it.

    Args:
        targets: Tensors to write; none of them requires grad.
        values: New values, one per target, of its shape.

    Raises:
        RuntimeError: Under vmap, if a value has a batch axis and its target has none; nothing is written then.
    """
    _overload(targets, values)
