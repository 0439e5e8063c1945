"""Turn the modules of a model into the ones of this package, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from primitives.nn import _modules
from primitives.nn._base import Converted, OfThisPackage
from primitives.nn._known import known_norm
from primitives.nn._sync_batch_norm import SyncBatchNorm

_Classes = type[torch.nn.Module] | Iterable[type[torch.nn.Module]]
_Change = type[torch.nn.Module] | Callable[..., Any]

_Model = TypeVar("_Model", bound=torch.nn.Module)

_COUNTERPARTS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    getattr(torch.nn, name): cls
    for name, cls in vars(_modules).items()
    if isinstance(cls, type) and issubclass(cls, OfThisPackage) and hasattr(torch.nn, name)
}
_COUNTERPARTS[torch.nn.SyncBatchNorm] = SyncBatchNorm
_ORIGINALS = {ours: theirs for theirs, ours in _COUNTERPARTS.items()}
# By the classes of users.
_FUNCTIONS: dict[type[torch.nn.Module], Callable[..., Any]] = {}

# The class of a module, without the one that parametrization puts before it.
_base = parametrize.type_before_parametrizations


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
        >>> len(pr.nn.converted(pr.nn.convert(CenteredNorm())))
        1
        >>> pr.nn.register_converter(CenteredNorm, None)
    """
    if not isinstance(cls, type) or not issubclass(cls, torch.nn.Module):
        raise TypeError(f"register_converter: cls must be a class of modules, got {cls!r}.")
    if issubclass(cls, OfThisPackage):
        raise TypeError(f"register_converter: cls must be a class of others, got {cls.__name__}, which is converted.")
    if function is None:
        _FUNCTIONS.pop(cls, None)
    elif callable(function):
        _FUNCTIONS[cls] = function
    else:
        raise TypeError(
            f"register_converter: function must be called as function(module, *args), got {type(function).__name__}."
        )


def _change_of(cls: type[torch.nn.Module]) -> _Change | None:
    """The class that stands for exactly `cls`, or the function that computes its modules; None if there is neither."""
    for base in cls.__mro__:
        if base in _FUNCTIONS and cls.forward is base.forward:
            return _FUNCTIONS[base]
    return _COUNTERPARTS.get(cls) or known_norm(cls)


def _is_ours(module: torch.nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, Converted) or (forward is None and isinstance(module, OfThisPackage))


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


def _undo(module: torch.nn.Module) -> None:
    if isinstance(forward := vars(module).get("forward"), Converted):
        forward.remove()
    if (original := _ORIGINALS.get(_base(module))) is not None:
        _retype(module, original)


def _name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _apply(caller: str, changes: list[tuple[str, torch.nn.Module, _Change]]) -> None:
    """All changes, or none and an error."""
    before = [type(module) for _, module, _ in changes]
    for i, (path, module, change) in enumerate(changes):
        try:
            if isinstance(change, type) and issubclass(change, OfThisPackage):
                _retype(module, change)
            else:
                Converted(module, change).install()
        except Exception as error:
            for (_, changed, _), cls in zip(changes[:i], before, strict=False):
                if isinstance(forward := vars(changed).get("forward"), Converted):
                    forward.remove()
                changed.__class__ = cls
            raise TypeError(
                f"{caller}: {path or 'the model'}, of class {_name(_base(module))}, cannot be changed: {error}\nThe "
                "model is as it was. Choose others by classes=, or see register_converter."
            ) from error


def _check_model(model: object, caller: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{caller}: model must be a torch.nn.Module, got {type(model).__name__}.")


def _chosen(classes: _Classes | None) -> tuple[type[torch.nn.Module], ...]:
    given = (torch.nn.Module,) if classes is None else (classes,) if isinstance(classes, type) else tuple(classes)
    for cls in given:
        if not isinstance(cls, type) or not issubclass(cls, torch.nn.Module):
            raise TypeError(f"convert: classes must hold classes of modules, got {cls!r}.")
    chosen = tuple(_ORIGINALS.get(cls, cls) for cls in given)
    for cls in chosen:
        if not any(issubclass(known, cls) for known in _COUNTERPARTS) and _change_of(cls) is None:
            names = ", ".join(theirs.__name__ for theirs in _COUNTERPARTS)
            raise TypeError(
                f"convert: nothing is known of {_name(cls)} in classes. Known are {names}, norms of transformers, timm "
                "and diffusers, and what register_converter was given."
            )
    return chosen


def convert(model: _Model, *, classes: _Classes | None = None) -> _Model:
    """Let the modules of a model run on this package's fused kernels, in place.

    Modules of exactly these classes of `torch.nn` turn into the class of the same name here: `LayerNorm`, `RMSNorm`,
    `GroupNorm`, `BatchNorm1d`, `2d` and `3d`, `InstanceNorm1d`, `2d` and `3d`, the lazy forms of both,
    `SyncBatchNorm`, `Softmax`, `LogSoftmax`, `Softmin`, `Softmax2d`, `CrossEntropyLoss` and `NLLLoss`. Norms that
    transformers, timm and diffusers write out themselves, and classes given to `register_converter`, keep their class
    and get a `forward` of their own. Every other module stays as it is, subclasses of the above included; attention
    too, which `repair_torch` serves.

    Parameters, parametrizations, buffers, hooks, training mode and `state_dict` stay the same objects under the same
    names. `converted` lists what changed, and `repr` shows torch's modules with `primitives.` before their name.

    Args:
        model: Any module; it may itself be one that is converted.
        classes: A class, or several, each with its subclasses, to convert and no others. `None` means all except
            `Dropout`, which costs less in torch; add it with `classes=torch.nn.Dropout`, in a call of its own or in
            one list with others.

    Returns:
        `model`.

    Raises:
        TypeError: If `model` is not a module, nothing is known of one of `classes`, or a module cannot be changed: the
            message has its path, and the model is as it was.

    Example:
        >>> import torch, primitives as pr
        >>> pr.nn.convert(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)))
        Sequential(
          (0): Linear(in_features=4, out_features=4, bias=True)
          (1): primitives.LayerNorm((4,), ...)
        )
    """
    _check_model(model, "convert")
    chosen, change_of = _chosen(classes), functools.cache(_change_of)
    changes = []
    for path, module in model.named_modules():
        if isinstance(module, OfThisPackage) or "forward" in vars(module) or not isinstance(module, chosen):
            continue
        change = change_of(_base(module))
        if change is not None and (classes is not None or change is not _modules.Dropout):
            changes.append((path, module, change))
    _apply("convert", changes)
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
        TypeError: If `module` is not a module, or a batch norm in it would keep the statistics of one process: it is
            lazy, or its `forward` is its own, with an activation perhaps, which torch's function drops without a
            word. The message has its path, and the model is as it was.

    Example:
        >>> import torch, primitives as pr
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> pr.nn.convert_sync_batchnorm(model)[1]
        primitives.SyncBatchNorm(8, ...)
    """
    _check_model(module, "convert_sync_batchnorm")
    norms = [
        (path, norm, SyncBatchNorm)
        for path, norm in module.named_modules()
        if isinstance(norm, torch.nn.modules.batchnorm._BatchNorm)
    ]
    known = (torch.nn.BatchNorm1d.forward, torch.nn.SyncBatchNorm.forward, _modules.BatchNorm1d.forward)
    for path, norm, _ in norms:
        is_lazy = isinstance(norm, LazyModuleMixin)
        if is_lazy or "forward" in vars(norm) or _base(norm).forward not in (*known, SyncBatchNorm.forward):
            own = "has a forward of its own, which would be lost: replace it by a batch norm and what follows it"
            raise TypeError(
                f"convert_sync_batchnorm: {path or 'the model'}, of class {_name(_base(norm))}, "
                f"{'is lazy: call the model once' if is_lazy else own}. Nothing is changed."
            )
    _apply("convert_sync_batchnorm", [each for each in norms if not isinstance(each[1], SyncBatchNorm)])
    for _, norm, _ in norms:
        vars(norm)["process_group"] = process_group
    return module


class _Conversions(dict[str, torch.nn.Module]):
    def __repr__(self) -> str:
        rows = [("module", "class", "computed by")]
        for path, module in self.items():
            cls, forward = _base(module), vars(module).get("forward")
            by = getattr(forward, "function", cls)
            name = _name(by) if hasattr(by, "__qualname__") else repr(by)
            rows.append((path or "(the model)", _name(_ORIGINALS.get(cls, cls)), name))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines) if self else "no module is this package's"


def converted(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules of `model` that this package computes.

    Args:
        model: Any module; it may itself be one of them.

    Returns:
        The modules, by their dotted names in `model` (`""` for `model` itself). The `repr` is a table of names,
        classes, and what computes them.

    Raises:
        TypeError: If `model` is not a module.

    Example:
        >>> import torch, primitives as pr
        >>> pr.nn.converted(pr.nn.convert(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.LayerNorm(4))))
        module  class                                     computed by
        1       torch.nn.modules.normalization.LayerNorm  primitives.nn.LayerNorm
    """
    _check_model(model, "converted")
    return _Conversions({path: module for path, module in model.named_modules() if _is_ours(module)})


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
        _undo(module)
    return model
