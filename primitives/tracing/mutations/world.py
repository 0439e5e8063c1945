"""Functionalization around a function that is traced: what it writes is recorded as new values."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from primitives.core.autograd import LinearMap, apply_linear
from primitives.tracing import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["FunctionalWorld"]


class FunctionalWorld:
    """Context in which a function runs on functional tensors, where writes become pure operations.

    Args:
        tensors: Inputs of the function, which are plain.

    Attributes:
        inputs: What the function gets for them. It may write to them, also where they require grad.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._leaves: list[Tensor] = []
        self.inputs: list[Tensor] = []

    def __enter__(self) -> FunctionalWorld:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(torch_private.functional_world())
        for x in self._tensors:
            leaf = torch_private.wrapped(x)
            self._leaves.append(leaf)
            if not leaf.requires_grad:
                self.inputs.append(leaf)
                continue
            with torch.enable_grad():
                # Autograd lets nobody write to a leaf, and an optimizer step on nothing else but what keeps its grad.
                self.inputs.append(leaf.clone())
            self.inputs[-1].retain_grad()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def leave(self, values: Sequence[Any]) -> Callable[[Any], Any]:
        """The way out for these values: their plain tensors, through which autograd finds the inputs."""
        tensors = {id(y): y for y in values if torch_private.is_functional(y)}
        plain = {key: torch_private.plain(y) for key, y in tensors.items()}
        tracked = [key for key, y in tensors.items() if y.requires_grad]
        if tracked and torch.is_grad_enabled():
            functional = [tensors[key] for key in tracked]
            places = [i for i, leaf in enumerate(self._leaves) if leaf.requires_grad]

            def transpose(*cotangents: Tensor) -> list[Tensor | None]:
                pairs = [(y, y_bar) for y, y_bar in zip(functional, cotangents, strict=True) if y_bar is not None]
                with torch_private.functional_world():
                    bars = torch.autograd.grad(
                        [y for y, _ in pairs],
                        [self._leaves[i] for i in places],
                        [torch_private.wrapped(y_bar) for _, y_bar in pairs],
                        allow_unused=True,
                        retain_graph=True,
                    )
                    return [torch_private.plain(bar) for bar in bars]

            linear = LinearMap(lambda *_: tuple(plain[key] for key in tracked), transpose)
            with torch_private.unrecorded():
                results = apply_linear(linear, *(self._tensors[i] for i in places))
            plain.update(zip(tracked, results, strict=True))
        # Held with the values, whose identities these are.
        return lambda y, held=tensors: plain.get(id(y), y) if id(y) in held else y
