"""What a function uses besides its arguments, found by its closure, its globals, and what these hold."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import dict_version
from torch.utils.data import Dataset

from primitives._core.errors import LeafError
from primitives.func import _code
from primitives.func._places import CELL, Place, Written, key_of
from primitives.func._values import (
    MISSING,
    are_same,
    has_other_values,
    is_constant,
    items_of,
    number_of,
    numbers_of,
    serves,
)
from primitives.tracing._modules.lending import guard_of
from primitives.tracing._torch_private import FunctionalTensor

# Attributes of every module, in which it keeps others; those that a call reads.
_REGISTRIES = frozenset(vars(nn.Module()))
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_READ_REGISTRIES = ("_parameters", "_buffers", "_modules", *_HOOKS)
_CONTAINERS = (list, dict, set, collections.deque)
_Cache = type(functools.lru_cache(repr))


class Reached:
    """Modules, variables and tensors that functions, or the modules among their arguments, reach.

    Into what code of modules names besides containers, as globals, functions and objects, it looks only `deeply`.

    Attributes:
        modules: The modules that are found.
        owners: With those inside.
        places: Where variables and attributes hold tensors.
        registered: Each parameter and buffer once, with all places where it is registered.
    """

    def __init__(self, roots: Sequence[Any], takes: Callable[[Tensor], bool], *, deeply: bool = False) -> None:
        self._deeply, self._kinds = deeply, object if deeply else (tuple, *_CONTAINERS)
        self.places: list[Place] = []
        # Variables that lead on, or are constants, with values; containers; attributes of objects, and variables of
        # Python modules, with the names that count.
        self._links: list[tuple[Place, Any]] = []
        self._containers: dict[int, Any] = {}
        self._objects: dict[int, tuple[dict[str, Any], set[str]]] = {}
        # Names that code reads, of attributes of a class of modules, and of any object.
        self._read: dict[type, set[str]] = {}
        # Classes of which code may read any number.
        self._by_text: set[type] = set()
        self._names: set[str] = set()
        # Names that code only writes to; variables of these names, and containers, that a trace leaves as they were.
        self._written: set[str] = set()
        self._kept: list[Place] = []
        self._filled: list[Any] = []
        self.modules = self._walk(roots, takes)
        self.owners = list(dict.fromkeys(owner for each in self.modules for owner in each.modules()))
        if any(isinstance(owner, torch.jit.ScriptModule) for owner in self.owners):
            raise no_torchscript()
        self.registered: dict[Any, list[tuple[nn.Module, str, str]]] = {}
        for owner in self.owners:
            for registry in ("_parameters", "_buffers"):
                for name, value in getattr(owner, registry).items():
                    if value is not None:
                        self.registered.setdefault(value, []).append((owner, registry, name))
        self._reads = [places[0] for places in self.registered.values()]
        self._ties = [places for places in self.registered.values() if len(places) > 1]
        # No version counts the entries of these, nor the order of the last, which `move_to_end` changes.
        containers = self._containers.values()
        self._lists: list[Any] = [
            x for x in containers if not isinstance(x, dict) or type(x) is collections.OrderedDict
        ]
        self._types = [*map(type, self.owners)]
        # A guard of dictionaries, modules and dictionaries, versions, entries of lists, parameters and buffers.
        self._seen: tuple[Any, list[Any], list[int], list[Any], list[Tensor]] = None, [], [-1], [], []
        self._state: Any = None

    def _walk(self, roots: Sequence[Any], takes: Callable[[Tensor], bool]) -> list[nn.Module]:
        modules: list[nn.Module] = []
        stack, objects, held = [*roots], [], []
        # What was seen is held, or another object could get its number.
        seen = self._walked = {}
        while stack:
            x = stack.pop()
            key = key_of(x)
            if key not in seen:
                seen[key] = x
                if isinstance(x, nn.Module):
                    modules.append(x)
                    for owner in x.modules():
                        own = [(Place(owner, name), y) for name, y in vars(owner).items() if name not in _REGISTRIES]
                        stack += [place for place, y in own if isinstance(y, torch.Tensor)]
                        held += [place for place, y in own if not is_constant(y) and isinstance(y, self._kinds)]
                        hooks = [each for name in _HOOKS for each in vars(owner)[name].values()]
                        stack += hooks if self._deeply else []
                        self._read.setdefault(type(owner), set())
                elif isinstance(x, (Place, Written)):
                    stack += self._at(x, takes) if isinstance(x, Place) else self._at_written(x.place)
                elif isinstance(x, types.FunctionType):
                    if not _code.is_opaque(x):
                        stack += self._variables(x)
                        self._names |= {*_code.names_in(x.__code__)}
                        self._written |= _code.written_in(x.__code__)
                else:
                    stack += _next(x)
                    objects += [x] * (_has_attributes(x) or (self._deeply and _code.is_of_users(x)))
                    if isinstance(x, _CONTAINERS):
                        self._containers[id(x)] = x
            if not stack:
                stack = self._named(objects, held, seen)
        return modules

    def _named(self, objects: list[Any], held: list[Place], seen: dict[Any, Any]) -> list[Any]:
        """Attributes and methods that are not seen yet, of modules and of objects, as far as code names them."""
        found: list[Any] = []
        for kind in self._read:
            names, functions = _code.read_in(kind, self._names)
            self._read[kind] = names
            if any(_code.puts_names_together(x) for x in functions):
                self._by_text.add(kind)
            self._written.update(*(_code.written_in(inspect.unwrap(each).__code__) for each in functions))
            found += [x for each in functions for x in self._variables(each)] if self._deeply else []
        names = self._names.union(*self._read.values())
        written = self._written - names
        found += [place for place in held if place.key in self._read[type(place.holder)]]
        found += [Written(place) for place in held if place.key in written]
        kinds = {each for x in (*self._read, *objects) for each in (x if isinstance(x, type) else type(x)).__mro__}
        found += [place for kind in kinds if self._deeply for place in _held_by(kind, names)]
        found += [Written(place) for kind in kinds if self._deeply for place in _held_by(kind, written)]
        for x in objects:
            # Behind the operators of a data set lie all its tensors.
            runs = _code.runs_unnamed if not isinstance(x, Dataset) else lambda *_: False
            if isinstance(attributes := getattr(x, "__dict__", None), dict):
                self._objects[id(attributes)] = attributes, names
                changing = [Place(attributes, name) for name, y in attributes.items() if not is_constant(y)]
                found += [place for place in changing if place.key in names]
                found += [Written(place) for place in changing if place.key in written]
            found += [
                Place(x, y) if isinstance(y, types.MemberDescriptorType) else y
                for name, y in _code.members(x if isinstance(x, type) else type(x)).items()
                if (isinstance(y, types.FunctionType) and (name in names or _is_rule(x) or runs(name, y)))
                or (name in names | written and _code.is_of_users(type(x)))
            ]
        return [x for x in found if key_of(x) not in seen]

    def _variables(self, x: types.FunctionType) -> list[Any]:
        """Where a function leads. Globals are watched, but those of a script, which change all the time."""
        variables = x.__globals__
        if variables.get("__name__") != "__main__":
            self._objects.setdefault(id(variables), (variables, set()))[1].update(_code.globals_in(x.__code__))
        return _next(x)

    def _at_written(self, place: Place) -> list[Any]:
        """Where a place leads that code only writes to."""
        value = place.get()
        if isinstance(value, _CONTAINERS):
            self._filled.append(value)
        elif not is_constant(value):
            return [place]
        self._kept.append(place)
        return []

    def _at(self, place: Place, takes: Callable[[Tensor], bool]) -> list[Any]:
        """Where the value of a place leads."""
        value = place.get()
        if isinstance(value, torch.Tensor):
            # A class holds constants, whose values code may ask for.
            is_fixed = isinstance(place.holder, type) and not value.requires_grad
            self._links += [(place, value)] * is_fixed
            self.places += [place] * (takes(value) and not is_fixed)
            return []
        # Attributes and entries are looked up where these were written to.
        holder = place.outermost.holder
        is_watched = isinstance(holder, nn.Module) or id(holder) in self._objects or id(holder) in self._containers
        if not (is_watched or isinstance(value, types.ModuleType)):
            self._links.append((place, value))
        if isinstance(value, tuple) and not is_constant(value):
            return [Place(place, i) for i in range(len(value))]
        return [value]

    def tensors(self) -> list[Tensor] | None:
        """The tensors in `places`, then parameters and buffers, as they are now; `None` if what is reached changed."""
        for place, value in self._links:
            if (now := place.get()) is not value and not serves(now, value):
                return None
        registered = self._registered_now()
        found = [place.get() for place in self.places]
        for x in found:
            if not _is_at_home(x):
                return None
        return None if registered is None else found + registered

    def _registered_now(self) -> list[Tensor] | None:
        """Parameters and buffers, asked for again where a dictionary of a module was written to."""
        guard, objects, versions, entries, found = self._seen
        listed = [x for each in self._lists for x in (*each, each)]
        if guard is not None:
            is_same = guard.check(objects)
        else:
            is_same = versions == self._versions(objects) and self._types == [*map(type, self.owners)]
        if is_same and are_same(listed, entries):
            if guard is None:
                # Called again, so that it is worth while: C++ takes a quarter of the time from now on.
                guard = guard_of(objects)
                if versions == self._versions(objects):
                    self._seen = guard, objects, versions, entries, found
            return found
        objects = [*self.owners, *(x for x, *_ in self._watched()[len(self.owners) :])]
        now = self._versions(objects)
        if self._has_changed(versions, now):
            return None
        found = [getattr(owner, registry).get(name) for owner, registry, name in self._reads]
        for places in self._ties:
            first, *others = (getattr(owner, registry).get(name) for owner, registry, name in places)
            if any(x is not first for x in others):
                return None
        if not all(map(_is_at_home, found)):
            return None
        # Another thread may lend them meanwhile.
        if now == self._versions(objects):
            self._seen = None, objects, now, listed, found
        return found

    def _has_changed(self, versions: list[int], now: list[int]) -> bool:
        """Whether what decides differs from the first time, where these versions of dictionaries differ."""
        watched = self._watched()
        if not self._state:
            self._state = [numbers_of(*each) for each in watched], self._outside_of_dicts()
            # Held, or others could get their numbers.
            self._alive = [y for x, *_ in watched for y in x.values() if not isinstance(y, torch.Tensor)]
        changed = (k for k, new in enumerate(now) if len(versions) < len(now) or versions[k] != new)
        inside, outside = self._state
        return outside != self._outside_of_dicts() or any(numbers_of(*watched[k]) != inside[k] for k in changed)

    def _watched(self) -> list[tuple[dict[Any, Any], Any]]:
        """Dictionaries that decide what runs, and of which names, `None` for all: of modules first."""
        owners = zip(self.owners, self._types, strict=True)
        found: list[Any] = [(vars(owner), self._read[kind] | self._numbers_of(owner)) for owner, kind in owners]
        found += [(vars(owner)[name], None) for owner in self.owners for name in _READ_REGISTRIES]
        found += [(each, None) for each in self._containers.values() if isinstance(each, dict)]
        return [*found, *self._objects.values()]

    def _numbers_of(self, owner: nn.Module) -> set[str]:
        """Names of constants of a module whose code puts names together."""
        pairs = vars(owner).items() if type(owner) in self._by_text else ()
        return {name for name, x in pairs if is_constant(x)}

    def _outside_of_dicts(self) -> tuple[list[Any], ...]:
        """What decides besides: classes of modules, and entries of lists."""
        return [*map(type, self.owners)], [[*map(number_of, each)] for each in self._lists]

    def _versions(self, objects: list[Any]) -> list[int]:
        """Numbers that grow when a dictionary is written to; a call that lends a module exchanges its attributes."""
        num = len(self.owners)
        return [*map(dict_version, map(vars, objects[:num])), *map(dict_version, objects[num:])]

    def described(self) -> list[tuple[str, Any]]:
        """Variables that are constants, and training modes, with names."""
        pairs = [(place.key, value) for place, value in self._links]
        pairs += [pair for each in self._containers.values() for pair in items_of(each)]
        pairs += [(name, x) for each, names in self._objects.values() for name, x in each.items() if name in names]
        constants = [(str(key), value) for key, value in pairs if isinstance(value, (int, float, str))]
        return [*constants, ("training", [owner.training for owner in self.owners])]

    @contextlib.contextmanager
    def restoring(self, say: Callable[[list[str]], None]) -> Iterator[None]:
        """Context after which variables, attributes and entries are as before; `say` gets names of others."""
        places = [*(place for place, _ in self._links if not isinstance(place.holder, Place)), *self._kept]
        links = [(place, place.get()) for place in places]
        attributes = [(each, names | self._written, {**each}) for each, names in self._objects.values()]
        copies = [(each, each.copy()) for each in (*self._containers.values(), *self._filled)]
        caches = [(x, x.cache_info().misses) for x in self._walked.values() if isinstance(x, _Cache)]
        try:
            yield
        finally:
            # What a trace has put there is of no use.
            for cache, misses in caches:
                if cache.cache_info().misses != misses:
                    cache.cache_clear()
            # Tables that libraries fill with objects of their own stay filled.
            filled = [(each, old) for each, old in copies if has_other_values(each, old)]
            for each, old in filled:
                each.clear()
                each.update(old) if isinstance(each, (dict, set)) else each.extend(old)
            changed = [(place, value) for place, value in links if place.get() is not value]
            for place, value in changed:
                place.put(value)
            pairs = [(each, k, old.get(k, MISSING)) for each, names, old in attributes for k in names & each.keys()]
            others = [(each, name, x) for each, name, x in pairs if each[name] is not x]
            for each, name, x in others:
                each.pop(name) if x is MISSING else each.update({name: x})
            names = [*(str(place.key) for place, _ in changed), *(name for _, name, _ in others)]
            say([*names, *(f"an entry of a {type(each).__name__}" for each, _ in filled)])

    @contextlib.contextmanager
    def holding(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Context in which `places` hold other values."""
        outermost = [place.outermost for place in self.places]
        originals = [place.get() for place in outermost]
        try:
            for place, value in zip(self.places, values, strict=True):
                place.put(value)
            yield
        finally:
            for place, original in zip(outermost, originals, strict=True):
                place.put(original)


def _is_at_home(x: Any) -> bool:
    """Whether it is a tensor, and not what another thread traces with in its place."""
    return isinstance(x, torch.Tensor) and not isinstance(x, FunctionalTensor)


def _next(x: Any) -> list[Any]:
    """Where a function, or a container that it reaches, leads."""
    if isinstance(x, functools.partial):
        has_tensors = any(isinstance(arg, (torch.Tensor, tuple)) and not is_constant(arg) for arg in x.args)
        return [x.func, *([Place(x, "args")] if has_tensors else x.args), *_changing(x.keywords)]
    if isinstance(x, types.MethodType):
        return [x.__self__, x.__func__]
    if isinstance(x, _CONTAINERS):
        return _changing(x)
    if isinstance(x, (tuple, frozenset)):
        return list(x)
    if isinstance(x, types.FunctionType):
        # Thousands of objects lie behind those of this package's functions, and none is a user's.
        is_ours = (x.__module__ or "").startswith("primitives.")
        names = [] if is_ours else _code.globals_in(x.__code__)
        variables = [Place(x.__globals__, name) for name in names if name in x.__globals__]
        cells = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
        written = () if is_ours else _code.written_in(x.__code__)
        kept = () if is_ours else ("__defaults__", "__kwdefaults__")
        defaults = [Place(x, name) for name in kept if getattr(x, name)]
        found = [Place(cell, CELL) if name not in written else Written(Place(cell, CELL)) for name, cell in cells]
        found += [Written(Place(x.__globals__, name)) for name in written if name in x.__globals__]
        return [*variables, *found, *defaults]
    # What stands for a function.
    wrapped = getattr(x, "__wrapped__", None) if callable(x) and not isinstance(x, type) else None
    call = inspect.getattr_static(type(x), "__call__", None) if _has_attributes(x) else None
    return [each for each in (wrapped, call) if each is not None]


def no_torchscript() -> LeafError:
    """The error for a module that no call can lend other parameters."""
    return LeafError(
        "a module of TorchScript (torch.jit.script or trace) is reached, which runs outside of Python and cannot be "
        "given the parameters of one call. Use the original module."
    )


def _changing(x: Any) -> list[Any]:
    """Entries of a container, by their places where these hold tensors."""
    pairs = [(key, value) for key, value in items_of(x) if not is_constant(value)]
    if isinstance(x, set):
        return [value for _, value in pairs]
    return [Place(x, key) if isinstance(value, (torch.Tensor, tuple)) else value for key, value in pairs]


def _is_rule(x: Any) -> bool:
    """Whether `x` is a class whose methods torch calls, of whatever names."""
    return isinstance(x, type) and issubclass(x, torch.autograd.Function)


def _is_descriptor(x: Any) -> bool:
    """Whether an entry of a class is a method, a property or the like, whose functions are looked at."""
    return hasattr(type(x), "__get__")


def _held_by(kind: type, names: set[str]) -> list[Place]:
    """Values of these names in a class of a user's."""
    held = [(name, x) for name, x in vars(kind).items() if name in names and not name.startswith("__")]
    return [Place(kind, name) for name, x in held if _code.is_of_users(kind) and not _is_descriptor(x)]


def _has_attributes(x: Any) -> bool:
    """Whether `x` is an object of a class of somebody's, in whose attributes a function may find values."""
    no_objects = torch.Tensor, type, types.ModuleType, types.MethodType, functools.partial
    has_any = isinstance(getattr(x, "__dict__", None), dict) or _code.is_of_users(type(x))
    # Operators fill tables of their own.
    is_ours = str(type(x).__module__).startswith(("primitives.custom.", "primitives._core.", "torch._", "logging"))
    return has_any and not (is_ours or isinstance(x, no_objects))
