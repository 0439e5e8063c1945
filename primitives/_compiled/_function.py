"""Compiled functions of pytrees: which program serves a call."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from typing import TYPE_CHECKING, Any, cast

import optree
import torch
from torch import _C
from torch._C import _functorch  # type: ignore[attr-defined] - no stub
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily

from primitives._compiled._derivatives import Compiled
from primitives._compiled._graphs import LOCK
from primitives._compiled._saved import Saved
from primitives._compiled._table import difference, table
from primitives._core.errors import LeafError
from primitives._core.recomputation import recomputed
from primitives.func._reached import Reached
from primitives.func._region import Guard, Region
from primitives.tracing._leaves import Leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from primitives._compiled._graphs import Program, Settings
    from primitives.tracing import JointGraph

__all__ = ["CompiledFunction"]

_log = logging.getLogger("primitives.compile")
# After so many sets of sizes or constants a user is told.
_MANY = 8


@contextlib.contextmanager
def _said_to_compile() -> Iterator[None]:
    """Context in which libraries ask for no values, as inside torch.compile and torch.export."""
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


class _Traced(Region):
    """A function with the structure and constants of its arguments, as a function `(*tensors, seed) -> tensors`."""

    def __init__(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
        super().__init__(fn, args, kwargs)
        kinds = {"cpu", *(x.device.type for x in self.tensors)}
        # Derivatives of every order are asked of it.
        self._is_repaired = True
        self._contexts = [functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()), _said_to_compile]
        self._contexts += [
            functools.partial(torch.autocast, kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False)
            for kind in kinds
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        ]
        self.device = next((x.device for x in self.tensors), torch.device("cpu"))
        self.names = self._names(args, kwargs)
        # Those of a call are the arguments of every run.
        self._leaves = [None if isinstance(x, torch.Tensor) else x for x in self._leaves]
        self.tensors = []

    is_random = False

    def _names(self, args: tuple, kwargs: dict[str, Any]) -> list[str]:
        given = Leaves.of_arguments(self._fn, args, dict(sorted(kwargs.items())))
        names = [*given.labels(self._places), *(f"captured[{k}]" for k in range(len(self._reached.places)))]
        paths = {owner: path for each in self._reached.modules for path, owner in each.named_modules()}
        places = [each[0] for each in self._registered.values()]
        constants = [i for i, x in enumerate(self._leaves) if not isinstance(x, torch.Tensor)]
        self.given = [*zip(given.labels(constants), (self._leaves[i] for i in constants), strict=True)]
        return [*names, *(f"{paths[owner]}.{name}".lstrip(".") for owner, _, name in places), "seed"]

    def _look(self, roots: list[Any]) -> Reached:
        return Reached([*roots, *(x for x in self._leaves if not isinstance(x, torch.Tensor))], lambda x: True)

    def _surroundings(self, tensors: Sequence[Tensor]) -> list[Any]:
        return []

    def _watch(self, known: Sequence[Tensor]) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Tensors of the output, then new values of buffers."""
        from primitives.tracing import PhiloxState, rng_mode

        *tensors, seed = given
        with contextlib.ExitStack() as stack:
            for make in self._contexts:
                stack.enter_context(make())
            mode = stack.enter_context(rng_mode(PhiloxState(seed, torch.zeros_like(seed))))
            results = super().__call__(*tensors)
            self.is_random = self.is_random or mode.has_drawn
            return results


class _Site:
    """What one call, or several that differ in their tensors alone, leads to.

    Attributes:
        region: The function.
        reached: What it reaches.
        compiled: The function of flat tensors.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], owner: CompiledFunction) -> None:
        self.owner, self.region = owner, _Traced(fn, args, kwargs)
        owner.settings.fixed.update(self.region.names[-1 - len(self.region._registered) :])
        self.reached = self.region._reached
        self.compiled = Compiled(self.region, owner.settings, "value", self.region.names)
        self._state, self._modes = GlobalStateGuard(), tuple(_modes())
        self._plans: list[tuple[Any, Callable[[list[Tensor]], Sequence[Tensor]]]] = []
        self._is_known = False
        with torch.inference_mode(False), temporarily_clear_interpreter_stack():
            self._no_seed = torch.zeros((), dtype=torch.int64, device=self.region.device)

    def tensors(self) -> list[Tensor] | None:
        """What the function reaches, or `None` if that, or torch's state, is not what it was."""
        if not self._state.check() or (
            (_C._len_torch_function_stack() or self._modes) and tuple(_modes()) != self._modes
        ):
            return None
        return self.reached.tensors()

    def __call__(self, tensors: list[Tensor]) -> Any:
        """The output, for the tensors of the arguments and those reached."""
        if _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            with temporarily_clear_interpreter_stack():
                seed = self._seed()
            tensors.append(seed)
            results = recomputed(self.compiled, tensors)
        else:
            tensors.append(self._seed())
            for guard, run in self._plans:
                if guard.check(*tensors):
                    results = run(tensors)
                    break
            else:
                results = self._planned(tensors)
        return self.region.output(tuple(results), tensors)

    def _seed(self) -> Tensor:
        if self._is_known:
            return self._drawn() if self.region.is_random else self._no_seed
        # A function that draws nothing leaves the generators alone.
        with torch.random.fork_rng([self.region.device] if self.region.device.type == "cuda" else []):
            return self._drawn()

    def _drawn(self) -> Tensor:
        return torch.empty((), dtype=torch.int64, device=self.region.device).random_()

    def settle(self) -> None:
        """After the first call it is known whether anything was random; then what was drawn aside counts."""
        self._is_known = True
        if self.region.is_random:
            with temporarily_clear_interpreter_stack():
                self._drawn()

    def _planned(self, tensors: list[Tensor]) -> Sequence[Tensor]:
        """The results, and a plan for the next call of such tensors."""
        if self.owner.settings.dynamic:
            # Its programs serve other sizes.
            return recomputed(self.compiled, tensors)
        guard = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        compiled, wanted = self.compiled, tuple(i for i, x in enumerate(tensors) if x.requires_grad)
        if wanted and torch.is_grad_enabled():
            run = functools.partial(_save, Saved.apply, compiled.halves(tensors, wanted))
        else:
            run = functools.partial(_call, compiled.program(tensors))
        results = run(tensors)
        self._plans = [(guard, run), *self._plans]
        described = [
            (name, ([*x.shape], x.dtype, x.stride())) for name, x in zip(self.region.names, tensors, strict=True)
        ]
        self.owner.note(
            [*self.region.given, *described, *self.reached.described(), ("grad mode", torch.is_grad_enabled())]
        )
        return results


def _save(apply: Any, halves: Any, tensors: list[Tensor]) -> Sequence[Tensor]:
    return apply(halves, *tensors)


def _call(program: Program, tensors: list[Tensor]) -> Sequence[Tensor]:
    with torch.no_grad(), _C._DisableAutocast():
        return program(tensors)


def _modes() -> Iterator[Any]:
    """Modes of torch functions, but that of `checkpoint`: what it looks for, `Reached` finds."""
    return (mode for mode in _get_current_function_mode_stack() if not isinstance(mode, Guard))


@contextlib.contextmanager
def _without_guards() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        modes = list(_modes())
        for _ in range(_C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        for mode in modes:
            stack.enter_context(mode)
        yield


class CompiledFunction:
    """A compiled function; made by `compile`. `print` shows a table of its programs.

    Attributes:
        settings: How it is compiled, and what has been.
    """

    def __init__(self, fn: Callable[..., Any], settings: Settings) -> None:
        self.settings = settings
        self._sites: dict[Any, list[_Site]] = {}
        self._described: list[tuple[str, Any]] = []
        self._num_described = 0
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the function."""
        fn = self.__wrapped__  # type: ignore[attr-defined] - set by update_wrapper
        if torch.compiler.is_dynamo_compiling() or _C._len_torch_dispatch_stack():
            return fn(*args, **kwargs)
        if _C._len_torch_function_stack() and any(isinstance(x, Guard) for x in _get_current_function_mode_stack()):
            with _without_guards():
                return self(*args, **kwargs)
        leaves, treespec = optree.tree_flatten((args, kwargs))  # type: ignore[arg-type] - any tree
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        key: Any = treespec
        if len(tensors) < len(leaves):
            constants = [x for x in leaves if not isinstance(x, torch.Tensor)]
            key = treespec, *constants, *map(type, constants)
        try:
            sites = self._sites.get(key, ())
        except TypeError:
            raise _unhashable(leaves, args, kwargs) from None
        for site in sites:
            reached = site.tensors()
            if reached is not None:
                return site(tensors + reached)
        return self._first(key, args, kwargs, tensors)

    def _first(self, key: Any, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """The first call of its kind; the site is kept if it succeeds."""
        fn = self.__wrapped__  # type: ignore[attr-defined] - as above
        with LOCK:
            site = _Site(fn, args, kwargs, self)
            reached = site.tensors()
            if reached is None:
                raise RuntimeError("compile: another thread changes what the function reaches.")
            output = site(tensors + reached)
            site.settle()
            # Another list: threads go through this one.
            self._sites[key] = [site, *self._sites.get(key, ())]
        return output

    def note(self, described: list[tuple[str, Any]]) -> None:
        """Say once that calls differ again and again, and how."""
        before, self._described = self._described, described
        self._num_described += 1
        if self._num_described == _MANY:
            _log.warning(
                "compile: %s has been compiled for %d different calls: %s. Each takes seconds: pass what changes as a "
                "tensor, keep sizes fixed, or use dynamic=True.",
                self,
                _MANY,
                difference(before, described),
            )

    @property
    def graphs(self) -> dict[str, JointGraph]:
        """The joint graphs of the programs, by name."""
        return dict(self.settings.graphs)

    def __repr__(self) -> str:
        """The table that is printed."""
        return table(getattr(self.__wrapped__, "__name__", type(self.__wrapped__).__name__), self.settings.programs)  # type: ignore[attr-defined] - as above

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledFunction, (self.__wrapped__, self.settings.fresh())  # type: ignore[attr-defined] - as above

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction:
        return CompiledFunction(copy.deepcopy(self.__wrapped__, memo), self.settings.fresh())  # type: ignore[attr-defined] - as above


def _unhashable(leaves: Sequence[Any], args: tuple, kwargs: dict[str, Any]) -> LeafError:
    for x, path in zip(leaves, optree.tree_accessors(cast("Any", (args, kwargs))), strict=True):
        try:
            hash(x)
        except TypeError:
            return LeafError(
                f"compile: {path.codify('')} must be a tensor, a hashable constant or a container that optree takes "
                f"apart, got {type(x).__name__}. Pass arrays as tensors; register other classes as pytree nodes."
            )
    return LeafError("compile: an argument is not hashable.")
