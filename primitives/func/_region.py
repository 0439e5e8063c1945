"""`checkpoint`, and a function as one of all tensors that it uses: arguments, captured ones, parameters, buffers."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import _C, Tensor
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import arg_tree_leaves
from torch.utils.checkpoint import get_device_states

from primitives._core.batching import rewinder
from primitives._core.errors import LeafError, MutationError
from primitives._core.levels import recomputed
from primitives._core.recomputation import Recomputable
from primitives._core.trees.nodes import ARGUMENTS, RESULTS, flattened
from primitives._repair.switch import is_repaired, repaired_thread
from primitives.func._reached import Reached
from primitives.tracing._memory import bottom, refuse_sharing
from primitives.tracing._modules.lending import attributes_kept, is_lending, running
from primitives.tracing._recompute import replaying_checkpoints, replays
from primitives.tracing._torch_private import has_data_mutation

_P = ParamSpec("_P")
_R = TypeVar("_R")
Context = Callable[[], contextlib.AbstractContextManager]

_write_back = torch.ops.primitives.write_back.default


class Region(Recomputable):
    """A function with its arguments, as a function `(*tensors) -> tensors`; every run but the first is a repetition.

    `tensors` are those of the arguments, then what `fn` captures, then parameters and buffers of the modules that it
    reaches, by `reached`; each once, wherever `fn` finds it. `changed` are the places among them of buffers that `fn`
    changes, whose new values come last in the result; `constants` the places there of those that are running statistics
    of a norm, constant to every derivative. It `varies` once a later run has returned what the first did not.
    """

    varies = False

    def __init__(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
        self._fn = fn
        self._leaves, self._treespec = flattened((args, kwargs), ARGUMENTS)
        self._places = [i for i, x in enumerate(self._leaves) if isinstance(x, torch.Tensor)]
        self.reached = self._look([fn])
        self._owners, self._registered = self.reached.owners, self.reached.registered
        captured = [place.get() for place in self.reached.places]
        found = [*(self._leaves[i] for i in self._places), *captured, *self._registered]
        self._start = len(found) - len(self._registered)
        self.tensors, self._numbers = once(found)
        self._changed: list[int] = []
        self._constants: frozenset[int] = frozenset()
        # What every run enters, the first one perhaps not.
        self._again: list[Context] = []
        self._out_treespec: Any = None
        self._is_repaired, self._is_lent = is_repaired(), is_lending()

    def _look(self, roots: list[Any]) -> Reached:
        return Reached(roots, _may_be_differentiated)

    def _surroundings(self, tensors: Sequence[Tensor]) -> list[Context]:
        """What every run but the first enters again."""
        return [*replays(), *_surroundings(tensors)]

    def _returned(self, results: list[Any]) -> list[Any]:
        """Leaves of the output, as they are given back."""
        return results

    def _lender(self) -> contextlib.ExitStack | None:
        """Holds what is lent for longer than a run; `None` where nothing needs it."""
        return None

    def _watch(self, known: Sequence[Tensor]) -> contextlib.AbstractContextManager:
        """Context of a run, in which all is lent."""
        return Guard(known) if self._out_treespec is None else contextlib.nullcontext()

    @property
    def changed(self) -> Sequence[int]:
        """Known after the first run."""
        return [self._numbers[i] for i in self._changed]

    @property
    def constants(self) -> frozenset[int]:
        """The same."""
        return self._constants

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors of the output of `fn`, then new values of the buffers that it changes."""
        with contextlib.ExitStack() as stack:
            is_first = self._out_treespec is None
            again = self._surroundings(tensors) if is_first else []
            for make in self._again:
                stack.enter_context(make())
            start = self._start
            found, used = (self._lender() or stack).enter_context(self._lent(tensors))
            stack.enter_context(replaying_checkpoints(self._moment(tensors)))
            if self._is_repaired:
                stack.enter_context(repaired_thread())
            if self._is_lent:
                stack.enter_context(running(self._owners))
            stack.enter_context(self._watch([*tensors, *used]))
            leaves = list(self._leaves)
            for i, x in zip(self._places, found, strict=False):
                leaves[i] = x
            inner: Any = self._treespec.unflatten(leaves)
            results, out_treespec = flattened(self._fn(*inner[0], **inner[1]), RESULTS)
            results = self._returned(results)
            places = list(self._registered.values())
            now = (getattr(owner, registry).get(name) for (owner, registry, name), *_ in places)
            current: list[Any] = [x if x is None else _functorch.unwrap_if_dead(x) for x in now]
            if not is_first:
                self._require_same(out_treespec, results)
            else:
                self._again += again
                self._out_treespec = out_treespec
                self._is_bare = out_treespec.is_leaf() and isinstance(results[0], torch.Tensor)
                self._out_places = [i for i, y in enumerate(results) if isinstance(y, torch.Tensor)]
                self._out_leaves = [None if isinstance(y, torch.Tensor) else y for y in results]
                for i, (x, y) in enumerate(zip(used, current, strict=True)):
                    if y is not None and (y is not x or _is_written(bottom(y), self._versions[i])):
                        self._changed.append(start + i)
                self._require_kept()
                self._constants = frozenset(
                    len(self._out_places) + k
                    for k, i in enumerate(self._changed)
                    if all(isinstance(owner, _NormBase) for owner, _, _ in places[i - start])
                )
            return *(results[i] for i in self._out_places), *(current[i - start] for i in self._changed)

    def _require_kept(self) -> None:
        """Raise where a buffer is set that was `None`, or written to and shares memory: in a call each is a copy."""
        places = [*self._registered.values()]
        known = {(owner, name) for each in places for owner, _, name in each}
        for owner in self._owners:
            for name, x in vars(owner)["_buffers"].items():
                if x is not None and (owner, name) not in known:
                    raise MutationError(
                        f"the function sets the buffer {name} of {type(owner).__name__}, which holds no tensor when it "
                        "is called, and what it sets would be lost. Register the buffer with its first value."
                    )
        names = [f"the buffer {each[0][2]}" for each in places]
        written = [i - self._start for i in self._changed]
        with _C.DisableTorchFunction():
            refuse_sharing("a compiled function", names, [*self._registered], written)

    def _require_same(self, treespec: Any, results: Sequence[Any]) -> None:
        """Raise if a later run returns what the first did not: where it looks at `requires_grad`, for instance."""

        def known(leaves: Sequence[Any]) -> list[Any]:
            return [y if type(y) in (bool, int, float, str) else isinstance(y, torch.Tensor) for y in leaves]

        first = [torch.empty(0) if i in self._out_places else y for i, y in enumerate(self._out_leaves)]
        if treespec != self._out_treespec or known(results) != known(first):
            self.varies = True
            raise LeafError(
                f"the function returned {self._out_treespec} in its first run, and returns {treespec}, or other "
                "constants in it, where it is differentiated or has other sizes. Return the same tree each time."
            )

    @contextlib.contextmanager
    def _lent(self, tensors: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Context in which all that is reached is in its places: arguments and captured tensors, those of modules."""
        numbers = self._numbers[self._start :]
        with attributes_kept(self._owners):
            used = self._put([tensors[k] for k in numbers])
            registered = dict(zip(numbers, used, strict=True))
            found = [registered.get(k, tensors[k]) for k in self._numbers[: self._start]]
            with self.reached.holding(found[len(self._places) :]):
                yield found, used

    def _moment(self, tensors: Sequence[Tensor]) -> Callable[[bool], Context | None]:
        """Tells regions of torch's checkpoint that begin in this run what they find when they are computed again."""
        thread = threading.get_ident()

        def moment(is_reentrant: bool) -> Context | None:
            if threading.get_ident() != thread:
                return None
            if is_reentrant and torch.is_grad_enabled():
                raise LeafError(
                    "torch.utils.checkpoint with use_reentrant=True runs its function again when this call has ended, "
                    "and modules hold its parameters no more. Pass use_reentrant=False, or use func.checkpoint."
                )
            return functools.partial(self._lent, tensors)

        return moment

    def _put(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Put parameters, and copies of buffers, into their places."""
        used = []
        for x, places in zip(tensors, self._registered.values(), strict=True):
            used.append(x.clone() if places[0][1] == "_buffers" else x)
            for owner, registry, name in places:
                getattr(owner, registry)[name] = used[-1]
        self._versions = [0 if x.is_inference() else bottom(x)._version for x in used]
        return used

    def output(self, results: tuple[Tensor, ...], tensors: Sequence[Tensor] | None = None) -> Any:
        """The output of `fn`, out of what a run (of `tensors`) has returned; buffers get their new values."""
        if not self.changed and self._is_bare:
            return results[0]
        tensors = self.tensors if tensors is None else tensors
        leaves, count = list(self._out_leaves), len(self._out_places)
        for i, y in zip(self._out_places, results, strict=False):
            leaves[i] = y
        registered = [*self._registered.values()]
        for i, new in zip(self._changed, results[count:], strict=True):
            old = tensors[self._numbers[i]]
            if new.requires_grad or new.shape != old.shape or new.dtype != old.dtype:
                for owner, registry, name in registered[i - self._start]:
                    getattr(owner, registry)[name] = new
            else:
                _write_back([old], [new])
        return self._out_treespec.unflatten(leaves)


def once(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Each tensor once, and for each of `tensors` its number there."""
    if len({*map(id, tensors)}) == len(tensors):
        return [*tensors], [*range(len(tensors))]
    found = {id(x): x for x in tensors}
    numbers = {key: k for k, key in enumerate(found)}
    return [*found.values()], [numbers[id(x)] for x in tensors]


def _is_written(x: Tensor, version: int) -> bool:
    """Whether `x` was written to since it had this version; functionalization counts some writes by itself."""
    return x._version > version or has_data_mutation(x)


def _may_be_differentiated(x: Tensor) -> bool:
    return x.requires_grad or _functorch.is_functorch_wrapped_tensor(x)


def autocasts(tensors: Sequence[Tensor], *, may_cache: bool = True) -> list[Context]:
    """Contexts with the state of autocast."""
    kinds = [kind for kind in {"cpu", *(x.device.type for x in tensors)} if torch.amp.is_autocast_available(kind)]
    return [
        functools.partial(
            torch.autocast,
            kind,
            dtype=torch.get_autocast_dtype(kind),
            enabled=torch.is_autocast_enabled(kind),
            cache_enabled=may_cache and torch.is_autocast_cache_enabled(),
        )
        for kind in kinds
    ]


def _surroundings(tensors: Sequence[Tensor]) -> list[Context]:
    """Contexts with what torch remembers outside of tensors: autocast, and the states of its generators."""
    contexts = autocasts(tensors)
    if _C._get_dispatch_mode(_C._TorchDispatchModeKey.PROXY) is not None:  # type: ignore[attr-defined] - no stub
        # A graph has no generators.
        return contexts
    rewind, (devices, _) = rewinder(tensors), get_device_states(*tensors)

    @contextlib.contextmanager
    def drawing_again() -> Iterator[None]:
        with torch.random.fork_rng(devices):
            rewind()
            yield

    return [*contexts, drawing_again]


def _depth() -> int:
    interpreter = _functorch.peek_interpreter_stack()
    return 0 if interpreter is None else interpreter.level()


class Guard(TorchFunctionMode):
    """Context in which no tensor is used whose derivative would get lost, since the region does not know it."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self._known = {id(x): x for x in known}
        self._level = _depth()
        self._refusal: LeafError | None = None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """End. Python takes a `TypeError` inside an operator for one of its own, and raises another."""
        super().__exit__(kind, error, trace)
        if self._refusal is not None and isinstance(error, TypeError):
            raise self._refusal from None

    def _is_foreign(self, x: Tensor) -> bool:
        if _functorch.is_functorch_wrapped_tensor(x):
            return _depth() == self._level < _functorch.maybe_get_level(x)
        return x.requires_grad and id(x) not in self._known

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Look at the arguments, and make the call."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__" and not isinstance(found := func(*args, **kwargs), torch.Tensor):
            # A shape or a dtype, which has no derivative.
            return found
        if func is torch.autograd.grad and not (torch.is_grad_enabled() or any(x.requires_grad for x in args[0])):
            raise LeafError(
                "checkpoint: the function calls torch.autograd.grad, and its first run, which keeps nothing, records "
                "no graph. Call torch.func.grad there, or use torch.utils.checkpoint with use_reentrant=False."
            )
        for x in arg_tree_leaves(*args, **kwargs):
            if isinstance(x, torch.Tensor) and self._is_foreign(x):
                self._refusal = LeafError(
                    f"checkpoint: the function uses a tensor {list(x.shape)} of {x.dtype} that is differentiated and "
                    "neither an argument, nor in its closure, nor of a module that it reaches. Pass it as an argument."
                )
                raise self._refusal
        result = func(*args, **kwargs)
        if func in _WRITES_STATISTICS:
            values = [*args, *kwargs.values()]
            *statistics, is_training = (values[k] for k in _WRITES_STATISTICS[func])
            torch.autograd.graph.increment_version([bottom(x) for x in statistics if is_training and x is not None])
        for y in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(y, torch.Tensor) and y.requires_grad:
                # A leaf of its own, or a view of one: nothing else requires grad in a first run.
                self._known[id(y)] = y
        return result


# Torch's batch norms do not count that they write; places of their statistics, and of whether they do.
_WRITES_STATISTICS = {torch.nn.functional.batch_norm: (1, 2, 5), torch.batch_norm: (3, 4, 5)}


def checkpoint(fn: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """`fn(*args, **kwargs)`, of which nothing but the arguments is kept: a backward pass computes the rest again.

    It works under every transform, in any nesting, where `torch.utils.checkpoint` raises: so a loss with a JVP in it
    keeps, for its backward pass, the arguments and tangents of each checkpointed block. `torch.compile` takes it too.
    Random numbers are the same when they are drawn again, also those of an explicit state.

    Args:
        fn: Function of pytrees, whose tensors are its arguments and the parameters and buffers of modules: `fn` itself,
            or what it reaches by its closure, its globals, attributes of objects, or `functools.partial`. Buffers that
            it changes are changed once. Attributes that a module assigns are forgotten.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        The result of `fn`.

    Raises:
        LeafError: If `fn` uses a tensor that requires grad, or belongs to a transform, and reaches it otherwise; if it
            calls `torch.autograd.grad`, for which nothing is recorded: take `torch.func.grad` there.

    Example:
        >>> import torch, primitives as pr
        >>> block = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
        >>> x, v = torch.ones(2), torch.ones(2)
        >>> y, y_dot = torch.func.jvp(lambda x: pr.func.checkpoint(block, x), (x,), (v,))
        >>> (y - y_dot).square().sum().backward()
        >>> block[0].weight.grad.shape
        torch.Size([2, 2])
    """
    if torch.compiler.is_dynamo_compiling():
        if not _may_be_marked():
            return fn(*args, **kwargs)
        # A mark for the compiler's partition.
        return torch_checkpoint.checkpoint(fn, *args, use_reentrant=False, **kwargs)
    if torch.is_inference_mode_enabled():
        # Nothing is recorded, and no tensor counts how often it is written.
        return fn(*args, **kwargs)
    region = Region(fn, args, kwargs)
    return region.output(recomputed(region, region.tensors))


def _may_be_marked() -> bool:
    """Whether no reverse-mode transform of `torch.func` is around."""
    return _C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined] - no stub


# As `torch.compiler.assume_constant_result` does, which would import the compiler.
_may_be_marked._dynamo_marked_constant = True  # type: ignore[attr-defined] - set here
