"""A function together with its backward pass, as one function of primals and cotangents: `create_joint`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from primitives._core.dtypes import has_derivatives
from primitives._core.errors import LeafError, MutationError, check_arguments
from primitives.tracing import _torch_private as torch_private
from primitives.tracing._errors import typed_errors
from primitives.tracing._leaves import Leaves, like, refuse_opaque
from primitives.tracing._memory import memories
from primitives.tracing._watching import Recorder

_FUNCTION = "create_joint"
_nothing = contextlib.nullcontext()


def create_joint(
    fn: Callable[..., Any], *, no_cotangents: bool = False, namespace: str = ""
) -> Callable[..., tuple[Any, Any]]:
    """`fn` and its backward pass as one function of primals and cotangents.

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
        no_cotangents: Whether `fn` returns a scalar loss, alone or as the first leaf of its output, which alone gets a
            cotangent, 1.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        `joint(primals, cotangents) -> (outs, grads)`, or `joint(primals)` with `no_cotangents`. `primals` is the tuple
        of the positional arguments of `fn`. `cotangents` has the structure of the output, `None` for an output that
        takes no cotangent, or is to get none; a cotangent of another shape is viewed in that of its output. `outs` is
        what `fn` returns; `grads` has the structure of `primals`, with `None` for leaves that take no gradient or that
        nothing depends on.

    Raises:
        LeafError: If no primal requires grad; if a cotangent is not a tensor, or is for an output that takes none; with
            `no_cotangents`, if a scalar loss is missing; if an object with a tensor in an attribute, that optree does
            not take apart, is among the primals or the outputs.
        TreeError: If `primals` is not a tuple, or `cotangents` has another structure than the output.
        ShapeError: If a cotangent cannot be viewed in the shape of its output.
        DtypeError: If it has another dtype.
        DeviceError: If it is on another device.
        MutationError: If `fn` writes in place to an input that requires grad.
        TraceError: In a trace, if `fn` asks for the values of a tensor, or if the backward pass draws random numbers
            from torch's generators.

    Example:
        >>> import torch, primitives as pr
        >>> joint = pr.tracing.create_joint(lambda w, x: {"y": (w * x).sin()})
        >>> w, x = torch.zeros(2, requires_grad=True), torch.tensor([1.0, 2.0])
        >>> joint((w, x), {"y": torch.ones(2)})
        ({'y': tensor([0., 0.])}, (tensor([1., 2.]), None))
    """

    # Two functions: a graph of a function with defaults is not valid code in torch 2.13.
    def joint(primals: tuple, cotangents: Any) -> tuple[Any, Any]:
        return _run(fn, primals, cotangents, namespace, no_cotangents=False)

    def joint_of_loss(primals: tuple) -> tuple[Any, Any]:
        return _run(fn, primals, None, namespace, no_cotangents=True)

    return joint_of_loss if no_cotangents else joint


def outside_inference_mode() -> contextlib.AbstractContextManager:
    """Context for what differentiates, in spite of an inference mode around it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _nothing


def takes_cotangent(y: Any, inputs: Sequence[Any]) -> bool:
    """Whether `y` is differentiable, requires grad and shares no memory with an input."""
    if not isinstance(y, torch.Tensor) or not has_derivatives(y.dtype) or not y.requires_grad:
        return False
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    return {number for x in tensors for number in memories(x)}.isdisjoint(memories(y))


def require_loss(function: str, outs: Leaves, taken: Sequence[int]) -> None:
    """Raise unless the first leaf of `outs` is a scalar loss, one of those `taken` that take a cotangent."""
    y = outs.values[0] if outs.values else None
    if 0 in taken and isinstance(y, torch.Tensor) and y.numel() == 1:
        return
    got = f"{list(y.shape)} of {y.dtype}" if isinstance(y, torch.Tensor) else type(y).__name__
    raise LeafError(
        f"{function}: with no_cotangents=True the first output must be a floating-point tensor of one element that "
        f"requires grad, got {got}{'' if 0 in taken else ', which takes no cotangent'}."
    )


def _run(
    fn: Callable[..., Any], primals: tuple, cotangents: Any, namespace: str, *, no_cotangents: bool
) -> tuple[Any, Any]:
    check_arguments(_FUNCTION, "primals", primals)
    given = checked_primals(_FUNCTION, fn, primals, None, namespace)
    with outside_inference_mode():
        passes_on = torch_private.differentiated_outside(given.values)
        leaves, used = zip(*(_of_its_own(x, passes_on=passes_on) for x in given.values), strict=True)
        histories = [getattr(x, "grad_fn", None) for x in used] if passes_on else []

        def cotangents_of(outs: Leaves) -> tuple[Leaves, list[Tensor | None]]:
            for i, history in enumerate(histories):
                if getattr(used[i], "grad_fn", None) is not history:
                    raise MutationError(
                        f"{_FUNCTION}: {given.label(i)} requires grad and is written to in place. Return the new "
                        "value, or use functionalize_mutations."
                    )
            taken = [i for i, y in enumerate(outs.values) if takes_cotangent(y, used)]
            if no_cotangents:
                require_loss(_FUNCTION, outs, taken)
                return outs, [torch.ones_like(outs.values[0]), *[None] * (len(outs.values) - 1)]
            names = outs._replace(roots="cotangents")
            return outs, [
                None if piece is None else like(f"{_FUNCTION}: {names.label(i)}", piece, y, y.shape, viewable=True)
                for i, (piece, y) in enumerate(
                    zip(outs.cotangents(_FUNCTION, cotangents, taken), outs.values, strict=True)
                )
            ]

        outs, bars = run_joint(_FUNCTION, fn, given, leaves, used, cotangents_of, create_graph=passes_on)
        values = outs.values if passes_on else [torch_private.detached(y) for y in outs.values]
        return outs.join(values), given.join(bars)


def checked_primals(
    function: str, fn: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any] | None, namespace: str
) -> Leaves:
    """The leaves of the arguments of `fn`, some of which require grad."""
    given = Leaves.of_arguments(fn, args, kwargs, namespace)
    refuse_opaque(function, given.values, given.label)
    if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in given.values):
        advice = "Call requires_grad_() on those to differentiate in."
        if isinstance(fn, torch.nn.Module):
            advice = (
                f"The parameters of a module are not primals: with params, buffers = pure_module(module).init(), "
                f"whose params require grad, pass pure_module(module) and (params, buffers, ...) to {function}."
            )
        raise LeafError(
            f"{function}: some leaf of the primals must be a tensor that requires grad, got none that does. {advice}"
        )
    return given


def _of_its_own(x: Any, *, passes_on: bool) -> tuple[Any, Any]:
    """The tensor to differentiate in, and the one that `fn` gets, whose history a joint function inside passes on."""
    # `fn` gets tensors that require no grad as they are: it may transpose them in place.
    if not (isinstance(x, torch.Tensor) and x.requires_grad):
        return x, x
    leaf = torch.ops.aten.alias.default(x) if passes_on else x.detach().requires_grad_()
    if x.layout != torch.strided:
        return leaf, leaf
    # Autograd refuses writes to views of leaves. A tensor with a history may be written to, which is seen as long as it
    # is not a view, whose history is made anew in any case.
    return leaf, torch.ops.aten._unsafe_view.default(leaf, x.shape) if passes_on else torch.ops.aten.alias.default(leaf)


def run_joint(
    function: str, fn: Callable[..., Any], given: Leaves, leaves: Sequence[Any], used: Sequence[Any],
    cotangents_of: Callable[[Leaves], tuple[Leaves, list[Tensor | None]]], *, captures: bool = True,
    modes: Sequence[contextlib.AbstractContextManager] = (), create_graph: bool = False,
) -> tuple[Leaves, list[Tensor | None]]:  # fmt: skip
    """Outputs of `fn` and gradients in `leaves`, of which `used`, the leaves of the arguments, is made.

    `cotangents_of` gets the outputs and returns them, or more of them, and a cotangent or `None` for each. With
    `captures`, `fn` may differentiate in tensors from elsewhere. `modes` are contexts of the two passes.
    """
    recorder = Recorder(function, captures=captures) if torch_private.is_tracing() else None
    forward, backward = modes or (_nothing, _nothing)
    with typed_errors(function), torch.enable_grad(), recorder.recording() if recorder else _nothing:
        with forward, recorder.forward() if recorder else _nothing:
            outs = Leaves.of(fn(*given.join(used)), "outs", given.namespace)
        refuse_opaque(function, outs.values, outs.label)
        outs, cotangents = cotangents_of(outs)
        places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
        pairs = [(y, y_bar) for y, y_bar in zip(outs.values, cotangents, strict=True) if y_bar is not None]
        if not pairs:
            return outs, [None] * len(leaves)
        with backward:
            wanted, (ys, y_bars) = [leaves[i] for i in places], zip(*pairs, strict=True)
            found = torch.autograd.grad(ys, wanted, y_bars, allow_unused=True, create_graph=create_graph)
        by_place = dict(zip(places, found, strict=True))
        return outs, [by_place.get(i) for i in range(len(leaves))]
