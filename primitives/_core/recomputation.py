"""Functions of tensors of which nothing is kept but the arguments: whoever differentiates them computes them again.

At every order and level: what a derivative needs is another function of the kind, of the arguments, and of tangents or
cotangents. A function may keep more, for a backward pass that is not differentiated itself: its last results.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import _C, Tensor
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import forward_ad

from primitives._core.autograd import function_class, unpack_dual
from primitives._core.dtypes import has_derivatives
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
        return _Recomputed.apply(self, len(tensors), *tensors, *kept)


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
    is_entered = interpreter is not None and _C._dispatch_tls_is_dispatch_key_excluded(_FRONT)
    if may_move:
        duals = [unpack_dual(x) for x in tensors]
        moving = [i for i, (_, x_dot) in enumerate(duals) if x_dot is not None]
        if moving and interpreter is None and torch.is_grad_enabled() and _C._any_requires_grad(*tensors):
            # Autograd keeps duals: a backward pass before the level ends has tangents.
            return _Recomputed.apply(function, len(tensors), *tensors, *kept)
        if moving:
            pushforward = function.pushforward(len(tensors), moving)
            both = [*(x for x, _ in duals), *(duals[i][1] for i in moving)]
            values = _further_out(interpreter, pushforward, both) if is_entered else recomputed(pushforward, both)
            pairs = zip(values, pushforward.tangents(values), strict=False)
            return tuple(y if y_dot is None else _make_dual(y, y_dot) for y, y_dot in pairs)
    if is_entered:
        # No transform can be entered twice: it keeps what it sees. That of forward mode sees nothing that moves.
        return function(*tensors, *kept)
    if interpreter is None and not (torch.is_grad_enabled() and _C._any_requires_grad(*tensors)):
        return function(*tensors, *kept)
    return function.recorded(tensors, kept)


def _make_dual(y: Tensor, y_dot: Tensor) -> Tensor:
    return torch._VF._make_dual(y, y_dot, level=0)  # type: ignore[attr-defined] - no stub


def _further_out(interpreter: Any, function: Recomputable, tensors: Sequence[Tensor]) -> Tensors:
    """`recomputed` by the levels outside of the one that an operator has been dispatched to."""
    level = interpreter.level()
    tensors = [_functorch._unwrap_for_grad(x, level) for x in tensors]
    # As before the dispatcher entered the level.
    excluded = _C._dispatch_tls_local_exclude_set() - _EXCLUDED_WITHIN
    with (
        temporarily_pop_interpreter_stack(),
        _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded),
        torch.enable_grad(),
        forward_ad._set_fwd_grad_enabled(True),
    ):
        values = recomputed(function, tensors)
    return tuple(_functorch._wrap_for_grad(y, level) for y in values)


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


def recorded_here(function: Recomputable, tensors: Sequence[Tensor]) -> Tensors:
    """The results without what is kept, where no transform is around: faster than `recorded`."""
    return _Here.apply(function, len(tensors), *tensors)


def _forward_here(ctx: Any, function: Recomputable, num: int, *tensors: Tensor) -> Tensors:
    output = function(*tensors)
    results = output[: len(output) - function.num_kept]
    _save(ctx, (function, num, *tensors), output, results, function.unread)
    return results


def _forward(function: Recomputable, num: int, *values: Any) -> Tensors:
    output = recomputed(function, values[:num], values[num:])
    # Autograd wants a result that is an argument as a view, and what is kept, a constant, as a tensor of its own.
    count, others = len(output) - function.num_kept, {*map(id, values)}
    results = [y.view_as(y) if id(y) in others else y for y in output[:count]]
    others.update(map(id, output[:count]))
    return *results, *(y.detach() if id(y) in others else y for y in output[count:])


def _setup_context(ctx: Any, inputs: tuple, output: Tensors) -> None:
    _save(ctx, inputs, output, output)
    ctx.save_for_forward(*inputs[2 : 2 + ctx.num])


def version_of(x: Tensor) -> int:
    """How often a tensor has been written; one of inference mode does not say, nor is it written outside of that."""
    return 0 if x.is_inference() else x._version


def _save(ctx: Any, inputs: tuple, output: Tensors, results: Tensors, unread: frozenset[int] = frozenset()) -> None:
    ctx.function, ctx.num, *values = inputs
    ctx.num_values, tensors = len(values), values[: ctx.num]
    # The buffers of the caller are about to be written.
    for i in ctx.function.changed:
        tensors[i] = tensors[i].clone()
    kept = output[len(output) - ctx.function.num_kept :]
    # Sizes come last.
    ctx.numbers = [x for x in kept if not isinstance(x, torch.Tensor)]
    ctx.unread = [(i, tensors[i], version_of(tensors[i])) for i in sorted(unread)]
    saved = [x for i, x in enumerate(tensors) if i not in unread]
    # Hooks may hand out copies in other strides, and a function reads those that it was given (`view`, `as_strided`).
    is_hooked = _top_saved_tensors_default_hooks(True) is not None
    ctx.strides = [x.stride() for x in saved] if is_hooked else ()
    ctx.save_for_backward(*saved, *kept[: len(kept) - len(ctx.numbers)])
    ctx.set_materialize_grads(False)
    constants, ys = ctx.function.constants, results[: len(output) - len(ctx.numbers)]
    ctx.mark_non_differentiable(*[y for k, y in enumerate(ys) if k in constants or not has_derivatives(y.dtype)])


def _backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    num, saved = ctx.num, [*ctx.saved_tensors]
    for i, strides in enumerate(ctx.strides):
        if saved[i].stride() != strides and 0 not in strides:
            saved[i] = saved[i].new_empty_strided(saved[i].shape, strides).copy_(saved[i])
    for i, x, _ in ctx.unread:
        saved.insert(i, x)
    wanted = tuple([i for i, needs in enumerate(ctx.needs_input_grad[2 : 2 + num]) if needs])
    given = tuple([k for k, y_bar in enumerate(cotangents) if y_bar is not None])
    bars: list[Any] = [None] * ctx.num_values
    if given and wanted:
        function = ctx.function.resumed(num, wanted, given)
        given_bars: Any = [cotangents[k] for k in given]
        is_read = torch.is_grad_enabled() or not function.resumes
        if is_read and any(version_of(x) != version for _, x, version in ctx.unread):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                "argument, a parameter or a captured tensor of a compiled function, before its recorded backward pass."
            )
        kept = [*saved[num:], *ctx.numbers] if function.resumes else ()
        found = recomputed(function, [*saved[:num], *given_bars], kept)
        zeros = function.zeros
        for k, i in enumerate(wanted):
            bars[i] = None if k in zeros else found[k]
    return None, None, *bars


def _jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
    tensors, tangents = [unpack_dual(x)[0] for x in ctx.saved_tensors], tangents[2 : 2 + ctx.num]
    moving = [i for i, x_dot in enumerate(tangents) if x_dot is not None]
    pushforward = ctx.function.pushforward(len(tensors), moving)
    results = pushforward.tangents(recomputed(pushforward, [*tensors, *(tangents[i] for i in moving)]))
    return *results, *[None] * ctx.function.num_kept


def _vmap(info: Any, in_dims: tuple, function: Any, num: int, *values: Any) -> tuple[Any, Any]:
    results = recomputed(function.batched(in_dims[2:], info.randomness), values[:num], values[num:])
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


_Here = function_class("Recomputed", forward=_forward_here, backward=_backward)


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
        pairs = [unpack_dual(y) for y in function(*map(_make_dual, primals, tangents))]
        both = [(y, torch.zeros_like(y) if y_dot is None else y_dot) for y, y_dot in pairs]
        results, results_dot = (
            [_functorch._unwrap_for_grad(y, level) for y in each] for each in zip(*both, strict=True)
        )
        return results, results_dot
