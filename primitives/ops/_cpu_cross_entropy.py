"""Cross-entropy on CPU tensors: the references, on blocks of rows that stay in the cache (see `_cpu`)."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from primitives.ops._cpu import row_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def in_blocks(reference: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...] | None]:
    """`reference` by blocks of the first axis, which every tensor argument has, and every result that has elements.

    `None`, which leaves the call to the reference itself, where x has no elements.
    """
    names = list(inspect.signature(reference).parameters)
    place_of_x, place_of_dim = names.index("x"), names.index("dim")

    @functools.wraps(reference)
    def kernel(*args: Any) -> tuple[Tensor, ...] | None:
        x, dim = args[place_of_x], args[place_of_dim]
        if not x.numel():
            return None
        # Along the first axis the classes lie in every row.
        blocks = list(row_blocks(x.shape[0], x.shape[1:].numel())) if dim else [slice(None)]
        if len(blocks) == 1:
            return reference(*args)
        parts = (reference(*[arg[rows] if isinstance(arg, torch.Tensor) else arg for arg in args]) for rows in blocks)
        outputs: list[Tensor] = []
        for rows, part in zip(blocks, parts, strict=True):
            # Allocated at once, since pieces that are joined at the end take the memory twice.
            outputs = outputs or [p.new_empty((x.shape[0], *p.shape[1:]) if p.numel() else (0,)) for p in part]
            for output, piece in zip(outputs, part, strict=True):
                if piece.numel():
                    output[rows] = piece
        return tuple(outputs)

    return kernel
