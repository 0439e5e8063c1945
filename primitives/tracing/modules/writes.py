"""Which tensors a function of torch writes, as far as its name, its schema or its arguments say so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Getter", "Write", "view_of", "written_by"]

Getter = type(torch.Tensor.shape.__get__)  # type: ignore[attr-defined] - a descriptor
"""How an attribute of a tensor is read, and set; most calls are that."""

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_DUNDERS = ("__setitem__", *(f"__i{name}__" for name in _OPERATORS))
_ON_LISTS = ("_foreach_", "_fused_")
# These change what a tensor says of itself, and nothing that its views share.
_OF_THE_OBJECT = {
    *("requires_grad_", "detach_", "rename_", "share_memory_", "set_", "as_strided_", "t_"),
    *("transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"),
}


def _writes(space: Any, name: str) -> bool:
    if not callable(getattr(space, name)):
        return False
    in_place = name.endswith("_") and (not name.startswith("_") or name.startswith(_ON_LISTS))
    return in_place or (space is torch.Tensor and name in _DUNDERS)


# Whether the memory is written, by the function that writes its first argument. Dicts all of them, as a compiler
# cannot look every function up in a set.
_IN_PLACE = {
    getattr(space, name): name not in _OF_THE_OBJECT
    for space in (torch.Tensor, torch, functional)
    for name in dir(space)
    if _writes(space, name)
}
_SETTERS = {
    getattr(torch.Tensor, name).__set__: name in ("real", "imag")
    for name in ("data", "grad", "requires_grad", "real", "imag")
}
# Place of the argument that says to write the first one.
_FLAGGED = {
    function: names.index("inplace")
    for function in vars(functional).values()
    if hasattr(function, "__code__")
    if "inplace" in (names := function.__code__.co_varnames[: function.__code__.co_argcount])
}
# These write their second argument, given the keyword.
_EMBEDDINGS = {functional.embedding: "max_norm", functional.embedding_bag: "max_norm"}
_VIEW_NAMES = (
    *("__getitem__", "alias", "as_strided", "chunk", "detach", "diagonal", "expand", "expand_as", "flatten", "movedim"),
    *(
        "moveaxis",
        "narrow",
        "permute",
        "ravel",
        "requires_grad_",
        "reshape",
        "reshape_as",
        "select",
        "split",
        "squeeze",
    ),
    *("swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view"),
    *("view_as", "view_as_complex", "view_as_real"),
)
_VIEWS = {getattr(space, name): True for space in (torch.Tensor, torch) for name in _VIEW_NAMES if hasattr(space, name)}
_VIEW_GETTERS = {getattr(torch.Tensor, name).__get__: True for name in ("data", "T", "H", "mT", "mH", "real", "imag")}


class Write(NamedTuple):
    """What a call writes.

    Attributes:
        targets: The tensors.
        memory: Whether it writes their memory, and so all that share it, and not only what they say of themselves.
    """

    targets: tuple[Tensor, ...]
    memory: bool = True


def written_by(func: Any, args: tuple, kwargs: dict[str, Any]) -> Write | None:
    """What a call of a function of torch writes; `None` for most."""
    if type(func) is Getter:
        return Write(args[:1], _SETTERS[func]) if func in _SETTERS else None
    if func in _IN_PLACE:
        return Write(_tensors(args[:1] or tuple(kwargs.values())), _IN_PLACE[func])
    if kwargs.get("out") is not None:
        return Write(_tensors((kwargs["out"],)))
    if func in _FLAGGED:
        i = _FLAGGED[func]
        flag = args[i] if len(args) > i else kwargs.get("inplace")
        return Write(_tensors(args[:1] or (kwargs.get("input"),))) if flag else None
    if func in _EMBEDDINGS:
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        return Write(_tensors((weight,))) if kwargs.get("max_norm") is not None else None
    # A compiler cannot read schemas.
    if not torch.compiler.is_compiling() and isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return _written_by_operator(func, args, kwargs)
    return None


def _written_by_operator(func: Any, args: tuple, kwargs: dict[str, Any]) -> Write | None:
    overload = func if isinstance(func, torch._ops.OpOverload) else getattr(func, func.overloads()[0])
    schema = overload._schema
    if not schema.is_mutable:
        return None
    values = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return Write(_tensors(tuple(values)))


def _tensors(values: tuple) -> tuple[Tensor, ...]:
    """The tensors among values, and in lists among them."""
    flat: list[Any] = []
    for value in values:
        flat += value if isinstance(value, (tuple, list)) else (value,)
    return tuple([each for each in flat if isinstance(each, torch.Tensor)])


def view_of(func: Any, args: tuple) -> Tensor | None:
    """The tensor that a call may give a view of, or an alias."""
    known = _VIEW_GETTERS if type(func) is Getter else _VIEWS
    return args[0] if func in known and len(args) > 0 and isinstance(args[0], torch.Tensor) else None
