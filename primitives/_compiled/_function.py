"""Compiled functions of pytrees: which program serves a call."""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar
from unittest import mock

import torch
from torch import _C, Tensor
from torch._C._dynamo.guards import GlobalStateGuard
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily

from primitives._compiled._arguments import hides, kind_of, number, taken_apart, unhashable
from primitives._compiled._derivatives import SEED, Compiled
from primitives._compiled._graphs import Settings, check_dense, compiling, until_traced
from primitives._core.errors import LeafError, TraceError
from primitives._core.levels import recomputed
from primitives._core.trees.nodes import ARGUMENTS, registered
from primitives.func._reached import Reached
from primitives.func._region import Guard, Region, autocasts, once
from primitives.tracing import JointGraph
from primitives.tracing._errors import current_line
from primitives.tracing._leaves import Leaves
from primitives.tracing._modules.lending import counting_in
from primitives.tracing._watching import as_outside

__all__ = ["CompiledFunction"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_log = logging.getLogger("primitives.compile")
# After so many sets of sizes or constants a user is told.
_MANY = 8


class _Unseeded:
    """Torch's generator, which the function may not seed: programs draw from the state that they are called in."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed") and threading.get_ident() == self._thread:
            raise TraceError(
                f"compile: torch.{name} is called inside the function, at {current_line()}, and no program does it. "
                "Call it outside: numbers are drawn from the state that it sets."
            )
        return getattr(torch.default_generator, name)


@contextlib.contextmanager
def _said_to_compile() -> Iterator[None]:
    """Context in which libraries and distributions ask for no values, no parametrization is kept, and LSTMs unroll."""
    # The LSTM of MKL-DNN saves a tensor that is none.
    flags = torch.backends.mkldnn.set_flags(False)
    try:
        with (
            mock.patch.object(torch.compiler, "_is_compiling_flag", True),
            mock.patch.object(torch.distributions.Distribution, "_validate_args", False),
            mock.patch.object(parametrize, "_cache", {}),
            mock.patch.object(torch.random, "default_generator", _Unseeded()),
        ):
            yield
    finally:
        torch.backends.mkldnn.set_flags(flags[0])


class _Site(Region):
    """What calls lead to that differ in their tensors alone: a function `(*tensors, seed) -> tensors`, compiled.

    Attributes:
        device: That of the first tensor.
        likeness: What the modules that it reaches have in common with others that its programs serve.
        is_random: Whether it draws random numbers, as far as it was traced.
    """

    is_random = False
    likeness: Any = None
    # What was served before.
    _other: Reached | None = None

    def __init__(self, owner: CompiledFunction, args: tuple, kwargs: dict[str, Any]) -> None:
        super().__init__(owner.__wrapped__, args, kwargs)  # type: ignore[attr-defined] - set by update_wrapper
        self._owner = owner
        if any(map(is_lazy, self.tensors)):
            raise LeafError(
                "compile: a lazy module has parameters of unknown sizes. Call it once, uncompiled, and compile it then."
            )
        if any(isinstance(owner, torch.nn.parallel.DistributedDataParallel) for owner in self._owners):
            raise LeafError(
                "compile: the function reaches a DistributedDataParallel, which prepares each backward pass in Python, "
                "and a program runs no Python. Compile what is inside: DistributedDataParallel(pr.compile(model))."
            )
        # Derivatives of every order are asked of it, and no counter of a batch norm has a value.
        self._is_repaired, self._is_lent = True, self._is_lent or bool(counting_in(self._owners))
        self._again = [functools.partial(torch.set_grad_enabled, torch.is_grad_enabled()), _said_to_compile]
        self._again += autocasts(self.tensors, may_cache=False)
        self._state, self._modes = GlobalStateGuard(), tuple(_modes())
        # Which tensors require grad, as code may ask.
        self._requiring, self._asked = [x.requires_grad for x in self.tensors], set[str]()
        self.device = next((x.device for x in self.tensors), torch.device("cpu"))
        with torch.inference_mode(False), temporarily_clear_interpreter_stack():
            self._no_seed = torch.zeros((), dtype=torch.int64, device=self.device)
        names = self._names(args, kwargs)
        check_dense(names, self.tensors)
        self._compiled = Compiled(self, owner.settings, "value", [*names, SEED])
        # Those of a call are the arguments of every run.
        self._leaves = [None if isinstance(x, torch.Tensor) else x for x in self._leaves]
        self.tensors = []

    def _names(self, args: tuple, kwargs: dict[str, Any]) -> list[str]:
        given = Leaves.of_arguments(self._fn, args, kwargs, ARGUMENTS)
        names = [*given.labels(self._places), *(f"captured[{k}]" for k in range(len(self.reached.places)))]
        paths = {owner: path for each in self.reached.modules for path, owner in each.named_modules()}
        places = [each[0] for each in self._registered.values()]
        constants = [i for i, x in enumerate(self._leaves) if not isinstance(x, torch.Tensor)]
        self._given = [*zip(given.labels(constants), (self._leaves[i] for i in constants), strict=True)]
        registered = [f"{paths[owner]}.{name}".lstrip(".") for owner, _, name in places]
        self._owner.settings.fixed.update(registered)
        # An argument that is a parameter has the name of that.
        return [*dict(zip(self._numbers, [*names, *registered], strict=True)).values()]

    def _look(self, roots: list[Any]) -> Reached:
        constants = [x for x in self._leaves if not isinstance(x, torch.Tensor)]
        return Reached([*roots, *constants], lambda x: True, deeply=True)

    def _surroundings(self, tensors: Sequence[Tensor]) -> list[Any]:
        return []

    def _returned(self, results: list[Any]) -> list[Any]:
        """Sizes as numbers: what is not a tensor is given back in each call as it was in the first."""
        lent = {id(place.get()) for place in self.reached.places}
        for y in results:
            if hides(y, lent):
                raise LeafError(
                    f"compile: the function returns a {type(y).__name__}, in which no program finds tensors. Return "
                    "them themselves, in a list, a dict or an object."
                )
        return [number(y) for y in results]

    def _lender(self) -> contextlib.ExitStack | None:
        # A backward pass runs hooks and backward methods, which read modules and variables, too.
        return until_traced.get()

    def _lent(self, tensors: Sequence[Tensor]) -> Any:
        pairs = zip(tensors, self._requiring, strict=True)
        return super()._lent([as_outside(x, requires_grad, self._asked) for x, requires_grad in pairs])

    def _put(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        firsts = [places[0] for places in self._registered.values()]
        before = [getattr(owner, registry)[name] for owner, registry, name in firsts]
        used = super()._put(tensors)
        for x, old, (_, registry, _) in zip(used, before, firsts, strict=True):
            # A user's attributes, and what `isinstance` asks for.
            vars(x).update({**vars(old), **vars(x), "_is_param": registry == "_parameters"})
        return used

    def _watch(self, known: Sequence[Tensor]) -> contextlib.AbstractContextManager:
        if (trace := until_traced.get()) is not None:
            # Hooks write, too, and what a checkpoint computes again.
            trace.enter_context(self.reached.restoring(self._owner.note_lost))
        return self.reached.restoring(self._owner.note_lost)

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Tensors of the output, then new values of buffers."""
        from primitives.tracing import PhiloxState, rng_mode

        if self._out_treespec is None and (trace := until_traced.get()) is not None:
            trace.push(self._forget_failed)
        *tensors, seed = given
        before = _states_elsewhere(self.reached.walked.values())
        with rng_mode(PhiloxState(seed, torch.zeros_like(seed))) as mode:
            results = super().__call__(*tensors)
        if _states_elsewhere(self.reached.walked.values()) != before:
            self._owner.note_lost(
                "draws from a generator of Python or NumPy, and each call gets the numbers of the first. Draw by "
                "torch, or pass them as tensors."
            )
        self.is_random = self.is_random or mode.has_drawn
        return results

    def _forget_failed(self, kind: type[BaseException] | None, *_: Any) -> None:
        """At the end of a trace: after an error another one is the first."""
        if kind is not None:
            self._out_treespec, self._changed = None, []

    def now(self, given: list[Tensor]) -> list[Tensor] | None:
        """Each tensor of the arguments and of what is reached, or `None` if these, or torch's state, are other ones."""
        has_modes = _C._len_torch_function_stack() or self._modes
        if not self._state.check() or (has_modes and tuple(_modes()) != self._modes):
            return None
        reached = self.reached.tensors()
        if reached is None and self._other is not None:
            self._use(self._other)
            reached = self.reached.tensors()
        if reached is None:
            return None
        found, numbers = once(given + reached)
        is_other = self._asked and self._requiring != [x.requires_grad for x in found]
        return found if numbers == self._numbers and not is_other else None

    def _use(self, reached: Reached) -> None:
        self.reached, self._other = reached, self.reached
        self._owners, self._registered = reached.owners, reached.registered
        self.forget()

    def compare(self) -> None:
        """Note what others are compared with."""
        self.likeness = self._modes, self._numbers, self._requiring, self.reached.likeness()

    def serves(self, other: _Site) -> bool:
        """Whether its programs serve another, whose modules are like its own, and do from now on."""
        is_like = self._state.check() and self.likeness == other.likeness
        if is_like:
            self._use(other.reached)
        return is_like

    def run(self, tensors: list[Tensor], seed: Tensor | None = None) -> Any:
        """The output, for what `now` has found."""
        if seed is None:
            seed = self.drawn() if self.is_random else self._no_seed
        tensors.append(seed)
        known = len(self._compiled.joints)
        results = recomputed(self._compiled, tensors)
        if self.is_random and seed is self._no_seed:
            # Other sizes of a dynamic program draw numbers where the first did not.
            return self.run(tensors[:-1])
        if len(self._compiled.joints) > known:
            named = zip(self._compiled.names, tensors, strict=True)
            layouts = [(name, ([*x.shape], x.dtype, x.stride())) for name, x in named]
            modes = ("grad mode", torch.is_grad_enabled())
            self._owner.note([*self._given, *layouts, *self.reached.described(), modes])
        return self.output(results, tensors)

    def forget(self) -> None:
        """Hold no more the parameters and buffers of the first call: others may take their places, or the modules'."""
        self.reached.registered = self._registered = dict(enumerate(self._registered.values()))

    def drawn(self) -> Tensor:
        """A seed from torch's generator."""
        with temporarily_clear_interpreter_stack():
            return torch.empty((), dtype=torch.int64, device=self.device).random_()


def _states_elsewhere(met: Iterable[Any]) -> bytes:
    """States of the generators that torch does not know."""
    numpy: Any = sys.modules.get("numpy.random")
    kinds = random.Random, getattr(numpy, "Generator", None), getattr(numpy, "RandomState", None)
    own = [x.bit_generator.state if hasattr(x, "bit_generator") else x.__getstate__() for x in met if type(x) in kinds]
    return pickle.dumps([random.getstate(), numpy and numpy.get_state(), own])


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


class CompiledFunction(Generic[_P, _R]):
    """A compiled function; made by `compile`. `print` shows a table of its programs.

    Attributes:
        settings: How it is compiled, and what has been.
    """

    def __init__(self, fn: Callable[_P, _R], settings: Settings) -> None:
        self.settings = settings
        self._sites: dict[Any, list[_Site]] = {}
        # Keys of calls whose sizes decide what the function returns, besides the numbers in tensors.
        self._varying: set[Any] = set()
        self._described: list[tuple[str, Any]] = []
        self._num_described = 0
        self._noted: set[str] = set()
        # The code is what torch.export asks for.
        functools.update_wrapper(self, fn, (*functools.WRAPPER_ASSIGNMENTS, "__code__"), updated=())

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """The result of the function."""
        fn = self.__wrapped__  # type: ignore[attr-defined] - set by update_wrapper
        if torch.compiler.is_dynamo_compiling() or _C._len_torch_dispatch_stack() or torch.jit.is_tracing():
            return fn(*args, **kwargs)
        if _C._len_torch_function_stack() and any(isinstance(x, Guard) for x in _get_current_function_mode_stack()):
            with _without_guards():
                return self(*args, **kwargs)
        leaves, treespec = taken_apart(args, kwargs)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if len(tensors) < len(leaves):
            constants = [x for x in leaves if not isinstance(x, torch.Tensor)]
            if registered(constants, ARGUMENTS):
                return self(*args, **kwargs)
        kinds = treespec, *[kind_of(x, self.settings.dynamic) for x in leaves]
        try:
            is_varying = bool(self._varying) and kinds in self._varying
            key = (treespec, *[kind_of(x, False) for x in leaves]) if is_varying else kinds
            sites = self._sites.get(key, ())
        except TypeError:
            raise unhashable(fn, args, kwargs) from None
        try:
            for site in sites:
                found = site.now(tensors)
                if found is not None:
                    return site.run(found)
            return self._first(key, args, kwargs, tensors)
        except LeafError:
            if is_varying or not self.settings.dynamic or not any(site.varies for site in sites):
                raise
            self._varying.add(kinds)
        return self(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """In a class, a method."""
        return self if instance is None else types.MethodType(self, instance)

    def _first(self, key: Any, args: tuple, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """The first call of its kind; the site is kept if it succeeds."""
        if any(isinstance(x, Iterator) for x in Leaves.of((args, kwargs), "", ARGUMENTS).values):
            raise unhashable(self.__wrapped__, args, kwargs)  # type: ignore[attr-defined] - set by update_wrapper
        with compiling():
            # Another thread was first, or had lent what is reached to its trace.
            for site in self._sites.get(key, ()):
                if (found := site.now(tensors)) is not None:
                    return site.run(found)
            site = _Site(self, args, kwargs)
            found = site.now(tensors)
            if found is None:
                raise RuntimeError("compile: another thread changes what the function reaches.")
            site.compare()
            for each in self._sites.get(key, ()):
                if each.serves(site):
                    return each.run(found)
            with torch.random.fork_rng([site.device] if site.device.type == "cuda" else []):
                seed = site.drawn()
            output = site.run(found, seed)
            if site.is_random:
                # The draw counts now.
                site.drawn()
            site.forget()
            # Another list: threads go through this one.
            self._sites[key] = [site, *self._sites.get(key, ())]
        return output

    def note(self, described: list[tuple[str, Any]]) -> None:
        """Say once that calls differ again and again, and how."""
        before, self._described = self._described, described
        self._num_described += 1
        if self._num_described == _MANY:
            pairs = ((name, old, new) for (name, old), (_, new) in zip(before, described, strict=False) if old != new)
            changes = [f"{name} was {old} and is {new}" for name, old, new in pairs]
            _log.warning(
                "compile: %s has been compiled for %d different calls: %s. Each takes seconds: pass what changes as a "
                "tensor, %s.",
                self._name(),
                _MANY,
                changes[0] if changes else "the structure of the arguments, or what the function reaches, differs",
                "or keep sizes fixed" if self.settings.dynamic else "keep sizes fixed, or use dynamic=True",
            )

    def note_lost(self, what: str) -> None:
        """Say once what the function does in its trace alone."""
        kind = what.split()[0]
        if kind not in self._noted:
            self._noted.add(kind)
            _log.warning("compile: %s %s", self._name(), what)

    @property
    def graphs(self) -> dict[str, JointGraph]:
        """The joint graphs of the programs, by name."""
        return dict(self.settings.graphs)

    def __repr__(self) -> str:
        """The table that is printed."""
        return self.settings.table(self._name())

    def _name(self) -> str:
        return getattr(self, "__name__", type(self.__wrapped__).__name__)  # type: ignore[attr-defined] - as above

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledFunction, (self.__wrapped__, self.settings.fresh())  # type: ignore[attr-defined] - as above
