"""What no graph can hold, refused with the user's line: values of tensors, and writes past autograd and dispatcher."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import arg_tree_leaves

from primitives.core.errors import MissingRuleError, MutationError
from primitives.tracing.lines import TraceError, current_line, is_users, line_of_error
from primitives.tracing.memory import bottom
from primitives.tracing.seeds import Seeds
from primitives.tracing.watching import is_collective

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

__all__ = [
    "UserCalls",
    "depends_on_inputs",
    "has_advice",
    "refuse_collective",
    "refuse_data",
    "refuse_reverse_mode",
    "typed_errors",
]

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined] - a getset descriptor
# They hand values to Python, or memory to others, without an operation that anything below sees.
_READS = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__})
_STORAGES = frozenset({torch.Tensor.untyped_storage, torch.Tensor.storage})
# They read tensors inside lists.
_FACTORIES = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor})
_VALUES = (
    "{function}: {what} needs the values or the memory of a tensor, which a graph does not have, at {line}. Use "
    "torch.where instead of a branch, and a tensor instead of .item()."
)
# What torch says where a graph is recorded, or tensors have no memory, and a value is asked for.
_NO_VALUES = (
    "get value out of a tracing tensor",
    "numpy() is not supported for tensor subclasses",
    "but its data is not allocated yet",
    "Cannot access data pointer of Tensor",
    "invalid python storage",
    "argument of type: <class 'torch.storage.UntypedStorage'>",
)
_ADVICE = {
    "leaf Variable that requires grad is being used in an in-place operation": (
        "an input that requires grad is written to in place, which autograd allows for no leaf",
        "Return the new value, or use functionalize_mutations.",
    ),
    "cannot resize variables that require grad": (
        "a tensor that requires grad is resized",
        "Make a tensor of the new size.",
    ),
    "Cannot backprop through mirrored meta": (
        "gradients are accumulated in .grad of an input",
        "Take them by torch.autograd.grad.",
    ),
    "Cannot view a tensor with shape": (
        "a tensor has other strides where it is functionalized, after a write to a view of it, and cannot be viewed",
        "Use contiguous() before reshape, or write out of place.",
    ),
    "doesn't match the broadcast shape": (
        "a value is written to a tensor that is too small for it",
        "Under vmap, a tensor without a batch axis takes none: make it an input with one, or write out of place.",
    ),
    "has more elements than `self`": (
        "a value with a batch axis of vmap is written to a tensor that has none",
        "Make it an input with a batch axis, or write out of place.",
    ),
}


def _values_needed(function: str, what: str, line: str) -> TraceError:
    return TraceError(_VALUES.format(function=function, what=what, line=line))


def _typed(function: str, error: RuntimeError | ValueError) -> RuntimeError | None:
    """The error to raise instead of one of torch's; `None` if that one says enough."""
    if isinstance(error, (TraceError, MutationError)):
        return None
    line = line_of_error(error.__traceback__)
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)):
        what = getattr(error, "func", None)
        return _values_needed(function, "a branch or a size" if what is None else str(what), line)
    message = str(error)
    if any(text in message for text in _NO_VALUES):
        return _values_needed(function, "an operation", line)
    for text, (what, advice) in _ADVICE.items():
        if text in message:
            return MutationError(f"{function}: {what}, at {line}. {advice} ({message.splitlines()[0]})")
    return None


def has_advice(error: Exception) -> bool:
    """Whether `typed_errors` has more to say about an error of torch's."""
    return any(text in str(error) for text in _ADVICE)


@contextlib.contextmanager
def typed_errors(function: str) -> Iterator[None]:
    """Context in which what cannot be traced, or written, raises `TraceError` or `MutationError` with the user's line.

    Args:
        function: Name of the public function, for the message.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        typed = _typed(function, error)
        if typed is None:
            raise
        raise typed from error


def depends_on_inputs(x: Tensor) -> bool:
    """Whether the value of `x` is one that a graph, or a run without memory, computes, and no constant."""
    x = bottom(x)
    if isinstance(x, FakeTensor):
        return x.constant is None
    if isinstance(x, FunctionalTensor):
        return True
    mode: Any = proxy_tensor.get_proxy_mode()
    slot = None if mode is None else proxy_tensor.get_proxy_slot(x, mode.tracer, None)
    return slot is not None and slot.constant is None


def refuse_data(function: str, x: Tensor) -> None:
    """Raise that the `.data` of a tensor is assigned, where a graph would lose it.

    Args:
        function: Name of the public function.
        x: The tensor.

    Raises:
        MutationError: Always.
    """
    raise MutationError(
        f"{function}: a tensor {list(x.shape)} of {x.dtype} is given other data through .data, which no graph can "
        f"hold, at {current_line()}. Use copy_(), or the new tensor itself."
    )


def refuse_collective(function: str, func: Any) -> None:
    """Raise for a collective that writes in place: a graph cannot hold what it waits on.

    Args:
        function: Name of the public function, for the message.
        func: The operator.

    Raises:
        TraceError: If it is one.
    """
    if is_collective(func):
        raise TraceError(
            f"{function}: the collective {func} writes in place, which no graph can hold, at {current_line()}. Use "
            "those of torch.distributed._functional_collectives, which return their result."
        )


def _under_reverse_mode(x: Tensor) -> bool:
    """Whether a reverse-mode transform of `torch.func` differentiates in `x`."""
    # With `jvp` they share the wrapper, but not the kind of interpreter.
    reverse = {
        interpreter.level()
        for interpreter in _functorch.get_interpreter_stack() or ()
        if interpreter.key() == _functorch.TransformType.Grad
    }
    while reverse and _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.maybe_get_level(x) in reverse and _functorch.is_gradtrackingtensor(x) and x.requires_grad:
            return True
        x = _functorch.get_unwrapped(x)
    return False


def _within_autograd_functional() -> bool:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != torch.autograd.functional.__file__:
        frame = frame.f_back  # type: ignore[assignment] - None ends it
    return frame is not None


def refuse_reverse_mode(function: str, leaves: Sequence[Any]) -> None:
    """Raise if a caller differentiates in an input by reverse mode: results have no history, and it would get zero.

    Args:
        function: Name of the public function, for the message.
        leaves: The inputs.

    Raises:
        MissingRuleError: If so.
    """
    if torch.compiler.is_compiling():
        return
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    by_functional = any(x.requires_grad for x in tensors) and _within_autograd_functional()
    if by_functional or any(map(_under_reverse_mode, tensors)):
        raise MissingRuleError(
            f"{function}: its results have no history, so grad, vjp, jacrev, hessian and torch.autograd.functional "
            "cannot differentiate it. Take derivatives of higher order inside the function: "
            "create_joint(primitives.func.grad(fn))."
        )


class UserCalls(TorchFunctionMode):
    """Context that looks at those calls of the user of which nothing below Python hears.

    Args:
        function: Name of the public function, for errors.
        is_symbolic: Whether the value of a tensor is one that Python must not read.
        on_data: Called with a tensor before its `.data` is assigned; by default that is refused.
        on_memory: Called with a tensor whose memory is handed out.
        refuses_seeds: Whether a generator that is passed, or seeded, raises `TraceError`.
        draws_nothing: Whether torch's generator moves only if it is seeded, as tensors have no memory.
    """

    def __init__(
        self,
        function: str,
        *,
        is_symbolic: Callable[[Tensor], bool] = depends_on_inputs,
        on_data: Callable[[Tensor], None] | None = None,
        on_memory: Callable[[Tensor], None] | None = None,
        refuses_seeds: bool = False,
        draws_nothing: bool = False,
    ) -> None:
        super().__init__()
        self._seeds: Seeds | None = None
        self._refuses_seeds, self._draws_nothing = refuses_seeds, draws_nothing
        self._function, self._is_symbolic = function, is_symbolic
        self._on_data = on_data or functools.partial(refuse_data, function)
        self._on_memory = on_memory

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Look at the call, and make it."""
        kwargs = kwargs or {}
        if self._seeds is not None:
            self._seeds.check_call((*args, *kwargs.values()))
        if func is _SET_DATA or func == _SET_DATA:
            self._on_data(args[0])
        elif func in _READS or (func in _STORAGES and is_users(sys._getframe(1).f_code.co_filename)):
            self._check_read(func, args[:1])
            self._hand_out(args[0])
        elif func in _FACTORIES:
            data = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple))]
            self._check_read(func, [x for x in arg_tree_leaves(*data) if isinstance(x, torch.Tensor)])
        return func(*args, **kwargs)

    def __enter__(self) -> UserCalls:
        """Look at torch's generator, and begin."""
        if self._refuses_seeds:
            self._seeds = Seeds(self._function, draws_nothing=self._draws_nothing)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """End, and look at torch's generator once more."""
        super().__exit__(*error)
        if self._seeds is not None:
            self._seeds.finish(failed=error[:1] != (None,))

    def _check_read(self, func: Any, tensors: Any) -> None:
        if any(self._is_symbolic(x) for x in tensors):
            raise _values_needed(self._function, f"{func.__name__}()", current_line())

    def _hand_out(self, x: Tensor) -> None:
        if self._on_memory is not None:
            self._on_memory(x)
