"""Turn the modules of a model into the ones of this package, serve the functions that others call, and back."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.weight_norm import WeightNorm

from primitives.nn import _modules
from primitives.nn._base import ConversionWarning, OfThisPackage, Overridden
from primitives.nn._norms import ByForm, ByFunction, Form, ReluNorm, ServedNorm, weight_normed
from primitives.nn._proof import SERVED, Verdict, configuration, examined, looks_like_a_norm
from primitives.nn._sync_batch_norm import SyncBatchNorm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    _Classes = type[torch.nn.Module] | Iterable[type[torch.nn.Module]]

__all__ = ["convert", "convert_sync_batchnorm", "converted", "register_converter", "revert"]

_Model = TypeVar("_Model", bound=torch.nn.Module)

_COUNTERPARTS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    getattr(torch.nn, name): getattr(_modules, name) for name in _modules.__all__ if hasattr(torch.nn, name)
}
_COUNTERPARTS[torch.nn.SyncBatchNorm] = SyncBatchNorm
_ORIGINALS = {ours: theirs for theirs, ours in _COUNTERPARTS.items()}


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


def _with_behavior_of(ours: type, own: type, form: Any = None) -> type:
    """A subclass of `own` with the methods of `ours` before it, which follow `form`; one for each three."""
    key = (own, ours, form)
    for known in own.__subclasses__():
        if vars(known).get("converted_by") == key:
            return known
    names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    names |= {"converted_from": own, "converted_by": key, "form": form, "__reduce_ex__": _reduce}
    # Who makes another of its type gives it the arguments of the class that it was.
    names["__init__"] = own.__init__
    return type(own.__name__, (ours, own), names)


def _reduce(module: Any, protocol: Any) -> Any:
    """As any module is pickled and copied, but its class by those which it came from: no name leads to its own."""
    cls = type(module)
    make, args, *state = cls.converted_from.__reduce_ex__(module, protocol)
    own, ours, form = cls.converted_by
    return _rebuild, (ours, own, form, make, *[own if arg is cls else arg for arg in args]), *state


def _rebuild(ours: type, own: type, form: Any, make: Any, *args: Any) -> Any:
    module = make(*args)
    object.__setattr__(module, "__class__", _with_behavior_of(ours, own, form))
    return module


class _Counterparts:
    """The classes that stand for those of modules; norms of others are checked once for each configuration."""

    def __init__(self) -> None:
        self._verdicts: dict[tuple, Verdict] = {}

    def of(self, module: torch.nn.Module) -> tuple[type[torch.nn.Module] | None, str]:
        """The class of this package that stands for that of `module`, made for it if it is somebody's, or None.

        A subclass that computes as torch's class does computes as ours, and so does a norm that was seen to compute one
        of ours. Any other forward may call functions of torch, by whatever name: it is run as it is, and they are
        served. With that comes the reason if it looks like a norm.
        """
        cls = _base(module)
        is_lazy, replaced = issubclass(cls, LazyModuleMixin), "forward" in vars(module)
        for registered, function in () if replaced else _FUNCTIONS.items():
            if issubclass(cls, registered) and cls.forward is registered.forward:
                return _with_behavior_of(ByFunction, cls, function), ""
        if cls in _COUNTERPARTS and not replaced:
            return _COUNTERPARTS[cls], ""
        if is_lazy or isinstance(module, torch.jit.ScriptModule):
            return None, ""
        for theirs, ours in _COUNTERPARTS.items():
            if issubclass(cls, theirs) and cls.forward is theirs.forward and not replaced:
                return _with_behavior_of(ours, cls), ""
        # A graph module writes its class anew whenever its graph changes.
        calls = not _is_torchs(cls.forward) and not isinstance(module, torch.fx.GraphModule)
        if not calls and not issubclass(cls, tuple(_COUNTERPARTS)):
            return None, ""
        verdict = self._verdict(module, cls) if calls and looks_like_a_norm(module) else Verdict(None)
        if verdict.form == SERVED:
            return _with_behavior_of(ServedNorm, cls), ""
        if verdict.form is not None:
            return _with_behavior_of(ByForm if isinstance(verdict.form, Form) else ReluNorm, cls, verdict.form), ""
        return _with_behavior_of(Overridden, cls), verdict.reason

    def _verdict(self, module: torch.nn.Module, cls: type) -> Verdict:
        key = configuration(module, cls)
        if key not in self._verdicts:
            self._verdicts[key] = examined(module, cls)
        return self._verdicts[key]


# By the classes of users, and torch's weight norm.
_FUNCTIONS: dict[type[torch.nn.Module], Callable[..., Any]] = {parametrizations._WeightNorm: weight_normed}


def register_converter(cls: type[torch.nn.Module], function: Callable[..., Any] | None) -> None:
    """Say how `convert` computes modules of a class.

    Such a module keeps its class, parameters, buffers and hooks, and `function` is called in place of its `forward`.
    It holds for subclasses that inherit `forward`, and for conversions from now on; `revert` undoes these as it does
    all others. A class may be torch's too, or one that `convert` knows.

    Args:
        cls: Class of the modules.
        function: `function(module, *args, **kwargs)` returns what `cls.forward(module, *args, **kwargs)` does, or
            `NotImplemented`, before any work, for a module or for arguments that it does not serve: the `forward` of
            the class is then run. To pickle a converted module it must be one that Python finds by its name. `None`
            forgets what was registered for `cls`.

    Raises:
        TypeError: If `cls` is not a class of modules, or `function` cannot be called.

    Example:
        >>> import torch, primitives as pr
        >>> class CenteredNorm(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gain = torch.nn.Parameter(torch.zeros(4))
        ...     def forward(self, x):
        ...         return torch.nn.functional.normalize(x, dim=-1) * 2 * (1 + self.gain)
        >>> def by_rms_norm(module, x):
        ...     return pr.functional.rms_norm(x, (4,), module.gain, 0.0, add_one=True)
        >>> pr.nn.register_converter(CenteredNorm, by_rms_norm)
        >>> pr.nn.convert(CenteredNorm())
        primitives.CenteredNorm()
        >>> pr.nn.register_converter(CenteredNorm, None)
    """
    if not isinstance(cls, type) or not issubclass(cls, torch.nn.Module):
        raise TypeError(f"register_converter: cls must be a class of modules, got {cls!r}.")
    if issubclass(cls, (OfThisPackage, Overridden)):
        raise TypeError(f"register_converter: cls must be a class of others, got {cls.__name__}, which is converted.")
    if function is not None and not callable(function):
        raise TypeError(
            f"register_converter: function must be called as function(module, *args), got {type(function).__name__}."
        )
    # A class is asked before those that it derives from.
    given = {**_FUNCTIONS, cls: function}
    _FUNCTIONS.clear()
    _FUNCTIONS.update({c: f for c, f in sorted(given.items(), key=lambda item: -len(item[0].__mro__)) if f is not None})


def _is_torchs(value: Any) -> bool:
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


_COMPOSED = "none is needed for its derivatives; for speed, see register_converter"


def _why_left(module: torch.nn.Module) -> tuple[str, str] | None:
    """Why `module` is left as it is, and what to do about it; `None` if it is none that one would expect to change."""
    if isinstance(module, torch.jit.ScriptModule):
        known = getattr(torch.nn, module.original_name, None) in _COUNTERPARTS
        return ("it is TorchScript", "convert the model before torch.jit.script") if known else None
    if any(isinstance(hook, WeightNorm) for hook in module._forward_pre_hooks.values()):
        return "torch's hook makes its weight", "replace weight_norm by that of torch.nn.utils.parametrizations"
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
        known = any(issubclass(cls, theirs) or issubclass(theirs, cls) for theirs in _COUNTERPARTS)
        if not known and (_is_torchs(cls) or not issubclass(cls, torch.nn.Module)):
            names = ", ".join(theirs.__name__ for theirs in _COUNTERPARTS)
            raise TypeError(
                f"convert: classes must be among {names}, their subclasses and modules of others, got {cls.__name__}."
            )
    return chosen


def convert(model: _Model, *, classes: _Classes | None = None) -> _Model:
    """Make a model right at every order of derivative, in place, as it is written.

    The modules of `torch.nn` that have a counterpart here turn into it: `LayerNorm`, `RMSNorm`, `GroupNorm`,
    `BatchNorm1d`, `2d` and `3d`, `InstanceNorm1d`, `2d` and `3d`, the lazy forms of both, `SyncBatchNorm`,
    `LogSoftmax`, `CrossEntropyLoss`, `NLLLoss`, `MultiheadAttention`, `TransformerEncoderLayer` and
    `TransformerEncoder`, weight norm by parametrization, and their subclasses that inherit `forward`. Parameters,
    parametrizations, buffers, hooks, training mode and `state_dict` stay the same objects under the same names. `repr`
    shows a changed module with `primitives.` before its name, and `converted` lists them.

    Norms with a `forward` of their own, of whatever library, are checked: run, on a twin, on inputs that tell apart
    what a norm may be. Those that compute one of this package's do so by it, and are shown and listed as the others.

    Modules that somebody else wrote stay as they are otherwise, and the functions of torch that they call are served,
    as inside `override_torch`, `dropout` excepted: `scaled_dot_product_attention` of a transformer of whatever library.
    It is so with each call of such a module, also where a part of the model is called alone, in another thread, or
    again by activation checkpointing.

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
        ConversionWarning: If norms or attention stay torch's: TorchScript, lazy norms of a class of their own, the old
            `torch.nn.utils.weight_norm`; and of modules that look like a norm of this package, and are not or cannot be
            checked. It has a table of paths, classes, reasons and remedies, and `left`, the same as a tuple.

    Example:
        >>> import torch, primitives as pr
        >>> pr.nn.convert(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)))
        Sequential(
          (0): Linear(in_features=4, out_features=4, bias=True)
          (1): primitives.LayerNorm((4,), ...)
        )
    """
    _check_model(model, "convert")
    chosen, left, counterparts = _chosen(classes), [], _Counterparts()
    for path, module in model.named_modules():
        if _is_ours(module) or isinstance(module, Overridden):
            continue
        if isinstance(module, torch.nn.Dropout) if classes is None else not isinstance(module, chosen):
            continue
        cls, (counterpart, reason) = _base(module), counterparts.of(module)
        if counterpart is not None:
            _retype(module, counterpart)
        why = (reason, _COMPOSED) if reason else None if counterpart is not None else _why_left(module)
        if why is not None:
            left.append(_Left(path, cls, *why))
    if left:
        text = _table("convert", left, "Torch's norms can be wrong beyond the first order.")
        warnings.warn(ConversionWarning(text, left), stacklevel=2)
    return model


def convert_sync_batchnorm(module: _Model, process_group: Any | None = None) -> _Model:
    """Turn the batch norms of a model into `SyncBatchNorm`, in place: `torch.nn.SyncBatchNorm.convert_sync_batchnorm`.

    It takes those of torch, `SyncBatchNorm` included, those of this package, and their subclasses that inherit
    `forward`. Parameters, buffers, hooks and training mode stay the same objects; a model changes before
    `DistributedDataParallel` wraps it. `revert` makes `torch.nn.SyncBatchNorm` of them.

    Args:
        module: Any module; it may itself be a batch norm.
        process_group: The processes over which statistics are taken; `None` means all.

    Returns:
        `module`.

    Raises:
        TypeError: If `module` is not a module.

    Warns:
        ConversionWarning: If a batch norm stays as it is: it is lazy, TorchScript, or its `forward` does more than to
            normalize, an activation perhaps, which torch's function drops without a word.

    Example:
        >>> import torch, primitives as pr
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> pr.nn.convert_sync_batchnorm(model)[1]
        primitives.SyncBatchNorm(8, ...)
    """
    _check_model(module, "convert_sync_batchnorm")
    left, forwards = [], (torch.nn.BatchNorm1d.forward, torch.nn.SyncBatchNorm.forward, _modules.BatchNorm1d.forward)
    for path, norm in module.named_modules():
        if not isinstance(norm, torch.nn.modules.batchnorm._BatchNorm):
            continue
        cls = _base(norm)
        if isinstance(norm, (LazyModuleMixin, torch.jit.ScriptModule)):
            left.append(_Left(path, cls, "it is lazy, or TorchScript", "convert the model after its first call"))
        elif "forward" in vars(norm) or cls.forward not in (*forwards, SyncBatchNorm.forward):
            remedy = "convert the norm that it consists of, or write its forward with SyncBatchNorm"
            left.append(_Left(path, cls, "its forward is its own, and may do more", remedy))
        else:
            if not isinstance(norm, SyncBatchNorm):
                _retype(norm, SyncBatchNorm)
            vars(norm)["process_group"] = process_group
    if left:
        text = _table("convert_sync_batchnorm", left, "Their statistics are those of one process.")
        warnings.warn(ConversionWarning(text, left), stacklevel=2)
    return module


def _table(caller: str, left: list[_Left], consequence: str) -> str:
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
    count = f"{len(left)} modules stay as they are" if len(left) > 1 else "1 module stays as it is"
    return f"{caller}: {count}. {consequence}\n" + "\n".join(lines)


def converted(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules of `model` that are this package's.

    Args:
        model: Any module; it may itself be one of them.

    Returns:
        The modules, by their dotted names in `model` (`""` for `model` itself).

    Raises:
        TypeError: If `model` is not a module.

    Example:
        >>> import torch, primitives as pr
        >>> pr.nn.converted(pr.nn.convert(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.LayerNorm(4))))
        {'1': primitives.LayerNorm((4,), ...)}
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

    Example:
        >>> import torch, primitives as pr
        >>> pr.nn.revert(pr.nn.convert(torch.nn.LayerNorm(4)))
        LayerNorm((4,), ...)
    """
    _check_model(model, "revert")
    for module in model.modules():
        if isinstance(module, (OfThisPackage, Overridden)):
            _retype(module, _original(_base(module)))
    return model
