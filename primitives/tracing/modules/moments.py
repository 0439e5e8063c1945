"""A module as it was at one time of a pure call, for what runs after the call has ended."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch

from primitives.core.errors import MutationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from primitives.tracing.modules.state import ModuleState

__all__ = ["MODULE_REGISTRIES", "Moment", "copied_attributes"]

MODULE_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""Attributes of every module that are containers of its own."""

_ABSENT: Any = object()
# The engine of autograd may run code of one module in several threads.
_lock = threading.RLock()


class Moment:
    """What the attributes, parameters and buffers of a module are when this is made.

    Args:
        state: The pure call that runs.
        is_end: Whether the call ends here. What the call has computed with a gradient is then left out of attributes
            and buffers: it would hold the graph that holds this, forever.
    """

    def __init__(self, state: ModuleState, *, is_end: bool = False) -> None:
        self._state = state
        self._attributes = [(owner, copied_attributes(owner.__dict__)) for owner in state.modules]
        if is_end:
            for (_, attributes), earlier in zip(self._attributes, state.earlier_attributes, strict=True):
                _drop_computed(attributes, earlier)
                _drop_computed(attributes["_buffers"], state.copies)
        buffers = [value for _, attributes in self._attributes for value in attributes["_buffers"].values()]
        self._names = {value: state.registered(value) for value in buffers if value is not None}
        self._versions = {value: _version(value) for value in self._names}
        self._preserved: dict[Tensor, Tensor] = {}

    def preserve(self, name: str) -> None:
        """Copy the buffer `name`, which is about to be written in place."""
        for value, tensor in self._names.items():
            if tensor is not None and tensor.name == name and value not in self._preserved:
                self._preserved[value] = value.detach().clone().requires_grad_(value.requires_grad)

    def _buffer(self, value: Tensor) -> Tensor:
        """A copy of a buffer as it was."""
        source = self._preserved.get(value, value)
        if source is value and _version(value) != self._versions[value]:
            raise MutationError(
                "functional_call: a buffer of the module was written after a checkpointed region had begun, which is "
                "to compute again with the values of before, and in a way that Python does not see. Assign the new "
                "value: self.buffer = ..."
            )
        return source.clone()

    @contextlib.contextmanager
    def again(self) -> Iterator[ModuleState]:
        """Context in which the module is as it was; whatever is changed in it is forgotten."""
        content = [(owner, copied_attributes(attributes)) for owner, attributes in self._attributes]
        copies = {value: self._buffer(value) for value in self._names}
        for _, attributes in content:
            registry = attributes["_buffers"]
            registry.update({name: copies[value] for name, value in registry.items() if value is not None})
        state = self._state.at({copies[value]: tensor for value, tensor in self._names.items() if tensor is not None})
        with _swapped(content):
            yield state

    @contextlib.contextmanager
    def afterwards(self) -> Iterator[ModuleState]:
        """Context in which the module is as it was; attributes that are assigned in it stay."""
        state = self._state.at({value: tensor for value, tensor in self._names.items() if tensor is not None})
        with _lock:
            before = [copied_attributes(attributes) for _, attributes in self._attributes]
            with _swapped(self._attributes):
                yield state
            for (owner, attributes), earlier in zip(self._attributes, before, strict=True):
                _require_same(owner, attributes, earlier)
                for name, value in attributes.items():
                    if name not in MODULE_REGISTRIES and earlier.get(name, _ABSENT) is not value:
                        owner.__dict__[name] = value


def copied_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes of a module, in registries of their own."""
    return {**attributes, **{name: attributes[name].copy() for name in MODULE_REGISTRIES}}


def _drop_computed(values: dict[str, Any], earlier: Any) -> None:
    """Leave out tensors with a history, but those that are the very ones of `earlier`."""
    known = {id(value) for value in earlier.values()}
    for name, value in list(values.items()):
        if isinstance(value, torch.Tensor) and value.grad_fn is not None and id(value) not in known:
            del values[name]


def _version(value: Tensor) -> int:
    return -1 if value.is_inference() else value._version


def _require_same(owner: nn.Module, attributes: dict[str, Any], earlier: dict[str, Any]) -> None:
    for what in ("_parameters", "_buffers"):
        old, new = earlier[what], attributes[what]
        changed = [name for name in {**old, **new} if old.get(name, _ABSENT) is not new.get(name, _ABSENT)]
        if changed:
            attributes[what] = old
            raise MutationError(
                f"functional_call: what {type(owner).__name__} runs in the backward pass assigns {changed[0]!r}, which "
                "the pure function has returned already. Assign it in forward, or keep it outside the module."
            )


@contextlib.contextmanager
def _swapped(content: list[tuple[nn.Module, dict[str, Any]]]) -> Iterator[None]:
    """Context in which modules have these attributes."""
    with _lock:
        saved = [owner.__dict__ for owner, _ in content]
        try:
            for owner, attributes in content:
                object.__setattr__(owner, "__dict__", attributes)
            yield
        finally:
            for (owner, _), attributes in zip(content, saved, strict=True):
                object.__setattr__(owner, "__dict__", attributes)
