"""Calls that torch's own C++ nodes record: their backward operators get the derivatives that torch has wrong.

The first-order backward pass of such a node is ATen's. Where it is recorded itself (`create_graph=True`), the operator
that it calls, such as `native_layer_norm_backward`, takes the formula from here. Torch numbers its nodes, so that this
holds after the repair has ended, on every thread, and for nodes that `primitives.functional` made without any repair.
"""

from __future__ import annotations

import functools
import importlib
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import _C, Tensor
from torch._C import _autograd, _functorch  # type: ignore[attr-defined] - no stub
from torch._ops import OpOverload
from torch.autograd import forward_ad

from primitives._audit.table import verdicts_of
from primitives._core.decomposition import decomposition_table
from primitives._core.fast_path import are_unwatched
from primitives._repair.dispatcher import DEVICES, Registrations, has_kernel
from primitives._repair.state import carries_tangent, is_active, is_repairing, repairing, without_subclass

__all__ = ["IN_PLACE", "backward_name", "backward_operators", "install_backwards", "keep_repaired", "recorded"]

aten = torch.ops.aten
_lock, _registrations = threading.Lock(), Registrations()
_next_number = _autograd._get_sequence_nr


class _Recorded:
    """The nodes that were recorded for this package are among those with a number below `until`.

    Each thread counts its own nodes: a node of torch alone may pass for one of ours, never the other way round.
    """

    until: float = 0


def keep_repaired(until: float | None = None) -> None:
    """Have all nodes up to a number, those that this thread has recorded so far, stay repaired."""
    with _lock:
        _Recorded.until = max(_Recorded.until, _next_number() if until is None else until)


def _is_ours() -> bool:
    """Whether a repaired node runs its backward pass, or torch is repaired here."""
    node: Any = _C._current_autograd_node()
    return is_active() or (node is not None and node._sequence_nr() < _Recorded.until)


def recorded(y: Tensor) -> Tensor:
    """`y`, which torch has recorded, with the derivatives of this package."""
    if y.requires_grad and _next_number() > _Recorded.until:
        install_backwards()
        keep_repaired()
    return y


@functools.cache
def _module(name: str) -> Any:
    """Looked up at its first call, since the functions that mark their nodes lie beside these primitives."""
    return importlib.import_module(f"primitives.ops.{name}")


def _unmasked(bars: Sequence[Any], mask: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(bar if want else None for bar, want in zip(bars, mask, strict=True))


def _are_of_one_dtype(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a primitive takes these; torch's statistics of half precision are in half precision on the CPU."""
    return x.dtype in (torch.float32, torch.float64) and all(y is None or y.dtype == x.dtype for y in others)


def _layer_norm(*args: Any) -> Any:
    y_bar, x, shape, mean, rstd, weight, bias, mask = args
    if not (x.numel() > 0 and are_unwatched((x, rstd)) and _are_of_one_dtype(x, y_bar, mean, weight, bias)):
        return decomposition_table[aten.native_layer_norm_backward.default](*args)
    rows = x.shape[: x.dim() - len(shape)]
    mask = (mask[0], mask[1] and weight is not None, mask[2] and bias is not None)
    statistics = mean.reshape(rows), rstd.reshape(rows)
    norm, given = _module("norms.layer_norm"), (y_bar.contiguous(), x, weight, *statistics)
    bars = norm.layer_norm_bwd_p(*given, *norm.NormOptions(len(shape), _eps(x, rstd)), mask)
    return _unmasked(bars, mask)


def _eps(x: Tensor, rstd: Tensor) -> float:
    """What separates the variance from 1 / rstd**2, which torch does not hand on: of the row that shows it best."""
    with _C._AutoDispatchBelowAutograd():
        rstd = rstd.flatten().double()
        row = rstd.nan_to_num(nan=-math.inf).argmax()
        return (rstd[row] ** -2 - x.reshape(len(rstd), -1)[row].double().var(correction=0)).item()


def _batch_norm(*args: Any) -> Any:
    y_bar, x, weight, _running_mean, _running_var, mean, rstd, training, eps, mask = args
    if not training or x.numel() == 0 or not _are_of_one_dtype(x, y_bar, mean, weight):
        return decomposition_table[aten.native_batch_norm_backward.default](*args)
    norm, given = _module("norms.batch_norm"), (y_bar.contiguous(), x, weight, mean, rstd)
    bars = norm.batch_norm_bwd_p(*given, *norm.ChannelOptions(eps), tuple(mask))
    return _unmasked(bars, mask)


def _attention(
    o_bar: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if attn_mask is not None:
        attn_mask = attn_mask.reshape([1] * (q.dim() - attn_mask.dim()) + [*attn_mask.shape])
    is_mask = attn_mask is not None and attn_mask.dtype == torch.bool
    bias, mask = (None, attn_mask) if is_mask else (attn_mask, None)
    if attn_mask is not None:
        # Torch says 0.
        lse = lse.masked_fill(_module("attention.cpu_attention").sees_no_key(attn_mask, lse), -math.inf)
    options = mask, None, None, scale, is_causal, 0.0, (True, True, True, False)
    return _module("attention.attention").attention_bwd_p(o_bar, None, q, k, v, bias, o, lse, *options)[:3]


def _has_lost_sums(*args: Any, attn_mask: Tensor | None = None, **_: Any) -> bool:
    """Whether torch's backward of attention takes 1 for each probability of some row."""
    return (
        attn_mask is not None
        and attn_mask.dtype != torch.bool
        and _module("attention.cpu_attention").has_lost_sums(args[5])
    )


_FORMULAS: dict[OpOverload, Callable[..., Any]] = {
    aten.native_layer_norm_backward.default: _layer_norm,
    aten.native_batch_norm_backward.default: _batch_norm,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention,
}


# Backward operators, and whether torch's own result for some arguments is wrong.
_WRONG_AT_ONCE = {"aten::_scaled_dot_product_flash_attention_for_cpu_backward": _has_lost_sums}
# Operators whose nodes call a backward operator of another name.
_ALIKE = {
    "_native_batch_norm_legit": "native_batch_norm",
    "_batch_norm_with_update": "batch_norm",
    "_batch_norm_no_update": "batch_norm",
}


def backward_name(operator: OpOverload) -> str:
    """Name of the operator that torch's node of an operator calls in its backward pass, if it has one of its own."""
    return f"aten::{_ALIKE.get(operator._opname, operator._opname)}_backward"


@functools.cache
def backward_operators() -> dict[str, Callable[..., Any]]:
    """Formulas of backward operators whose derivatives torch has wrong, by name."""
    formulas = dict(_FORMULAS)
    for overload, formula in decomposition_table.items():
        if overload.namespace == "aten" and overload._opname.endswith("_backward") and overload not in formulas:
            forward = getattr(aten, overload._opname.removesuffix("_backward"), None)
            is_right = forward is not None and not verdicts_of(forward.default).beyond(0)
            if has_kernel(overload.name(), "Autograd") and not is_right:
                formulas[overload] = formula
    return {overload.name(): formula for overload, formula in formulas.items()}


def _kernel(name: str, formula: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    is_grad_enabled, peek = torch.is_grad_enabled, _functorch.peek_interpreter_stack
    mistakes_layouts = name == "aten::native_batch_norm_backward"
    is_wrong = _WRONG_AT_ONCE.get(name)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if args[0] is None:  # no cotangent, of which torch's own makes none; a trace would record a tensor
            return None, None, None
        is_plain = forward_ad._current_level < 0 and peek() is None and not _C._len_torch_dispatch_stack()
        is_misread = mistakes_layouts and _is_one_sample_of_two_layouts(*args[:2])
        is_wrong_at_once = is_plain and is_wrong is not None and is_wrong(*args, **kwargs)
        if is_plain and not is_grad_enabled() and not (is_misread or is_wrong_at_once):
            return own(keyset, *args, **kwargs)
        is_ours = _is_ours()
        if is_misread and is_ours:
            args = (torch.empty_like(args[1]).copy_(args[0]), *args[1:])
        if not is_ours or is_repairing(name):
            return own(keyset, *args, **kwargs)
        is_recorded = is_grad_enabled() and _C._any_requires_grad(*args, *kwargs.values())
        if not (is_recorded or is_wrong_at_once or peek() is not None or carries_tangent(args, kwargs)):
            return own(keyset, *args, **kwargs)
        with repairing(name):
            return formula(*map(without_subclass, args), **kwargs)

    return kernel


IN_PLACE: dict[str, Callable[..., Tensor]] = {
    **{"aten::as_strided_": torch.as_strided, "aten::t_": torch.t, "aten::unsqueeze_": torch.unsqueeze},
    **dict.fromkeys(("aten::squeeze_", "aten::squeeze_.dim", "aten::squeeze_.dims"), torch.squeeze),
    **dict.fromkeys(("aten::transpose_", "aten::swapaxes_", "aten::swapdims_"), torch.transpose),
}
"""Operators that change the axes of a tensor in place, and the functions that return a view instead."""
_BATCHED: Any = _C._parse_dispatch_key("Batched")


def _in_place_kernel(function: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that changes the axes of a cotangent where autograd takes a batch of them (`is_grads_batched`).

    Torch's own changes the axes of each slice, views that it then drops: silently nothing happens.
    """

    def kernel(keyset: Any, x: Tensor, *args: Any) -> Any:
        if not _is_ours():
            return own(keyset, x, *args)
        depth = _C._vmapmode_increment_nesting() - 1
        _C._vmapmode_decrement_nesting()
        # One that a tensor lacks would expand it to the size given, which no batch has.
        levels = [i for i in range(depth, 0, -1) if torch._remove_batch_dim(x, i, 0, 0).shape[0]]

        def below(z: Tensor) -> Tensor:
            for level in levels:
                z = torch._remove_batch_dim(z, level, 0, 0)
            return z

        y, memory = function(x, *args), below(x)
        if memory is not below(x):  # a view, since its batch does not come first: torch's rules put it there
            raise NotImplementedError(f"is_grads_batched: {function.__name__}_ of a batch along another axis than 0.")
        of_y = below(y)
        memory.as_strided_(of_y.shape, of_y.stride(), of_y.storage_offset())
        with _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_BATCHED)):
            x.data = y  # the axes alone: a tensor with a batch keeps its own tensor below
        return x

    return kernel


def _group_norm_kernel(own: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of a group norm on the CPU: torch's writes to no memory for a frozen channels_last input, and dies.

    For a bias without a weight it raises.
    """

    def kernel(keyset: Any, y_bar: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Any, *rest: Any) -> Any:
        *sizes, mask = rest
        dies, raises = not (mask[0] or x.is_contiguous()), weight is None and mask[2]
        if not (dies or raises) or not _is_ours():
            return own(keyset, y_bar, x, mean, rstd, weight, *sizes, mask)
        weight = rstd.new_ones(x.shape[1], dtype=x.dtype) if weight is None else weight
        return _unmasked(own(keyset, y_bar, x, mean, rstd, weight, *sizes, (True, *mask[1:])), mask)

    return kernel


def _convolution_kernel(own: Callable[..., Any]) -> Callable[..., Any]:
    """The backward pass of a convolution's, of which torch makes two convolutions and some views for each group.

    Those are a thousand for a depthwise convolution, and for a transposed one with `output_padding` torch's raises. The
    backward pass is bilinear in its cotangent and in input or weight, so that its own is convolutions of all groups.
    """

    def kernel(keyset: Any, *args: Any) -> Any:
        x_bar, weight_bar, bias_bar, cotangent, weight, x, *geometry, mask = args
        *_, is_transposed, padding, groups = geometry
        if (groups == 1 and not (is_transposed and any(padding))) or not _is_ours():
            return own(keyset, *args)
        terms = []
        if mask[0]:
            terms += [torch.convolution(x_bar, weight, None, *geometry)] if x_bar is not None else []
            terms += [torch.convolution(x, weight_bar, None, *geometry)] if weight_bar is not None else []
            terms += [bias_bar.view(-1, *[1] * (x.dim() - 2)).expand_as(cotangent)] if bias_bar is not None else []
        of_x = of_weight = None
        if mask[1] and weight_bar is not None:
            of_x, _, _ = aten.convolution_backward(cotangent, x, weight_bar, None, *geometry, [True, False, False])
        if mask[2] and x_bar is not None:
            _, of_weight, _ = aten.convolution_backward(cotangent, x_bar, weight, None, *geometry, [False, True, False])
        return sum(terms[1:], terms[0]) if terms else None, of_x, of_weight

    return kernel


def _is_one_sample_of_two_layouts(y_bar: Tensor, x: Tensor) -> bool:
    """Whether torch's backward of a batch norm on the CPU reads `y_bar` by the strides of `x`, which differ."""
    return x.shape[0] == 1 and x.is_cpu and y_bar.stride() != x.stride()


def install_backwards() -> None:
    """Register the derivatives of backward operators, once: torch's own run for nodes that are not repaired."""
    with _lock:
        if not _registrations:
            derivatives = [
                (name, f"Autograd{device}", functools.partial(_kernel, name, formula))
                for name, formula in backward_operators().items()
                for device in DEVICES
            ]
            views = [
                (name, "Batched", functools.partial(_in_place_kernel, function)) for name, function in IN_PLACE.items()
            ]
            group_norm = "aten::native_group_norm_backward", "AutogradCPU", _group_norm_kernel
            convolution = "aten::_convolution_double_backward"
            again = [(convolution, f"Autograd{device}", _convolution_kernel) for device in DEVICES]
            _registrations.add([*derivatives, *views, group_norm, *again])
