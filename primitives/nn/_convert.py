"""Turn the modules of a model into the ones of this package, and back."""

from __future__ import annotations

import torch

from primitives.nn import _modules

__all__ = ["convert", "revert"]

_COUNTERPARTS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    getattr(torch.nn, name): getattr(_modules, name) for name in _modules.__all__
}


def _retype(model: torch.nn.Module, types: dict[type, type], caller: str) -> dict[str, torch.nn.Module]:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{caller}: model must be a torch.nn.Module, got {type(model).__name__}.")
    changed = {name: module for name, module in model.named_modules() if type(module) in types}
    for module in changed.values():
        # The counterpart differs by its methods alone, so the object itself changes type: parameters, buffers, hooks,
        # mode and every reference to the module stay as they are.
        module.__class__ = types[type(module)]
    return changed


def convert(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Turn every module of `model` that has a counterpart here into it, in place.

    Only modules whose type is exactly one of `torch.nn` are changed: subclasses, and whatever else this package does
    not know, stay untouched. Parameters, buffers, hooks, training mode and `state_dict` stay the same objects under
    the same names.

    Args:
        model: Any module; it may itself be one that is converted.

    Returns:
        The modules that changed, by their dotted names in `model` (`""` for `model` itself).

    Raises:
        TypeError: If `model` is no module.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        >>> list(convert(model))
        ['1']
        >>> type(model[1]).__module__.split(".")[0]
        'primitives'
    """
    return _retype(model, _COUNTERPARTS, "convert")


def revert(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Turn every module of this package in `model` back into the one of `torch.nn`: the inverse of `convert`.

    Args:
        model: Any module; it may itself be one that is reverted.

    Returns:
        The modules that changed, by their dotted names in `model`.

    Raises:
        TypeError: If `model` is no module.
    """
    return _retype(model, {ours: theirs for theirs, ours in _COUNTERPARTS.items()}, "revert")
