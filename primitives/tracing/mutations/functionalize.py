"""Writes to inputs as further outputs: `functionalize_mutations`."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import arg_tree_leaves

from primitives.core.errors import MissingRuleError, MutationError
from primitives.core.trees.overlay import key_path
from primitives.tracing import torch_private
from primitives.tracing.errors import typed_errors
from primitives.tracing.leaves import refuse_opaque
from primitives.tracing.lines import current_line
from primitives.tracing.memory import is_wrapped, memories, refuse_sharing, sharing
from primitives.tracing.mutations.world import FunctionalWorld
from primitives.tracing.watching import UserCalls, WriteWatcher, written_by

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["PureFunction", "functionalize_mutations"]

_FUNCTION = "functionalize_mutations"
_aten = torch.ops.aten
# They update the running statistics, in training.
_BATCH_NORMS = (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default)
_lift_fresh = _aten.lift_fresh.default
_write_back = torch.ops.primitives.write_back.default


class _Watch(WriteWatcher):
    """Context that notes which memory is written to, and refuses writes to what is neither an input nor made inside.

    Attributes:
        written: The memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self._own: set[int] = set()
        # No tensor from elsewhere is to come to lie where one that is noted here was.
        self._held: list[Tensor] = []

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Let these be written to."""
        self._held += tensors
        self._own.update(number for x in tensors for number in memories(x))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Look at what `func` writes, and run it."""
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        for x in written:
            if torch_private.is_functional(x):
                continue
            if x.layout != torch.strided:
                raise MutationError(
                    f"{_FUNCTION}: a sparse tensor {list(x.shape)} is written to in place, at {current_line()}, and "
                    "its memory cannot be told from that of an input. Return the new value instead."
                )
            if not self._own.issuperset(memories(x)):
                raise MutationError(
                    f"{_FUNCTION}: a tensor {list(x.shape)} of {x.dtype} that is no input is written to, at "
                    f"{current_line()}. Make it an input; for a module, use functional_call."
                )
            if torch.Tag.inplace_view not in getattr(func, "tags", ()) or func._schema.name == "aten::set_":
                self.written.update(memories(x))
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if type(error) is not RuntimeError or not any(map(torch_private.is_functional, written)):
                raise
            raise MutationError(
                f"{_FUNCTION}: {func} cannot be made pure, at {current_line()}: {str(error).splitlines()[0]}"
            ) from error
        if func is _lift_fresh or not _may_alias(func):
            self.take([x for x in arg_tree_leaves(result) if isinstance(x, torch.Tensor)])
        return result


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes, those included of which its schema says nothing."""
    if func in _BATCH_NORMS:
        return [x for x in args[3:5] if args[5] and x is not None]
    if func is _write_back or (getattr(func, "namespace", "") == "c10d" and func._opname.endswith("_")):
        return [x for x in arg_tree_leaves(args[0]) if isinstance(x, torch.Tensor)]
    return written_by(func, args, kwargs)


@functools.cache
def _may_alias(func: Any) -> bool:
    """Whether a result may share memory with an argument."""
    schema = getattr(func, "_schema", None)
    return schema is not None and any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return (tuple(x.shape), *((tuple(x.stride()), x.storage_offset()) if x.layout == torch.strided else (x.layout,)))


class _Input:
    """An input of the function, and what the function gets in its place.

    Args:
        label: Key path.
        x: The input.
        used: What the function gets.
    """

    def __init__(self, label: str, x: Tensor, used: Tensor) -> None:
        self.label, self.x, self.used = label, x, used
        self._geometry, self._memories, self._grad_fn = _geometry(used), memories(used), used.grad_fn
        self._fits = used.layout == torch.strided and used.shape == x.shape and used.stride() == x.stride()
        self.is_data = self.is_copied = self.is_moved = self.is_reshaped = self.is_back = False

    def look(self, watch: _Watch) -> None:
        """See what the function has done to it."""
        used = self.used
        self.is_reshaped = _geometry(used) != self._geometry
        self.is_copied = not watch.copied.isdisjoint(self._memories)
        if torch_private.is_functional(used):
            self.is_data = torch_private.has_data_mutation(used)
            self.is_moved = torch_private.has_other_storage(used)
        else:
            self.is_data = not watch.written.isdisjoint(self._memories)
            self.is_moved = memories(used) != self._memories

    @property
    def is_changed(self) -> bool:
        """Whether the function has changed its values, or what it says of itself."""
        return self.is_data or self.is_moved or self.is_reshaped

    @property
    def is_hidden(self) -> bool:
        """Whether autograd has seen none of the writes: torch then takes the new value for one without a history."""
        return self.used.grad_fn is self._grad_fn

    def holds(self, y: Tensor) -> bool:
        """Whether `y` is what the function got, or a view of it, and the input itself has these values."""
        if (self.is_data or self.is_moved) and not self.is_back:
            return False
        return y is self.used or (bool(self._memories) and memories(y) == self._memories)

    def outside(self, y: Tensor) -> Tensor | None:
        """The input, or the view of it, that `y` is of what the function got; `None` if it has no such view."""
        x = self.x
        if y is self.used and (self.is_back or not self.is_changed):
            return x
        if not self._fits or is_wrapped(x) or y.dtype != x.dtype or (y.requires_grad and not x.requires_grad):
            return None
        source = x if y.requires_grad else x.detach()
        return source.as_strided(y.shape, y.stride(), x.storage_offset() + y.storage_offset() - self._geometry[2])

    def write_back(self, value: Tensor) -> None:
        """Make the input what the function has made of it."""
        x, used = self.x, self.used
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_hidden):
            if self.is_moved or (self.is_reshaped and used.numel() > x.numel()):
                x.set_(value.detach())  # type: ignore[arg-type] - a tensor is a source too
            elif self.is_reshaped:
                if self.is_data and used.numel() < x.numel():
                    self._write_all(value)
                x.as_strided_(used.shape, used.stride(), x.storage_offset() + used.storage_offset() - self._geometry[2])
            if self.is_data and not self.is_moved:
                x.copy_(value)
        self.is_back = True

    def _write_all(self, value: Tensor) -> None:
        """Write the part of the input too that its new shape leaves out: other views of the memory have it."""
        if value.requires_grad:
            raise MutationError(
                f"{_FUNCTION}: {self.label} is written to and made smaller, and the part that its new shape leaves out "
                "would lose its derivative. Change the shape out of place."
            )
        self.x.copy_(value.as_strided(*self._geometry))


class _Call(NamedTuple):
    """What a call of the function has come to.

    Attributes:
        inputs: The inputs, each tensor once.
        outs: Leaves of the output, as the function returned them.
        plain: The value of a leaf, or of what the function got, as a tensor of the caller.
        treespec: Structure of the output.
    """

    inputs: list[_Input]
    outs: list[Any]
    plain: Callable[[Any], Any]
    treespec: Any

    def output(self) -> Any:
        """The output, with inputs and views of them where the function returned those of what it got."""
        # One tensor for one tensor.
        found = {id(y): self._outside(y) for y in self.outs if isinstance(y, torch.Tensor)}
        return self.treespec.unflatten([found.get(id(y), y) for y in self.outs])

    def _outside(self, y: Tensor) -> Any:
        holder = next((each for each in self.inputs if each.holds(y)), None)
        found = None if holder is None else holder.outside(y)
        return self.plain(y) if found is None else found

    def new_value(self, each: _Input) -> Tensor:
        """What an input is afterwards, if it is left alone."""
        view = None if each.is_data or each.is_moved else each.outside(each.used)
        value = self.plain(each.used) if view is None else view
        return value.detach() if value.requires_grad and each.is_data and each.is_hidden else value


class PureFunction:
    """A function whose writes to its inputs are outputs; made by `functionalize_mutations`.

    Attributes:
        fn: The function that writes.
        keep_data_mutations: Whether values are copied back to inputs that do not require grad.
    """

    def __init__(self, fn: Callable[..., Any], *, keep_data_mutations: bool = False) -> None:
        self.fn = fn
        self.keep_data_mutations = keep_data_mutations

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, OrderedDict[str, Tensor]]:
        """Call the function, and leave its inputs as they are.

        Args:
            *args: Pytrees.
            **kwargs: Pytrees.

        Returns:
            `(output, mutated)`: what the function returns, and the inputs that it wrote to, as they are afterwards,
            by key path (`"args[0]['w']"`), in the order of the leaves of `args` and then `kwargs`.

        Raises:
            MutationError: If the function writes a tensor that is neither an input nor made inside; one of several
                inputs that overlap in memory; or, in a trace, in a way that cannot be made pure.
            TraceError: In a trace, if it asks for the values of a tensor.
            LeafError: If an object with a tensor inside, that optree does not take apart, is passed or returned.
            MissingRuleError: Under `make_fx(pre_dispatch=True)`.
        """
        call = self._run(args, kwargs)
        if self.keep_data_mutations:
            for each in call.inputs:
                if each.is_data and not (each.is_moved or each.is_reshaped or each.x.requires_grad):
                    each.write_back(call.plain(each.used))
        left = [each for each in call.inputs if each.is_changed and not each.is_back]
        mutated = OrderedDict((each.label, call.new_value(each)) for each in left)
        return call.output(), mutated

    def in_place(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function and copy what it wrote back to its inputs: the effect of `fn(*args, **kwargs)`.

        Args:
            *args: Pytrees.
            **kwargs: Pytrees.

        Returns:
            What the function returns. What aliases an input in it is an alias of that input.

        Raises:
            MutationError: As in a call.
            RuntimeError: If autograd sees a write to a leaf that requires grad.
        """
        call = self._run(args, kwargs)
        for each in call.inputs:
            if each.is_changed:
                each.write_back(call.plain(each.used))
        return call.output()

    def _run(self, args: tuple, kwargs: dict[str, Any]) -> _Call:
        if torch_private.is_tracing(pre_dispatch=True):
            raise MissingRuleError(
                f"{_FUNCTION}: make_fx(pre_dispatch=True) records writes before they can be made pure. Leave "
                "pre_dispatch out."
            )
        accessors, leaves, treespec = optree.tree_flatten_with_accessor((args, kwargs))  # type: ignore[arg-type] - any tree
        labels = [_label(accessor) for accessor in accessors]
        refuse_opaque(_FUNCTION, leaves, labels.__getitem__)
        first = {id(x): label for label, x in zip(labels[::-1], leaves[::-1], strict=True)}
        tensors = list({id(x): x for x in leaves if isinstance(x, torch.Tensor)}.values())
        # A transform outside of this, or functionalization, makes its own graph of writes to copies.
        is_pure = torch_private.is_tracing() and not any(map(_is_of_a_transform, tensors))
        world = FunctionalWorld(tensors) if is_pure else None
        watch = _Watch()
        with typed_errors(_FUNCTION), world or contextlib.nullcontext():
            with watch:
                used = [_copied(x) for x in tensors] if world is None else world.inputs
            inputs = [_Input(first[id(x)], x, y) for x, y in zip(tensors, used, strict=True)]
            watch.take(used)
            watch.written.clear()
            by_id = {id(x): y for x, y in zip(tensors, used, strict=True)}
            with watch, UserCalls(_FUNCTION) if torch_private.is_tracing() else contextlib.nullcontext():
                inner: Any = treespec.unflatten([by_id.get(id(x), x) for x in leaves])
                output = self.fn(*inner[0], **inner[1])
            outs, out_treespec = optree.tree_flatten(output)
            for each in inputs:
                each.look(watch)
            plain = (lambda y: y) if world is None else world.leave([*outs, *used])
            refuse_opaque(_FUNCTION, outs, functools.partial(_out_label, out_treespec))
        overlapping = sharing(tensors, [i for i, each in enumerate(inputs) if each.is_data or each.is_copied])
        refuse_sharing(_FUNCTION, [inputs[i].label for i in overlapping])
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, WriteWatcher):
                mode.copied.update(number for each in inputs if each.is_data for number in memories(each.x))
        return _Call(inputs, outs, plain, out_treespec)

    def __repr__(self) -> str:
        """`functionalize_mutations(step)`."""
        return f"functionalize_mutations({getattr(self.fn, '__name__', self.fn)})"


def _is_of_a_transform(x: Tensor) -> bool:
    return torch_private.is_functional(x) or torch_private.is_in_a_transform(x)


def _copied(x: Tensor) -> Tensor:
    """A copy for the function to write to, with the strides of `x`, to which autograd leads back."""
    with torch.enable_grad():
        if is_wrapped(x) or x.layout != torch.strided or x.is_contiguous() or 0 in x.stride():
            copy = x.clone()
        else:
            copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    if copy.requires_grad and not is_wrapped(copy):
        # An optimizer takes nothing else that is no leaf.
        copy.retain_grad()
        copy.grad = x.grad if x.is_leaf else None
    return copy


def _out_label(treespec: optree.PyTreeSpec, index: int) -> str:
    return key_path(treespec.accessors()[index], "outs")


def _label(accessor: optree.PyTreeAccessor) -> str:
    return key_path(accessor[1:], "kwargs" if accessor[0].entry else "args")  # type: ignore[arg-type] - a slice is one


def functionalize_mutations(fn: Callable[..., Any], *, keep_data_mutations: bool = False) -> PureFunction:
    """`fn` as a function that leaves its inputs untouched, and returns what it would have written to them.

    Writes to values (`add_`, `copy_`, `x[i] = ...`, through views, of inputs that share memory) and to metadata
    (`transpose_`, `resize_`, `set_`) all count. Derivatives, of any order, are those of `fn`; leaves that require grad
    may be written to. Outputs that are inputs, or views of inputs, still are. `make_fx` records a graph without writes.

    An input counts as written to if an operation wrote to its memory, whatever the values; if one of several inputs
    that overlap in memory is written to, all of them are. A metadata change that was taken back does not count.

    Args:
        fn: Function of pytrees.
        keep_data_mutations: Whether new values are copied, at the end, to the inputs they belong to, instead of being
            returned; where an input requires grad, or its metadata changed as well, they are returned all the same.

    Returns:
        `pure(*args, **kwargs) -> (output, mutated)`; `mutated` is an `OrderedDict` from key path to new value, in the
        order of the input leaves. `pure.in_place(*args, **kwargs) -> output` copies everything back.

    Example:
        >>> def step(x, total):
        ...     total.add_(x)
        ...     return x * 2
        >>> pure = functionalize_mutations(step)
        >>> total = torch.zeros(2)
        >>> pure(torch.ones(2), total)
        (tensor([2., 2.]), OrderedDict([('args[1]', tensor([1., 1.]))]))
        >>> total
        tensor([0., 0.])
        >>> pure.in_place(torch.ones(2), total), total
        (tensor([2., 2.]), tensor([1., 1.]))
    """
    return PureFunction(fn, keep_data_mutations=keep_data_mutations)
