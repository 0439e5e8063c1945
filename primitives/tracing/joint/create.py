"""A function together with its backward pass, as one function of primals and tangents: `create_joint`."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from primitives.core.errors import LeafError, MutationError
from primitives.tracing import torch_private as internals
from primitives.tracing.errors import typed_errors
from primitives.tracing.joint.replays import draws_refused, replays_refused
from primitives.tracing.joint.tangents import match_tangents, require_loss, takes_cotangent
from primitives.tracing.leaves import Leaves, refuse_opaque
from primitives.tracing.watching import UserCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

__all__ = ["checked_primals", "create_joint", "outside_inference_mode", "run_joint"]

_FUNCTION = "create_joint"


def create_joint(fn: Callable[..., Any], *, no_tangents: bool = False) -> Callable[..., tuple[Any, Any]]:
    """`fn` and its backward pass as one function of primals and tangents.

    The result is an ordinary function: it runs eagerly, and `make_fx` traces it to a graph whose backward nodes carry
    the stack traces of the forward lines they come from.

    An input takes a gradient if it is a tensor that requires grad: call `requires_grad_()` on those to differentiate
    in. An output takes a cotangent if it is a floating-point or complex tensor, requires grad (depends on an input that
    does), and shares no memory with an input. The same tensor given twice counts as two inputs, each with its own
    partial gradient. Results have no history if all primals are leaves; those that have a history, or are inside a
    transform of `torch.func`, pass it on, so derivatives of higher order go through.

    Args:
        fn: Function of pytrees. Leaves that are not tensors are constants. It may write to inputs where torch lets it
            write to leaves, and they are changed; for other writes see `functionalize_mutations`.
        no_tangents: Whether `fn` returns a scalar loss, alone or as the first leaf of its output, which alone gets a
            cotangent, 1.

    Returns:
        `joint(primals, tangents) -> (outs, grads)`, or `joint(primals)` with `no_tangents`. `primals` is the tuple of
        the positional arguments of `fn`. `tangents` has the structure of the output, `None` for an output that takes
        no cotangent, or is to get none; a cotangent of another shape is viewed in that of its output. `outs` is what
        `fn` returns; `grads` has the structure of `primals`, with `None` for leaves that take no gradient or that
        nothing depends on.

    Raises:
        TypeError: If `primals` is not a tuple.
        LeafError: If no primal requires grad; if a cotangent is not a tensor, or is for an output that takes none; with
            `no_tangents`, if there is no scalar loss; if an object with a tensor in an attribute, that optree does not
            take apart, is among the primals or the outputs.
        TreeError: If `tangents` has another structure than the output.
        ShapeError: If a cotangent cannot be viewed in the shape of its output.
        DtypeError: If it has another dtype.
        DeviceError: If it is on another device.
        MutationError: If `fn` writes in place to an input that requires grad.
        TraceError: In a trace, if `fn` asks for the values of a tensor, or if the backward pass draws random numbers
            from torch's generators.

    Example:
        >>> joint = create_joint(lambda w, x: {"y": (w * x).sin()})
        >>> w, x = torch.zeros(2, requires_grad=True), torch.tensor([1.0, 2.0])
        >>> joint((w, x), {"y": torch.ones(2)})
        ({'y': tensor([0., 0.])}, (tensor([1., 2.]), None))
    """

    # Two functions: a graph of a function with defaults is not valid code in torch 2.13.
    def joint(primals: tuple, tangents: Any) -> tuple[Any, Any]:
        return _run(fn, primals, lambda outs, taken: match_tangents(_FUNCTION, outs, taken, tangents))

    def joint_of_loss(primals: tuple) -> tuple[Any, Any]:
        return _run(fn, primals, _loss_tangents)

    return joint_of_loss if no_tangents else joint


def outside_inference_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which differentiates, in spite of an inference mode around it."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return run


def _loss_tangents(outs: Leaves, taken: Sequence[bool]) -> list[Tensor | None]:
    require_loss(_FUNCTION, outs, taken)
    return [torch.ones_like(outs.values[0]), *[None] * (len(outs.values) - 1)]


@outside_inference_mode
def _run(fn: Callable[..., Any], primals: tuple, cotangents_of: Callable[..., list[Tensor | None]]) -> tuple[Any, Any]:
    if not isinstance(primals, tuple):
        raise TypeError(
            f"{_FUNCTION}: primals must be the tuple of the positional arguments, got {type(primals).__name__}."
        )
    given = checked_primals(_FUNCTION, fn, primals)
    passes_on = internals.differentiated_outside(given.values)
    leaves, used = zip(*(_of_its_own(x, passes_on=passes_on) for x in given.values), strict=True)
    histories = [_history(x) for x in used] if passes_on else []

    def cotangents(outs: Leaves) -> tuple[Leaves, list[Tensor | None]]:
        for i, history in enumerate(histories):
            if _history(used[i]) is not history:
                raise MutationError(
                    f"{_FUNCTION}: {given.label(i)} requires grad and is written to in place. Return the new value, or "
                    "use functionalize_mutations."
                )
        return outs, cotangents_of(outs, [takes_cotangent(y, used) for y in outs.values])

    outs, bars = run_joint(_FUNCTION, fn, given, leaves, used, cotangents, create_graph=passes_on)
    values = outs.values if passes_on else [internals.detached(y) for y in outs.values]
    return outs.join(values), given.join(bars)


def checked_primals(function: str, fn: Callable[..., Any], primals: tuple) -> Leaves:
    """The leaves of the arguments of `fn`, some of which require grad."""
    given = Leaves.of_arguments(fn, primals)
    refuse_opaque(function, given.values, given.label)
    if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in given.values):
        advice = "Call requires_grad_() on those to differentiate in."
        if isinstance(fn, torch.nn.Module):
            advice = (
                f"The parameters of a module are not primals: with params, buffers = functional_call(module).init(), "
                f"whose params require grad, pass functional_call(module) and (params, buffers, ...) to {function}."
            )
        raise LeafError(
            f"{function}: some leaf of the primals must be a tensor that requires grad, got none that does. {advice}"
        )
    return given


def _of_its_own(x: Any, *, passes_on: bool) -> tuple[Any, Any]:
    """What a gradient is taken in, and what `fn` gets, whose history a joint function inside passes on."""
    # What requires no grad is passed as it is: `fn` may transpose it in place.
    if not (isinstance(x, torch.Tensor) and x.requires_grad):
        return x, x
    leaf = torch.ops.aten.alias.default(x) if passes_on else x.detach().requires_grad_()
    if x.layout != torch.strided:
        return leaf, leaf
    # Autograd refuses writes to views of leaves. What has a history may be written to, which is seen as long as it is
    # not a view, whose history is made anew in any case.
    return leaf, torch.ops.aten._unsafe_view.default(leaf, x.shape) if passes_on else torch.ops.aten.alias.default(leaf)


def _history(x: Any) -> Any:
    return x.grad_fn if isinstance(x, torch.Tensor) else None


def run_joint(
    function: str,
    fn: Callable[..., Any],
    given: Leaves,
    leaves: Sequence[Any],
    used: Sequence[Any],
    cotangents_of: Callable[[Leaves], tuple[Leaves, list[Tensor | None]]],
    *,
    forward: Sequence[contextlib.AbstractContextManager] = (),
    backward: Sequence[contextlib.AbstractContextManager] = (),
    create_graph: bool = False,
) -> tuple[Leaves, list[Tensor | None]]:
    """Outputs of `fn` and gradients: what `create_joint` runs and `trace_joint` traces.

    Args:
        function: Name of the public function, for errors.
        fn: The function.
        given: Its arguments, for their structure.
        leaves: What gradients are taken in.
        used: What `fn` is called with, made of `leaves`.
        cotangents_of: Called with the outputs; returns them, or more of them, and a cotangent or `None` for each.
        forward: Contexts of the forward pass.
        backward: Contexts of the backward pass.
        create_graph: Whether the gradients have a history.
    """
    is_tracing = internals.is_tracing()
    with typed_errors(function), torch.enable_grad(), internals.lines_recorded() as lines:
        with _together(replays_refused(function), *forward, *[UserCalls(function)] * is_tracing):
            outs = Leaves.of(fn(*given.join(used)), "outs")
        lines.end_forward()
        refuse_opaque(function, outs.values, outs.label)
        outs, cotangents = cotangents_of(outs)
        with _together(*backward), draws_refused(function):
            return outs, _gradients(leaves, outs.values, cotangents, create_graph=create_graph)


@contextlib.contextmanager
def _together(*contexts: contextlib.AbstractContextManager) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _gradients(
    inputs: Sequence[Any], outputs: Sequence[Any], cotangents: Sequence[Tensor | None], *, create_graph: bool
) -> list[Tensor | None]:
    """One gradient for each input, `None` where it takes none or no output with a cotangent depends on it."""
    pairs = [(y, y_bar) for y, y_bar in zip(outputs, cotangents, strict=True) if y_bar is not None]
    places = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    bars: list[Tensor | None] = [None] * len(inputs)
    if pairs and places:
        ys, y_bars = zip(*pairs, strict=True)
        xs = [inputs[i] for i in places]
        found = torch.autograd.grad(ys, xs, y_bars, allow_unused=True, create_graph=create_graph)
        for i, bar in zip(places, found, strict=True):
            bars[i] = bar
    return bars
