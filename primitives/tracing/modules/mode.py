"""What a module may write while it runs as a pure function: its buffers, and those without touching the caller's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C import _functorch  # type: ignore[attr-defined] - no stub

from primitives.core.errors import LeafError, MutationError
from primitives.core.overrides import OverrideMode
from primitives.tracing.modules.writes import Getter, Write, view_of, written_by

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from primitives.tracing.modules.state import ModuleState

__all__ = ["PureMode"]

_HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
_write_back = torch.ops.primitives.write_back.default


class PureMode(OverrideMode):
    """Functions of torch run on the primitives; new values of buffers take the place of the old ones.

    Args:
        state: The module's parameters and buffers.
        is_over: Whether the call has ended, and buffers can take no more values.
        on_hook: Called with a hook that is registered on a tensor; returns the one to register.
    """

    def __init__(
        self, state: ModuleState, *, is_over: bool = False, on_hook: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__()
        self._state = state
        self._is_over = is_over
        self._on_hook = on_hook

    @property
    def state(self) -> ModuleState:
        """The module's parameters and buffers."""
        return self._state

    def write(self, targets: list[Tensor], values: list[Tensor]) -> None:
        """Rebind what is a buffer of the module; write anything else in place."""
        others: tuple[list[Tensor], list[Tensor]] = [], []
        for target, value in zip(targets, values, strict=True):
            if self._state.is_buffer(target):
                self._refuse_late(self._state.buffer_name(target))
                self._refuse_shared(self._state.buffer_name(target))
                self._state.rebind(target, value)
            else:
                others[0].append(target)
                others[1].append(value)
        if others[0]:
            super().write(*others)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict | None = None) -> Any:
        """Refuse to write parameters, and call what stands for `func`, or `func`."""
        kwargs = kwargs or {}
        is_attribute = type(func) is Getter
        if func is _write_back:
            return self.write(*args)
        if not torch.compiler.is_compiling() and not (is_attribute and view_of(func, args) is None):
            self._refuse_others((*args, *kwargs.values()))
        write = written_by(func, args, kwargs)
        if write is not None:
            self._refuse(write)
        if is_attribute:
            result = func(*args)
        elif self._on_hook is not None and func in _HOOKS:
            result = self._hooked(func, *args, **kwargs)
        elif write is not None:
            result = self._written(func, write, types, args, kwargs)
        else:
            result = super().__torch_function__(func, types, args, kwargs)
        if torch.compiler.is_compiling():
            # No compiler looks at memory.
            self._state.follow(view_of(func, args), result)
        return result

    def _hooked(self, func: Any, tensor: Tensor, hook: Any) -> Any:
        return func(tensor, self._on_hook(hook))  # type: ignore[misc] - only called with one

    def _refuse(self, write: Write) -> None:
        """Raise if a parameter is written."""
        for target in write.targets:
            name = self._state.param_name(target, by_memory=write.memory)
            if name is not None:
                raise MutationError(
                    f"functional_call: the module writes its parameter {name!r} in place, which the pure function "
                    "cannot return. Make it a buffer, or write it outside the module."
                )

    def _refuse_others(self, values: tuple) -> None:
        """Raise if a tensor is used that is not that of the call."""
        for value in values:
            for each in value if isinstance(value, (tuple, list)) else (value,):
                if not isinstance(each, torch.Tensor):
                    continue
                name = self._state.aside_name(each)
                if name is not None:
                    raise LeafError(
                        f"functional_call: the module uses its own {name!r}, and not what was given for it: it holds "
                        "the tensor in a list or an attribute besides, or is called with it. Let it read the tensor "
                        "where it is registered."
                    )
                name = self._state.replaced_name(each) if self._state.has_replaced else None
                if name is not None:
                    raise MutationError(
                        f"functional_call: the module uses its buffer {name!r}, or a view of it, as it was before a "
                        "batch norm gave it a new value. Read the buffer again from the module, after the norm."
                    )

    def _refuse_late(self, name: str | None) -> None:
        """Raise if a buffer is written after the call."""
        if self._is_over and name is not None:
            raise MutationError(
                f"functional_call: what the module runs in the backward pass writes its buffer {name!r}, which the "
                "pure function has returned already. Write it in forward, or keep it outside the module."
            )

    def _refuse_shared(self, name: str | None) -> None:
        """Raise if a buffer is written whose memory another buffer of the module has as well."""
        other = None if name is None else self._state.sharing_name(name)
        if other is not None:
            raise MutationError(
                f"functional_call: the module writes its buffer {name!r}, which shares memory with its buffer "
                f"{other!r}: as arguments of a function they are apart. Make the one out of the other in forward."
            )

    def _written(self, func: Any, write: Write, types: Any, args: tuple, kwargs: dict) -> Any:
        named = [(self._state.buffer_name(each), each) for each in write.targets]
        for name, _ in named if write.memory else ():
            self._refuse_late(name)
            self._refuse_shared(name)
            self._state.preserve(name)
        try:
            return super().__torch_function__(func, types, args, kwargs)
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
