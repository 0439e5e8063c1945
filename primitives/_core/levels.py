"""Functions of tensors that are computed again by whoever differentiates them, at one level after another.

The levels are those of `torch.func`, and eager autograd and `forward_ad` below them.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import _C, Tensor
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.utils import unwrap_dead_wrappers
from torch.autograd import forward_ad
from torch.overrides import _pop_mode_temporarily

from primitives._core.autograd import function_class, unpack_dual
from primitives._core.dtypes import has_derivatives

# A class of `recomputation`, which builds on this.
Recomputable = Any
Tensors = tuple[Tensor, ...]

_FRONT = _C.DispatchKey.FuncTorchDynamicLayerFrontMode
# Keys that a level of torch.func excludes from dispatch (`keysToExcludeWhenEnteringDynamicLayer`).
_EXCLUDED_WITHIN = functools.reduce(
    operator.or_,
    (
        _C.DispatchKeySet(_C._dispatch_key_parse(name))
        for name in (
            "FuncTorchDynamicLayerFrontMode",
            "FuncTorchBatched",
            "FuncTorchVmapMode",
            "FuncTorchGradWrapper",
            "Batched",
            "BatchedNestedTensor",
            "VmapMode",
            "Functionalize",
            "Conjugate",
            "Negative",
            "ZeroTensor",
            "Tracer",
            "DeferredInit",
            "PythonTLSSnapshot",
        )
    ),
)


def _is_entered() -> bool:
    """Whether an operator has been dispatched to the innermost transform, and runs there."""
    return _C._dispatch_tls_is_dispatch_key_excluded(_FRONT)


def recomputed(function: Recomputable, tensors: Sequence[Tensor], kept: Sequence[Any] = ()) -> Tensors:
    """`function(*tensors, *kept)`, computed again by whoever differentiates it: here, or further out.

    The derivatives of the function are functions of `tensors` alone. It may be called by a user or a rule, and by what
    an operator runs at a level that it has been dispatched to.
    """
    interpreter = _functorch.peek_interpreter_stack()
    if interpreter is None:
        if _C._dispatch_tls_is_dispatch_key_excluded(_C.DispatchKey.AutogradOther):
            return function(*tensors, *kept)
        may_move = forward_ad._current_level >= 0 and _C._is_fwd_grad_enabled()
    else:
        may_move = interpreter.key() == _functorch.TransformType.Jvp
    is_entered = interpreter is not None and _is_entered()
    if may_move:
        duals = [unpack_dual(x) for x in tensors]
        moving = [i for i, (_, x_dot) in enumerate(duals) if x_dot is not None]
        if moving and interpreter is None and torch.is_grad_enabled() and _C._any_requires_grad(*tensors):
            # Autograd keeps duals: a backward pass before the level ends has tangents.
            return _Recomputed.apply(False, function, len(tensors), *tensors, *kept)
        if moving:
            pushforward = function.pushforward(len(tensors), moving)
            both = [*(x for x, _ in duals), *(duals[i][1] for i in moving)]
            values = _outside(pushforward, len(both), both) if is_entered else recomputed(pushforward, both)
            pairs = zip(values, pushforward.tangents(values), strict=False)
            return tuple(y if y_dot is None else make_dual(y, y_dot) for y, y_dot in pairs)
    if is_entered:
        # No transform can be entered twice: it keeps what it sees. That of forward mode sees nothing that moves.
        return function(*tensors, *kept)
    if interpreter is None and not (torch.is_grad_enabled() and _C._any_requires_grad(*tensors)):
        return function(*tensors, *kept)
    return function.recorded(tensors, kept)


def make_dual(y: Tensor, y_dot: Tensor) -> Tensor:
    """With a tangent at this level, which torch copies where its strides are others: not to elements that overlap."""
    y = y.clone() if 0 in y.stride() and y.stride() != y_dot.stride() else y
    return torch._VF._make_dual(y, y_dot, level=0)  # type: ignore[attr-defined] - no stub


def recorded_at_each_level(function: Recomputable, tensors: Sequence[Tensor], kept: Sequence[Any]) -> Tensors:
    """The results, differentiable at each level of reverse mode, and mapped by each `vmap`.

    Custom functions of torch go through the levels by trees and operators of functions, which takes longer than most
    programs run.
    """
    values = unwrap_dead_wrappers((*tensors, *kept))
    if _functorch.peek_interpreter_stack() is None:
        return _Recomputed.apply(False, function, len(tensors), *values)
    with contextlib.ExitStack() as stack:
        # Modes do not look inside, as they do not look into custom functions.
        for _ in range(_C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        return _at_level(function, len(tensors), values)


def _at_level(function: Recomputable, num: int, values: Sequence[Any]) -> Tensors:
    """`recorded` by the innermost transform of `torch.func`."""
    interpreter = retrieve_current_functorch_interpreter()
    level, kind = interpreter.level(), interpreter.key()
    if kind == _functorch.TransformType.Grad:
        # Only what is of the level may require grad there.
        values = [x if _is_of(level, x) else _functorch._wrap_for_grad(x, level) for x in values]
        previous = _functorch.get_single_level_autograd_function_allowed()
        _functorch.set_single_level_autograd_function_allowed(True)
        try:
            return _Recomputed.apply(True, function, num, *values)
        finally:
            _functorch.set_single_level_autograd_function_allowed(previous)
    if kind == _functorch.TransformType.Jvp:
        # Nothing moves here, or `recomputed` would have asked for the pushforward.
        return _outside(function, num, values)
    if kind != _functorch.TransformType.Vmap:
        return function(*values)
    pairs = [_functorch._unwrap_batched(x, level) if isinstance(x, torch.Tensor) else (x, None) for x in values]
    values, in_dims = zip(*pairs, strict=True)
    is_batched = any(axis is not None for axis in in_dims)
    if is_batched:
        function = function.batched(in_dims, interpreter.randomness())  # type: ignore[attr-defined] - of vmap
    with interpreter.lower():
        results = recomputed(function, values[:num], values[num:])
    return tuple(_functorch._add_batch_dim(y, 0, level) for y in results) if is_batched else results


def _is_of(level: int, x: Any) -> bool:
    return not isinstance(x, torch.Tensor) or _functorch.maybe_get_level(x) == level


def _outside(function: Recomputable, num: int, values: Sequence[Any]) -> Tensors:
    """The results by what is outside of this level of derivatives."""
    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    values = [_functorch._unwrap_for_grad(x, level) if isinstance(x, torch.Tensor) else x for x in values]
    # Forward mode leaves it to the caller whether outer levels of reverse mode record, unless an operator runs this.
    records = interpreter.key() == _functorch.TransformType.Grad or _is_entered() or torch.is_grad_enabled()
    with torch.set_grad_enabled(records), forward_ad._set_fwd_grad_enabled(True), interpreter.lower(), _not_entered():
        output = _apart(function, recomputed(function, values[:num], values[num:]), values)
    return tuple(_functorch._wrap_for_grad(y, level) if isinstance(y, torch.Tensor) else y for y in output)


def _not_entered() -> contextlib.AbstractContextManager:
    """Keys of dispatch as before an operator was dispatched to a level."""
    if not _is_entered():
        return contextlib.nullcontext()
    excluded = _C._dispatch_tls_local_exclude_set() - _EXCLUDED_WITHIN
    return _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded)


def _apart(function: Recomputable, output: Tensors, values: Sequence[Any]) -> Tensors:
    """Autograd wants a result that is an argument as a view, and what is kept, a constant, as a tensor of its own."""
    count, others = len(output) - function.num_kept, {*map(id, values)}
    results = [y.view_as(y) if id(y) in others else y for y in output[:count]]
    others.update(map(id, output[:count]))
    return *results, *(y.detach() if id(y) in others else y for y in output[count:])


def _forward(ctx: Any, is_transformed: bool, function: Recomputable, num: int, *values: Any) -> Tensors:
    if is_transformed:
        output = _outside(function, num, values)
    else:
        output = _apart(function, recomputed(function, values[:num], values[num:]), values)
    ctx.is_transformed, ctx.function, ctx.num, ctx.num_values = is_transformed, function, num, len(values)
    tensors = [*values[:num]]
    # The buffers of the caller are about to be written.
    for i in function.changed:
        tensors[i] = tensors[i].clone()
    kept = output[len(output) - function.num_kept :]
    # Sizes come last.
    ctx.sizes = [x for x in kept if not isinstance(x, torch.Tensor)]
    ctx.strides = [x.stride() for x in tensors] if are_saved_by_hooks() else ()
    ctx.save_for_backward(*tensors, *kept[: len(kept) - len(ctx.sizes)])
    ctx.save_for_forward(*values[:num])
    ctx.set_materialize_grads(False)
    constants, ys = function.constants, output[: len(output) - len(ctx.sizes)]
    ctx.mark_non_differentiable(*[y for k, y in enumerate(ys) if k in constants or not has_derivatives(y.dtype)])
    return output


def are_saved_by_hooks() -> bool:
    """Whether what is saved may come back as copies in other strides; a function may read those that it was given."""
    return _top_saved_tensors_default_hooks(True) is not None


def in_strides(x: Tensor, strides: Sequence[int]) -> Tensor:
    """A copy in these strides, where it has others; elements in one place are left as they are."""
    is_kept = x.stride() == strides or 0 in strides
    return x if is_kept else x.new_empty_strided(x.shape, strides).copy_(x)


def version_of(x: Tensor) -> int:
    """How often a tensor has been written; one of inference mode does not say, nor is it written outside of that."""
    return 0 if x.is_inference() else x._version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Of each the same, where time counts."""
    try:
        return [x._version for x in tensors]
    except RuntimeError:  # one of inference mode
        return [*map(version_of, tensors)]


def _backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    num, saved = ctx.num, [*ctx.saved_tensors]
    if ctx.is_transformed:
        # Behind `torch.func.vjp` the level is over, and what it has wrapped does not say what requires grad outside.
        saved = [*unwrap_dead_wrappers(tuple(saved))]
    saved[:num] = map(in_strides, saved, ctx.strides) if ctx.strides else saved[:num]
    wanted = tuple([i for i, needs in enumerate(ctx.needs_input_grad[3 : 3 + num]) if needs])
    given = tuple([k for k, y_bar in enumerate(cotangents) if y_bar is not None])
    bars: list[Any] = [None] * ctx.num_values
    if given and wanted:
        function = ctx.function.resumed(num, wanted, given)
        given_bars: Any = [cotangents[k] for k in given]
        kept = [*saved[num:], *ctx.sizes] if function.resumes else ()
        found = recomputed(function, [*saved[:num], *given_bars], kept)
        zeros = function.zeros
        for k, i in enumerate(wanted):
            bars[i] = None if k in zeros else found[k]
    return None, None, None, *bars


def _jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
    tensors, tangents = [unpack_dual(x)[0] for x in ctx.saved_tensors], tangents[3 : 3 + ctx.num]
    moving = [i for i, x_dot in enumerate(tangents) if x_dot is not None]
    pushforward = ctx.function.pushforward(len(tensors), moving)
    results = pushforward.tangents(recomputed(pushforward, [*tensors, *(tangents[i] for i in moving)]))
    return *results, *[None] * ctx.function.num_kept


# A function of tensors at one level of differentiation; its arguments are all that is saved.
_Recomputed = function_class("Recomputed", forward=_forward, backward=_backward, jvp=_jvp)
