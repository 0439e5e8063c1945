"""What a function does to its inputs, found by running it once on tensors without memory."""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode

from primitives.core.errors import LeafError, MutationError
from primitives.tracing._joint import Leaves, run_forward, takes_cotangent
from primitives.tracing._user_code import TraceError, current_line, line_of_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

__all__ = ["Inspection", "inspected", "typed_errors"]

_FUNCTION = "trace_joint"


class Inspection(NamedTuple):
    """What was found.

    Attributes:
        outs: The output.
        taken: Whether each leaf of the output takes a cotangent.
        mutated: Places of the input leaves that are written to, in order.
        mutated_taken: Whether each of these takes a cotangent as an output.
        clones: The inputs as they are after the function.
    """

    outs: Leaves
    taken: list[bool]
    mutated: list[int]
    mutated_taken: list[bool]
    clones: list[Any]


def _captured_name(fn: Callable[..., Any], wanted: Tensor) -> str:
    """Name by which `fn` reaches a tensor that is none of its arguments."""
    fn = inspect.unwrap(fn)
    try:
        found = inspect.getclosurevars(fn)
        names = {**found.globals, **found.nonlocals}
    except TypeError:
        names = {}
    names["self"] = getattr(fn, "__self__", fn)
    for name, value in names.items():
        if value is wanted:
            return name
        if isinstance(value, torch.nn.Module):
            for inner, tensor in (*value.named_parameters(), *value.named_buffers()):
                if tensor is wanted:
                    return f"{name}.{inner}"
    return f"a tensor {list(wanted.shape)} of {wanted.dtype}"


class _Watch(TorchDispatchMode):
    """Context that notes writes to inputs, and refuses what a graph would get wrong without a word."""

    def __init__(self, fn: Callable[..., Any], given: Leaves, clones: Sequence[Any]) -> None:
        super().__init__()
        self._fn, self._given = fn, given
        self._differentiated = {i for i, x in enumerate(clones) if isinstance(x, torch.Tensor) and x.requires_grad}
        self._places = {x.untyped_storage()._cdata: i for i, x in enumerate(clones) if isinstance(x, torch.Tensor)}
        self.mutated: set[int] = set()
        self.refusal: Exception | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        for i, argument in enumerate(schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for x in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(x, torch.Tensor):
                    self._check_noted(x, writes=writes)
        return func(*args, **kwargs)

    def _check_noted(self, x: Tensor, *, writes: bool) -> None:
        try:
            self._check(x, writes=writes)
        except (LeafError, MutationError) as error:
            self.refusal = error
            raise

    def _check(self, x: Tensor, *, writes: bool) -> None:
        if not isinstance(x, FakeTensor):
            self._check_captured(x, writes=writes)
        elif writes and (place := self._places.get(x.untyped_storage()._cdata)) is not None:
            self.mutated.add(place)
            if place in self._differentiated and not (torch.is_grad_enabled() and x.requires_grad):
                raise MutationError(
                    f"{_FUNCTION}: {self._given.label(place)} requires grad and is written to where autograd does not "
                    f"see it (under no_grad, or through detach() or .data), at {current_line()}. Return the new "
                    "value instead."
                )

    def _check_captured(self, x: Tensor, *, writes: bool) -> None:
        if writes:
            raise MutationError(
                f"{_FUNCTION}: {_captured_name(self._fn, x)} is written to and is no input, at {current_line()}. Make "
                "it an input; for a module, use functional_call."
            )
        if x.requires_grad:
            raise LeafError(
                f"{_FUNCTION}: {_captured_name(self._fn, x)} requires grad and is no input, used at {current_line()}. "
                "Make it an input (for a module, use functional_call), or detach it to hold it constant."
            )


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Context in which what cannot be traced raises `TraceError`, naming the user's line."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        what = getattr(error, "func", None)
        detail = f"{what} needs" if what is not None else "a branch or a size needs"
        raise TraceError(
            f"{_FUNCTION}: {detail} the values of a tensor, which a graph does not have, at "
            f"{line_of_error(error.__traceback__)}. Use torch.where instead of a branch, and a tensor instead of "
            ".item()."
        ) from error


def _clone(x: Any, *, functionalize: bool) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    # What is written to must be no leaf of autograd, and what is transposed in place must not be the input itself.
    with torch.enable_grad():
        return x.clone() if x.requires_grad and functionalize else x.detach().requires_grad_(x.requires_grad)


def inspected(
    fn: Callable[..., Any], given: Leaves, leaves: Sequence[Any], *, functionalize: bool, shared: Sequence[set[int]]
) -> Inspection:
    """Run `fn` on clones of `leaves` and note what it does.

    Args:
        fn: The function.
        given: Its arguments, for their structure.
        leaves: The leaves to run it on, without memory.
        functionalize: Whether writes to inputs become outputs.
        shared: Groups of places whose tensors share memory.
    """
    clones = [_clone(x, functionalize=functionalize) for x in leaves]
    watch = _Watch(fn, given, clones)
    try:
        with typed_errors(), watch:
            result = run_forward(fn, given.join(clones))
    except TypeError:
        # Python takes a TypeError inside an operator for one of its own, and raises another.
        if watch.refusal is None:
            raise
        raise watch.refusal from None
    mutated = sorted(watch.mutated)
    for place in mutated:
        for group in shared:
            if place in group:
                labels = ", ".join(given.label(i) for i in sorted(group))
                raise MutationError(f"{_FUNCTION}: {labels} share memory, and one of them is written to.")
    outs = Leaves.of(result, "outs")
    taken = [takes_cotangent(y, clones) for y in outs.values]
    after = [clones[i] for i in mutated]
    return Inspection(outs, taken, mutated, [takes_cotangent(x, ()) for x in after], clones)
