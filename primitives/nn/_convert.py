"""Turn the modules of a model into the ones of this package, and back."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from primitives.nn import _modules
from primitives.nn._modules import ConversionWarning, OfThisPackage

if TYPE_CHECKING:
    from collections.abc import Iterable

    _Classes = type[torch.nn.Module] | Iterable[type[torch.nn.Module]]

__all__ = ["convert", "converted", "revert"]

_Model = TypeVar("_Model", bound=torch.nn.Module)

_COUNTERPARTS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    getattr(torch.nn, name): getattr(_modules, name) for name in _modules.__all__ if hasattr(torch.nn, name)
}
_ORIGINALS = {ours: theirs for theirs, ours in _COUNTERPARTS.items()}
_ASK_OVERRIDE = "run it inside primitives.override_torch()"
# Norms of torch without a counterpart, whose derivatives torch gets wrong beyond the first.
_NO_COUNTERPART = {
    torch.nn.SyncBatchNorm: ("its statistics are those of all processes", "none: rely on first derivatives alone"),
    torch.nn.modules.instancenorm._InstanceNorm: ("it has no counterpart", _ASK_OVERRIDE),
}


class _Left(NamedTuple):
    """A module that `convert` left as it was."""

    path: str
    type: type[torch.nn.Module]
    reason: str
    remedy: str


def _is_ours(module: torch.nn.Module) -> bool:
    return isinstance(module, OfThisPackage) and "forward" not in vars(module)


def _base(module: torch.nn.Module) -> type[torch.nn.Module]:
    """The class of `module`, without the one that parametrization puts before it."""
    return parametrize.type_before_parametrizations(module)


def _with_behavior_of(ours: type, own: type) -> type:
    """A subclass of `own` with the methods of `ours` before it; one for each class."""
    for known in own.__subclasses__():
        if vars(known).get("converted_from") is own:
            return known
    names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(own.__name__, (ours, own), {**names, "converted_from": own, "__reduce_ex__": _reduce})


def _reduce(module: Any, protocol: Any) -> Any:
    """As any module is pickled and copied, but its class by that which it came from: no name leads to its own."""
    own = type(module).converted_from
    _, (_, *args), *state = own.__reduce_ex__(module, protocol)
    return _rebuild, (own, *args), *state


def _rebuild(own: type[torch.nn.Module], *args: Any) -> Any:
    cls = _counterpart(own) or own
    return cls.__new__(cls, *args)


def _counterpart(cls: type[torch.nn.Module]) -> type[torch.nn.Module] | None:
    """The class of this package that stands for `cls`: made for a subclass that computes what torch's class does."""
    if cls in _COUNTERPARTS:
        return _COUNTERPARTS[cls]
    for theirs, ours in _COUNTERPARTS.items():
        if issubclass(cls, theirs) and not issubclass(cls, LazyModuleMixin) and cls.forward is theirs.forward:
            return _with_behavior_of(ours, cls)
    return None


def _original(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    return vars(cls).get("converted_from") or _ORIGINALS.get(cls, cls)


def _retype(module: torch.nn.Module, changed: type[torch.nn.Module]) -> None:
    # The classes differ by their methods alone, so the object itself changes type: parameters, buffers, hooks, mode
    # and every reference to the module stay as they are.
    cls = type(module)
    if cls is _base(module):
        module.__class__ = changed
        return
    # A parametrized module has a class of its own before the one that it had, which holds its properties; copies of
    # the module share it, so it is not the one to change.
    names = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    parametrized: Any = type(cls.__name__, (changed,), names)
    module.__class__ = parametrized


def _why_left(module: torch.nn.Module) -> tuple[str, str] | None:
    """Why `module` is left as it is, and what to do about it; `None` if it is none that one would expect to change."""
    if isinstance(module, torch.jit.ScriptModule):
        known = getattr(torch.nn, module.original_name, None) in _COUNTERPARTS
        return ("it is TorchScript", "convert the model before torch.jit.script") if known else None
    for theirs, why in _NO_COUNTERPART.items():
        if isinstance(module, theirs):
            return why
    if not isinstance(module, tuple(_COUNTERPARTS)):
        return None
    if "forward" in vars(module):
        return "its forward was replaced on the object", f"convert the model before that, or {_ASK_OVERRIDE}"
    if isinstance(module, LazyModuleMixin):
        return "it is lazy, and of a class of its own", "convert the model after its first call"
    return "its class has a forward of its own", _ASK_OVERRIDE


def _check_model(model: object, caller: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{caller}: model must be a torch.nn.Module, got {type(model).__name__}.")


def _chosen(classes: _Classes | None) -> tuple[type[torch.nn.Module], ...]:
    if classes is None:
        return tuple(theirs for theirs in (*_COUNTERPARTS, *_NO_COUNTERPART) if theirs is not torch.nn.Dropout)
    given = (classes,) if isinstance(classes, type) else tuple(classes)
    for cls in given:
        if not isinstance(cls, type):
            raise TypeError(f"convert: classes must hold classes of modules, got {cls!r}.")
    chosen = tuple(_ORIGINALS.get(cls, cls) for cls in given)
    for cls in chosen:
        if not any(issubclass(cls, theirs) or issubclass(theirs, cls) for theirs in _COUNTERPARTS):
            names = ", ".join(theirs.__name__ for theirs in _COUNTERPARTS)
            raise TypeError(f"convert: classes must be among {names} and their subclasses, got {cls.__name__}.")
    return chosen


def convert(model: _Model, *, classes: _Classes | None = None) -> _Model:
    """Turn the modules of `model` that have a counterpart here into it, in place.

    These are `LayerNorm`, `BatchNorm1d`, `2d` and `3d`, their lazy forms, and `LogSoftmax` of `torch.nn`, and their
    subclasses that inherit `forward`. Parameters, parametrizations, buffers, hooks, training mode and `state_dict`
    stay the same objects under the same names. `repr` shows a changed module with `primitives.` before its name, and
    `converted` lists them.

    Args:
        model: Any module; it may itself be one that is converted.
        classes: A class of torch, or several, each with its subclasses, to convert and no others. `None` means all
            that have a counterpart except `Dropout`, which torch differentiates right; add it with
            `classes=torch.nn.Dropout`, in a call of its own or in one list with others.

    Returns:
        `model`.

    Raises:
        TypeError: If `model` is not a module, or a class has no counterpart.

    Warns:
        ConversionWarning: If norms stay torch's, whose second derivatives are wrong: subclasses with a `forward` of
            their own, those without a counterpart, modules whose `forward` was replaced. It has a table of paths,
            classes, reasons and remedies, and `left`, the same as a tuple.

    Example:
        >>> import torch
        >>> convert(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)))
        Sequential(
          (0): Linear(in_features=4, out_features=4, bias=True)
          (1): primitives.LayerNorm((4,), ...)
        )
    """
    _check_model(model, "convert")
    chosen, left = _chosen(classes), []
    for path, module in model.named_modules():
        if _is_ours(module) or not isinstance(module, (*chosen, torch.jit.ScriptModule)):
            continue
        counterpart = None if "forward" in vars(module) else _counterpart(_base(module))
        if counterpart is not None:
            _retype(module, counterpart)
        elif (why := _why_left(module)) is not None:
            left.append(_Left(path, _base(module), *why))
    if left:
        warnings.warn(ConversionWarning(_table(left), left), stacklevel=2)
    return model


def _table(left: list[_Left]) -> str:
    """One line per class and reason."""
    groups: dict[tuple, list[str]] = {}
    for path, *why in left:
        groups.setdefault(tuple(why), []).append(path or "(the model)")
    rows = [("module", "class", "reason", "remedy")]
    for (cls, reason, remedy), paths in groups.items():
        others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        rows.append((paths[0] + others, f"{cls.__module__}.{cls.__qualname__}", reason, remedy))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    count = f"{len(left)} module{'s' * (len(left) > 1)}"
    return f"convert: {count} stay torch's, whose derivatives beyond the first can be wrong:\n" + "\n".join(lines)


def converted(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules of `model` that are this package's.

    Args:
        model: Any module; it may itself be one of them.

    Returns:
        The modules, by their dotted names in `model` (`""` for `model` itself).

    Raises:
        TypeError: If `model` is not a module.
    """
    _check_model(model, "converted")
    return {path: module for path, module in model.named_modules() if _is_ours(module)}


def revert(model: _Model) -> _Model:
    """Turn every module of this package in `model` back into the one of `torch.nn`: the inverse of `convert`.

    Args:
        model: Any module; it may itself be one that is reverted.

    Returns:
        `model`.

    Raises:
        TypeError: If `model` is not a module.
    """
    _check_model(model, "revert")
    for module in model.modules():
        if isinstance(module, OfThisPackage):
            _retype(module, _original(_base(module)))
    return model
