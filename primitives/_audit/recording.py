"""Record the operators of a call: which ones depend on what is differentiated, and where they are called."""

from __future__ import annotations

import contextlib
import inspect
import re
import textwrap
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from primitives._audit.table import name_of, verdict_of
from primitives._core.recomputation import nodes_of
from primitives.tracing._errors import frames_of_user

# Other operators that draw numbers have derivatives, as those of a gamma distribution and cuDNN's LSTM.
_CONSTANTS = re.compile(
    "aten::(detach|lift_fresh|.*_like|new_.*|rand(n|int|perm)?|multinomial|"
    "(bernoulli|cauchy|exponential|geometric|log_normal|normal|poisson|uniform)(_functional)?_?)"
)
# Cells of a notebook.
_CELL = re.compile(r"<ipython-input|.*[/\\]ipykernel_\d+[/\\]")


def _storage(x: Tensor) -> int | None:
    """Which memory a tensor lies in; None where torch cannot say, as of sparse ones."""
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _told(frame: traceback.FrameSummary) -> str:
    """File, line and function in words; of a cell of a notebook, whose file says little, the text of the line too."""
    path = Path(frame.filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(*path.parts[-3:])
    text = f"{shown}:{frame.lineno} in {frame.name}"
    return f"cell {text}: {frame.line}" if _CELL.match(frame.filename) else text


def told(error: BaseException) -> str:
    """An exception in words, and the innermost line of the user's that it came through."""
    lines = [*map(_told, frames_of_user(traceback.walk_tb(error.__traceback__)))]
    text = textwrap.shorten(f"{type(error).__name__}: {error}", 160)
    return f"{text} ({lines[-1]})" if lines else text


def line_of_definition(function: Any) -> str:
    """Where a function or the forward of a module begins; empty where Python does not know."""
    code = getattr(inspect.unwrap(getattr(function, "forward", function)), "__code__", None)
    return _told(traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)) if code else ""


def _functions(base: type = torch.autograd.Function) -> Iterator[tuple[Any, type]]:
    """The code of each user's `autograd.Function.forward`, and the class that has it."""
    for function in base.__subclasses__():
        if "forward" in vars(function) and _is_users(function):
            yield getattr(inspect.unwrap(function.forward), "__code__", None), function  # type: ignore[attr-defined]
        yield from _functions(function)


def _is_users(function: Any) -> bool:
    # Those of torch are the backward of a custom operator, which stands in the list by itself.
    return function.__module__.partition(".")[0] not in {"torch", "primitives"}


class Recorder(TorchDispatchMode):
    """Counts the operators that depend on some tensors, by name and place.

    An `autograd.Function` of the user stands for all operators of its forward, which nothing differentiates; `applied`
    has the places of its calls. `cuts` has the places where a derivative ends, with the reason.

    Args:
        moving: The tensors that are differentiated.
        modules: Where the names of the modules stand whose forward runs, outermost first.
    """

    def __init__(self, moving: Iterable[Tensor], modules: Sequence[str]) -> None:
        super().__init__()
        self.calls: dict[str, Counter[str]] = defaultdict(Counter)
        self.applied: dict[type, Counter[str]] = defaultdict(Counter)
        self.cuts: Counter[str] = Counter()
        self._call: Any = None
        self._function_of: dict[Any, type | None] = {}
        self._modules = modules
        # Memory of what is differentiated, but for the tensors that lie in it and have been detached.
        self._moving = {_storage(x) for x in moving}
        self._detached = WeakTensorKeyDictionary()

    def _moves(self, x: Tensor) -> bool:
        memory = _storage(x)
        return x not in self._detached and (memory is None or memory in self._moving)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **kwargs or {})
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        depends = any(map(self._moves, given)) and not _makes_constants(func)
        moves = [x for x in made if depends and (x.is_floating_point() or x.is_complex())]
        cut = self._cut(func, given, made, bool(moves))
        shared = self._moving.intersection(map(_storage, given))
        for x in made:
            self._detached.pop(x, None)
            if _storage(x) in shared:
                self._detached[x] = True
        # Memory is used again for other tensors, which may not depend on anything.
        self._moving.difference_update({_storage(x) for x in made} - shared)
        for x in moves:
            self._detached.pop(x, None)
            self._moving.add(_storage(x))
        if moves or cut:
            frame = inspect.currentframe()
            call, function = self._applied(frame)
            module = f"{self._modules[-1]}, " if self._modules else ""
            lines = frames_of_user(traceback.walk_stack(frame if function is None else call.f_back))
            place = module + next(map(_told, lines), "(no Python frame)")
            if function is None and cut:
                self.cuts[f"{place}: {cut}"] += 1
            if function is None and moves:
                self.calls[name_of(func, args, self._moves)][place] += 1
            elif function is not None and call is not self._call:
                self.applied[function][place] += 1
            self._call = call
        return out

    def _cut(self, func: Any, given: Sequence[Tensor], made: Sequence[Tensor], moves: bool) -> str:
        """Why a derivative ends here, in words; empty if it does not."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return "makes a Python number of a tensor" * any(map(self._moves, given))
        if moves and not torch.is_grad_enabled():
            return "runs under no_grad"
        # Autograd detaches results that it saves, which no operator reads.
        return "uses a detached tensor" * (bool(made) and any(x in self._detached for x in given))

    def _applied(self, frame: Any) -> tuple[Any, type | None]:
        """The frame of the outermost `forward` of a user's `autograd.Function`, and which; None twice outside."""
        call = function = None
        while frame is not None:
            code = frame.f_code
            if code not in self._function_of:
                self._function_of[code] = dict(_functions()).get(code)
            if self._function_of[code] is not None:
                call, function = frame, self._function_of[code]
            frame = frame.f_back
        return call, function


def _makes_constants(operator: Any) -> bool:
    """Whether an operator takes of its inputs their shapes alone, or draws numbers that have no derivative."""
    return bool(_CONSTANTS.fullmatch(operator._schema.name)) and verdict_of(name_of(operator)) is None


def labels_of(model: Any) -> Callable[[Any], str]:
    """How modules are called: `0.norm (LayerNorm)`; by its class alone the model itself, and one that is not in it."""
    names = {module: name for name, module in model.named_modules()} if isinstance(model, torch.nn.Module) else {}
    return lambda m: f"{names[m]} ({type(m).__name__})" if names.get(m) else type(m).__name__


@contextlib.contextmanager
def calls_seen(enter: Callable[[Any, Any], None], leave: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which `enter(module, args)` is called before each forward of a module, and `leave(kwargs)` after."""

    def left(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        leave(kwargs)

    before = register_module_forward_pre_hook(enter)
    after = register_module_forward_hook(left, with_kwargs=True, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()
        # torch forgets to, and warns of hooks from then on.
        torch.nn.modules.module._global_forward_hooks_with_kwargs.pop(after.id, None)


@contextlib.contextmanager
def places_by_module(model: Any) -> Iterator[list[str]]:
    """Context in which a list holds the labels of the modules whose forward runs."""
    label, running = labels_of(model), []
    with calls_seen(lambda module, args: running.append(label(module)), lambda kwargs: running.pop()):
        yield running


def autograd_functions(outputs: Iterable[Any]) -> Counter[type]:
    """The user's `autograd.Function`s in the history of outputs, with how often each stands there."""
    nodes = nodes_of(y for y in tree_leaves(outputs) if isinstance(y, torch.Tensor))
    # Torch sets the class on each node.
    classes = [node._forward_cls for node in nodes if isinstance(node, BackwardCFunction)]  # type: ignore[attr-defined]
    return Counter(filter(_is_users, classes))
