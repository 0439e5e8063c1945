"""The `.grad` of inputs, which is no input and no output: reading, writing and accumulating in it is refused."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode

from primitives.core.errors import MutationError
from primitives.tracing.lines import current_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["grads_guarded"]

_GET, _SET, _DELETE = (getattr(torch.Tensor.grad, f"__{name}__") for name in ("get", "set", "delete"))  # type: ignore[attr-defined] - a descriptor


class _GradAccess(TorchFunctionMode):
    def __init__(self, function: str, label: Callable[[int], str], inputs: Sequence[Any], given: Sequence[Any]) -> None:
        super().__init__()
        self._function, self._label, self._given = function, label, given
        self._places = {id(x): i for i, x in reversed([*enumerate(inputs)]) if isinstance(x, torch.Tensor)}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in (_GET, _SET, _DELETE):
            place = self._places.get(id(args[0]))
            if place is not None and func == _GET and self._given[place].grad is None:
                # Not asked for, as torch warns of a copy that is no leaf.
                return None
            if place is not None:
                what = "read" if func == _GET else "assigned"
                raise MutationError(
                    f"{self._function}: .grad of {self._label(place)}, which is neither an input nor an output, is "
                    f"{what}, at {current_line()}. Pass gradients as inputs, and return them."
                )
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def grads_guarded(
    function: str,
    label: Callable[[int], str],
    inputs: Sequence[Any],
    given: Sequence[Any],
    leaves: Sequence[Any],
) -> Iterator[None]:
    """Context in which a function has no business with the `.grad` of its inputs.

    Args:
        function: Name of the public function, for errors.
        label: Key path of the input at a place.
        inputs: What the function is called with.
        given: What the caller passed for each, whose `.grad` the function would see.
        leaves: For each, the tensor that a backward pass in the function would accumulate in.
    """

    def refuse(place: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            raise MutationError(
                f"{function}: a backward pass within accumulates gradients in .grad of {label(place)}, at "
                f"{current_line()}. Take them by torch.autograd.grad."
            )

        return hook

    # Held, as a tensor does not keep its node alive.
    nodes = []
    handles = []
    with proxy_tensor.disable_proxy_modes_tracing():
        for i, x in enumerate(leaves):
            if _accumulates(x):
                nodes.append(_accumulator(x))
                handles.append(nodes[-1].register_prehook(refuse(i)))
    try:
        with _GradAccess(function, label, inputs, given):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _accumulator(x: torch.Tensor) -> Any:
    with torch.enable_grad():
        # A sparse tensor has no views.
        used = x.view_as(x) if x.layout == torch.strided else x.clone()
    return used.grad_fn.next_functions[0][0]  # type: ignore[union-attr] - `x` requires grad


def _accumulates(x: Any) -> bool:
    is_leaf = isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf
    return is_leaf and not _functorch.is_functorch_wrapped_tensor(x)
