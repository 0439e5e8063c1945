"""Recomputation in the backward pass, under every transform: `checkpoint`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import _C
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch.autograd import forward_ad
from torch.utils import checkpoint as torch_checkpoint

from primitives.core.autograd import function_class
from primitives.core.dtypes import has_derivatives
from primitives.core.errors import MissingRuleError
from primitives.func._region import Region

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["checkpoint"]


def checkpoint(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, of which nothing but the arguments is kept: a backward pass computes the rest again.

    It works under every transform, in any nesting, where `torch.utils.checkpoint` raises: so a loss with a JVP in it
    keeps, for its backward pass, the arguments and tangents of each checkpointed block. `torch.compile` takes it too.
    Random numbers are the same when they are drawn again, also those of an explicit state.

    Args:
        fn: Function of pytrees, whose tensors are its arguments and the parameters and buffers of modules: `fn` itself,
            or what it reaches by its closure, its globals, `functools.partial` or as a method. Buffers that it changes
            are changed once. Attributes that a module assigns are forgotten.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        What `fn` returns.

    Raises:
        LeafError: If `fn` uses a tensor that requires grad, or belongs to a transform, and reaches it otherwise.
        MissingRuleError: Inside `torch.autograd.forward_ad.dual_level`, given a dual tensor; use `func.jvp`.

    Example:
        >>> block = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
        >>> x, v = torch.ones(2), torch.ones(2)
        >>> y, y_dot = torch.func.jvp(lambda x: checkpoint(block, x), (x,), (v,))
        >>> (y - y_dot).square().sum().backward()
        >>> block[0].weight.grad.shape
        torch.Size([2, 2])
    """
    if torch.compiler.is_compiling():
        if not _may_be_marked():
            return fn(*args, **kwargs)
        # A mark for the compiler's partition.
        return torch_checkpoint.checkpoint(fn, *args, use_reentrant=False, **kwargs)
    region = Region(fn, args, kwargs)
    return region.output(_run(region, region.tensors))


def _may_be_marked() -> bool:
    """Whether no reverse-mode transform of `torch.func` is around."""
    return _C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined] - no stub


# As `torch.compiler.assume_constant_result` does, which would import the compiler.
_may_be_marked._dynamo_marked_constant = True  # type: ignore[attr-defined] - set here


def _run(function: Any, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`function(*tensors)`, recomputed by whoever differentiates it here, or further out."""
    interpreter = _functorch.peek_interpreter_stack()
    if interpreter is None:
        if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            raise MissingRuleError("checkpoint: forward_ad.dual_level is not served. Use primitives.func.jvp.")
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            return function(*tensors)
    elif interpreter.key() == _functorch.TransformType.Jvp:
        duals = [forward_ad.unpack_dual(x) for x in tensors]
        moving = [i for i, dual in enumerate(duals) if dual.tangent is not None]
        if moving:
            pushforward = _Pushforward(function, len(tensors), moving)
            values = _run(pushforward, [*(dual.primal for dual in duals), *(duals[i].tangent for i in moving)])  # type: ignore[list-item] - those that move
            pairs = zip(values, pushforward.tangents(values), strict=False)
            return tuple(y if y_dot is None else forward_ad.make_dual(y, y_dot) for y, y_dot in pairs)
    return _Recomputed.apply(function, *tensors)


def _forward(function: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    return _run(function, tensors)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    ctx.function, *tensors = inputs
    # The buffers of the caller are about to be written.
    for i in ctx.function.region.changed:
        tensors[i] = tensors[i].clone()
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)
    constants = ctx.function.constants
    ctx.mark_non_differentiable(*[y for k, y in enumerate(output) if k in constants or not has_derivatives(y.dtype)])


def _backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    wanted = [i for i in range(len(tensors)) if ctx.needs_input_grad[1 + i]]
    given = [k for k, y_bar in enumerate(cotangents) if y_bar is not None]
    bars: list[Any] = [None] * len(tensors)
    if given and wanted:
        pullback = _Pullback(ctx.function, len(tensors), wanted, given)
        found = _run(pullback, [*tensors, *(cotangents[k] for k in given)])  # type: ignore[list-item] - those given
        for i, bar in zip(wanted, found, strict=True):
            bars[i] = bar
    return None, *bars


def _jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    moving = [i for i, x_dot in enumerate(tangents[1:]) if x_dot is not None]
    pushforward = _Pushforward(ctx.function, len(tensors), moving)
    return pushforward.tangents(_run(pushforward, [*tensors, *(tangents[1 + i] for i in moving)]))


def _vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[Any, Any]:
    function, *tensors = args
    results = _run(_Batched(function, in_dims[1:], info.randomness), tensors)
    return results, (0,) * len(results)


# A function of tensors at one level of differentiation after another; its arguments are all that is saved.
_Recomputed = function_class(
    "Recomputed",
    every_level=True,
    forward=_forward,
    setup_context=_setup_context,
    backward=_backward,
    jvp=_jvp,
    vmap=_vmap,
)


class _Derived:
    """A function made of another one of the same region."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.region = inner, inner.region

    @property
    def constants(self) -> frozenset[int]:
        """Places of running statistics among the results: they have no derivative, whatever they are computed of."""
        return self.inner.constants


class _Batched(_Derived):
    """A function, mapped over batch axes."""

    def __init__(self, function: Any, in_dims: tuple, randomness: str) -> None:
        super().__init__(function)
        self._mapped = torch.vmap(function, in_dims=in_dims, randomness=randomness)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self._mapped(*tensors)


class _Pushforward(_Derived):
    """A function together with its jvp: results, then the tangents of those that have any."""

    def __init__(self, function: Any, num_tensors: int, moving: Sequence[int]) -> None:
        super().__init__(function)
        self._count, self._moving = num_tensors, moving
        self._with_tangent: list[int] = []

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        tensors, tangents = values[: self._count], values[self._count :]
        moved = _in_places(self.inner, tensors, self._moving)
        pair: Any = torch.func.jvp(moved, tuple(tensors[i] for i in self._moving), tangents)
        results, results_dot = pair
        self._with_tangent = [k for k, y in enumerate(results) if has_derivatives(y.dtype) and k not in self.constants]
        return *results, *(results_dot[k] for k in self._with_tangent)

    def tangents(self, values: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """One tangent for each result, out of what a call has returned."""
        found: list[Tensor | None] = [None] * (len(values) - len(self._with_tangent))
        for k, y_dot in zip(self._with_tangent, values[len(found) :], strict=True):
            found[k] = y_dot
        return tuple(found)


class _Pullback(_Derived):
    """The vjp of a function: cotangents of the wanted tensors, from tensors and the cotangents of given results."""

    def __init__(self, function: Any, num_tensors: int, wanted: Sequence[int], given: Sequence[int]) -> None:
        super().__init__(function)
        self._count, self._wanted, self._given = num_tensors, wanted, given

    @property
    def constants(self) -> frozenset[int]:
        """None: they are cotangents."""
        return frozenset()

    def __call__(self, *values: Tensor) -> tuple[Any, ...]:
        tensors, cotangents = values[: self._count], values[self._count :]
        inputs, moved = [tensors[i] for i in self._wanted], _in_places(self.inner, tensors, self._wanted)

        def results(*inputs: Tensor) -> tuple[Tensor, ...]:
            found = moved(*inputs)
            return tuple(found[k] for k in self._given)

        if torch.is_grad_enabled() or _functorch.peek_interpreter_stack() is not None:
            return torch.func.vjp(results, *inputs)[1](cotangents)
        # Nobody differentiates this once more: autograd itself also takes what no transform does.
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in inputs]
            pairs = [(y, y_bar) for y, y_bar in zip(results(*inputs), cotangents, strict=True) if y.requires_grad]
            bars = torch.autograd.grad([y for y, _ in pairs], inputs, [y_bar for _, y_bar in pairs], allow_unused=True)
        return tuple(torch.zeros_like(x) if bar is None else bar for x, bar in zip(inputs, bars, strict=True))


def _in_places(function: Any, tensors: Sequence[Tensor], places: Sequence[int]) -> Callable[..., tuple[Tensor, ...]]:
    """The function of the tensors at these places, given all others."""

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        values = list(tensors)
        for i, x in zip(places, inputs, strict=True):
            values[i] = x
        return function(*values)

    return run
