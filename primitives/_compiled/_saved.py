"""Reverse mode of a compiled function: a forward pass that saves, and a backward pass of what was saved.

A backward pass that is differentiated itself gives its value from what was saved, too. Its derivative is that of the
pullback, a function of the arguments alone: only then anything is computed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import _C
from torch._C import _functorch  # type: ignore[attr-defined] - no stub

from primitives._core.autograd import function_class, unpack_dual
from primitives._core.recomputation import Derived, Recomputable, pushed, recomputed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    Tensors = tuple[Tensor, ...]

__all__ = ["Known", "Saved", "SavedAtLevels", "is_here"]


def is_here() -> bool:
    """Whether programs may run: no trace and no transform is around, nor torch's older vmap."""
    if _C._len_torch_dispatch_stack() or _functorch.peek_interpreter_stack() is not None:
        return False
    return not _C._dispatch_tls_is_dispatch_key_included(_OLDER_VMAP)


_OLDER_VMAP = _C._dispatch_key_parse("VmapMode")


class Known(Derived):
    """A function of some of the tensors, whose value there is a better way to than to call it.

    Attributes:
        inner: The function, whose derivatives are those of the whole.
        pick: Places of its arguments among the tensors; all others are constants.
        value: What is called instead.
        num: Number of results of the function.
        num_kept: Number of results, constants, that `value` returns after these.
    """

    def __init__(
        self,
        inner: Recomputable,
        pick: Sequence[int],
        value: Recomputable | None = None,
        num: int = 0,
        num_kept: int = 0,
    ) -> None:
        super().__init__(inner)
        self.pick, self.value, self.num, self.num_kept = list(pick), value, num, num_kept
        # Of a pushforward: the function that it is of, and the number of its arguments.
        self._primal: tuple[Known, int] | None = None
        self._batched: dict[Any, Known] = {}

    @property
    def constants(self) -> frozenset[int]:
        """Those of the function, and what is kept."""
        return self.inner.constants | frozenset(range(self.num, self.num + self.num_kept))

    def __call__(self, *tensors: Tensor) -> Tensors:
        """The results."""
        if self.value is not None:
            return self.value(*tensors)
        results = self.inner(*(tensors[i] for i in self.pick))
        if self._primal is None or not self.num_kept:
            return results
        primal, count = self._primal
        return *results[: self.num], *primal(*tensors[:count])[self.num :], *results[self.num :]

    def tangents(self, values: Tensors) -> tuple[Tensor | None, ...]:
        """Of a pushforward; those of what is kept are `None`."""
        own = *values[: self.num], *values[self.num + self.num_kept :]
        return *self.inner.tangents(own), *[None] * self.num_kept  # type: ignore[attr-defined] - of a pushforward

    def pushforward(self, num_tensors: int, moving: Sequence[int]) -> Known:
        """That of the function."""
        known = [j for j, i in enumerate(moving) if i in self.pick]
        inner = self.inner.pushforward(len(self.pick), [self.pick.index(moving[j]) for j in known])
        found = Known(inner, [*self.pick, *(num_tensors + j for j in known)], None, self.num, self.num_kept)
        found._primal = self, num_tensors
        return found

    def pullback(self, num_tensors: int, wanted: Sequence[int], given: Sequence[int]) -> Known:
        """That of the function."""
        inner = self.inner.pullback(len(self.pick), [self.pick.index(i) for i in wanted], given)
        return Known(inner, [*self.pick, *range(num_tensors, num_tensors + len(given))])

    def batched(self, in_dims: tuple, randomness: str) -> Known:
        """Both, mapped over batch axes."""
        found = self._batched.get((in_dims, randomness))
        if found is None:
            inner = self.inner.batched(tuple(in_dims[i] for i in self.pick), randomness)
            value = None if self.value is None else self.value.batched(in_dims, randomness)
            found = self._batched[in_dims, randomness] = Known(inner, self.pick, value, self.num, self.num_kept)
            if self._primal is not None:
                primal, count = self._primal
                found._primal = primal.batched(in_dims[:count], randomness), count
        return found


# The autograd functions get the two halves of a joint graph, and the arguments. What is saved: the arguments, then what
# the forward half has kept.


def _save(ctx: Any, halves: Any, tensors: Sequence[Tensor], outputs: Sequence[Any]) -> None:
    tensors = list(tensors)
    # The buffers of the caller are about to be written.
    for i in halves.function.changed:
        tensors[i] = tensors[i].clone()
    kept = outputs[halves.num :]
    ctx.halves = halves
    # Sizes, where they are symbols in the graphs.
    ctx.numbers = [(k, x) for k, x in enumerate(kept) if not isinstance(x, torch.Tensor)] if halves.has_numbers else ()
    ctx.save_for_backward(*tensors, *([x for x in kept if isinstance(x, torch.Tensor)] if ctx.numbers else kept))
    # Where sizes are symbols, graphs cannot make the zeros.
    ctx.set_materialize_grads(halves.function.settings.dynamic)
    ctx.mark_non_differentiable(*[outputs[k] for k in halves.constants])


def _forward_here(ctx: Any, halves: Any, *tensors: Tensor) -> Tensors:
    # Autocast is in the graphs already.
    with _C._DisableAutocast():
        outputs = halves.forward([*tensors])
    _save(ctx, halves, tensors, outputs)
    return tuple(outputs[: halves.num])


def _forward(halves: Any, *tensors: Tensor) -> Tensors:
    return recomputed(halves.forward_function, tensors)


def _setup_context(ctx: Any, inputs: tuple, outputs: Tensors) -> None:
    halves, *tensors = inputs
    _save(ctx, halves, tensors, outputs)
    ctx.save_for_forward(*tensors)
    kept = outputs[halves.num :]
    ctx.mark_non_differentiable(*[outputs[k] for k in halves.constants], *kept)


def _backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    halves, saved, needed = ctx.halves, ctx.saved_tensors, ctx.needs_input_grad[1:]
    for k, x in ctx.numbers:
        saved = *saved[: len(needed) + k], x, *saved[len(needed) + k :]
    given = tuple([y_bar is not None for y_bar in cotangents[: halves.num]])
    if not torch.is_grad_enabled() and is_here():
        with _C._DisableAutocast():
            return None, *halves.backward(saved + cotangents, needed, given)
    bars: list[Any] = [None] * len(needed)
    if any(given):
        function, wanted = halves.resumed(needed, given)
        num = len(needed)
        y_bars = [y_bar for y_bar in cotangents[: halves.num] if y_bar is not None]
        # Among what is kept are views of arguments, constants here.
        kept = [x.detach() if isinstance(x, torch.Tensor) else x for x in saved[num:]]
        for i, bar in zip(wanted, recomputed(function, [*saved[:num], *y_bars, *kept]), strict=True):
            bars[i] = bar
    return None, *bars


def _jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
    halves = ctx.halves
    tensors = [unpack_dual(x)[0] for x in ctx.saved_tensors]
    return *pushed(halves.function, tensors, tangents[1:]), *[None] * halves.num_kept


def _vmap(info: Any, in_dims: tuple, halves: Any, *tensors: Tensor) -> tuple[Any, Any]:
    results = recomputed(halves.forward_function.batched(in_dims[1:], info.randomness), tensors)
    return results, (0,) * len(results)


Saved = function_class("Compiled", forward=_forward_here, backward=_backward)
SavedAtLevels = function_class(
    "CompiledAtLevels",
    every_level=True,
    forward=_forward,
    setup_context=_setup_context,
    backward=_backward,
    jvp=_jvp,
    vmap=_vmap,
)
