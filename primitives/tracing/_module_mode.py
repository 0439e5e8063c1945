"""What a module may write while it runs as a pure function: its buffers, and those without touching the caller's."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from primitives.core.errors import MutationError
from primitives.core.overrides import OverrideMode

if TYPE_CHECKING:
    from torch import Tensor

    from primitives.tracing._module_state import ModuleState

__all__ = ["PureMode"]

_write_back = torch.ops.primitives.write_back.default
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_DUNDERS = ("__setitem__", *(f"__i{name}__" for name in _OPERATORS))
# A dict, as a compiler cannot look every function up in a set.
_IN_PLACE = {
    getattr(space, name): True
    for space in (torch.Tensor, torch, functional)
    for name in dir(space)
    if (name.endswith("_") and not name.startswith("_")) or (space is torch.Tensor and name in _DUNDERS)
    if callable(getattr(space, name))
}
# How an attribute of a tensor is read; most calls are that.
_Getter = type(torch.Tensor.shape.__get__)  # type: ignore[attr-defined] - a descriptor
# Functions that write their second argument, given the keyword.
_EMBEDDINGS = (functional.embedding, functional.embedding_bag)


def _saving() -> Any:
    """The hooks that tensors saved for the backward pass go through."""
    if torch.compiler.is_compiling():
        return None
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined] - no stub


class PureMode(OverrideMode):
    """Functions of torch run on the primitives; new values of buffers take the place of the old ones.

    Args:
        state: The module's parameters and buffers.
    """

    def __init__(self, state: ModuleState) -> None:
        super().__init__()
        self._state = state
        self._grad_enabled = torch.is_grad_enabled()
        self._saving = _saving()

    def write(self, targets: list[Tensor], values: list[Tensor]) -> None:
        """Rebind what is a buffer of the module; write anything else in place."""
        others: tuple[list[Tensor], list[Tensor]] = [], []
        for target, value in zip(targets, values, strict=True):
            if self._state.buffer_name(target) is None:
                others[0].append(target)
                others[1].append(value)
            else:
                self._state.rebind(target, value)
        if others[0]:
            super().write(*others)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict | None = None) -> Any:
        """Refuse to write parameters, and call what stands for `func`, or `func`."""
        if type(func) is _Getter:
            return func(*args)
        kwargs = kwargs or {}
        if self._grad_enabled and not torch.compiler.is_compiling():
            self._refuse_checkpoint()
        if func is _write_back:
            return self.write(*args)
        if _IN_PLACE.get(func) and len(args) > 0:
            return self._write_in_place(func, args[0], args, kwargs)
        if kwargs.get("out") is not None:
            return self._write_in_place(func, kwargs["out"], args, kwargs)
        if func in _EMBEDDINGS and kwargs.get("max_norm") is not None:
            self._refuse(args[1])
        return super().__torch_function__(func, types, args, kwargs)

    def _refuse_checkpoint(self) -> None:
        """Raise inside of `torch.utils.checkpoint`, if the module has called it."""
        # A region that is run again either changes how tensors are saved, or records no gradient.
        if torch.is_grad_enabled() and _saving() == self._saving:
            return
        code = inspect.unwrap(checkpoint).__code__
        frame = inspect.currentframe()
        while frame is not None and frame.f_locals.get("state") is not self._state:
            if frame.f_code is code:
                raise RuntimeError(
                    "functional_call: the module calls torch.utils.checkpoint, which would run a part of it again in "
                    "the backward pass, when its own parameters are back in their places. Checkpoint the pure function "
                    "instead: checkpoint(net, params, buffers, x, use_reentrant=False)."
                )
            frame = frame.f_back

    def _refuse(self, target: Any) -> None:
        """Raise if `target` is a parameter."""
        if isinstance(target, torch.Tensor) and target in self._state.param_names:
            raise MutationError(
                f"functional_call: the module writes its parameter {self._state.param_names[target]!r} in place, which "
                "the pure function cannot return. Make it a buffer, or write it outside the module."
            )

    def _write_in_place(self, func: Any, target: Any, args: tuple, kwargs: dict) -> Any:
        targets = target if isinstance(target, (tuple, list)) else [target]
        for each in targets:
            self._refuse(each)
        named = [(self._state.buffer_name(each), each) for each in targets if isinstance(each, torch.Tensor)]
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            unbatched = [name for name, value in named if name is not None and not _is_batched(value)]
            if not unbatched or not any(_is_batched(value) for value in (*args, *kwargs.values())):
                raise
            raise MutationError(
                f"functional_call: the module writes a batched value in place into its buffer {unbatched[0]!r}, which "
                "has no batch axis. Give buffers with one (in_dims), or assign the new value: self.buffer = ..."
            ) from error


def _is_batched(value: Any) -> bool:
    """Whether some `vmap` maps over a tensor."""
    while isinstance(value, torch.Tensor) and _functorch.is_functorch_wrapped_tensor(value):
        if _functorch.is_batchedtensor(value):
            return True
        value = _functorch.get_unwrapped(value)
    return False
