"""A module that is lent to a call: its attributes come back as they were, and it runs on the primitives."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import BatchNorm1d, SyncBatchNorm
from torch.overrides import _get_current_function_mode_stack

from primitives.core.errors import MutationError
from primitives.core.overrides import BatchWeight, OverrideMode
from primitives.tracing.recompute import replaying_checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor, nn

__all__ = ["attributes_kept", "running"]

_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
# Batch norms that read nothing of their momentum but whether it is None, and hand it on.
_FORWARDS_THAT_PASS_MOMENTUM = (BatchNorm1d.forward, SyncBatchNorm.forward)
# Dynamo of older versions cannot look through the attributes of a module.
_DYNAMO_READS_ATTRIBUTES = torch.__version__ >= "2.13"
_write_back = torch.ops.primitives.write_back.default


@contextlib.contextmanager
def attributes_kept(owners: Sequence[nn.Module]) -> Iterator[None]:
    """Context after which the attributes of modules, their registries included, are what they were."""
    if torch.compiler.is_compiling():
        saved = [_attributes(owner) for owner in owners]
        try:
            yield
        finally:
            for owner, attributes in zip(owners, saved, strict=True):
                _restore(owner, *attributes)
        return
    originals = [owner.__dict__ for owner in owners]
    try:
        # On a copy of its attributes, a module can change whatever it wants.
        for owner in owners:
            object.__setattr__(owner, "__dict__", _copied(owner.__dict__))
        yield
    finally:
        for owner, attributes in zip(owners, originals, strict=True):
            object.__setattr__(owner, "__dict__", attributes)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    return {**attributes, **{name: attributes[name].copy() for name in _REGISTRIES}}


def _attributes(owner: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    registries = {name: getattr(owner, name).copy() for name in _REGISTRIES}
    if _DYNAMO_READS_ATTRIBUTES:
        return dict(owner.__dict__), registries
    return {"momentum": owner.momentum} if _counts_batches(owner) else {}, registries


def _restore(owner: nn.Module, attributes: dict[str, Any], registries: dict[str, Any]) -> None:
    if _DYNAMO_READS_ATTRIBUTES:
        for name in [name for name in owner.__dict__ if name not in attributes]:
            del owner.__dict__[name]
        for name, value in attributes.items():
            if owner.__dict__.get(name, owner) is not value:
                owner.__dict__[name] = value
    elif attributes:
        owner.momentum = attributes["momentum"]
    for name, content in registries.items():
        registry = getattr(owner, name)
        registry.clear()
        registry.update(content)


def _counts_batches(owner: nn.Module) -> bool:
    """Whether a module of torch will read its counter as a number, to average over all batches."""
    return (
        type(owner).forward in _FORWARDS_THAT_PASS_MOMENTUM
        and owner.momentum is None
        and owner.training
        and bool(owner.track_running_stats)
        and owner.num_batches_tracked is not None
    )


@contextlib.contextmanager
def running(owners: Sequence[nn.Module]) -> Iterator[None]:
    """Context for a call of modules, within `attributes_kept`: they run on the primitives, and checkpoints replay.

    Args:
        owners: The module that is called, and all those inside.
    """
    for owner in owners:
        if _counts_batches(owner):
            owner.momentum = BatchWeight(owner)  # type: ignore[assignment] - stands for a float
    mode = _PureMode(owners)
    if torch.compiler.is_compiling():
        with mode:
            yield
        return
    with mode, replaying_checkpoints(mode.moment, on_reentrant=mode.refuse_reentrant):
        yield


class _PureMode(OverrideMode):
    """Functions of torch run on the primitives; new running statistics take the place of the old ones."""

    def __init__(self, owners: Sequence[nn.Module]) -> None:
        super().__init__()
        self._owners = owners
        self._moments: list[_Moment] = []
        self._places: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        for owner in owners:
            for leaf, value in owner._buffers.items():
                if value is not None:
                    self._places[value] = [*self._places.get(value, []), (owner, leaf)]

    def write(self, targets: list[Tensor], values: list[Tensor]) -> None:
        """Rebind what is a buffer of the modules, so that it may be batched; write anything else in place."""
        others: tuple[list[Tensor], list[Tensor]] = [], []
        for target, value in zip(targets, values, strict=True):
            places = self._places.pop(target, [])
            for owner, leaf in places:
                if owner._buffers.get(leaf) is target:
                    owner._buffers[leaf] = value
            if places:
                self._places[value] = places
            else:
                others[0].append(target)
                others[1].append(value)
        if others[0]:
            super().write(*others)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict | None = None) -> Any:
        """Call what stands for `func`, or `func`."""
        if func is _write_back:
            return self.write(*args)
        if self._moments and args and _writes_by_name(func):
            for moment in self._moments:
                moment.preserve(args[0])
        return super().__torch_function__(func, types, args, kwargs)

    def moment(self) -> Callable[[], contextlib.AbstractContextManager] | None:
        """What a checkpointed region that begins here is to be computed again in; `None` on another thread."""
        if self not in _get_current_function_mode_stack():
            return None
        self._moments.append(_Moment(self._owners))
        return self._moments[-1].again

    def refuse_reentrant(self) -> None:
        """Raise: a region of this kind takes the parameters that it finds in the module in the backward pass."""
        if torch.is_grad_enabled() and self in _get_current_function_mode_stack():
            raise RuntimeError(
                "functional_call: the module calls torch.utils.checkpoint with use_reentrant=True, whose backward "
                "pass cannot be given the parameters of the call. Pass use_reentrant=False."
            )


def _writes_by_name(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__setitem"))


class _Moment:
    """Modules as they are when this is made, for what is computed again in the backward pass.

    Args:
        owners: The modules.
    """

    def __init__(self, owners: Sequence[nn.Module]) -> None:
        self._owners = owners
        self._attributes = [_copied(owner.__dict__) for owner in owners]
        buffers = [value for attributes in self._attributes for value in attributes["_buffers"].values()]
        self._versions = {value: value._version for value in buffers if value is not None and not value.is_inference()}
        self._preserved: dict[Tensor, Tensor] = {}

    def preserve(self, value: Any) -> None:
        """Copy a buffer that is about to be written in place."""
        if isinstance(value, torch.Tensor) and value in self._versions and value not in self._preserved:
            self._preserved[value] = value.detach().clone().requires_grad_(value.requires_grad)

    def _buffer(self, value: Tensor) -> Tensor:
        if value not in self._preserved and value._version != self._versions.get(value, value._version):
            raise MutationError(
                f"functional_call: a buffer {list(value.shape)} of {value.dtype} was written through a view after a "
                "checkpointed region had begun, which is to compute again with the values of before. Assign the new "
                "value: self.buffer = ..."
            )
        return self._preserved.get(value, value).clone()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Context in which the modules are as they were; whatever is changed in them is forgotten."""
        # One copy for a buffer that has several places.
        copies = {value: self._buffer(value) for value in {**self._versions, **self._preserved}}
        with attributes_kept(self._owners):
            for owner, earlier in zip(self._owners, self._attributes, strict=True):
                attributes = _copied(earlier)
                registry = attributes["_buffers"]
                registry.update({leaf: copies.get(value, value) for leaf, value in registry.items()})
                object.__setattr__(owner, "__dict__", attributes)
            with running(self._owners):
                yield
