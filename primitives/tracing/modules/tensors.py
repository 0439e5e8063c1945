"""The parameters and buffers of a module by name, and those that are given for a call in their places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined] - no stub

from primitives.core.errors import DtypeError, LeafError, ShapeError, TreeError
from primitives.tracing.memory import bottom

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Given", "require_names"]


class _Slot(NamedTuple):
    """One tensor of a module.

    Attributes:
        original: What the module has; `None` for a buffer without a value.
        names: All names that it has, as tied ones.
        places: The modules that have it, with its name there.
    """

    original: Tensor | None
    names: list[str]
    places: list[tuple[nn.Module, str]]


class Given:
    """The tensors of one kind that a call of a module is given.

    Args:
        what: `"params"` or `"buffers"`.
        module: The module.
        tree: Tensors by dotted name.

    Attributes:
        missing: Names of what the module has and `tree` has not; the module's own value is taken for it.
        unexpected: Names that the module does not have.
    """

    def __init__(self, what: str, module: nn.Module, tree: Any) -> None:
        if not isinstance(tree, Mapping):
            raise TreeError(f"functional_call: {what} must be a dict of tensors by name, got {type(tree).__name__}.")
        self._what = what
        self._registry = "_parameters" if what == "params" else "_buffers"
        self.missing: list[str] = []
        # A slot, the names of it that were given, and its value.
        self._entries: list[tuple[_Slot, list[str], Any]] = []
        known: dict[str, bool] = {}
        for slot in _slots(module, self._registry):
            known.update(dict.fromkeys(slot.names, True))
            names = [name for name in slot.names if name in tree]
            if not names and slot.original is not None:
                self.missing.append(slot.names[0])
            value = tree[names[0]] if names else slot.original
            if any(tree[name] is not value for name in names):
                raise TreeError(
                    f"functional_call: {', '.join(map(repr, names))} are one tensor in the module (tied), and must be "
                    f"given the same one, got several. Give one of them in {what}."
                )
            self._entries.append((slot, names, value))
        self.names = known
        self.unexpected = [name for name in tree if name not in known]

    def check(self, *, strict: bool) -> None:
        """Raise unless every value is a tensor and, if `strict`, has the shape and dtype of the module's."""
        for slot, names, value in self._entries:
            original, label = slot.original, f"{self._what}[{names[0]!r}]" if names else slot.names[0]
            if isinstance(original, UninitializedTensorMixin):
                raise ShapeError(
                    f"functional_call: {slot.names[0]!r} of the module must have a shape, got one that is not yet "
                    "initialized. Run the module once."
                )
            if value is None and self._what == "buffers":
                continue
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

    def put(self, *, copied: bool) -> None:
        """Put the tensors, or copies of them, into their places in the module."""
        for slot, _, value in self._entries:
            placed = value.clone() if copied and value is not None else value
            for owner, leaf in slot.places:
                getattr(owner, self._registry)[leaf] = placed

    def versions(self) -> dict[str, tuple[Tensor, int]]:
        """Each given tensor, below all transforms, and how often it has been written, by name."""
        given = {names[0]: bottom(x) for _, names, x in self._entries if names}
        return {name: (x, x._version) for name, x in given.items() if not x.is_inference()}

    def current(self) -> dict[str, Any]:
        """What is in the places now, by the names that were given."""
        result: dict[str, Any] = {}
        for slot, given, _ in self._entries:
            values = {
                name: getattr(owner, self._registry).get(leaf)
                for name, (owner, leaf) in zip(slot.names, slot.places, strict=True)
            }
            shown = values[(given or slot.names)[0]]
            for name, value in values.items():
                # A tie that the call has broken shows, and so does a buffer that had no value before.
                untold = value is not shown or (not given and name == slot.names[0])
                if name in given or (untold and value is not None):
                    result[name] = value
        return result


def _slots(module: nn.Module, registry: str) -> list[_Slot]:
    slots: dict[Any, _Slot] = {}
    first_names: dict[Any, str] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        first_name = first_names.setdefault(owner, prefix)
        for leaf, value in getattr(owner, registry).items():
            if value is None and registry == "_parameters":
                continue
            key = f"{first_name}.{leaf}" if value is None else value
            if key not in slots:
                slots[key] = _Slot(value, [], [])
            slots[key].names.append(f"{prefix}.{leaf}" if prefix else leaf)
            slots[key].places.append((owner, leaf))
    return list(slots.values())


def require_names(module: nn.Module, params: Given, buffers: Given) -> None:
    """Raise if a name is missing or unknown; the error lists all of them.

    Raises:
        TreeError: If so.
    """
    if not (params.missing or params.unexpected or buffers.missing or buffers.unexpected):
        return
    lines = [f"functional_call: params and buffers must have the names that {type(module).__name__} has."]
    for what, given, other, others in (("params", params, buffers, "buffers"), ("buffers", buffers, params, "params")):
        if given.missing:
            lines.append(f"Missing in {what}: {', '.join(map(repr, given.missing))}.")
        if given.unexpected:
            hints = [f"{name!r} (one of {others})" if name in other.names else repr(name) for name in given.unexpected]
            lines.append(f"Unexpected in {what}: {', '.join(hints)}.")
    raise TreeError("\n".join(lines))
