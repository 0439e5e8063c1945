"""Tensors of a user's class that are made inside a trace, as `x.as_subclass(LabelTensor)` does.

Torch refuses: a tensor that functionalization has wrapped is an object of a class already. Here it gets one of both.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterable
from typing import Any
from unittest import mock

import optree
import torch
from torch import Tensor

from primitives._core.errors import LeafError
from primitives._core.trees.nodes import RESULTS
from primitives.tracing._errors import current_line
from primitives.tracing._torch_private import (
    FunctionalTensor,
    bottom,
    is_in_a_transform,
    mapped_tensors,
    without_functions,
)


class _Traced(FunctionalTensor):
    """A base of classes that are a user's, too."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:  # type: ignore[override] - torch's has an instance method
        """The result of an operator, whose rules are for the class of functionalization alone."""
        no_mode: Any = None
        args, kwargs = mapped_tensors(_Traced, lambda x: FunctionalTensor(x.elem, no_mode), (args, kwargs or {}))
        return func(*args, **kwargs or {})


# A class with a `__torch_dispatch__` is made deaf to functions of torch, which the user's is not.
_Traced.__torch_function__ = vars(torch.Tensor)["__torch_function__"]


@functools.cache
def _of_both(kind: type) -> type:
    """The class of the traced tensors that are of `kind` to the user; results come back as what the user has made."""

    def parts(x: Any) -> tuple[list[Any], tuple[str, ...], None]:
        plain = _as_subclass(x, torch.Tensor)
        names = tuple(name for name in vars(x) if name not in vars(plain))
        return [plain, *(vars(x)[name] for name in names)], names, None

    def together(names: Any, values: Iterable[Any]) -> Any:
        x, *attributes = values
        x = x.as_subclass(kind)
        vars(x).update(zip(names, attributes, strict=True))
        return x

    made: Any = type(kind.__name__, (kind, _Traced), {"__module__": kind.__module__})
    if "__torch_function__" in vars(made):
        del made.__torch_function__
    optree.register_pytree_node(made, parts, together, namespace=RESULTS)
    return made


def subclasses_made() -> contextlib.AbstractContextManager:
    """Context of a trace in which such tensors are made; of one at a time."""
    # Autograd imports it in any trace, and it looks at the original method then.
    importlib.import_module("torch._dynamo")
    return mock.patch.multiple(torch.Tensor, as_subclass=_as_subclass, __new__=_new)


def _as_subclass(x: Tensor, kind: type) -> Any:
    if not isinstance(bottom(x), FunctionalTensor):
        return _AS_SUBCLASS(x, kind)
    # Torch names the class of an argument.
    kind = kind.__bases__[0] if issubclass(kind, FunctionalTensor) else kind
    if kind.__torch_dispatch__ is not vars(torch.Tensor)["__torch_dispatch__"]:
        raise _refusal(kind, "have no __torch_dispatch__ of its own")
    with without_functions():
        y = torch.ops.aten.alias.default(x)
    try:
        if not is_in_a_transform(y):
            y.__class__ = FunctionalTensor if kind is torch.Tensor else _of_both(kind)
        elif kind is not torch.Tensor:
            y.__class__ = kind
    except TypeError:
        raise _refusal(kind, "have the layout of torch.Tensor") from None
    return y


def _new(kind: type, *args: Any, **kwargs: Any) -> Any:
    # Some classes take a tensor over by `torch.Tensor.__new__`.
    if args and isinstance(args[0], torch.Tensor):
        return _as_subclass(args[0], kind)
    return _NEW(kind, *args, **kwargs)


_AS_SUBCLASS, _NEW = torch.Tensor.as_subclass, torch.Tensor.__new__


def _refusal(kind: type, requirement: str) -> LeafError:
    return LeafError(
        f"as_subclass: {kind.__name__} must {requirement} to be made inside a trace, at {current_line()}. Compute with "
        "plain tensors, and make it outside, of the result."
    )
