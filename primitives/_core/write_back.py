"""The one place that writes into a tensor a caller owns: an operator that every transform knows how to treat."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch.autograd import forward_ad

from primitives._core.autograd import is_transforming
from primitives._core.errors import MutationError
from primitives._core.fast_path import are_unwatched
from primitives._core.inductor import register_inductor_write
from primitives._core.spec import NAMESPACE, library

# Looked up once: this is asked at every call.
_is_tracing = torch.compiler.is_dynamo_compiling

_library = library(NAMESPACE)
_library.define("write_back(Tensor(a!)[] targets, Tensor[] values) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


def _write_back(targets: list[Tensor], values: list[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def _write_back_autograd(keyset: Any, targets: list[Tensor], values: list[Tensor]) -> None:
    """Called once for each level that differentiates."""
    _refuse_differentiated(targets)
    _overload._handle.redispatch_boxed(keyset & torch._C._after_autograd_keyset, targets, values)


def _refuse_differentiated(targets: list[Tensor]) -> None:
    """Raise unless every target is a constant to this level: a derivative of what is written there would be lost."""
    # Only where a forward-mode level is open: a compiler that traces this must find the write and nothing else.
    dual = forward_ad._current_level >= 0 or is_transforming()
    for target in targets:
        tangent = torch._VF._unpack_dual(target, level=0)[1] if dual else None  # type: ignore[attr-defined] - no stub
        if tangent is not None or (target.requires_grad and torch.is_grad_enabled()):
            raise MutationError(
                "A tensor that is updated in place is being differentiated, and its derivative would be lost. Use the "
                "pure form, which returns the new value (primitives.functional.pure_batch_norm, `pure` of a custom "
                "operator), or detach it."
            )


def _write_back_fake(targets: list[Tensor], values: list[Tensor]) -> None:
    pass


def _write_back_vmap(info: Any, in_dims: tuple, targets: list[Tensor], values: list[Tensor]) -> tuple[None, None]:
    target_axes, value_axes = in_dims
    # Everything is checked before anything is written.
    if any(t is None and v is not None for t, v in zip(target_axes, value_axes, strict=True)):
        raise MutationError(
            "vmap: the values to write differ from sample to sample, but the tensor that they are to be written to has "
            "no batch axis. Use the pure form, which returns them (primitives.tracing.pure_module of a module in "
            "training, primitives.functional.pure_batch_norm, `pure` of a custom operator), or pass a tensor with a "
            "batch axis; a batch norm writes none after eval() or with track_running_stats=False."
        )
    fronts = [t if axis is None else t.movedim(axis, 0) for t, axis in zip(targets, target_axes, strict=True)]
    aligned = [
        v.expand_as(front) if axis is None else v.movedim(axis, 0)
        for v, axis, front in zip(values, value_axes, fronts, strict=True)
    ]
    write_back(fronts, aligned)
    return None, None


_library.impl("write_back", _write_back, "CompositeExplicitAutograd")
_library.impl("write_back", _write_back_autograd, "Autograd", with_keyset=True)
torch.library.register_fake(f"{NAMESPACE}::write_back", _write_back_fake, lib=_library)
torch.library.register_vmap(f"{NAMESPACE}::write_back", _write_back_vmap, lib=_library)
register_inductor_write(f"{NAMESPACE}::write_back", _write_back, _library)
_overload = torch.ops.primitives.write_back.default


def write_back(targets: list[Tensor], values: list[Tensor]) -> None:
    """Copy each of `values` into its target, in place.

    `Tensor.copy_` inside `torch.func.grad` refuses to write what a transform wrapped into a tensor from outside it. As
    an operator, the write happens below the transforms, as it does in torch's own batch norm; a compiler functionalizes
    it.
    """
    if not _is_tracing() and are_unwatched((*targets, *values)):
        # As the dispatcher would do, in less than half of the time.
        _refuse_differentiated(targets)
        _write_back(targets, [value.detach() if value.requires_grad else value for value in values])
    else:
        _overload(targets, values)


def count_up(counter: Tensor) -> None:
    """Add 1 to `counter`, an integer, in place: `write_back` of its next value."""
    if not _is_tracing() and are_unwatched((counter,)):
        counter.add_(1)
    else:
        _overload([counter], [counter + 1])


def cumulative_weight(num_batches: Tensor) -> Tensor:
    """One over the number of batches, in the precision of a Python number where the device has it."""
    dtype = torch.float32 if num_batches.device.type == "mps" else torch.float64
    return num_batches.to(dtype).reciprocal()


def shares_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have one storage, below all transforms."""
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    while _functorch.is_functorch_wrapped_tensor(y):
        y = _functorch.get_unwrapped(y)
    return x is y or torch._C._is_alias_of(x, y)  # type: ignore[attr-defined] - no stub


def spans_overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the bytes that two tensors span in one memory overlap; interleaved ones count too."""
    spans = []
    for z in (x, y):
        first = z.storage_offset()
        past = first + sum((n - 1) * stride for n, stride in zip(z.shape, z.stride(), strict=True)) + 1
        spans.append((first * z.element_size(), (past if z.numel() else first) * z.element_size()))
    return max(first for first, _ in spans) < min(past for _, past in spans)
