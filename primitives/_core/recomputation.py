"""Functions of tensors of which nothing is kept but the arguments: whoever differentiates them computes them again.

At every order and level: what a derivative needs is another function of the kind, of the arguments, and of tangents or
cotangents. A function may keep more, for a backward pass that is not differentiated itself: its last results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from primitives._core.autograd import unpack_dual
from primitives._core.dtypes import has_derivatives
from primitives._core.levels import make_dual, recorded_at_each_level
from primitives._core.sequences import in_places

Tensors = tuple[Tensor, ...]


def nodes_of(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """The nodes of the graph that autograd recorded of some tensors, each once."""
    todo, seen = [y.grad_fn for y in outputs], {None}
    while todo:
        node: Any = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += [parent for parent, _ in node.next_functions]


class Recomputable:
    """A function `(*tensors) -> tensors` that gives the same results each time."""

    def __call__(self, *tensors: Tensor) -> Tensors:
        """The results."""
        raise NotImplementedError

    @property
    def changed(self) -> Sequence[int]:
        """Places of arguments that the caller writes into after the first call."""
        return ()

    @property
    def constants(self) -> frozenset[int]:
        """Places of results without derivative, whatever they are computed of."""
        return frozenset()

    @property
    def zeros(self) -> frozenset[int]:
        """Places of results of a pullback that are zero in each call so far, since nothing depends on the argument."""
        return frozenset()

    # Places of arguments that a backward pass reads only if it is differentiated itself: they may be written before it.
    unread: frozenset[int] = frozenset()
    # Number of results, the last ones and constants, that `resumed` may read.
    num_kept = 0
    # Whether this is a pullback that gets what was kept behind its arguments, and has derivatives in these alone.
    resumes = False

    def resumed(self, num_tensors: int, wanted: Sequence[int], given: Sequence[int]) -> Recomputable:
        """The pullback, from what was kept where there is a way."""
        return self.pullback(num_tensors, wanted, given)

    # Its derivatives, of which some kinds know a better way.

    def pushforward(self, num_tensors: int, moving: Sequence[int]) -> Derived:
        """The function `(*tensors, *tangents of those moving) -> (*results, *tangents)`."""
        return Pushforward(self, num_tensors, moving)

    def pullback(self, num_tensors: int, wanted: Sequence[int], given: Sequence[int]) -> Recomputable:
        """The function `(*tensors, *cotangents of given results) -> cotangents of the wanted tensors`."""
        return Pullback(self, num_tensors, wanted, given)

    def batched(self, in_dims: tuple, randomness: str) -> Recomputable:
        """The function, mapped over batch axes; results have theirs first."""
        return Batched(self, in_dims, randomness)

    def recorded(self, tensors: Sequence[Tensor], kept: Sequence[Any] = ()) -> Tensors:
        """The results, where the levels of reverse mode and `vmap` that are open take part."""
        return recorded_at_each_level(self, tensors, kept)


class Derived(Recomputable):
    """A function made of another one, whose arguments come first among its own."""

    def __init__(self, inner: Recomputable) -> None:
        self.inner = inner

    @property
    def changed(self) -> Sequence[int]:
        """Known after the first call."""
        return self.inner.changed

    @property
    def constants(self) -> frozenset[int]:
        """The same."""
        return self.inner.constants

    @property
    def zeros(self) -> frozenset[int]:
        """The same."""
        return self.inner.zeros

    def tangents(self, values: Tensors) -> tuple[Tensor | None, ...]:
        """Of a pushforward: one tangent for each result, out of what a call has returned."""
        return self.inner.tangents(values)  # type: ignore[attr-defined] - made of a pushforward


class Batched(Derived):
    """A function, mapped over batch axes."""

    def __init__(self, function: Any, in_dims: tuple, randomness: str) -> None:
        super().__init__(function)
        self._mapped = torch.vmap(function, in_dims=in_dims, randomness=randomness)

    def __call__(self, *tensors: Tensor) -> Tensors:
        # vmap expands results that have no batch, and forward mode refuses a tangent for elements in one place.
        return tuple(y.contiguous() if 0 in y.stride() else y for y in self._mapped(*tensors))


class Pushforward(Derived):
    """A function together with its jvp: results, then the tangents of those that have any."""

    def __init__(self, function: Any, num_tensors: int, moving: Sequence[int]) -> None:
        super().__init__(function)
        self._count, self._moving = num_tensors, moving
        self._with_tangent: list[int] = []

    def __call__(self, *values: Tensor) -> Tensors:
        tensors, tangents = values[: self._count], values[self._count :]
        moved = in_places(self.inner, tensors, self._moving)
        results, results_dot = _jvp_of(moved, [tensors[i] for i in self._moving], tangents)
        self._with_tangent = [k for k, y in enumerate(results) if has_derivatives(y.dtype) and k not in self.constants]
        return *results, *(results_dot[k] for k in self._with_tangent)

    def tangents(self, values: Tensors) -> tuple[Tensor | None, ...]:
        """The tangents, behind the results."""
        found: list[Tensor | None] = [None] * (len(values) - len(self._with_tangent))
        for k, y_dot in zip(self._with_tangent, values[len(found) :], strict=True):
            found[k] = y_dot
        return tuple(found)


class Pullback(Derived):
    """The vjp of a function: cotangents of the wanted tensors, from tensors and the cotangents of given results."""

    def __init__(self, function: Any, num_tensors: int, wanted: Sequence[int], given: Sequence[int]) -> None:
        super().__init__(function)
        self._count, self._wanted, self._given = num_tensors, wanted, given
        self._zeros: frozenset[int] | None = None

    @property
    def constants(self) -> frozenset[int]:
        """None: they are cotangents."""
        return frozenset()

    @property
    def zeros(self) -> frozenset[int]:
        """As autograd tells."""
        return self._zeros or frozenset()

    def __call__(self, *values: Tensor) -> tuple[Any, ...]:
        tensors, cotangents = values[: self._count], values[self._count :]
        inputs, moved = [tensors[i] for i in self._wanted], in_places(self.inner, tensors, self._wanted)

        def results(*inputs: Tensor) -> Tensors:
            found = moved(*inputs)
            return tuple(found[k] for k in self._given)

        create_graph = torch.is_grad_enabled()
        if _functorch.peek_interpreter_stack() is not None or (create_graph and forward_ad._current_level >= 0):
            self._zeros = frozenset()
            return torch.func.vjp(results, *inputs)[1](cotangents)
        # Autograd itself also takes what no transform does.
        with torch.enable_grad():
            passes_on = [create_graph and x.requires_grad for x in inputs]
            pairs = zip(inputs, passes_on, strict=True)
            inputs = [x.view_as(x) if passes else x.detach().requires_grad_() for x, passes in pairs]
            pairs = [(y, y_bar) for y, y_bar in zip(results(*inputs), cotangents, strict=True) if y.requires_grad]
            ys, y_bars = [y for y, _ in pairs], [y_bar for _, y_bar in pairs]
            bars = torch.autograd.grad(ys, inputs, y_bars, allow_unused=True, create_graph=create_graph)
        # With other sizes there may be fewer.
        zeros = frozenset(k for k, bar in enumerate(bars) if bar is None)
        self._zeros = zeros if self._zeros is None else self._zeros & zeros
        return tuple(torch.zeros_like(x) if bar is None else bar for x, bar in zip(inputs, bars, strict=True))


def _jvp_of(function: Callable[..., Tensors], primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> tuple[Any, Any]:
    """Results and their tangents: `torch.func.jvp`, also where forward mode has been entered without it.

    So it is in `forward_ad.dual_level`, and in a graph of transforms that a compiler runs.
    """
    with contextlib.ExitStack() as stack:
        level = stack.enter_context(eager_transforms.jvp_increment_nesting())
        stack.enter_context(forward_ad._set_fwd_grad_enabled(True))
        # Refused where it has been entered.
        with contextlib.suppress(RuntimeError):
            stack.enter_context(forward_ad.dual_level())
        pairs = [unpack_dual(y) for y in function(*map(make_dual, primals, tangents))]
        both = [(y, torch.zeros_like(y) if y_dot is None else y_dot) for y, y_dot in pairs]
        results, results_dot = (
            [_functorch._unwrap_for_grad(y, level) for y in each] for each in zip(*both, strict=True)
        )
        return results, results_dot
