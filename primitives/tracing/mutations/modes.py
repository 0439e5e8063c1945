"""Modes that watch what a function writes, and record the writes of a traced function as new values."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass
from torch.utils._pytree import arg_tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from primitives.core.errors import MissingRuleError, MutationError
from primitives.tracing.errors import depends_on_inputs, has_advice, refuse_collective, refuse_data
from primitives.tracing.joint.dirty_inputs import DirtyInputs
from primitives.tracing.joint.leaf_guard import LeafGuard
from primitives.tracing.joint.reshaped import ReshapedViews
from primitives.tracing.lines import current_line
from primitives.tracing.memory import bottom, extent, memories
from primitives.tracing.watching import BATCH_NORMS, WriteWatcher, has_aliases, written_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

__all__ = ["FUNCTION", "Recorder", "Watch", "make_mode", "unrecorded"]

FUNCTION = "functionalize_mutations"
_aten = torch.ops.aten
_write_back = torch.ops.primitives.write_back.default


def unrecorded() -> Any:
    """Context in which `make_fx` records nothing, of sizes neither."""
    return proxy_tensor.disable_proxy_modes_tracing()


def _copied(x: Tensor, end: Any) -> Tensor:
    """Copy of `x` with its strides and offset; all of the memory up to `end`, flat, where that is given."""
    if end is None and (
        x.layout != torch.strided or (x.storage_offset() == 0 and _aten.is_non_overlapping_and_dense.default(x))
    ):
        return x.clone()
    first, last = (0, end) if end is not None else extent(x)
    flat = torch.empty_strided((last,), (1,), dtype=x.dtype, device=x.device)
    flat[first:].copy_(x.as_strided((last - first,), (1,), first))
    return flat if end is not None else flat.as_strided(x.shape, x.stride(), x.storage_offset())


class Watch(WriteWatcher):
    """Context that copies inputs, notes which copies are written to, and refuses writes to anything else from outside.

    It lies below autograd and the transforms of `torch.func`: a copy is one for all of them.

    Attributes:
        places: Place of the input, by the memory of its copy.
        hidden_matters: Places of the inputs whose derivative a write would falsify that autograd does not see.
        unrelated: Places whose inputs share memory that their copies do not share.
        copies: What stands for the inputs.
        written: Places that were written to.
        views: Views whose shapes change, where a joint function differentiates.
        handed_out: Places whose memory was given to what is no operation, which may write to it.
        records: Whether the copies stand for the inputs in a graph, aliases of them included.
    """

    supports_higher_order_operators = True
    records = False

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, list[int]] = {}
        self.hidden_matters: dict[int, bool] = {}
        self.unrelated: dict[int, str] = {}
        self.labels: Sequence[str] = ()
        self.copies: Sequence[Any] = ()
        self.written: set[int] = set()
        self.handed_out: set[int] = set()
        self.views = ReshapedViews(FUNCTION)
        self._own: set[int] = set()
        self._dirty = DirtyInputs()
        self._copy_next: tuple[Any] | None = None
        self._armed = self._in_joint = False

    def copy_of(self, x: Tensor, end: Any = None) -> Tensor:
        """Copy of `x`, of which `x` is an input to autograd; see `_copied`."""
        self._copy_next = (end,)
        try:
            with torch.enable_grad():
                return x.clone()
        finally:
            self._copy_next = None

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Context in which writes are noted."""
        self._armed = True
        self._in_joint = any(isinstance(mode, LeafGuard) for mode in _get_current_dispatch_mode_stack())
        try:
            yield
        finally:
            self._armed = False

    def finish(self) -> None:
        """Called when the function has returned, outside the context."""
        self._dirty.settle(at_end=True)

    def is_symbolic(self, x: Tensor) -> bool:
        """Whether the value of `x` is one that Python must not read."""
        return depends_on_inputs(x)

    def on_data(self, x: Tensor) -> None:
        """Called before the `.data` of `x` is assigned."""
        for place in {place for number in memories(x) for place in self.places.get(number, ())}:
            if x.requires_grad:
                raise MutationError(
                    f"{FUNCTION}: {self.labels[place]} requires grad and is given other data through .data, which "
                    f"autograd does not see, at {current_line()}. Use copy_(), or return the new value instead."
                )

    def on_memory(self, x: Tensor) -> None:
        """Called before the memory of `x` is handed out, where it may be written to without an operation."""
        self.handed_out.update(place for number in memories(x) for place in self.places.get(number, ()))

    def on_written_copy(self, x: Tensor) -> None:
        """Called when a pure function within has written to a copy of `x`."""
        for place in {place for number in memories(x) for place in self.places.get(number, ())}:
            self._check_related(place)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Look at the writes of `func` and run it."""
        kwargs = kwargs or {}
        tensors = [x for x in arg_tree_leaves(*args, **kwargs) if isinstance(x, torch.Tensor)]
        if any(map(is_traceable_wrapper_subclass, tensors)):
            # The subclass takes the operation apart; its parts arrive here.
            return NotImplemented
        if self._copy_next is not None and func is _aten.clone.default:
            result = self._copy(args[0], *self._copy_next)
        elif func is _write_back:
            for target, value in zip(*args, strict=True):
                self.__torch_dispatch__(_aten.copy_.default, types, (target, value))
            return None
        else:
            if self._armed:
                self._dirty.settle()
                written = written_by(func, args, kwargs)
                if self._in_joint:
                    self.views.before(func, args, kwargs, written)
                for x in written:
                    self._check(func, x)
            result = self._run(func, args, kwargs)
            self.views.after(func, result)
        self._note(func, tensors, result)
        return result

    def _copy(self, x: Tensor, end: Any) -> Tensor:
        outer = _recorder()
        return _copied(x, end) if outer is None else outer.copy_of(x, end)

    def _run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _note(self, func: Any, tensors: list[Tensor], result: Any) -> None:
        """Remember memory that was taken inside: writes to it are nobody's business."""
        found = {number for x in arg_tree_leaves(result) if isinstance(x, torch.Tensor) for number in memories(x)}
        if func is not _aten.lift_fresh.default:
            for x in tensors:
                found.difference_update(memories(x))
        self._own |= found

    def _check(self, func: Any, x: Tensor) -> None:
        if x.layout != torch.strided:
            raise MutationError(
                f"{FUNCTION}: a sparse tensor {list(x.shape)} is written to in place, at {current_line()}, and its "
                "memory cannot be told from that of an input. Return the new value instead."
            )
        for number in memories(x):
            places = self.places.get(number)
            if places is None:
                if number not in self._own:
                    raise MutationError(
                        f"{FUNCTION}: a tensor {list(x.shape)} of {x.dtype} that is no input is written to, at "
                        f"{current_line()}. Make it an input; for a module, use functional_call."
                    )
            elif torch.Tag.inplace_view not in func.tags or func._schema.name == "aten::set_":
                for place in places:
                    self._check_input(func, place, x)

    def _check_input(self, func: Any, place: int, x: Tensor) -> None:
        sets = func._schema.name == "aten::set_"
        if not sets:
            self._check_related(place)
        # What a transform wraps does not tell the mode below whether it requires grad.
        told = x.requires_grad or not self.hidden_matters.get(place, False)
        if place in self.hidden_matters and (sets or not (torch.is_grad_enabled() and told)):
            error = MutationError(
                f"{FUNCTION}: {self.labels[place]} is a leaf that requires grad and is written to where autograd does "
                f"not see it (under no_grad, or through detach() or .data), at {current_line()}. Return the new value "
                "instead, or pass it detached."
            )
            if sets or not self._dirty.expect(self.copies[place], error):
                raise error
        if not sets:
            self.written.add(place)

    def check_handed_out(self, place: int) -> None:
        """Count the input at `place`, which was written to without an operation.

        Raises:
            MutationError: If it is a leaf that requires grad.
        """
        self._check_related(place)
        if place in self.hidden_matters:
            raise MutationError(
                f"{FUNCTION}: {self.labels[place]} is a leaf that requires grad and is written to through NumPy or its "
                "storage, which autograd does not see. Return the new value instead."
            )
        self.written.add(place)

    def _check_related(self, place: int) -> None:
        if place in self.unrelated:
            raise MutationError(
                f"{FUNCTION}: {self.labels[place]} is written to, at {current_line()}, and shares memory with "
                f"{self.unrelated[place]} in a way that a copy cannot (under a transform, in a wrapper subclass, in "
                "another dtype, or with elements that overlap). Pass a copy of one of them."
            )


class Recorder(Watch):
    """`Watch` under `make_fx`: what is recorded has no writes, and the tensors of the function stand for new values.

    Every tensor of the function has a shadow in torch's functionalization. The operations are recorded as the
    shadows go through them. After the function, each tensor that is left stands for the value of its shadow: whatever
    reads it later, a backward pass too, sees an ordinary tensor.
    """

    records = True

    def __init__(self) -> None:
        super().__init__()
        self._proxy_mode = proxy_tensor.get_proxy_mode()
        self._functional = FunctionalTensorMode()
        self._shadows: Any = WeakIdKeyDictionary()

    def _shadow(self, x: Tensor) -> Any:
        if isinstance(x, FunctionalTensor):
            return x
        shadow = self._shadows.get(x)
        if shadow is None:
            self._track(x)
            shadow = self._shadows[x] = self._as_shadow(x)
        return shadow

    def _as_shadow(self, value: Tensor) -> Tensor:
        with self._functional:
            return FunctionalTensor.to_functional(value.detach() if value.requires_grad else value)

    @staticmethod
    def _value(shadow: Any) -> Tensor:
        torch._sync(shadow)
        return torch._from_functional_tensor(shadow.elem)

    def _copy(self, x: Tensor, end: Any) -> Tensor:
        value = self._value(self._shadow(x))
        if end is not None:
            value = value.as_strided((end,), (1,), 0)
        with unrecorded():
            copy = _copied(x, end)
        self._shadows[copy] = self._as_shadow(value)
        return copy

    def _run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        refuse_collective(FUNCTION, func)
        if func is _aten.lift_fresh.default and not isinstance(args[0], FunctionalTensor):
            return func(*args)
        if func in BATCH_NORMS[1:]:
            with self:
                return decomposition_table[func](*args, **kwargs)
        shadow_args, shadow_kwargs = tree_map_only(torch.Tensor, self._shadow, (args, kwargs))
        try:
            with self._functional:
                shadows = func(*shadow_args, **shadow_kwargs)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            known = isinstance(error, MutationError) or has_advice(error) or type(error).__module__ != "builtins"
            if known or not has_aliases(func):
                raise
            raise MutationError(
                f"{FUNCTION}: {func} cannot be made pure, at {current_line()}: {str(error).splitlines()[0]}"
            ) from error
        written = written_by(func, args, kwargs)
        if not has_aliases(func) or (written and torch.Tag.inplace_view not in func.tags):
            self._follow(written)
            known = {id(self._shadow(x)): x for x in written}
            # Where nothing else holds it, torch marks a new tensor as one for autograd without a `detach`.
            fresh = not any(isinstance(x, torch.Tensor) for x in arg_tree_leaves(*args, **kwargs))
            adopt = functools.partial(self._adopt, known, fresh)
            return tree_map_only(torch.Tensor, adopt, shadows)
        with unrecorded():
            result = func(*args, **kwargs)
        for x, shadow in zip(arg_tree_leaves(result), arg_tree_leaves(shadows), strict=True):
            if isinstance(x, torch.Tensor) and x not in self._shadows:
                self._shadows[x] = shadow if isinstance(shadow, FunctionalTensor) else self._as_shadow(shadow)
        return result

    def _adopt(self, known: dict[int, Tensor], fresh: bool, shadow: Tensor) -> Tensor:
        """The tensor of the function for a shadow: a new one, unless it is known."""
        if id(shadow) in known:
            return known[id(shadow)]
        if not isinstance(shadow, FunctionalTensor):
            shadow = self._as_shadow(shadow)
        value = self._value(shadow)
        if fresh or not isinstance(value, FakeTensor):
            # The function may write it, and the shadow may need it as it is.
            recorded = self._slot(value)
            with unrecorded():
                value = _copied(value, None)
            self._set_slot(value, recorded)
        self._shadows[value] = shadow
        return value

    def _follow(self, written: list[Tensor]) -> None:
        """Write to the tensors of the function what was written to their shadows."""
        for x in written:
            shadow = self._shadow(x)
            with unrecorded():
                if shadow.shape != x.shape:
                    x.resize_(shadow.shape)
            if not isinstance(x, FakeTensor):
                value = self._value(shadow)
                with unrecorded():
                    x.copy_(value)

    def _track(self, x: Tensor) -> None:
        """Make a tensor from outside a constant of the graph, which functionalization wants of it in torch 2.11."""
        tracer: Any = self._proxy_mode.tracer  # type: ignore[union-attr] - there is one
        if self._slot(x) is None:
            proxy = torch.fx.Proxy(tracer.create_arg(x), tracer)
            constant = None if isinstance(x, FakeTensor) else x
            self._set_slot(x, proxy_tensor._ProxyTensor(proxy, constant))

    def _slot(self, x: Tensor) -> Any:
        tracer: Any = self._proxy_mode.tracer  # type: ignore[union-attr] - there is one
        return proxy_tensor.get_proxy_slot(x, tracer, None)

    def _set_slot(self, x: Tensor, slot: Any) -> None:
        tracer: Any = self._proxy_mode.tracer  # type: ignore[union-attr] - there is one
        if slot is not None:
            proxy_tensor.set_proxy_slot(x, tracer, slot)

    def is_symbolic(self, x: Tensor) -> bool:
        """Whether the value of `x` is one of the graph."""
        return bottom(x) in self._shadows or depends_on_inputs(x)

    def on_data(self, x: Tensor) -> None:
        """Raise: no operation can be recorded for it."""
        refuse_data(FUNCTION, x)

    def on_memory(self, x: Tensor) -> None:
        """Nothing: the memory of what is no input is anybody's."""

    def finish(self) -> None:
        """Let each tensor that is left stand for its value, in the graph."""
        super().finish()
        # All are read before any is set: a value may itself be a tensor of the function.
        final = [(x, self._slot(self._value(shadow))) for x, shadow in list(self._shadows.items())]
        for x, slot in final:
            self._set_slot(x, slot)
        self._shadows.clear()


def make_mode() -> Watch:
    """The mode that is needed here.

    Raises:
        MissingRuleError: Under `make_fx(pre_dispatch=True)`.
    """
    proxy_mode: Any = proxy_tensor.get_proxy_mode()
    if proxy_mode is None:
        return Watch()
    if getattr(proxy_mode, "pre_dispatch", False):
        raise MissingRuleError(
            f"{FUNCTION}: make_fx(pre_dispatch=True) records writes before they can be made pure. Leave pre_dispatch "
            "out."
        )
    # Where torch functionalizes already, its graph has no writes.
    functional = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)  # type: ignore[attr-defined] - no stub
    return Watch() if functional is not None or _recorder() is not None else Recorder()


def _recorder() -> Recorder | None:
    """The recorder that is in force: functions within its function leave the recording to it."""
    found = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)]
    return found[-1] if found else None
