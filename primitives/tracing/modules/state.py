"""A module with other parameters and buffers in their places, for the time of one call."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import BatchNorm1d, SyncBatchNorm
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined] - no stub

from primitives.core.errors import DtypeError, LeafError, ShapeError, TreeError
from primitives.core.overrides import BatchWeight
from primitives.tracing.memory import memories
from primitives.tracing.modules.moments import MODULE_REGISTRIES, Moment, copied_attributes

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["ModuleState"]

# Batch norms that read nothing of their momentum but whether it is None, and hand it on.
_FORWARDS_THAT_PASS_MOMENTUM = (BatchNorm1d.forward, SyncBatchNorm.forward)


class _Tensor:
    """One tensor of a module: every place where it is registered, and what it is given for the call."""

    def __init__(self, original: Tensor | None) -> None:
        self.original = original
        self.value: Tensor | None = None
        self.names: list[str] = []
        self.given: list[str] = []
        self.places: dict[str, tuple[nn.Module, str]] = {}

    @property
    def name(self) -> str:
        """The name that it is given under, or the first one that it has."""
        return (self.given or self.names)[0]


def _registered(named: list[tuple[str, nn.Module]], kind: str) -> list[_Tensor]:
    """The parameters or buffers of named modules, tied ones once; a buffer that is None is one of them."""
    tensors: list[_Tensor] = []
    by_identity: dict[Any, _Tensor] = {}
    first_names: dict[Any, str] = {}
    for prefix, owner in named:
        first_name = first_names.setdefault(owner, prefix)
        for leaf, original in getattr(owner, kind).items():
            if original is None and kind == "_parameters":
                continue
            key = f"{first_name}.{leaf}" if original is None else original
            if key not in by_identity:
                by_identity[key] = _Tensor(original)
                tensors.append(by_identity[key])
            name = f"{prefix}.{leaf}" if prefix else leaf
            by_identity[key].names.append(name)
            by_identity[key].places[name] = (owner, leaf)
    return tensors


def _assign(what: str, tensors: list[_Tensor], tree: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Give every tensor its value in `tree`, or its own; names that `tree` lacks, and names that it has too many."""
    if not isinstance(tree, Mapping):
        raise TreeError(f"functional_call: {what} must be a dict of tensors by name, got {type(tree).__name__}.")
    missing, known = [], {}
    for tensor in tensors:
        for name in tensor.names:
            known[name] = tensor
        tensor.given = [name for name in tensor.names if name in tree]
        if not tensor.given:
            tensor.value = tensor.original
            if tensor.original is not None:
                missing.append(tensor.names[0])
            continue
        tensor.value = tree[tensor.given[0]]
        if any(tree[name] is not tensor.value for name in tensor.given):
            listed = ", ".join(repr(name) for name in tensor.given)
            raise TreeError(
                f"functional_call: {listed} are one tensor in the module (tied), and must be given the same one, got "
                f"several. Give one of them in {what}."
            )
    return missing, [name for name in tree if name not in known]


def _check(what: str, tensors: list[_Tensor], strict: bool) -> None:
    """Raise unless every given value is a tensor and, if `strict`, has the shape and dtype of the module's."""
    for tensor in tensors:
        value, original = tensor.value, tensor.original
        if isinstance(original, UninitializedTensorMixin):
            raise ShapeError(
                f"functional_call: {tensor.names[0]!r} of the module must have a shape, got one that is not yet "
                "initialized. Run the module once."
            )
        if value is None and what == "buffers":
            continue
        label = f"{what}[{tensor.given[0]!r}]" if tensor.given else tensor.names[0]
        if not isinstance(value, torch.Tensor):
            hint = " Names are dotted, as in 'layer.weight'." if isinstance(value, Mapping) else ""
            raise LeafError(f"functional_call: {label} must be a tensor, got {type(value).__name__}.{hint}")
        if original is None or not strict:
            continue
        if value.shape != original.shape:
            raise ShapeError(
                f"functional_call: {label} must have shape {list(original.shape)}, as in the module, got "
                f"{list(value.shape)}."
            )
        if value.dtype != original.dtype:
            raise DtypeError(
                f"functional_call: {label} must have dtype {original.dtype}, as in the module, got {value.dtype}. "
                "Pass strict=False to run the module in another dtype."
            )


def _names_error(module: nn.Module, names: dict[str, tuple[list[str], list[str]]], known: set[str]) -> TreeError:
    """The error that lists everything that is missing or unknown in either tree."""
    lines = [f"functional_call: params and buffers must have the names that {type(module).__name__} has."]
    for what, (missing, unexpected) in names.items():
        if missing:
            lines.append(f"Missing in {what}: {', '.join(map(repr, missing))}.")
        if unexpected:
            other = "buffers" if what == "params" else "params"
            hints = [f"{name!r} (one of {other})" if name in known else repr(name) for name in unexpected]
            lines.append(f"Unexpected in {what}: {', '.join(hints)}.")
    return TreeError("\n".join(lines))


class ModuleState:
    """Context in which a module has the given parameters, and copies of the given buffers.

    Everything is checked when this is made. On leaving, every attribute of the module and its submodules is again what
    it was.

    Args:
        module: The module.
        params: Parameters by dotted name.
        buffers: Buffers by dotted name; `None` for one that the module is to have no value for.
        strict: Whether names, shapes and dtypes must be those of the module.

    Raises:
        TreeError: If the names are wrong.
        ShapeError: If a shape is.
        DtypeError: If a dtype is, or something is no tensor.
    """

    def __init__(self, module: nn.Module, params: Any, buffers: Any, *, strict: bool) -> None:
        named = list(module.named_modules(remove_duplicate=False))
        self._params, self._buffers = _registered(named, "_parameters"), _registered(named, "_buffers")
        names = {
            "params": _assign("params", self._params, params),
            "buffers": _assign("buffers", self._buffers, buffers),
        }
        if strict and any(missing or unexpected for missing, unexpected in names.values()):
            raise _names_error(module, names, {name for t in (*self._params, *self._buffers) for name in t.names})
        _check("params", self._params, strict)
        _check("buffers", self._buffers, strict)
        self.modules = list({owner: True for _, owner in named})
        self._saved: list[Any] = []
        self._current: dict[Tensor, _Tensor] = {}
        # Names of parameters, by themselves and by their memory; and of buffers, by the memory that they had before.
        self._param_names = {t.value: t.name for t in self._params if t.value is not None}
        self._param_memory: dict[int, str] | None = None
        self._replaced: dict[int, tuple[str, Tensor]] = {}
        # What the module has got on its own, which nothing is to read or write in the time of the call.
        self._put_aside = {
            t.original: t.name
            for t in (*self._params, *self._buffers)
            if t.original is not None and t.original not in self._param_names
        }
        self._sharing: dict[str, str] | None = None
        # The buffers that the call begins with, by name, and what is to be found by what runs after it.
        self.copies: dict[str, Tensor] = {}
        self.is_needed_later = False
        self.last: Moment | None = None
        self._moments: Any = None

    def __enter__(self) -> ModuleState:
        """Put parameters and buffers in their places."""
        # What forward writes in place must not be the caller's tensor.
        copies = [None if t.value is None else t.value.clone() for t in self._buffers]
        self._saved = [_attributes(owner) for owner in self.modules]
        if not torch.compiler.is_compiling():
            # On a copy of its attributes, a module can change whatever it wants.
            for owner in self.modules:
                object.__setattr__(owner, "__dict__", copied_attributes(owner.__dict__))
        for tensor in self._params:
            for owner, leaf in tensor.places.values():
                owner._parameters[leaf] = tensor.value  # type: ignore[assignment] - a tensor in place of a Parameter
        for tensor, copied in zip(self._buffers, copies, strict=True):
            for owner, leaf in tensor.places.values():
                owner._buffers[leaf] = copied
            if copied is not None:
                self._current[copied] = tensor
                self.copies[tensor.name] = copied
        for owner in self.modules:
            if _counts_batches(owner):
                owner.momentum = BatchWeight(owner)  # type: ignore[assignment] - stands for a float
        return self

    def __exit__(self, *error: object) -> None:
        """Put back what was there."""
        if not torch.compiler.is_compiling():
            self.end()
        for owner, saved in zip(self.modules, self._saved, strict=True):
            _restore(owner, saved)
        self._current, self._replaced = {}, {}

    def end(self) -> None:
        """Keep what is to be found later."""
        if self.is_needed_later:
            self.last = Moment(self, is_end=True)

    @property
    def earlier_attributes(self) -> list[dict]:
        """What the attributes of the modules were before the call."""
        return self._saved

    def moment(self) -> Moment:
        """The module as it is at this time, for what is to be computed again."""
        moment = Moment(self)
        self._moments = weakref.WeakSet() if self._moments is None else self._moments
        self._moments.add(moment)
        return moment

    def preserve(self, name: str | None) -> None:
        """Keep the values of a buffer that is about to be written, for the moments that need them."""
        if name is not None and self._moments is not None:
            for moment in self._moments:
                moment.preserve(name)

    def at(self, buffers: dict[Tensor, Any]) -> ModuleState:
        """The same call with other tensors for its buffers, at a later time."""
        state = copy.copy(self)
        state._current, state._replaced, state._moments = buffers, {}, None
        state.is_needed_later, state.last = False, None
        return state

    def registered(self, value: Tensor) -> Any:
        """What stands for a buffer of the call, or `None`."""
        return self._current.get(value)

    def param_name(self, value: Tensor, *, by_memory: bool) -> str | None:
        """The name of the parameter that `value` is, or with `by_memory` shares memory with; `None` if none."""
        name = self._param_names.get(value)
        if name is not None or not by_memory or torch.compiler.is_compiling():
            return name
        if self._param_memory is None:
            self._param_memory = {part: name for param, name in self._param_names.items() for part in memories(param)}
        found = [self._param_memory[part] for part in memories(value) if part in self._param_memory]
        return found[0] if found else None

    def follow(self, source: Tensor | None, result: Any) -> None:
        """Take what is a view of a parameter for that parameter."""
        name = None if source is None else self._param_names.get(source)
        if name is not None:
            for each in result if isinstance(result, (tuple, list)) else (result,):
                self._param_names[each] = name

    def buffer_name(self, value: Tensor) -> str | None:
        """The name of the buffer that `value` is at this time, or shares memory with; `None` if none."""
        tensor = self._current.get(value)
        if tensor is not None or torch.compiler.is_compiling():
            return None if tensor is None else tensor.name
        parts = memories(value)
        for other, owner in self._current.items():
            if any(part in parts for part in memories(other)):
                return owner.name
        return None

    def aside_name(self, value: Tensor) -> str | None:
        """The name of the module's own parameter or buffer that `value` is, where another has taken its place."""
        return self._put_aside.get(value)

    def sharing_name(self, name: str) -> str | None:
        """The name of another buffer that shares memory with a buffer in the module, and does not in the call."""
        if self._sharing is None:
            self._sharing, first = {}, {}
            for tensor in self._buffers if not torch.compiler.is_compiling() else ():
                for part in [] if tensor.original is None else memories(tensor.original):
                    other = first.setdefault(part, tensor.name)
                    if other != tensor.name:
                        self._sharing.update({tensor.name: other, other: tensor.name})
        return self._sharing.get(name)

    @property
    def has_replaced(self) -> bool:
        """Whether buffers have got new values other than by writes in place."""
        return len(self._replaced) > 0

    def replaced_name(self, value: Tensor) -> str | None:
        """The name of the buffer whose earlier value shares memory with `value`, or `None`."""
        found = [self._replaced[part][0] for part in memories(value) if part in self._replaced]
        return found[0] if found else None

    def is_buffer(self, value: Tensor) -> bool:
        """Whether `value` itself is a buffer at this time."""
        return value in self._current

    def rebind(self, old: Tensor, new: Tensor) -> None:
        """Put `new` wherever the buffer `old` is registered."""
        tensor = self._current.pop(old)
        for owner, leaf in tensor.places.values():
            if owner._buffers.get(leaf) is old:
                owner._buffers[leaf] = new
        self._current[new] = tensor
        if not torch.compiler.is_compiling():
            # With the tensor itself, so that its memory gets no other use.
            self._replaced.update(dict.fromkeys(memories(old), (tensor.name, old)))

    def buffers(self) -> dict[str, Any]:
        """Every buffer as it is at this time, under the names that were given."""
        result: dict[str, Any] = {}
        for tensor in self._buffers:
            values = {name: owner._buffers.get(leaf) for name, (owner, leaf) in tensor.places.items()}
            shown = values[tensor.name]
            for name, value in values.items():
                # A tie that the call has broken shows, and so does a buffer that had no value before.
                untold = value is not shown or (not tensor.given and name == tensor.names[0])
                if name in tensor.given or (untold and value is not None):
                    result[name] = value
        return result


def _counts_batches(owner: nn.Module) -> bool:
    """Whether a module of torch will read its counter as a number, to average over all batches."""
    return (
        type(owner).forward in _FORWARDS_THAT_PASS_MOMENTUM
        and owner.momentum is None
        and owner.training
        and bool(owner.track_running_stats)
        and owner.num_batches_tracked is not None
    )


# Dynamo of older versions cannot look through the attributes of a module.
_DYNAMO_READS_ATTRIBUTES = torch.__version__ >= "2.13"


def _attributes(owner: nn.Module) -> Any:
    """What `_restore` takes: the attributes of a module; under a compiler a copy, and copies of its registries."""
    if not torch.compiler.is_compiling():
        return owner.__dict__
    registries = {name: getattr(owner, name).copy() for name in MODULE_REGISTRIES}
    if _DYNAMO_READS_ATTRIBUTES:
        return dict(owner.__dict__), registries
    return {"momentum": owner.momentum} if _counts_batches(owner) else {}, registries


def _restore(owner: nn.Module, saved: Any) -> None:
    if not torch.compiler.is_compiling():
        object.__setattr__(owner, "__dict__", saved)
        return
    attributes, registries = saved
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
