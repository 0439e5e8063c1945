"""Stand-ins for functions of torch, and the mode in which they are called instead.

The table is filled by the modules that define the operations; this one knows none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from primitives._core.write_back import write_back

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["BatchWeight", "OverrideMode", "cumulative_weight", "is_overriding", "overrides", "register_override"]

_Stand = TypeVar("_Stand", bound="Callable[..., Any]")

overrides: dict[Any, Callable[..., Any]] = {}
"""Stand-ins by the function of torch that they stand for."""


def register_override(*functions: Any) -> Callable[[_Stand], _Stand]:
    """Decorator: the function stands for `functions` wherever an `OverrideMode` is active.

    A stand-in takes the mode, then the arguments of the function. It returns `NotImplemented`, before any work, for
    arguments that it does not serve: torch's own function is then called with them.

    Args:
        *functions: Functions and methods of torch, as `__torch_function__` names them.
    """

    def register(stand_in: _Stand) -> _Stand:
        for function in functions:
            overrides[function] = stand_in
        return stand_in

    return register


class BatchWeight:
    """Stands for `momentum=None` of a batch norm module: the weight that makes running statistics plain averages.

    A batch norm module of torch reads its counter as a Python number, which neither `vmap` nor a compiler can. A module
    with this in the place of its momentum hands it to `batch_norm` unread, after the counter has moved on.

    Args:
        module: Batch norm module with a counter.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def tensor(self) -> Tensor:
        """The weight of the batch that was counted last, a number as a tensor."""
        return cumulative_weight(self.module.num_batches_tracked)  # type: ignore[arg-type] - a buffer


def cumulative_weight(num_batches: Tensor) -> Tensor:
    """One over the number of batches, in the precision of a Python number where the device has it."""
    dtype = torch.float32 if num_batches.device.type == "mps" else torch.float64
    return num_batches.to(dtype).reciprocal()


class OverrideMode(TorchFunctionMode):
    """Calls of torch's functions go to the stand-ins, on this thread, as long as the mode is active.

    Attributes:
        left: Functions of torch that have a stand-in, and stay torch's in this mode.
    """

    left: frozenset[Any] = frozenset()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call what stands for `func`, or `func`."""
        stand_in = overrides.get(func)
        if stand_in is not None and func not in self.left:
            result = stand_in(self, *args, **kwargs or {})
            if result is not NotImplemented:
                return result
        if func is torch.Tensor.unflatten:
            # Torch's method calls `super()`, which Dynamo cannot trace inside a mode; multi-head attention calls it.
            # Dynamo does not find a method in a table.
            return torch.unflatten(*args, **kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def write(self, targets: list[Tensor], values: list[Tensor]) -> None:
        """Give each of `targets` its new value; here, in place.

        Args:
            targets: Tensors that torch's own function would write.
            values: New values, one per target.
        """
        write_back(targets, values)


def is_overriding() -> bool:
    """Whether an `OverrideMode` is active on this thread."""
    for mode in _get_current_function_mode_stack():  # noqa: SIM110 - a loop takes half the time, and a compiler reads it
        if isinstance(mode, OverrideMode):
            return True
    return False
