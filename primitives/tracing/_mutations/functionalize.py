"""Writes to inputs as further outputs: `functionalize_mutations`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from primitives._core.autograd import apply_linear
from primitives._core.errors import MissingRuleError, MutationError
from primitives.tracing import _torch_private as torch_private
from primitives.tracing._errors import current_line, typed_errors
from primitives.tracing._leaves import Leaves, refuse_opaque
from primitives.tracing._memory import is_wrapped, memories, refuse_sharing
from primitives.tracing._watching import UserCalls, written_by

_FUNCTION = "functionalize_mutations"
_aten = torch.ops.aten
# They update the running statistics, in training.
_BATCH_NORMS = (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default)
_lift_fresh = _aten.lift_fresh.default
_write_back = torch.ops.primitives.write_back.default


class _Watch(torch_private.TorchDispatchMode):
    """Context that notes which memory is written to, and refuses writes to what is neither an input nor made inside."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self.copied: set[int] = set()
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
        written = written_by(func, args, kwargs)
        # The schemas of these say nothing of what they write.
        if func in _BATCH_NORMS and args[5]:
            written = [x for x in args[3:5] if x is not None]
        elif func is _write_back:
            written = torch_private.leaves_of(args[0])
        for x in written:
            if torch_private.is_functional(x):
                continue
            # The memory of a sparse tensor cannot be told from that of an input.
            if x.layout != torch.strided or not self._own.issuperset(memories(x)):
                raise MutationError(
                    f"{_FUNCTION}: a tensor {list(x.shape)} of {x.dtype} that is not an input, or is sparse, is "
                    f"written to, at {current_line()}. Make it an input, or return the new value; for a module, use "
                    "pure_module."
                )
            is_view = torch.Tag.inplace_view in getattr(func, "tags", ())
            if not is_view or torch_private.schema_of(func).name == "aten::set_":
                self.written.update(memories(x))
        result = torch_private.called(func, args, kwargs)
        if func is _lift_fresh or not _may_alias(func):
            self.take([x for x in torch_private.leaves_of(result) if isinstance(x, torch.Tensor)])
        return result


@functools.cache
def _may_alias(func: Any) -> bool:
    """Whether a result may share memory with an argument."""
    schema = torch_private.schema_of(func)
    return schema is not None and any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))


def _geometry(x: Tensor) -> tuple[Any, ...]:
    return (tuple(x.shape), *((tuple(x.stride()), x.storage_offset()) if x.layout == torch.strided else (x.layout,)))


class _Input:
    """An input of the function, by its key path, and what the function gets in its place."""

    def __init__(self, label: str, x: Tensor, used: Tensor) -> None:
        self.label, self.x, self.used = label, x, used
        self._geometry, self._memories, self._grad_fn = _geometry(used), memories(used), used.grad_fn
        self._fits = used.layout == torch.strided and used.shape == x.shape and used.stride() == x.stride()
        self.is_back = False

    def look(self, watch: _Watch) -> None:
        """See what the function has done to it."""
        used = self.used
        self.is_reshaped = _geometry(used) != self._geometry
        self.is_data, is_moved = not watch.written.isdisjoint(self._memories), memories(used) != self._memories
        if torch_private.is_functional(used):
            self.is_data, is_moved = torch_private.has_data_mutation(used), torch_private.has_other_storage(used)
        if is_moved or used.numel() != self.x.numel():
            raise MutationError(
                f"{_FUNCTION}: {self.label} is given other memory, or another number of elements, in place (as by "
                "resize_ or set_). Return the new tensor instead."
            )
        self.is_changed = self.is_data or self.is_reshaped
        # Autograd has seen none of the writes: torch then takes the new value for one without a history.
        self.is_hidden = used.grad_fn is self._grad_fn

    def outside(self, y: Tensor) -> Tensor | None:
        """The input, or the view of it, that `y` is of what the function got; `None` if it has no such view."""
        x = self.x
        if y is self.used and (self.is_back or not self.is_changed):
            return x
        is_view = y is self.used or (self._memories and memories(y) == self._memories)
        if not is_view or (self.is_data and not self.is_back):
            return None
        if not self._fits or is_wrapped(x) or y.dtype != x.dtype or (y.requires_grad and not x.requires_grad):
            return None
        source = x if y.requires_grad else x.detach()
        return source.as_strided(y.shape, y.stride(), x.storage_offset() + y.storage_offset() - self._geometry[2])

    def write_back(self, value: Tensor) -> None:
        """Make the input what the function has made of it."""
        x, used = self.x, self.used
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_hidden):
            if self.is_reshaped:
                x.as_strided_(used.shape, used.stride(), x.storage_offset() + used.storage_offset() - self._geometry[2])
            if self.is_data:
                x.copy_(value)
        self.is_back = True


class _Call:
    """A call of the function, and what it has come to."""

    def __init__(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], namespace: str) -> None:
        if torch_private.is_tracing(pre_dispatch=True):
            raise MissingRuleError(
                f"{_FUNCTION}: make_fx(pre_dispatch=True) records writes before they can be made pure. Leave "
                "pre_dispatch out."
            )
        given = Leaves.of((args, kwargs), ("args", "kwargs"), namespace)
        refuse_opaque(_FUNCTION, given.values, given.label)
        # Each tensor, by the first of its places.
        first: dict[Tensor, str] = {}
        for x, label in zip(given.values, given.labels(range(len(given.values))), strict=True):
            if isinstance(x, torch.Tensor):
                first.setdefault(x, label)
        is_tracing = torch_private.is_tracing()
        # A transform outside of this, or functionalization, makes its own graph of writes to copies. Else a trace runs
        # on functional tensors, where writes become pure operations.
        in_transform = any(torch_private.is_functional(x) or torch_private.is_in_a_transform(x) for x in first)
        is_world = is_tracing and not in_transform
        watch = _Watch()
        with typed_errors(_FUNCTION), torch_private.functional_world() if is_world else contextlib.nullcontext():
            with watch:
                leaves = [torch_private.wrapped(x) if is_world else x for x in first]
                used = [x if is_world and not x.requires_grad else _copied(x) for x in leaves]
            self.inputs = [_Input(label, x, y) for (x, label), y in zip(first.items(), used, strict=True)]
            watch.take(used)
            watch.written.clear()
            replaced = dict(zip(first, used, strict=True))
            with watch, UserCalls(_FUNCTION) if is_tracing else contextlib.nullcontext():
                values = [replaced[x] if isinstance(x, torch.Tensor) else x for x in given.values]
                inner_args, inner_kwargs = given.join(values)
                self._outs = Leaves.of(fn(*inner_args, **inner_kwargs), "outs", namespace)
            for each in self.inputs:
                each.look(watch)
            # By identity, the tensors of the caller for functional ones.
            self._plain = self._plain_tensors([*self._outs.values, *used], leaves) if is_world else {}
            refuse_opaque(_FUNCTION, self._outs.values, self._outs.label)
        written = [i for i, each in enumerate(self.inputs) if each.is_data or watch.copied & {*memories(each.used)}]
        refuse_sharing(_FUNCTION, [*first.values()], [*first], written)
        # A function around this one has copies that overlap no more, and must look at its own inputs.
        for mode in torch_private.dispatch_modes():
            getattr(mode, "copied", set()).update(*(memories(self.inputs[i].x) for i in written))

    def _plain_tensors(self, values: Sequence[Any], leaves: Sequence[Tensor]) -> dict[int, Tensor]:
        """Plain tensors of these values, by identity, through which autograd finds the inputs of the function."""
        tensors = {id(y): y for y in values if torch_private.is_functional(y)}
        plain = {key: torch_private.plain(y) for key, y in tensors.items()}
        tracked = [key for key, y in tensors.items() if y.requires_grad]
        if not (tracked and torch.is_grad_enabled()):
            return plain
        sources = [(leaf, each.x) for leaf, each in zip(leaves, self.inputs, strict=True) if leaf.requires_grad]

        def transpose(*cotangents: Tensor) -> list[Tensor | None]:
            pairs = [(tensors[key], bar) for key, bar in zip(tracked, cotangents, strict=True) if bar is not None]
            with torch_private.functional_world():
                bars = torch.autograd.grad(
                    [y for y, _ in pairs],
                    [leaf for leaf, _ in sources],
                    [torch_private.wrapped(y_bar) for _, y_bar in pairs],
                    allow_unused=True,
                    retain_graph=True,
                )
                return [torch_private.plain(bar) for bar in bars]

        with torch_private.unrecorded():
            inputs = [x for _, x in sources]
            results = apply_linear(lambda *_: tuple(plain[key] for key in tracked), transpose, *inputs)
        return {**plain, **dict(zip(tracked, results, strict=True))}

    def plain(self, y: Any) -> Any:
        """A leaf, or what the function got, as a tensor of the caller."""
        return self._plain.get(id(y), y)

    def output(self) -> Any:
        """The output, with inputs and views of them where the function returned those of what it got."""
        found: dict[int, Tensor] = {}
        for y in self._outs.values:
            # One tensor for one tensor.
            if isinstance(y, torch.Tensor) and id(y) not in found:
                views = (each.outside(y) for each in self.inputs)
                found[id(y)] = next((view for view in views if view is not None), self.plain(y))
        return self._outs.join([found.get(id(y), y) for y in self._outs.values])

    def new_value(self, each: _Input) -> Tensor:
        """The value of an input afterwards, if it is left alone."""
        view = None if each.is_data else each.outside(each.used)
        value = self.plain(each.used) if view is None else view
        return value.detach() if value.requires_grad and each.is_data and each.is_hidden else value


@dataclasses.dataclass(eq=False)
class PureFunction:
    """A function whose writes to its inputs are outputs; made by `functionalize_mutations`.

    Attributes:
        fn: The function that writes.
        namespace: optree namespace of custom pytree nodes.
    """

    fn: Callable[..., Any]
    namespace: str = ""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, OrderedDict[str, Tensor]]:
        """Call the function, and leave its inputs as they are.

        Args:
            *args: Pytrees.
            **kwargs: Pytrees.

        Returns:
            `(output, mutated)`: what the function returns, and the inputs that it wrote to, as they are afterwards,
            by key path (`"args[0]['w']"`), in the order of the leaves of `args` and then `kwargs`.

        Raises:
            MutationError: If the function writes a tensor that is neither an input nor made inside, or one of several
                inputs that overlap in memory; or gives an input other memory or another number of elements.
            TraceError: In a trace, if it asks for the values of a tensor.
            LeafError: If an object with a tensor inside, that optree does not take apart, is passed or returned.
            MissingRuleError: Under `make_fx(pre_dispatch=True)`.
        """
        call = _Call(self.fn, args, kwargs, self.namespace)
        mutated = OrderedDict((each.label, call.new_value(each)) for each in call.inputs if each.is_changed)
        return call.output(), mutated

    def in_place(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function and copy what it wrote back to its inputs: the effect of `fn(*args, **kwargs)`.

        Args:
            *args: Pytrees.
            **kwargs: Pytrees.

        Returns:
            The result of the function. An alias of an input in it is an alias of that input.

        Raises:
            MutationError: As in a call.
            RuntimeError: If autograd sees a write to a leaf that requires grad.
        """
        call = _Call(self.fn, args, kwargs, self.namespace)
        for each in call.inputs:
            if each.is_changed:
                each.write_back(call.plain(each.used))
        return call.output()


def _copied(x: Tensor) -> Tensor:
    """A copy for the function to write to, with the strides of `x`, to which autograd leads back."""
    with torch.enable_grad():
        if is_wrapped(x) or x.layout != torch.strided or x.is_contiguous() or 0 in x.stride():
            copy = x.clone()
        else:
            copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    if copy.requires_grad and not is_wrapped(copy):
        # An optimizer takes nothing else that is not a leaf.
        copy.retain_grad()
        copy.grad = x.grad if x.is_leaf else None
    return copy


def functionalize_mutations(fn: Callable[..., Any], *, namespace: str = "") -> PureFunction:
    """`fn` as a function that leaves its inputs untouched, and returns what it would have written to them.

    Writes to values (`add_`, `copy_`, `x[i] = ...`, through views, of inputs that share memory) and to metadata
    (`transpose_`, `unsqueeze_`) all count. Derivatives, of any order, are those of `fn`; leaves that require grad
    may be written to. Outputs that are inputs, or views of inputs, still are. `make_fx` records a graph without writes.

    An input counts as written to if an operation wrote to its memory, whatever the values; if one of several inputs
    that overlap in memory is written to, all of them are. A metadata change that was taken back does not count.

    Args:
        fn: Function of pytrees.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        `pure(*args, **kwargs) -> (output, mutated)`; `mutated` is an `OrderedDict` from key path to new value, in the
        order of the input leaves. `pure.in_place(*args, **kwargs) -> output` copies everything back.

    Example:
        >>> import torch, primitives as pr
        >>> def step(x, total):
        ...     total.add_(x)
        ...     return x * 2
        >>> pure = pr.tracing.functionalize_mutations(step)
        >>> total = torch.zeros(2)
        >>> pure(torch.ones(2), total)
        (tensor([2., 2.]), OrderedDict([('args[1]', tensor([1., 1.]))]))
        >>> total
        tensor([0., 0.])
        >>> pure.in_place(torch.ones(2), total), total
        (tensor([2., 2.]), tensor([1., 1.]))
    """
    return PureFunction(fn, namespace)
