"""Modes around a function that is traced, which see each operator: what it writes to, and which values it asks for."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import _C, Tensor
from torch.fx.experimental import proxy_tensor
from torch.nn import functional as F

from primitives._core.errors import MutationError
from primitives._core.inductor import shown_in_a_program
from primitives.tracing import _torch_private as torch_private
from primitives.tracing._errors import current_line
from primitives.tracing._joint.replayed import Replayed
from primitives.tracing._memory import is_dense, memories
from primitives.tracing._watching import written_by

__all__ = ["Functional", "Plain"]

# Before torch 2.13 functionalization refuses what the tracer does not know; copies of constants are read there alone.
_MAY_WRAP_CONSTANTS = torch.__version__ >= "2.13"
_BATCH_NORM = torch.ops.aten.native_batch_norm.default
_FUNCTIONAL_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_ASKS_FOR_SIGNS = F.gaussian_nll_loss.__code__
_LERPS_IN_PLACE = (torch.ops.aten.lerp_.Tensor, torch.ops.aten.lerp_.Scalar)
_DEVICE = torch.ops.prim.device.default
# Autograd asks them of each tangent; a graph has no use for the answers.
_QUESTIONS = (torch.ops.aten.is_same_size.default, torch.ops.aten._has_same_storage_numel.default)
# What makes tensors of literals of a program.
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift.default)


class _Mode(torch_private.TorchDispatchMode):
    """What both have in common.

    Attributes:
        refusal: A tensor from elsewhere that was written to, and the line.
        lines: Where each piece of memory was first written to.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.refusal: tuple[Tensor, str] | None = None
        self.lines: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """The call."""
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], torch_private.FakeTensor):
            # Autograd and transforms ask for it, more often than for anything else.
            return args[0].fake_device
        if torch_private.needs_values(func):
            # Inside operators: `torch.cov` asks whether its number of samples is too small.
            given = [x for x in torch_private.leaves_of(args, kwargs) if isinstance(x, torch.Tensor)]
            values = [*map(torch_private.constant_value, given)]
            if all(x is not None for x in values):
                found = iter(values)
                known: Any = torch_private.mapped_tensors(torch.Tensor, lambda _: next(found), (args, kwargs))
                with torch_private.without_modes():
                    result = func(*known[0], **known[1])
                # A constant of the graph: autograd marks the tensor as one that requires grad.
                return torch_private.mapped_tensors(torch.Tensor, torch.ops.aten.lift_fresh_copy.default, result)
            if any(frame.f_code is _ASKS_FOR_SIGNS for frame, _ in traceback.walk_stack(None)):
                # Whether a variance is negative: it clamps them all the same.
                return False
        # A mode of functions has a say in calls of the user, not in those of autograd.
        with torch_private.without_functions():
            return self._called(func, types, args, kwargs)

    def _called(self, func: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class Functional(_Mode):
    """Inside functionalization. Tensors from elsewhere are wrapped, too: what is made of them may be written to."""

    def __init__(self) -> None:
        super().__init__()
        self._constants: dict[int, tuple[Tensor, Any]] = {}
        # How many elements a tensor had that was taken apart into windows with gaps, by its memory.
        self._gapped: dict[int, int] = {}

    def _called(self, func: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        writes = written_by(func, args, kwargs)
        for number in {number for x in writes if isinstance(x, torch.Tensor) for number in memories(x)}:
            self.lines.setdefault(number, current_line())
        if func is torch.ops.aten.unfold.default and args[3] > args[2]:
            self._gapped.update({number: args[0].numel() for number in memories(args[0])})
        if self._gapped and any(x.numel() < self._gapped.get(n, 0) for x in writes for n in memories(x)):
            # Functionalization would make zeros of the gaps.
            raise MutationError(
                f"the function writes, at {current_line()}, to a part of a tensor that unfold has cut into windows "
                "with gaps between them. Take the windows of a clone, or write to slices of another one."
            )
        if _MAY_WRAP_CONSTANTS and not writes and func not in _LIFTS:
            args, kwargs = torch_private.mapped_constants(self._wrapped, (args, kwargs))
        if func in _LERPS_IN_PLACE:
            # Its fake kernel prints tensors on the way: that raises in forward mode, and leaves autograd off.
            result = args[0].copy_(torch.lerp(*args))
        else:
            result = torch_private.called(func, args, kwargs)
        if writes and self.refusal is None:
            written = [x for x, y in self._constants.values() if torch_private.has_data_mutation(y)]
            self.refusal = (written[0], current_line()) if written else None
        return result

    def _wrapped(self, x: Tensor) -> Any:
        if id(x) not in self._constants:
            self._constants[id(x)] = x, torch_private.wrapped(x)
        return self._constants[id(x)][1]


class Plain(_Mode):
    """Without functionalization, which takes a third of the time of a trace: for functions that hardly write.

    A write to memory that the function has allocated, and has no views of but such as reshape all of it, gives its
    tensors other nodes, and so does a change of shape in place. Any other raises.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__()
        self._replayed = Replayed()
        # The tensors of each piece of memory, all of it in one order in each; `None` where others may see it.
        self._whole: dict[int, list[Tensor] | None] = {
            number: None for x in given if isinstance(x, torch.Tensor) for number in memories(x)
        }

    def _called(self, func: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        shown = shown_in_a_program(func)
        if shown is not None:
            with self:
                result = shown(types, args, kwargs)
            if result is not NotImplemented:
                return result
        if func is _BATCH_NORM and args[5] and args[3] is not None:
            # Its schema does not say that it writes statistics.
            *result, mean, var = self._noted(_FUNCTIONAL_BATCH_NORM, args, kwargs)
            self._becomes(func, args[3], mean)
            self._becomes(func, args[4], var)
            return tuple(result)
        if func is torch.ops.aten.detach_.default:
            # Only autograd, above, has anything to do.
            return args[0]
        if func in _QUESTIONS:
            with torch_private.unrecorded():
                return func(*args, **kwargs)
        if written_by(func, args, kwargs):
            returning = _returning(func)
            self._becomes(func, args[0], returning and returning(*args, **kwargs))
            return args[0]
        return self._noted(func, args, kwargs)

    def _noted(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        result = self._replayed(func, args, kwargs)
        for y in torch_private.leaves_of(result):
            if isinstance(y, torch.Tensor) and y.layout == torch.strided:
                number = torch_private.memory_of(y)
                known = self._whole.setdefault(number, [] if _allocates(func) else None)
                if known is None or any(y is x for x in known):
                    continue
                if known and not _are_alike(known[0], y):
                    self._whole[number] = None
                else:
                    known.append(y)
        return result

    def _becomes(self, func: Any, x: Tensor, y: Any) -> None:
        """Take `y` for what `func` has written to `x`."""
        known = self._whole.get(torch_private.memory_of(x))
        # A fake tensor with a value is one of a literal, and would keep it.
        if known is None or y is None or any(each.constant is not None for each in known):  # type: ignore[attr-defined] - fakes
            raise MutationError(f"{func} writes to memory that others see.")
        if torch.Tag.inplace_view in func.tags and x.numel() == y.numel():
            is_reshaped = is_dense(y) and all(each is x or _are_alike(each, y) for each in known)
            self._whole[torch_private.memory_of(x)], known = known if is_reshaped else None, [x]
            with torch_private.unrecorded():
                x.as_strided_(y.shape, y.stride(), y.storage_offset())
        elif x.dtype == y.dtype and x.shape == y.shape and x.stride() != y.stride():
            axes = sorted(range(x.dim()), key=x.stride().__getitem__, reverse=True)
            y = y.permute(axes).clone(memory_format=torch.contiguous_format)
            y = y.permute(sorted(range(x.dim()), key=axes.__getitem__))
        if _kind(x) != _kind(y):
            raise MutationError(f"{func} changes more than numbers.")
        for each in known:
            _record(each, y if each.shape == y.shape else torch.ops.aten.view.default(y, each.shape))


def _kind(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.is_conj(), x.is_neg()


def _are_alike(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one memory have the same elements in the same order: from where the first begins on."""
    is_reshaped = x.is_contiguous() and y.is_contiguous() and x.numel() == y.numel() and _kind(x)[2:] == _kind(y)[2:]
    return is_reshaped or _kind(x) == _kind(y)


@functools.cache
def _allocates(func: Any) -> bool:
    """Whether what an operator returns is never a view: it says so, and is not composed of others."""
    is_operator = torch_private.schema_of(func) is not None and _C._dispatch_has_kernel(func.name())
    return is_operator and not func._can_decompose() and not any(y.alias_info for y in func._schema.returns)


@functools.cache
def _returning(func: Any) -> Any:
    """The operator that returns what `func` writes to its first argument; `None` if torch has none."""
    schema = torch_private.schema_of(func)
    # After `set_` a tensor has the memory of another, which the operator that returns it does not say.
    if not schema.name.endswith("_") or len(schema.returns) != 1 or schema.name == "aten::set_":
        return None
    namespace, name = schema.name.split("::")
    return getattr(getattr(getattr(torch.ops, namespace), name[:-1], None), func._overloadname, None)


def _record(x: Tensor, y: Tensor) -> None:
    """Take `y` for the value of `x` from here on."""
    mode: Any = proxy_tensor.get_proxy_mode()
    proxy_tensor.set_proxy_slot(x, mode.tracer, proxy_tensor.get_proxy_slot(y, mode.tracer))
    x.is_written = True  # type: ignore[attr-defined] - set here
