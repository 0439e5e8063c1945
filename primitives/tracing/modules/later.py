"""Code of a module that runs after its pure call: in hooks, in custom functions, and where a region is recomputed.

All of it finds the parameters and buffers of the call in the module, for as long as it runs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import OrderedDict
from collections.abc import Iterator as IteratorType
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch.autograd.function import BackwardCFunction
from torch.overrides import _get_current_function_mode_stack

from primitives.core.errors import LeafError
from primitives.tracing.modules.mode import PureMode
from primitives.tracing.recompute import replaying_checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from primitives.tracing.modules.moments import Moment
    from primitives.tracing.modules.state import ModuleState

__all__ = ["adopt", "pure_region", "require_finished"]

_MODULE_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
# Custom functions of torch and of this package know no module, but for those that functorch makes of the user's.
_LIBRARIES, _FUNCTORCH = ("torch.", "primitives."), "torch._functorch.autograd_function"


@contextlib.contextmanager
def pure_region(state: ModuleState) -> Iterator[None]:
    """Context in which the module runs purely, and what it leaves for later will find what it finds."""
    if torch.compiler.is_compiling():
        with PureMode(state):
            yield
        return
    for owner in state.modules:
        for name in _MODULE_HOOKS:
            hooks = owner.__dict__.get(name)
            if hooks:
                owner.__dict__[name] = OrderedDict((key, _hook(state, hook)) for key, hook in hooks.items())
    mode = PureMode(state, on_hook=functools.partial(_hook, state))
    with replaying_checkpoints(_replay, on_reentrant=_refuse_reentrant), mode:
        yield


@contextlib.contextmanager
def _again(moment: Moment) -> Iterator[None]:
    with moment.again() as state:
        try:
            with pure_region(state):
                yield
        finally:
            state.end()


@contextlib.contextmanager
def _afterwards(states: tuple[ModuleState, ...]) -> Iterator[None]:
    """Context in which modules are as they were at the end of their calls; the outermost call first."""
    with contextlib.ExitStack() as stack:
        for call in states:
            # Without an end the call still runs, and this is a backward pass inside it.
            if call.last is not None:
                state = stack.enter_context(call.last.afterwards())
                stack.callback(state.end)
                stack.enter_context(replaying_checkpoints(_replay, on_reentrant=_refuse_reentrant))
                mode = PureMode(state, is_over=True, on_hook=functools.partial(_hook, state))
                stack.enter_context(mode)
        yield


def _pure_modes() -> list[PureMode]:
    return [mode for mode in _get_current_function_mode_stack() if isinstance(mode, PureMode)]


def _replay() -> Callable[[], contextlib.AbstractContextManager] | None:
    """What a checkpointed region that begins here is to be recomputed in."""
    moments = [mode.state.moment() for mode in _pure_modes()]
    if not moments:
        return None

    @contextlib.contextmanager
    def replay() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for moment in moments:
                stack.enter_context(_again(moment))
            yield

    return replay


def _refuse_reentrant() -> None:
    if torch.is_grad_enabled() and _pure_modes():
        raise RuntimeError(
            "functional_call: the module calls torch.utils.checkpoint with use_reentrant=True, whose backward "
            "pass cannot be given the parameters of the call. Pass use_reentrant=False."
        )


def _hook(state: ModuleState, hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of autograd that finds the tensors of the call in the module."""
    state.is_needed_later = True

    @functools.wraps(hook, updated=())
    def run(*args: Any) -> Any:
        start = torch.autograd._get_sequence_nr()
        with _afterwards((state,)):
            result = hook(*args)
            adopt(state, start, result)
        return result

    return run


def adopt(state: ModuleState, start: int, *values: Any) -> None:
    """Let custom functions that have been called since `start` find the tensors of the call in their backward passes.

    Args:
        state: The call.
        start: Number of the first operation of autograd to look at.
        *values: Trees in which everything is that these operations have computed.
    """
    stack = [node for x in _tensors(values) for node in _nodes(x)]
    seen = set()
    while stack:
        node: Any = stack.pop()
        if node in seen or node._sequence_nr() < start:
            continue
        seen.add(node)
        stack += [parent for parent, _ in node.next_functions if parent is not None]
        if isinstance(node, BackwardCFunction) and _is_users(type(node)):
            state.is_needed_later = True
            _run_later(node, state)


def _tensors(values: tuple) -> list[torch.Tensor]:
    leaves = optree.tree_leaves(values)  # type: ignore[arg-type] - any tree
    # Objects that are no pytrees, as outputs of model libraries, hold tensors in their attributes.
    opaque = [list(vars(x).values()) for x in leaves if not isinstance(x, torch.Tensor) and hasattr(x, "__dict__")]
    leaves += optree.tree_leaves(opaque)  # type: ignore[arg-type] - any tree
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def _nodes(x: torch.Tensor) -> list[Any]:
    """The operations that made a tensor, at every level of functorch."""
    nodes = []
    while True:
        if x.grad_fn is not None:
            nodes.append(x.grad_fn)
        if not _functorch.is_functorch_wrapped_tensor(x):
            return nodes
        x = _functorch.get_unwrapped(x)


def _is_users(kind: type) -> bool:
    module = f"{kind._forward_cls.__module__}."  # type: ignore[attr-defined] - of every such class
    return not module.startswith(_LIBRARIES) or module == f"{_FUNCTORCH}."


def _run_later(node: Any, state: ModuleState) -> None:
    """Make the backward pass of a custom function run inside `state`."""
    kind = type(node)
    if "_is_adopted" not in vars(kind):
        if "_adopted" not in vars(kind):
            kind._adopted = _adopted_kind(kind)  # type: ignore[attr-defined] - set here
        # The context of the function has no other place to be replaced: the engine calls its methods.
        node.__class__ = kind._adopted  # type: ignore[attr-defined] - set above
        node._pure_states = ()
    node._pure_states = (state, *node._pure_states)


def _adopted_kind(kind: Any) -> type:
    def running_later(name: str) -> Callable[..., Any]:
        def run(self: Any, *args: Any) -> Any:
            start = torch.autograd._get_sequence_nr()
            with _afterwards(self._pure_states):
                result = getattr(kind, name)(self, *args)
                for state in self._pure_states:
                    adopt(state, start, result)
            return result

        return run

    names = [name for name in ("apply", "apply_boxed") if hasattr(kind, name)]
    return type(kind.__name__, (kind,), {"_is_adopted": True, **{name: running_later(name) for name in names}})


def require_finished(state: ModuleState, output: Any) -> None:
    """Raise if the module returns what would run its code after the call.

    Args:
        state: The call.
        output: What the module returns.

    Raises:
        LeafError: If a leaf is a generator, another iterator, a coroutine, or a function that holds the module.
    """
    for leaf in optree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor) or not (_runs_later(leaf) or _holds(leaf, state)):
            continue
        raise LeafError(
            f"functional_call: the module must return what it has computed, got {type(leaf).__name__}, which would run "
            "after the call, when the module's own parameters are back in their places. Return a list, or the values."
        )


def _runs_later(leaf: Any) -> bool:
    return isinstance(leaf, IteratorType) or inspect.isawaitable(leaf) or inspect.isasyncgen(leaf)


def _holds(leaf: Any, state: ModuleState) -> bool:
    """Whether a function is a method of the module, or has it in its closure."""
    held = [getattr(leaf, "__self__", None)]
    for cell in getattr(leaf, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            held.append(cell.cell_contents)
    return any(isinstance(each, torch.nn.Module) and each in state.modules for each in held)
