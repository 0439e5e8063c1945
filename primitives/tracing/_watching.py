"""Looking at a function while it is traced: its lines, and what no graph can hold."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch._ops import HigherOrderOperator
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from primitives._core.errors import LeafError, MutationError, TraceError
from primitives.tracing import _torch_private as torch_private
from primitives.tracing._errors import current_line, current_stack, values_needed
from primitives.tracing._random.operations import arguments_of, draws_nothing, is_random
from primitives.tracing._recompute import replaying_checkpoints

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined] - a getset descriptor
_GRAD = torch.Tensor.grad.__get__  # type: ignore[attr-defined] - as above
_SET_GRAD = torch.Tensor.grad.__set__  # type: ignore[attr-defined] - as above
_FREEZING = torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined] - as above
# The attribute of a tensor in a trace that tells whether it requires grad outside, and gets to know who has asked.
_OUTSIDE = "_requires_grad_outside"
# They hand values to Python without an operation that anything below sees.
_READS = frozenset({torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__})
# They ask for values of a tensor, which are known where only constants take part.
_VALUES = frozenset(
    getattr(torch.Tensor, name) for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")
)
_INDEXED = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})
_PUT = frozenset({torch.index_put, torch.Tensor.index_put, torch.Tensor.index_put_})
# They read tensors inside lists.
_FACTORIES = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor})
# Torch's operators of functions, which have first derivatives at most, and what has those of every order.
_OF_FUNCTIONS = {
    "cond": "torch.where of the results of both branches",
    "while_loop": "a loop of Python, of as many steps as are needed at most",
    "scan": "a loop of Python",
    "map_impl": "torch.vmap",
    "flex_attention": "scaled_dot_product_attention with attn_mask",
}


def _is_collective(func: Any) -> bool:
    """Whether an operator is one of `torch.distributed` that writes in place, of which its schema says nothing."""
    name = torch_private.schema_of(func).name
    return name.startswith("c10d::") and name.endswith("_")


@functools.cache
def _written_slots(func: Any) -> tuple[tuple[int, str], ...]:
    schema = torch_private.schema_of(func)
    if schema is None:
        return ()
    if _is_collective(func):
        return ((0, schema.arguments[0].name),)
    return tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write)


def written_by(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The tensors, or nodes of them, that a call writes to."""
    slots = _written_slots(func)
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name in slots]
    return [x for x in torch_private.leaves_of(*values) if x is not None] if slots else []


def _without_masks(index: Any) -> Any:
    """An index with the places that constant masks stand for, which a backward pass would have to ask for."""
    found = []
    for x in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(x, torch.Tensor) and x.dtype == torch.bool and x.dim()
        value = torch_private.constant_value(x) if is_mask else None
        with torch_private.without_modes():
            found += [x] if value is None else value.nonzero(as_tuple=True)
    return tuple(found)


def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """As torch composes it, but in C++ it asks how many elements there are, which symbols do not say in a transform."""
    if not any(isinstance(n, torch.SymInt) for n in x.shape):
        return F.dropout(x, p, training, inplace)
    if not training or p == 0.0:
        return x
    # Without a batch, which `vmap` adds where samples draw different numbers.
    noise = torch.bernoulli(torch.empty(x.shape, dtype=x.dtype, device=x.device), 1.0 - p)
    noise = noise.mul_(1.0 / (1.0 - p) if p < 1.0 else 0.0)
    return x.mul_(noise) if inplace else x * noise


def _index_fill(x: Any, dim: int, index: Any, value: Any) -> Any:
    """By a mask for a tensor: the backward pass of torch's own asks which places differ."""
    if not isinstance(value, torch.Tensor):
        return torch.index_fill(x, dim, index, value)
    mask = torch.zeros_like(x, dtype=torch.bool).index_fill(dim, index, True)
    return torch.where(mask, torch.fill(x, value), x)


def _one_hot(index: Any, num_classes: int = -1) -> Any:
    """As torch composes it in a trace; in a transform it does not see the trace, and asks for the values."""
    if num_classes < 1 or index.dtype != torch.int64:
        return F.one_hot(index, num_classes)
    return (index.unsqueeze(-1) == torch.arange(num_classes, device=index.device)).long()


def _unfold(x: Any, dimension: int, size: int, step: int) -> Any:
    """By windows side by side: where one is written to, functionalization makes zeros of what lies in none."""
    num = (x.shape[dimension] - size) // step * step + size if x.dim() and 0 < size <= step else 0
    is_whole = step == size and isinstance(num, int) and num == x.shape[dimension]
    if is_whole or num < size or step % size:
        return x.unfold(dimension, size, step)
    every = (*[slice(None)] * (dimension % x.dim()), slice(None, None, step // size))
    return x.narrow(dimension, 0, num).unfold(dimension, size, size)[every]


def _deepcopy(x: Any, memo: dict[int, Any]) -> Any:
    """A leaf, as of a parameter, where the trace holds a tensor with a history in its place."""
    return memo.setdefault(id(x), x.detach().clone().requires_grad_(x.requires_grad))


def _requires_grad(x: Any) -> bool:
    """What a user is told; torch and this package ask what the trace is to record."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    if _OUTSIDE in vars(x) and not name.startswith(("torch.", "primitives.")):
        does, asked = vars(x)[_OUTSIDE]
        asked.add(name)
        return does or x.requires_grad
    return x.requires_grad


def _grad(*args: Any, **kwargs: Any) -> Any:
    """Without freeing what the joint graph goes back through: an energy is returned beside its forces."""
    return torch.autograd.grad(*args, **{**kwargs, "retain_graph": True})


_COMPOSED = {
    torch.Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined] - a getset descriptor
    torch.autograd.grad: _grad,
    torch.Tensor.__deepcopy__: _deepcopy,
    F.dropout: _dropout,
    F.one_hot: _one_hot,
    torch.index_fill: _index_fill,
    torch.Tensor.index_fill: _index_fill,
    torch.Tensor.unfold: _unfold,
    torch.Tensor.index_fill_: lambda x, *args, **kwargs: x.copy_(_index_fill(x, *args, **kwargs)),
}


def as_outside(x: Any, requires_grad: bool, asked: set[str]) -> Any:
    """A tensor of a trace that a user sees as the one outside, which requires grad or not; `asked` gets who has asked.

    Where grad is not recorded outside, code may do so inside, for a derivative that goes back to it.
    """
    is_recorded = torch.is_grad_enabled() or _functorch.peek_interpreter_stack() is not None
    if requires_grad and not (is_recorded or x.requires_grad):
        x = x.detach().requires_grad_()
    vars(x)[_OUTSIDE] = requires_grad, asked
    return x


class UserCalls(TorchFunctionMode):
    """Context that refuses, in a trace, those calls of the user of which nothing below Python hears."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Look at the call, and make it."""
        kwargs = kwargs or {}
        if func is _SET_DATA or func == _SET_DATA:
            raise MutationError(
                f"{self._function}: {_described(args[0])} is given other data through .data, which no graph can hold, "
                f"at {current_line()}. Use copy_(), or the new tensor itself."
            )
        if func is torch.Tensor.backward:
            raise TraceError(
                f"{self._function}: backward() is called inside the function, at {current_line()}, and no graph holds "
                ".grad. Return the loss, and call backward() and the optimizer outside; a derivative in the loss is "
                "torch.autograd.grad(..., create_graph=True), or one of torch.func."
            )
        if func in (_GRAD, _SET_GRAD) and self._function == "compile":
            x = func(*args) if func == _GRAD else None
            if x is not None and torch_private.is_computed(x):
                return x
            raise TraceError(
                f"compile: .grad is read or written inside the function, at {current_line()}, and a program does not "
                "see it. Pass the gradient as an argument, and return what is to be one."
            )
        is_frozen = func in _FREEZING and False in (*args[1:], *kwargs.values())
        if is_frozen and _OUTSIDE in vars(args[0]) and args[0].grad_fn:
            raise TraceError(
                f"compile: a parameter or an argument is frozen inside the function, at {current_line()}, which no "
                "program does. Call requires_grad_(False) outside, around the function, or use x.detach() inside."
            )
        if isinstance(func, HigherOrderOperator) and self._function == "compile" and func.name() in _OF_FUNCTIONS:
            raise TraceError(
                f"compile: {func.name()} is called inside the function, at {current_line()}, and torch has no "
                f"derivatives of every order for it. Use {_OF_FUNCTIONS[func.name()]}."
            )
        lists = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple))] if func in _FACTORIES else []
        reads = func in _READS or (func is torch.Tensor.__format__ and args[1])
        read = args[:1] if reads else torch_private.leaves_of(*lists)
        if func in _VALUES and (value := torch_private.constant_value(args[0])) is not None:
            return func(value)
        if func in _INDEXED or (func in _PUT and len(args) > 1):
            index = args[1] if func in _INDEXED else (*args[1],)
            args = (args[0], _without_masks(index), *args[2:])
        if any(isinstance(x, torch.Tensor) and torch_private.is_computed(x) for x in read):
            raise values_needed(self._function, f"{func.__name__}()", current_line())
        return _COMPOSED.get(func, func)(*args, **kwargs)


class Recorder:
    """Gives each node that `make_fx` records the user's lines, and refuses what no graph can hold before it runs.

    A backward node gets the lines of the forward operation that it belongs to. Random numbers that the backward pass,
    or a checkpointed region in it, would draw are other ones than those of the forward pass: outside a trace torch sets
    its generator back, which no graph can. With `captures`, the user's function may write to tensors from elsewhere,
    and differentiate in them.
    """

    def __init__(self, function: str, *, captures: bool) -> None:
        self._function, self._captures = function, captures
        self._stacks: dict[int, str] = {}
        self._is_forward, self._is_again = True, False
        self._refusal: Exception | None = None
        # In a graph of a program, nothing writes.
        self._is_plain = function == "compile" and not torch_private.is_functionalizing()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context for both passes."""
        try:
            with torch_private.nodes_seen(self._see):
                yield
        except TypeError as error:
            # Python takes a `TypeError` inside an operator for one of its own, and raises another.
            raise self._refusal or error from None

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Context for the forward pass; the nodes after it belong to the backward pass."""
        # Functionalization has one of its own, of which no mode hears.
        tolist = mock.patch.object(torch_private.FunctionalTensor, "tolist", torch.Tensor.tolist)
        with replaying_checkpoints(lambda _: self._again), UserCalls(self._function), tolist:
            yield
        self._is_forward = False

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        before, self._is_again = self._is_again, True
        try:
            # Neither a backward pass nor a derivative inside runs in that of the forward pass.
            with UserCalls(self._function):
                yield
        finally:
            self._is_again = before

    def _see(self, node: fx.Node, constant: Callable[[fx.Node], Any]) -> None:
        node.stack_trace = self._stack()
        try:
            self._check(node, constant)
        except (LeafError, MutationError, TraceError) as error:
            self._refusal = error
            raise

    def _stack(self) -> str:
        number = torch_private.running_number()
        if number is not None:
            # A write to a view has a node of its own, made right after that of the operation.
            return self._stacks.get(number) or self._stacks.get(number - 1, "")
        if not self._is_forward:
            # Autograd adds up gradients, for no line.
            return ""
        # The first one that is recorded after autograd has made its own is the operation that this undoes.
        stack = current_stack()
        self._stacks.setdefault(torch_private.last_number(), stack)
        return stack

    def _check(self, node: fx.Node, constant: Callable[[fx.Node], Any]) -> None:
        func, is_first = node.target, self._is_forward and not self._is_again
        if node.op == "get_attr" and not self._captures and getattr(constant(node), "requires_grad", False):
            raise LeafError(
                f"{self._function}: {_described(constant(node))} requires grad and is not an input, used at "
                f"{current_line()}. Make it an input (for a module, use pure_module), or detach it to hold it "
                "constant."
            )
        if node.op != "call_function" or torch_private.schema_of(func) is None:
            return
        if self._is_plain and _written_slots(func):
            raise MutationError(f"{func} writes in place.")
        if not is_first and is_random(func) and not draws_nothing(arguments_of(func, node.args, node.kwargs)):
            raise TraceError(
                f"{self._function}: the backward pass draws random numbers by {func}, at {current_line()}, and a "
                "graph cannot give it those of the forward pass, as checkpoint needs them. Make the state explicit: "
                "functionalize_rng=True in trace_joint, or functionalize_rng around what is traced."
            )
        written = written_by(func, node.args, node.kwargs) if is_first and not self._captures else []
        if written and _is_collective(func):
            raise MutationError(
                f"{self._function}: the collective {func} writes in place, which no graph can hold, at "
                f"{current_line()}. Use those of torch.distributed._functional_collectives, which return their result."
            )
        for source in written:
            while getattr(source.target, "is_view", False):  # torch 2.11 records views of constants
                source = source.all_input_nodes[0]
            if source.op == "get_attr":
                raise constant_written(self._function, constant(source), current_line())


def constant_written(function: str, x: Any, line: str) -> MutationError:
    """The error for a write to a tensor from elsewhere."""
    return MutationError(
        f"{function}: {_described(x)} is written to and is not an input, at {line}. Make it an input; for a module, "
        "use pure_module."
    )


def _described(x: Any) -> str:
    return f"a tensor {list(x.shape)} of {x.dtype}"
