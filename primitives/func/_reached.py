"""What a function uses besides its arguments, found by its closure, its globals, and what these hold."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from primitives.func import _code
from primitives.func._calls import no_torchscript
from primitives.func._places import CELL, CONTAINERS, UNCOUNTED, Place, has_attributes, key_of, next_of
from primitives.func._values import (
    MISSING,
    are_same,
    has_changed,
    has_other_values,
    is_a,
    is_at_home,
    is_constant,
    is_small_array,
    items_of,
    number_of,
    numbers_of,
    renumbered,
    serves,
    version_of,
)
from primitives.tracing._modules.lending import guard_of

# Attributes of every module, in which it keeps others; those that a call reads.
_REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_READ_REGISTRIES = ("_parameters", "_buffers", "_modules", *_HOOKS)


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
        self._deeply, self._takes = deeply, takes
        self.modules: list[nn.Module] = []
        self.places: list[Place] = []
        # Variables with values, functions, arrays with bytes, containers, dictionaries with the names that count.
        self._links: list[tuple[Place, Any]] = []
        self._functions: dict[types.FunctionType, None] = {}
        self._arrays: list[tuple[Any, bytes]] = []
        self._containers: dict[int, Any] = {}
        self._objects: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._classes: dict[int, tuple[dict[str, Any], set[str]]] = {}
        # Names that functions and methods read, of whatever; classes of modules.
        self._names: set[str] = set()
        self._kinds: dict[type, None] = {}
        self._by_text: set[type] = set()  # classes of which code may read any number
        # Names that code only writes to; variables of these names, and containers, that a trace leaves as they were.
        self._written: set[str] = set()
        self._kept: list[Place] = []
        self._filled: list[Any] = []
        # Modules, objects and functions, whose attributes code may name; how many were looked at, for how many names.
        self._holders: list[Any] = []
        self._num_held = self._num_names = 0
        self._slots: dict[type, list[Any]] = {}
        self.walked: dict[Any, Any] = {}
        self._walk(roots)
        self.owners = list(dict.fromkeys(owner for each in self.modules for owner in each.modules()))
        if any(isinstance(owner, torch.jit.ScriptModule) for owner in self.owners):
            raise no_torchscript()
        self.registered: dict[Any, list[tuple[nn.Module, str, str]]] = {}
        for owner, registry in itertools.product(self.owners, ("_parameters", "_buffers")):
            for name, value in getattr(owner, registry).items():
                if value is not None:
                    self.registered.setdefault(value, []).append((owner, registry, name))
        self._lists: list[Any] = [x for x in self._containers.values() if is_a(x, UNCOUNTED)]
        self._types = [*map(type, self.owners)]
        # A guard of dictionaries, modules and dictionaries, versions, entries of lists, parameters and buffers.
        self._seen: tuple[Any, list[Any], list[int], list[Any], list[Tensor]] = None, [], [-1], [], []
        self._state: Any = None

    def _walk(self, roots: Sequence[Any]) -> None:
        """Find all that is reached, each thing once."""
        # What was seen is held, or another object could get its number.
        stack, seen = [*roots], self.walked
        while stack:
            x = stack.pop()
            if (key := key_of(x)) not in seen:
                seen[key] = x
                # An object that raises where it is looked at is left alone.
                with contextlib.suppress(Exception):
                    stack += self._led_to(x)
            stack = stack or self._named()

    def _led_to(self, x: Any) -> list[Any]:
        """What `x` leads to without a name."""
        if is_a(x, Place):
            return self._at(x)
        if is_a(x, nn.Module):
            owners = [*x.modules()]
            self.modules.append(x)
            self._holders += owners
            self._kinds.update(dict.fromkeys(map(type, owners)))
            return [each for owner in owners for name in _HOOKS * self._deeply for each in vars(owner)[name].values()]
        if is_a(x, types.FunctionType):
            if _code.is_opaque(x):
                self._names.update(_code.names_in(x.__code__) if x.__module__.startswith(_code.READERS) else ())
                return []
            self._names.update(_code.names_in(x.__code__))
            self._written |= _code.written_in(x.__code__)
            self._holders += [x] * (self._deeply and _code.is_of_users(x))
            return self._variables(x)
        found = next_of(x)
        self._holders += [x] * (has_attributes(x) or (self._deeply and _code.is_of_users(x)))
        if is_a(x, torch.optim.Optimizer):
            # Numbers that change in each step are beside the parameters.
            self._objects.update({id(each): (each, self._names) for each in x.param_groups})
        if is_a(x, CONTAINERS) and id(x) not in self._objects:
            self._containers[id(x)] = x
        if self._deeply and is_small_array(x):
            self._arrays.append((x, memoryview(x).tobytes()))
        return found

    def _named(self) -> list[Any]:
        """Attributes and methods that code names: those of all, or, if it names no more than before, of new ones."""
        found: list[Any] = []
        growing = self._names, self._written, self._kinds
        while self._num_names != sum(map(len, growing)):
            self._num_held, self._num_names = 0, sum(map(len, growing))
            found = self._of_modules()
        new, written = self._holders[self._num_held :], self._written - self._names
        self._num_held = len(self._holders)
        self._names.update(*(_code.entries_of(x, self._names) for x in new))
        kinds = {x if is_a(x, type) else type(x) for x in (*new, *map(type, new))}
        for look, x in (*((self._of_class, kind) for kind in kinds), *((self._of_object, x) for x in new)):
            with contextlib.suppress(Exception):
                found += look(x, written)
        return found

    def _of_modules(self) -> list[Any]:
        """Where methods of modules lead; the names that they read are noted."""
        found: list[Any] = []
        for kind in self._kinds:
            names, functions = _code.read_in(kind, self._names)
            self._names |= names
            if any(_code.puts_names_together(x) for x in functions):
                self._by_text.add(kind)
            self._written.update(*(_code.written_in(inspect.unwrap(each).__code__) for each in functions))
            leads = ([each] if is_a(each, _code.CACHE) else self._variables(each) for each in functions)
            found += [x for each in leads for x in each] if self._deeply else []
        return found

    def _of_class(self, kind: type, written: set[str]) -> list[Any]:
        """Methods of a class but of modules, and values in it and its bases, where these are of a user's."""
        # Behind the operators of a data set lie all its tensors.
        runs = _code.runs_unnamed if not issubclass(kind, Dataset) else lambda *_: False
        methods = [] if issubclass(kind, nn.Module) else _code.members(kind)
        # Torch calls methods of any names.
        is_rule = issubclass(kind, (torch.autograd.Function, torch.distributions.Distribution))
        named = {name for name, y in methods if name in self._names or is_rule or runs(name, y)}
        bodies = [y for name, y in methods if name in named and is_a(y, _code.FUNCTIONS)]
        named.update(_code.named_by_text(bodies, dict(methods)))
        found: list[Any] = [y for name, y in methods if name in named and is_a(y, _code.FUNCTIONS)]
        slots = [y for _, y in methods if is_a(y, types.MemberDescriptorType)]
        self._slots[kind] = [y for y in slots if y.__name__ in self._names | written and _code.is_of_users(kind)]
        for base in kind.__mro__ if self._deeply else ():
            if _code.is_of_users(base):
                # The dictionary itself, whose versions are counted.
                (space,) = gc.get_referents(vars(base))
                self._classes[id(space)] = space, self._names | named
                kept = [k for k, y in space.items() if _code.is_of_users(type(y)) or not hasattr(type(y), "__get__")]
                found += self._chosen([Place(base, name) for name in kept], written)
        return found

    def _of_object(self, x: Any, written: set[str]) -> list[Any]:
        """Attributes of a module, an object, a function or a Python module."""
        attributes: Any = getattr(x, "__dict__", None)
        is_module = is_a(x, nn.Module)
        found: list[Any] = [Place(x, y) for y in self._slots.get(type(x), ())]
        if is_a(attributes, dict):
            pairs = [(k, y) for k, y in attributes.items() if not ((is_module and k in _REGISTRIES) or is_constant(y))]
            if not is_module:
                self._objects[id(attributes)] = attributes, self._names
            else:
                kinds = object if self._deeply else (torch.Tensor, tuple, *CONTAINERS)
                pairs = [(name, y) for name, y in pairs if is_a(y, kinds)]
                found += [Place(x, name) for name, y in pairs if is_a(y, torch.Tensor)]
            places = [Place(x if is_module else attributes, name) for name, _ in pairs]
            found += self._chosen(places, written)
        return found

    def _chosen(self, places: list[Place], written: set[str]) -> list[Any]:
        """Places that code reads, and where others lead that it only writes to."""
        others = [y for place in places if place.key in written for y in self._at_written(place)]
        return [*(place for place in places if place.key in self._names), *others]

    def _variables(self, x: types.FunctionType) -> list[Any]:
        """Where a function leads. Globals are watched, but those of a script, which change all the time."""
        variables = x.__globals__
        if variables.get("__name__") != "__main__":
            self._objects.setdefault(id(variables), (variables, set()))[1].update(_code.globals_in(x.__code__))
        if _code.is_of_users(x):
            self._functions[x] = None
            self._names |= _code.spread_in(x.__code__)
        cells = zip(x.__code__.co_freevars, (Place(cell, CELL) for cell in x.__closure__ or ()), strict=True)
        if (x.__module__ or "").startswith("primitives."):
            # Thousands of objects lie behind these, and none is a user's.
            return [place for _, place in cells]
        names, written = _code.globals_in(x.__code__), _code.written_in(x.__code__)
        places = [*cells, *((name, Place(variables, name)) for name in (*names, *written) if name in variables)]
        found = [Place(x, name) for name in ("__defaults__", "__kwdefaults__") if getattr(x, name)]
        found += [y for name, place in places for y in (self._at_written(place) if name in written else [place])]
        # Those that it imports itself, too.
        return [*found, *(sys.modules[name] for name in names if name in sys.modules)]

    def _at_written(self, place: Place) -> list[Any]:
        """Where a place leads that code only writes to."""
        value = place.get()
        if is_a(value, CONTAINERS):
            self._filled.append(value)
        elif not is_constant(value):
            return [place]
        self._kept.append(place)
        return []

    def _at(self, place: Place) -> list[Any]:
        """Where the value of a place leads."""
        value = place.get()
        if is_a(value, torch.Tensor):
            # A class holds constants, whose values code may ask for.
            is_fixed = is_a(place.holder, type) and not value.requires_grad
            self._links += [(place, value)] * is_fixed
            self.places += [place] * (self._takes(value) and not is_fixed)
            return []
        # Attributes and entries are looked up where these were written to.
        holder = place.outermost.holder
        is_watched = is_a(holder, (nn.Module, type)) or id(holder) in self._objects or id(holder) in self._containers
        if is_a(place.holder, type):
            self._kept.append(place)
        elif not (is_watched or is_a(value, types.ModuleType)):
            self._links.append((place, value))
        if is_a(value, tuple) and not is_constant(value):
            return [Place(place, i) for i in range(len(value))]
        return [value]

    def tensors(self) -> list[Tensor] | None:
        """The tensors in `places`, then parameters and buffers, as they are now; `None` if what is reached changed."""
        for place, value in self._links:
            if (now := place.get()) is not value and not serves(now, value):
                return None
        for x, held in self._arrays:
            if memoryview(x).tobytes() != held:
                return None
        registered, found = self._registered_now(), [place.get() for place in self.places]
        return found + registered if registered is not None and all(map(is_at_home, found)) else None

    def _registered_now(self) -> list[Tensor] | None:
        """Parameters and buffers, asked for again where a dictionary of a module was written to."""
        guard, objects, versions, entries, found = self._seen
        listed = self._listed()
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
        found = []
        for places in self.registered.values():
            first, *others = (getattr(owner, registry).get(name) for owner, registry, name in places)
            if not is_at_home(first) or any(x is not first for x in others):
                return None
            found.append(first)
        # Another thread may lend them meanwhile.
        if now == self._versions(objects):
            self._seen = None, objects, now, listed, found
        return found

    def _has_changed(self, versions: list[int], now: list[int]) -> bool:
        """Whether what decides differs from the first time, where these versions of dictionaries differ."""
        watched, outside = self._watched(), [*map(type, self.owners), *map(number_of, self._listed())]
        if not self._state:
            self._state = [numbers_of(*each) for each in watched], outside
            # Held, or others could get their numbers.
            self._alive = [y for x, *_ in watched for y in x.values() if not is_a(y, torch.Tensor)]
        changed = (k for k, new in enumerate(now) if len(versions) < len(now) or versions[k] != new)
        inside, before = self._state
        return outside != before or any(numbers_of(*watched[k]) != inside[k] for k in changed)

    def _watched(self) -> list[tuple[dict[Any, Any], Any]]:
        """Dictionaries that decide what runs, and of which names, `None` for all: of modules first."""
        found: list[Any] = [(vars(owner), self._numbers_of(owner) or self._names) for owner in self.owners]
        found += [(vars(owner)[name], None) for owner in self.owners for name in _READ_REGISTRIES]
        found += [(each, None) for each in self._containers.values() if isinstance(each, dict)]
        return [*found, *self._objects.values(), *self._classes.values()]

    def _numbers_of(self, owner: nn.Module) -> set[str]:
        """Where the code of a module puts names together, those of its constants, and those that are read."""
        pairs = vars(owner).items() if type(owner) in self._by_text else ()
        return {name for name, x in pairs if is_constant(x) or name in self._names}

    def _listed(self) -> list[Any]:
        """What decides and is in no dictionary: entries of lists, and code of functions."""
        found = [fn.__code__ for fn in self._functions]
        for each in self._lists:
            found += *each, each
        return found

    def _versions(self, objects: list[Any]) -> list[int]:
        """Numbers that grow when a dictionary is written to; a call that lends a module exchanges its attributes."""
        num = len(self.owners)
        return [*map(version_of, map(vars, objects[:num])), *map(version_of, objects[num:])]

    def likeness(self) -> Any:
        """What is equal for modules of one structure that hold the same values, in the same places."""
        unread = self._written - self._names
        owners = [numbers_of(vars(x), vars(x).keys() - _REGISTRIES - unread) for x in self.owners]
        links = [(place.key, [id(x)] if is_a(x, torch.Tensor) else number_of(x)) for place, x in self._links]
        arrays = [(id(x), held) for x, held in self._arrays]
        places = [[(id(owner), *others) for owner, *others in each] for each in self.registered.values()]
        registries = (x for owner in self.owners for name, x in vars(owner).items() if name in _REGISTRIES)
        reached = enumerate((*self.walked.values(), *self.owners, *registries))
        numbers = {id(x): (type(x), k) for k, x in reached if is_a(x, nn.Module) or type(x) in CONTAINERS}
        return renumbered([owners, links, arrays, places, [place.key for place in self.places], self._state], numbers)

    def described(self) -> list[tuple[str, Any]]:
        """Variables that are constants, and training modes, with names."""
        pairs = [(place.key, value) for place, value in self._links]
        pairs += [pair for each in self._containers.values() for pair in items_of(each)]
        pairs += [(name, x) for each, names in self._objects.values() for name, x in each.items() if name in names]
        constants = [(str(key), value) for key, value in pairs if is_a(value, (int, float, str))]
        return [*constants, ("training", [owner.training for owner in self.owners])]

    @contextlib.contextmanager
    def restoring(self, say: Callable[[str], None]) -> Iterator[None]:
        """Context after which variables, attributes and entries are as before; `say` gets names of others."""
        places = [*(place for place, _ in self._links if not isinstance(place.holder, Place)), *self._kept]
        links = [(place, place.get()) for place in places]
        attributes = [(each, names | self._written, {**each}) for each, names in self._objects.values()]
        containers = [*self._containers.values(), *self._filled]
        copies = [(each, dict(each.items()) if is_a(each, dict) else [*each]) for each in containers]
        caches = [(x, x.cache_info().misses) for x in self.walked.values() if is_a(x, _code.CACHE)]
        lent = [(vars(x), {**vars(x)}) for x in self.owners if not type(x).__module__.startswith("torch.")]
        try:
            yield
        finally:
            # What a trace has put there is of no use; modules get their attributes back from who has lent them.
            for cache in (x for x, misses in caches if x.cache_info().misses != misses):
                cache.cache_clear()
            # Tables that libraries fill with objects of their own stay filled.
            filled = [(each, old) for each, old in copies if has_other_values(each, old)]
            for each, old in filled:
                each.clear()
                each.update(old) if is_a(each, (dict, set)) else each.extend(old)
            changed = [(place, value) for place, value in links if has_changed(value, place.get())]
            for place, value in changed:
                place.put(value)
            pairs = [(each, k, old.get(k, MISSING)) for each, names, old in attributes for k in names & each.keys()]
            others = [(each, name, x) for each, name, x in pairs if has_changed(x, each[name])]
            for each, name, x in others:
                each.pop(name) if x is MISSING else each.update({name: x})
            names = [*(str(place.key) for place, _ in changed), *(name for _, name, _ in others)]
            names += [k for now, old in lent for k in now.keys() - _REGISTRIES if now[k] is not old.get(k, MISSING)]
            for name in [*names, *(f"an entry of a {type(each).__name__}" for each, _ in filled)]:
                say(f"assigns {name}, which no program does: it keeps its value.")

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
