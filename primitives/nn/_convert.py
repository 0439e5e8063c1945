"""Turn the modules of a model into the ones of this package, serve the functions that others call, and back."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from primitives.nn import _modules
from primitives.nn._modules import ConversionWarning, OfThisPackage, Overridden

if TYPE_CHECKING:
    from collections.abc import Iterable

    _Classes = type[torch.nn.Module] | Iterable[type[torch.nn.Module]]

__all__ = ["convert", "converted", "revert"]

_Model = TypeVar("_Model", bound=torch.nn.Module)

_COUNTERPARTS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    getattr(torch.nn, name): getattr(_modules, name) for name in _modules.__all__ if hasattr(torch.nn, name)
}
_ORIGINALS = {ours: theirs for theirs, ours in _COUNTERPARTS.items()}
# Norms of torch without a counterpart, that compute by a function which has one.
_BY_FUNCTION = (torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d)


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
    """A subclass of `own` with the methods of `ours` before it; one for each pair."""
    for known in own.__subclasses__():
        if vars(known).get("converted_from") is own and issubclass(known, ours):
            return known
    names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    names |= {"converted_from": own, "behavior": ours, "__reduce_ex__": _reduce}
    return type(own.__name__, (ours, own), names)


def _reduce(module: Any, protocol: Any) -> Any:
    """As any module is pickled and copied, but its class by those which it came from: no name leads to its own."""
    cls = type(module)
    make, args, *state = cls.converted_from.__reduce_ex__(module, protocol)
    args = tuple(cls.converted_from if arg is cls else arg for arg in args)
    return _rebuild, (cls.behavior, cls.converted_from, make, *args), *state


def _rebuild(ours: type, own: type, make: Any, *args: Any) -> Any:
    module = make(*args)
    object.__setattr__(module, "__class__", _with_behavior_of(ours, own))
    return module


def _counterpart(module: torch.nn.Module) -> type[torch.nn.Module] | None:
    """The class of this package that stands for that of `module`, made for it if it is somebody's; None without one.

    A subclass that computes as torch's class does computes as ours. Any other forward may call functions of torch, by
    whatever name: it is run as it is, and they are served.
    """
    cls = _base(module)
    is_lazy, replaced = issubclass(cls, LazyModuleMixin), "forward" in vars(module)
    if cls in _COUNTERPARTS and not replaced:
        return _COUNTERPARTS[cls]
    if is_lazy or isinstance(module, (torch.jit.ScriptModule, torch.nn.SyncBatchNorm)):
        return None
    for theirs, ours in _COUNTERPARTS.items():
        if issubclass(cls, theirs) and cls.forward is theirs.forward and not replaced:
            return _with_behavior_of(ours, cls)
    # A graph module writes its class anew whenever its graph changes.
    calls = not _is_torchs(cls.forward) and not isinstance(module, torch.fx.GraphModule)
    return _with_behavior_of(Overridden, cls) if calls or issubclass(cls, (*_COUNTERPARTS, *_BY_FUNCTION)) else None


def _is_torchs(value: Any) -> bool:
    """Whether a class or function was written in torch."""
    return (getattr(value, "__module__", None) or "").split(".")[0] == "torch"


def _original(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    while (changed := vars(cls).get("converted_from") or _ORIGINALS.get(cls)) is not None:
        cls = changed
    return cls


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
    if isinstance(module, torch.nn.SyncBatchNorm):
        return "its statistics are those of all processes", "none: rely on first derivatives alone"
    if isinstance(module, tuple(_COUNTERPARTS)):
        return "it is lazy, and of a class of its own", "convert the model after its first call"
    return None


def _check_model(model: object, caller: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{caller}: model must be a torch.nn.Module, got {type(model).__name__}.")


def _chosen(classes: _Classes | None) -> tuple[type[torch.nn.Module], ...]:
    given = (classes,) if isinstance(classes, type) else tuple(classes or ())
    for cls in given:
        if not isinstance(cls, type):
            raise TypeError(f"convert: classes must hold classes of modules, got {cls!r}.")
    chosen = tuple(_ORIGINALS.get(cls, cls) for cls in given)
    for cls in chosen:
        known = any(issubclass(cls, theirs) or issubclass(theirs, cls) for theirs in (*_COUNTERPARTS, *_BY_FUNCTION))
        if not known and (_is_torchs(cls) or not issubclass(cls, torch.nn.Module)):
            names = ", ".join(theirs.__name__ for theirs in _COUNTERPARTS)
            raise TypeError(
                f"convert: classes must be among {names}, their subclasses and modules of others, got {cls.__name__}."
            )
    return chosen


def convert(model: _Model, *, classes: _Classes | None = None) -> _Model:
    """Make a model right at every order of derivative, in place, as it is written.

    The modules of `torch.nn` that have a counterpart here turn into it: `LayerNorm`, `RMSNorm`, `BatchNorm1d`, `2d` and
    `3d`, their lazy forms, `LogSoftmax`, `CrossEntropyLoss`, `NLLLoss`, `MultiheadAttention`, `TransformerEncoderLayer`
    and `TransformerEncoder`, and their subclasses that inherit `forward`. Parameters, parametrizations, buffers, hooks,
    training mode and `state_dict` stay the same objects under the same names. `repr` shows a changed module with
    `primitives.` before its name, and `converted` lists them.

    Modules that somebody else wrote stay as they are, and the functions of torch that they call are served, as
    inside `override_torch`, `dropout` excepted: `scaled_dot_product_attention` of a transformer of whatever library,
    norms with a `forward` of their own. It is so with each call of such a module, also where a part of the model is
    called alone, in another thread, or again by activation checkpointing.

    Args:
        model: Any module; it may itself be one that is converted.
        classes: A class, or several, each with its subclasses, to convert and no others: those of torch above, and
            classes of others. `None` means all except `Dropout`, which torch differentiates right; add it with
            `classes=torch.nn.Dropout`, in a call of its own or in one list with others.

    Returns:
        `model`.

    Raises:
        TypeError: If `model` is not a module, or one of `classes` is torch's and has no counterpart.

    Warns:
        ConversionWarning: If norms or attention stay torch's: TorchScript, `SyncBatchNorm`, lazy norms of a class of
            their own. It has a table of paths, classes, reasons and remedies, and `left`, the same as a tuple.

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
        if _is_ours(module) or isinstance(module, Overridden):
            continue
        if isinstance(module, torch.nn.Dropout) if classes is None else not isinstance(module, chosen):
            continue
        counterpart = _counterpart(module)
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
    """Turn every module of `model` back into what it was: the inverse of `convert`.

    Args:
        model: Any module; it may itself be one that is reverted.

    Returns:
        `model`.

    Raises:
        TypeError: If `model` is not a module.
    """
    _check_model(model, "revert")
    for module in model.modules():
        if isinstance(module, (OfThisPackage, Overridden)):
            _retype(module, _original(_base(module)))
    return model
