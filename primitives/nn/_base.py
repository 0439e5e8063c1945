"""Parts of this package's modules, and of those that `convert` changes, beside the class of torch or of others."""

from collections.abc import Sequence
from typing import Any

import torch

from primitives._core.overrides import is_overriding
from primitives._override import override_except_dropout

__all__ = ["ConversionWarning", "OfThisPackage", "Overridden", "namespace_of"]


class ConversionWarning(UserWarning):
    """Modules are torch's that one might take for this package's: `convert` left them, or something replaced them.

    Attributes:
        left: The modules that `convert` left, one entry per module, with `path`, `type`, `reason` and `remedy`.
    """

    def __init__(self, message: str, left: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.left: tuple[Any, ...] = tuple(left)


class OfThisPackage(torch.nn.Module):
    """The base of every module here: it says so in its `repr`, and is a leaf to `torch.fx`, as those of torch are."""

    # Of optree, in modules over pytrees; kept by those alone that are given one, so that state and pickles are torch's.
    namespace: str = ""

    def _over(self, namespace: str) -> None:
        if namespace:
            self.namespace = namespace

    def _get_name(self) -> str:
        return f"primitives.{type(self).__name__}"

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        # Before any hook runs: a leaf runs its hooks when the graph does.
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, torch.fx.Proxy) and isinstance(tracer := value.tracer, torch.fx.Tracer):
                return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
        return torch.nn.Module._call_impl(self, *args, **kwargs)


def namespace_of(module: torch.nn.Module) -> str:
    """The optree namespace of a module over pytrees."""
    # TorchScript passes an object without it, and tensors alone.
    return getattr(module, "namespace", "")


class Overridden(torch.nn.Module):
    """A module whose calls of functions of torch are served by this package, as inside `override_torch`.

    It goes before the class that computes, which may be anybody's. The context is entered with each call of a module,
    and not once around the model: what runs a part of a model again, as activation checkpointing does, or runs it in
    another thread, has it too.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Who counts the subclasses of a class of theirs is not to find those of `convert` among them.
        if "converted_from" not in vars(cls):
            super().__init_subclass__(**kwargs)

    def _get_name(self) -> str:
        name = super()._get_name()
        return name if isinstance(self, OfThisPackage) else f"primitives.override_torch({name})"

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        if is_overriding():
            return super()._call_impl(*args, **kwargs)
        with override_except_dropout():
            return super()._call_impl(*args, **kwargs)
