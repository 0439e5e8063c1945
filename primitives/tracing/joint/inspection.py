"""What a function does to its inputs, found by running it once on tensors without memory."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import optree
import torch
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import arg_tree_leaves

from primitives.core.errors import LeafError, MutationError
from primitives.tracing.errors import UserCalls, refuse_collective, typed_errors
from primitives.tracing.joint.create import Leaves, run_forward, takes_cotangent
from primitives.tracing.joint.dirty_inputs import DirtyInputs
from primitives.tracing.joint.grad_guard import grads_guarded
from primitives.tracing.joint.leaf_guard import LeafGuard, hidden_write
from primitives.tracing.joint.opaque import find_tensor, refuse_opaque
from primitives.tracing.lines import TraceError, current_line
from primitives.tracing.memory import bottom
from primitives.tracing.watching import is_hidden, written_by

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["Inspection", "inspected"]

_FUNCTION = "trace_joint"


class Inspection(NamedTuple):
    """What was found.

    Attributes:
        outs: The output.
        taken: Whether each leaf of the output takes a cotangent.
        mutated: Places of the input leaves that are written to, in order.
        mutated_taken: Whether each of these takes a cotangent as an output.
        alone: Places of the input leaves that may share memory with no other: these, and those that a pure function
            within writes copies of.
        clones: The inputs as they are after the function.
    """

    outs: Leaves
    taken: list[bool]
    mutated: list[int]
    mutated_taken: list[bool]
    alone: list[int]
    clones: list[Any]


def _reached(fn: Callable[..., Any]) -> dict[str, Any]:
    """What `fn` reaches beside its arguments, by name."""
    fn = inspect.unwrap(fn)
    try:
        found = inspect.getclosurevars(fn)
        names = {**found.globals, **found.nonlocals}
    except TypeError:
        names = {}
    return {**names, "self": getattr(fn, "__self__", fn)}


def _captured_name(fn: Callable[..., Any], wanted: Tensor) -> str:
    """Name by which `fn` reaches a tensor that is none of its arguments."""
    for name, value in _reached(fn).items():
        if value is wanted:
            return name
        if isinstance(value, torch.nn.Module):
            for inner, tensor in (*value.named_parameters(), *value.named_buffers()):
                if tensor is wanted:
                    return f"{name}.{inner}"
    return f"a tensor {list(wanted.shape)} of {wanted.dtype}"


class _Watch(LeafGuard):
    """Context that notes writes to inputs, and refuses what a graph would get wrong without a word.

    Attributes:
        written: Places of the inputs that are written to.
        written_copies: Places of the inputs that a pure function would write to, and writes copies of.
        refusal: What was raised.
    """

    def __init__(self, fn: Callable[..., Any], given: Leaves, clones: Sequence[Any]) -> None:
        super().__init__(_FUNCTION, given.label, clones)
        self._fn = fn
        self._tensors = {i: x for i, x in enumerate(clones) if isinstance(x, torch.Tensor)}
        self._kept = [x.untyped_storage() for x in self._tensors.values()]
        self._places = {storage._cdata: i for i, storage in zip(self._tensors, self._kept, strict=True)}
        self._dirty = DirtyInputs()
        self.written: set[int] = set()
        self.written_copies: set[int] = set()
        self.refusal: Exception | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        try:
            self._dirty.settle()
            refuse_collective(_FUNCTION, func)
            if any(map(is_traceable_wrapper_subclass, arg_tree_leaves(*args, **kwargs))):
                self._check_wrappers(arg_tree_leaves(*args, **kwargs))
                # The subclass takes the operation apart; its parts arrive here.
                return NotImplemented
            written = written_by(func, args, kwargs)
            for x in written:
                self._check_written(func, x)
            self._views.before(func, args, kwargs, written)
            for x in arg_tree_leaves(*args, **kwargs):
                if isinstance(x, torch.Tensor) and not is_fake(x):
                    self._check_captured(x)
        except (LeafError, MutationError, TraceError) as error:
            self.refusal = error
            raise
        result = func(*args, **kwargs)
        self._views.after(func, result)
        return result

    def _place_of(self, x: Tensor) -> int | None:
        return self._places.get(x.untyped_storage()._cdata)

    def _check_written(self, func: Any, x: Tensor) -> None:
        if not isinstance(x, FakeTensor):
            raise MutationError(
                f"{_FUNCTION}: {_captured_name(self._fn, x)} is written to and is no input, at {current_line()}. Make "
                "it an input; for a module, use functional_call."
            )
        place = self._place_of(x)
        if place is None:
            return
        self.written.add(place)
        if place in self._leaves and is_hidden(func, x):
            error = hidden_write(_FUNCTION, self._label(place), current_line())
            if not self._dirty.expect(self._tensors[place], error):
                raise error

    def _check_wrappers(self, values: Sequence[Any]) -> None:
        for x in values:
            if is_traceable_wrapper_subclass(x) and not _made_inside(x):
                self._check_captured(cast("Tensor", x))

    def _check_captured(self, x: Tensor) -> None:
        if x.requires_grad:
            raise LeafError(
                f"{_FUNCTION}: {_captured_name(self._fn, x)} requires grad and is no input, used at {current_line()}. "
                "Make it an input (for a module, use functional_call), or detach it to hold it constant."
            )

    def on_written_copy(self, x: Tensor) -> None:
        """Note that a pure function within writes to a copy of `x`, and not to what shares memory with `x`."""
        x = bottom(x)
        if isinstance(x, FakeTensor) and (place := self._place_of(x)) is not None:
            self.written_copies.add(place)

    def finish(self, outputs: Sequence[Any]) -> None:
        """Look once more, at the end.

        Args:
            outputs: What the function returns.

        Raises:
            MutationError: If a write by a custom function turns out to be one that autograd has not seen.
            TraceError: If the derivative of an output would be wrong.
        """
        self.check_outputs([*outputs, *self._tensors.values()])
        self._dirty.settle(at_end=True)
        self.check_leaves()


def _made_inside(x: Any) -> bool:
    """Whether the parts of a wrapper subclass have no memory."""
    parts = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
    tensors = [y for y in parts if isinstance(y, torch.Tensor)]
    return all(_made_inside(y) if is_traceable_wrapper_subclass(y) else is_fake(y) for y in tensors)


def _clone(x: Any, *, functionalize: bool) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    # What is written to must be no leaf of autograd, and what is transposed in place must not be the input itself.
    with torch.enable_grad():
        return x.clone() if x.requires_grad and functionalize else x.detach().requires_grad_(x.requires_grad)


def _refuse_kept(fn: Callable[..., Any], clones: Sequence[Any]) -> None:
    """Raise if the function has put a tensor without memory where it outlives the trace."""
    modes = {id(x.fake_mode) for x in clones if isinstance(x, FakeTensor)}

    def is_ours(x: Tensor) -> bool:
        return isinstance(x, FakeTensor) and id(x.fake_mode) in modes

    for name, value in _reached(fn).items():
        path = find_tensor(value, through_functions=True, wanted=is_ours)
        if path is not None:
            raise TraceError(
                f"{_FUNCTION}: the function stores a tensor that it computes in {name}{path}, where it would outlive "
                "the trace without ever having a value. Return it."
            )


def inspected(fn: Callable[..., Any], given: Leaves, leaves: Sequence[Any], *, functionalize: bool) -> Inspection:
    """Run `fn` on clones of `leaves` and note what it does.

    Args:
        fn: The function.
        given: Its arguments, for their structure.
        leaves: The leaves to run it on, without memory.
        functionalize: Whether writes to inputs become outputs.
    """
    clones = [_clone(x, functionalize=functionalize) for x in leaves]
    watch = _Watch(fn, given, clones)
    try:
        with typed_errors(_FUNCTION):
            guarded = grads_guarded(_FUNCTION, given.label, clones, given.values, leaves if functionalize else clones)
            with guarded, watch, UserCalls(_FUNCTION, refuses_seeds=True, draws_nothing=True):
                result = run_forward(_FUNCTION, fn, given.join(clones))
            watch.finish(arg_tree_leaves(*optree.tree_leaves(result)))
    except TypeError:
        # Python takes a TypeError inside an operator for one of its own, and raises another.
        if watch.refusal is None:
            raise
        raise watch.refusal from None
    _refuse_kept(fn, clones)
    mutated = sorted(watch.written)
    outs = Leaves.of(result, "outs")
    refuse_opaque(_FUNCTION, outs.values, outs.label, through_functions=True)
    taken = [takes_cotangent(y, clones) for y in outs.values]
    after = [takes_cotangent(clones[i], ()) for i in mutated]
    return Inspection(outs, taken, mutated, after, sorted(watch.written | watch.written_copies), clones)
