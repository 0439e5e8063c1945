"""A function together with its backward pass, as one function of primals and tangents: `create_joint`."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import optree
import torch
from torch.autograd import forward_ad

from primitives.core.autograd import has_derivatives
from primitives.core.errors import DeviceError, DtypeError, LeafError, ShapeError
from primitives.core.trees.overlay import align, key_path
from primitives.tracing.errors import UserCalls, refuse_reverse_mode, typed_errors
from primitives.tracing.joint.grad_guard import grads_guarded
from primitives.tracing.joint.leaf_guard import LeafGuard
from primitives.tracing.joint.opaque import refuse_opaque
from primitives.tracing.joint.replays import draws_refused, replays_refused
from primitives.tracing.memory import require_storage
from primitives.tracing.torch_private import backward_metadata, forward_metadata, is_tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

__all__ = ["Leaves", "create_joint", "detached", "gradients", "match_tangents", "takes_cotangent"]


class Leaves(NamedTuple):
    """A tree, taken apart into leaves; `None` is no leaf.

    Attributes:
        values: The leaves.
        treespec: What puts them together.
        root: Name of the tree in key paths.
    """

    values: list[Any]
    treespec: optree.PyTreeSpec
    root: str

    @classmethod
    def of(cls, tree: Any, root: str) -> Leaves:
        """The leaves of `tree`."""
        return cls(*optree.tree_flatten(tree), root)

    def label(self, index: int) -> str:
        """Key path of a leaf, as code."""
        return key_path(self.treespec.accessors()[index], self.root)

    def join(self, values: Sequence[Any]) -> Any:
        """The tree, with other leaves."""
        return optree.tree_unflatten(self.treespec, values)


def _storage(x: Tensor) -> int | None:
    # Tensors inside a transform, and sparse ones, have no storage to compare.
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def takes_cotangent(y: Any, inputs: Sequence[Any]) -> bool:
    """Whether `y` is differentiable, requires grad and shares no memory with an input."""
    if not isinstance(y, torch.Tensor) or not has_derivatives(y.dtype) or not y.requires_grad:
        return False
    storages = {_storage(x) for x in inputs if isinstance(x, torch.Tensor)} - {None}
    return _storage(y) not in storages


def match_tangents(function: str, outs: Leaves, taken: Sequence[bool], tangents: Any) -> list[Tensor | None]:
    """One cotangent, or `None`, for each leaf of `outs`; those of other shapes are viewed.

    Raises:
        TreeError: If the structure of `tangents` is not that of `outs`, with `None` where a leaf takes none.
        LeafError: If a cotangent is no tensor, or given for a leaf that takes none.
        ShapeError: If it cannot be viewed in the shape of its output.
        DtypeError: If its dtype differs.
        DeviceError: If its device differs.
    """
    options = {"namespace": "", "is_leaf": None}
    pieces = align(function, "tangents", tangents, "outs", outs.join(outs.values), options)
    found: list[Tensor | None] = []
    for i, (piece, y) in enumerate(zip(pieces, outs.values, strict=True)):
        label = outs._replace(root="tangents").label(i)
        if piece is not None and not taken[i]:
            raise LeafError(
                f"{function}: {label} must be None: this output takes no cotangent, as it is no floating-point tensor, "
                "does not require grad, or shares memory with an input."
            )
        found.append(None if piece is None else _viewed(function, label, piece, y))
    return found


def _viewed(function: str, label: str, y_bar: Any, y: Tensor) -> Tensor:
    if not isinstance(y_bar, torch.Tensor):
        raise LeafError(f"{function}: {label} must be a tensor or None, got {type(y_bar).__name__}.")
    if y_bar.dtype != y.dtype:
        raise DtypeError(f"{function}: {label} must have the dtype of its output, {y.dtype}, got {y_bar.dtype}.")
    if y_bar.device != y.device:
        raise DeviceError(f"{function}: {label} must be on the device of its output, {y.device}, got {y_bar.device}.")
    if y_bar.shape == y.shape:
        return y_bar
    try:
        return y_bar.view(y.shape)
    except RuntimeError:
        raise ShapeError(
            f"{function}: {label} must have the shape of its output, {list(y.shape)}, or be viewable in it, got "
            f"{list(y_bar.shape)} with strides {list(y_bar.stride())}."
        ) from None


def loss_tangents(function: str, outs: Leaves, taken: Sequence[bool]) -> list[Tensor | None]:
    """The cotangent 1 for the first leaf, which is the loss, and none for the others."""
    if not outs.values or not taken[0] or outs.values[0].numel() != 1:
        got = "no output" if not outs.values else _described(outs.values[0], taken[0])
        raise LeafError(
            f"{function}: with no_tangents=True the first output must be a floating-point tensor of one element that "
            f"requires grad, got {got}."
        )
    return [torch.ones_like(outs.values[0]), *[None] * (len(outs.values) - 1)]


def _described(y: Any, taken: bool) -> str:
    if not isinstance(y, torch.Tensor):
        return type(y).__name__
    return f"{list(y.shape)} of {y.dtype}" + ("" if taken else ", which takes no cotangent")


def require_some_input(function: str, primals: Sequence[Any]) -> None:
    """Raise unless some leaf takes a gradient."""
    if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in primals):
        raise LeafError(
            f"{function}: some leaf of primals must be a tensor that requires grad, got none that does. Call "
            "requires_grad_() on those to differentiate in."
        )


def gradients(
    function: str, inputs: Sequence[Any], outputs: Sequence[Any], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """One gradient for each input, `None` where it takes none or no output with a cotangent depends on it.

    Raises:
        TraceError: If a graph is recorded and the backward pass draws random numbers from a generator.
    """
    pairs = [(y, y_bar) for y, y_bar in zip(outputs, cotangents, strict=True) if y_bar is not None]
    places = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    bars: list[Tensor | None] = [None] * len(inputs)
    if not pairs or not places:
        return bars
    ys = [y for y, _ in pairs]
    with backward_metadata(ys), draws_refused(function):
        found = torch.autograd.grad(ys, [inputs[i] for i in places], [y_bar for _, y_bar in pairs], allow_unused=True)
    for i, bar in zip(places, found, strict=True):
        bars[i] = bar
    return bars


def run_forward(function: str, fn: Callable[..., Any], primals: tuple) -> Any:
    """`fn(*primals)`, differentiated, and with its lines remembered where a graph is recorded."""
    with torch.enable_grad(), forward_metadata(), replays_refused(function):
        return fn(*primals)


@contextlib.contextmanager
def _guarded(function: str, given: Leaves, inputs: Sequence[Any]) -> Iterator[LeafGuard]:
    """Context for the forward pass, in which nothing happens to leaves that autograd does not see."""
    guard = LeafGuard(function, given.label, inputs)
    calls = UserCalls(function, refuses_seeds=True) if is_tracing() else contextlib.nullcontext()
    with grads_guarded(function, given.label, inputs, given.values, inputs), guard, calls:
        yield guard
    guard.check_leaves()


def outside_inference_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which differentiates, in spite of an inference mode around it."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return run


def create_joint(fn: Callable[..., Any], *, no_tangents: bool = False) -> Callable[..., tuple[Any, Any]]:
    """`fn` and its backward pass as one function of primals and tangents.

    The result is an ordinary function: it runs eagerly, and `make_fx` traces it to a graph whose backward nodes carry
    the stack traces of the forward lines they come from.

    An input takes a gradient if it is a tensor that requires grad: call `requires_grad_()` on those to differentiate
    in. An output takes a cotangent if it is a floating-point or complex tensor, requires grad (depends on an input that
    does), and shares no memory with an input. Inputs are detached from their history and results have none: for
    derivatives of higher order differentiate `fn` by `primitives.func` and make the joint function of that.
    The same tensor given twice counts as two inputs, each with its own partial gradient.

    Args:
        fn: Function of pytrees. Leaves that are no tensors are constants. It may write to inputs that do not require
            grad, and they are changed; for others see `functionalize_mutations`.
        no_tangents: Whether `fn` returns a scalar loss, alone or as the first leaf of its output, which alone gets a
            cotangent, 1.

    Returns:
        `joint(primals, tangents) -> (outs, grads)`, or `joint(primals)` with `no_tangents`. `primals` is the tuple of
        the positional arguments of `fn`. `tangents` has the structure of the output, `None` for an output that takes
        no cotangent, or is to get none; a cotangent of another shape is viewed in that of its output. `outs` is what
        `fn` returns; `grads` has the structure of `primals`, with `None` for leaves that take no gradient or that
        nothing depends on.

    Raises:
        TypeError: If `primals` is no tuple.
        LeafError: If no primal requires grad; if a cotangent is no tensor, or is for an output that takes none; with
            `no_tangents`, if there is no scalar loss; if an object with a tensor inside, that optree does not take
            apart, is among the primals or the outputs.
        TreeError: If `tangents` has another structure than the output.
        ShapeError: If a cotangent cannot be viewed in the shape of its output.
        DtypeError: If it has another dtype.
        DeviceError: If it is on another device.
        MutationError: If `fn` writes to an input that requires grad, or has to do with the `.grad` of an input:
            accumulates in it, assigns it, or reads one that is there.
        MissingRuleError: If a caller differentiates in `primals` by reverse mode.
        TraceError: In a trace, if `fn` asks for the values of a tensor, seeds torch's generator or passes one, calls a
            collective that writes in place, or if the backward pass draws random numbers from torch's generators.

    Example:
        >>> joint = create_joint(lambda w, x: {"y": (w * x).sin()})
        >>> w, x = torch.zeros(2, requires_grad=True), torch.tensor([1.0, 2.0])
        >>> joint((w, x), {"y": torch.ones(2)})
        ({'y': tensor([0., 0.])}, (tensor([1., 2.]), None))
    """

    # Two functions: a graph of a function with defaults is no valid code in torch 2.13.
    def joint(primals: tuple, tangents: Any) -> tuple[Any, Any]:
        return run_joint("create_joint", fn, primals, tangents, no_tangents=False)

    def joint_of_loss(primals: tuple) -> tuple[Any, Any]:
        return run_joint("create_joint", fn, primals, None, no_tangents=True)

    return joint_of_loss if no_tangents else joint


@outside_inference_mode
def run_joint(
    function: str, fn: Callable[..., Any], primals: tuple, tangents: Any, *, no_tangents: bool
) -> tuple[Any, Any]:
    """Outputs and gradients of `fn`."""
    given = _checked_primals(function, primals)
    inputs = [_leaf(x) for x in given.values]
    with typed_errors(function):
        with _guarded(function, given, inputs) as guard:
            outs = Leaves.of(run_forward(function, fn, given.join(inputs)), "outs")
        guard.check_outputs(outs.values)
        refuse_opaque(function, outs.values, outs.label, through_functions=True)
        return _with_gradients(function, given, inputs, outs, tangents, no_tangents=no_tangents)


def _with_gradients(
    function: str, given: Leaves, inputs: Sequence[Any], outs: Leaves, tangents: Any, *, no_tangents: bool
) -> tuple[Any, Any]:
    taken = [takes_cotangent(y, inputs) for y in outs.values]
    if no_tangents:
        cotangents = loss_tangents(function, outs, taken)
    else:
        cotangents = match_tangents(function, outs, taken, tangents)
    bars = gradients(function, inputs, outs.values, cotangents)
    return outs.join([detached(y) for y in outs.values]), given.join(bars)


def detached(x: Any) -> Any:
    """`x`, out of the history of autograd; anything without one as it is."""
    if not (isinstance(x, torch.Tensor) and x.requires_grad):
        return x
    if forward_ad._current_level < 0:
        return x.detach()
    with torch.no_grad():
        # It keeps the tangent of forward mode, which `detach` does not.
        return torch.ops.aten.alias.default(x)


def _checked_primals(function: str, primals: Any) -> Leaves:
    if not isinstance(primals, tuple):
        raise TypeError(
            f"{function}: primals must be the tuple of the positional arguments, got {type(primals).__name__}."
        )
    given = Leaves.of(primals, "primals")
    for i, x in enumerate(given.values):
        require_storage(function, given.label(i), x)
    refuse_opaque(function, given.values, given.label)
    refuse_reverse_mode(function, given.values)
    require_some_input(function, given.values)
    return given


def _leaf(x: Any) -> Any:
    # What requires no grad is passed as it is: `fn` may transpose it in place.
    return x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.requires_grad else x
