"""What a function uses besides its arguments, found by its closure, its globals, and what these hold."""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import dict_version

from primitives._core.errors import LeafError
from primitives.tracing._modules.lending import guard_of
from primitives.tracing._torch_private import FunctionalTensor


class _Place(NamedTuple):
    """Where a function finds a value.

    A cell, a key, an attribute of a module, the defaults of a function, the arguments of a partial one, or an entry of
    the tuple in a place.
    """

    holder: Any
    key: Any

    def get(self) -> Any:
        """The value; `None` where there is none."""
        # Not `contextlib.suppress`, which takes a microsecond in every call of a compiled function.
        try:
            return self.holder.cell_contents if self.key is _CELL else self._items()[self.key]
        except (ValueError, LookupError, TypeError):
            return None

    def put(self, value: Any) -> None:
        """Exchange the value."""
        if self.key is _CELL:
            self.holder.cell_contents = value
        elif isinstance(self.holder, _Place):
            old = self._items()
            entries = [*old[: self.key], value, *old[self.key + 1 :]]
            self.holder.put(getattr(old, "_make", type(old))(entries))
        elif isinstance(self.holder, types.FunctionType):
            setattr(self.holder, self.key, value)
        elif isinstance(self.holder, functools.partial):
            self.holder.__setstate__((self.holder.func, value, self.holder.keywords, vars(self.holder)))  # type: ignore[attr-defined] - no stub
        else:
            self._items()[self.key] = value

    def _items(self) -> Any:
        if isinstance(self.holder, _Place):
            return self.holder.get()
        if isinstance(self.holder, (types.FunctionType, functools.partial)):
            return {self.key: getattr(self.holder, self.key)}
        return vars(self.holder) if isinstance(self.holder, torch.nn.Module) else self.holder

    @property
    def outermost(self) -> _Place:
        """The place that is exchanged, also where a tuple is made anew."""
        return self.holder.outermost if isinstance(self.holder, _Place) else self


_CELL, _MISSING = "a variable of the closure", object()
# Attributes of modules that are constants: the training mode, the probability of a dropout, the weight of a loss.
_NUMBERS = frozenset({bool, int, float, str, type(None)})
# Attributes of every module, in which it keeps others.
_REGISTRIES = frozenset(vars(nn.Module()))


class Reached:
    """Modules, variables and tensors that functions, or the modules among their arguments, reach.

    Attributes:
        modules: The modules that are found.
        owners: With those inside.
        places: Where variables and attributes hold tensors.
        registered: Each parameter and buffer once, with all places where it is registered.
    """

    def __init__(self, roots: Sequence[Any], takes: Callable[[Tensor], bool]) -> None:
        self.places: list[_Place] = []
        # Attributes of objects that code may read or write; variables that lead on, or are constants, with values.
        self._attributes: list[tuple[dict[str, Any], str]] = []
        self._links: list[tuple[_Place, Any]] = []
        # Lists and dictionaries; attributes of modules that hold one, or a tuple.
        self._containers: list[Any] = []
        self._held: list[_Place] = []
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
        self._state = self._state_now()
        self._dicts = [x for x in self._containers if isinstance(x, dict)]
        # No version counts the order of the second, which `move_to_end` changes.
        self._lists = [x for x in self._containers if isinstance(x, (list, collections.OrderedDict))]
        # A guard of dictionaries, those of modules, versions, entries of lists, parameters and buffers.
        self._seen: tuple[Any, list[Any], list[int], list[Any], list[Tensor]] = None, [], [-1], [], []

    def _walk(self, roots: Sequence[Any], takes: Callable[[Tensor], bool]) -> list[nn.Module]:
        modules: list[nn.Module] = []
        stack, names, objects, held = [*roots], {}, [], []
        # What was seen is held, or another object could get its number.
        seen = self._walked = {}
        while stack:
            x = stack.pop()
            key = (id(x.holder), x.key) if isinstance(x, _Place) else id(x)
            if key not in seen:
                seen[key] = x
                if isinstance(x, torch.nn.Module):
                    modules.append(x)
                    pairs = [pair for owner in x.modules() for pair in _own_attributes(owner)]
                    stack += [place for place, value in pairs if isinstance(value, torch.Tensor)]
                    held += [place for place, value in pairs if isinstance(value, (list, dict, tuple))]
                elif isinstance(x, _Place):
                    stack += self._at(x, takes)
                elif isinstance(x, types.FunctionType):
                    if not (x.__module__ or "").startswith(_OPAQUE):
                        stack += _next(x)
                        names |= dict.fromkeys(_names(x.__code__))
                else:
                    stack += _next(x)
                    objects += [x] * _has_attributes(x)
                    self._containers += [x] * isinstance(x, (list, dict))
            if not stack:
                # Of modules, as far as what runs in their class reads it.
                read = {kind: _read_in(kind, names) for kind in {type(place.holder) for place in held}}
                self._held = [place for place in held if place.key in read[type(place.holder)]]
                changing = [place for place in self._held if not _is_constant(place.get())]
                stack += [place for place in changing if (id(place.holder), place.key) not in seen]
                # Attributes of objects, as far as any code reads some of that name.
                pairs = [(x, name) for x in objects for name in names]
                self._attributes = [(vars(x), name) for x, name in pairs]
                found = [_Place(vars(x), name) for x, name in pairs if name in vars(x)]
                stack += [place for place in found if (id(place.holder), place.key) not in seen]
                methods = [inspect.getattr_static(type(x), name, None) for x, name in pairs]
                stack += [m for m in methods if isinstance(m, types.FunctionType) and id(m) not in seen]
        return modules

    def _at(self, place: _Place, takes: Callable[[Tensor], bool]) -> list[Any]:
        """Where the value of a place leads."""
        value = place.get()
        if isinstance(value, torch.Tensor):
            self.places += [place] * takes(value)
            return []
        # Attributes of modules are looked up where these were written to.
        is_variable = not isinstance(place.holder, nn.Module)
        if isinstance(place.holder, types.CellType) or (is_variable and isinstance(value, _LINKED)):
            self._links.append((place, value))
        return [_Place(place, i) for i in range(len(value))] if isinstance(value, tuple) else [value]

    def _state_now(self) -> tuple[list[Any], ...]:
        """What decides how the modules run, beside their tensors."""
        owners = self.owners
        return (
            [_number(place.get()) for place in self._held],
            [[_number(x) for x in _entries(each)] for each in self._containers],
            [[(name, repr(x)) for name, x in vars(owner).items() if type(x) in _NUMBERS] for owner in owners],
            # A name may be registered without a tensor, and get one later.
            [sum(x is not None for x in (*o._parameters.values(), *o._buffers.values())) for o in owners],
            [[*vars(owner)["_modules"].items()] for owner in owners],
        )

    def tensors(self) -> list[Tensor] | None:
        """The tensors in `places`, then parameters and buffers, as they are now; `None` if what is reached changed."""
        for place, value in self._links:
            if (now := place.get()) is not value and not _serves(now, value):
                return None
        registered = self._registered_now()
        found = [place.get() for place in self.places]
        for x in found:
            if not _is_at_home(x):
                return None
        return None if registered is None else found + registered

    def _registered_now(self) -> list[Tensor] | None:
        """Parameters and buffers, asked for again where a dictionary of a module was written to."""
        guard, registries, versions, entries, found = self._seen
        listed = [x for each in self._lists for x in (*each, each)]
        objects = [*self.owners, *registries]
        is_same = guard.check(objects) if guard is not None else versions == self._versions(registries)
        if is_same and _are_same(listed, entries):
            if guard is None:
                # Called again, so that it is worth while: C++ takes a quarter of the time from now on.
                guard = guard_of(objects)
                if versions == self._versions(registries):
                    self._seen = guard, registries, versions, entries, found
            return found
        registries = [vars(x)[name] for x in self.owners for name in ("_parameters", "_buffers", "_modules")]
        registries += self._dicts
        versions = self._versions(registries)
        if self._state_now() != self._state:
            return None
        found = [getattr(owner, registry).get(name) for owner, registry, name in self._reads]
        for places in self._ties:
            first, *others = (getattr(owner, registry).get(name) for owner, registry, name in places)
            if any(x is not first for x in others):
                return None
        if not all(map(_is_at_home, found)):
            return None
        # Another thread may lend them meanwhile.
        if versions == self._versions(registries):
            self._seen = None, registries, versions, listed, found
        return found

    def _versions(self, registries: list[Any]) -> list[int]:
        """Numbers that grow when a dictionary is written to; a call that lends a module exchanges its attributes."""
        return [*map(dict_version, map(vars, self.owners)), *map(dict_version, registries)]

    def described(self) -> list[tuple[str, Any]]:
        """Variables that are constants, and training modes, with names."""
        pairs = [(place.key, value) for place, value in self._links]
        pairs += [pair for each in self._containers for pair in _items(each)]
        constants = [(str(key), value) for key, value in pairs if isinstance(value, (int, float, str))]
        return [*constants, ("training", [owner.training for owner in self.owners])]

    @contextlib.contextmanager
    def restoring(self, say: Callable[[list[str]], None]) -> Iterator[None]:
        """Context after which variables, attributes and entries are as before; `say` gets names of others."""
        links = [(place, place.get()) for place, _ in self._links if not isinstance(place.holder, _Place)]
        attributes = [(holder, name, holder.get(name, _MISSING)) for holder, name in self._attributes]
        copies = [(each, each.copy()) for each in self._containers]
        try:
            yield
        finally:
            # Tables that libraries fill with objects of their own stay filled.
            filled = [(each, old) for each, old in copies if _has_other_values(each, old)]
            for each, old in filled:
                each.clear()
                each.update(old) if isinstance(each, dict) else each.extend(old)
            changed = [(place, value) for place, value in links if place.get() is not value]
            for place, value in changed:
                place.put(value)
            others = [each for each in attributes if each[0].get(each[1], _MISSING) is not each[2]]
            for holder, name, value in others:
                holder.pop(name) if value is _MISSING else holder.update({name: value})
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


# Values of globals that a function reads and that may be exchanged; modules of Python and classes are not followed.
_LINKED = (torch.nn.Module, types.FunctionType, functools.partial, list, tuple, dict, int, float, str, type(None))


def _is_at_home(x: Any) -> bool:
    """Whether it is a tensor, and not what another thread traces with in its place."""
    return isinstance(x, torch.Tensor) and not isinstance(x, FunctionalTensor)


def _serves(x: Any, y: Any) -> bool:
    """Whether a value may stand for another: entries of tuples are places of their own."""
    if type(x) is not type(y) or not isinstance(x, (tuple, int, float, str)):
        return False
    return len(x) == len(y) if isinstance(x, tuple) else repr(x) == repr(y)


def _next(x: Any) -> list[Any]:
    """Where a function, or a container that it reaches, leads."""
    if isinstance(x, functools.partial):
        has_tensors = any(isinstance(arg, (torch.Tensor, tuple)) and not _is_constant(arg) for arg in x.args)
        return [x.func, *([_Place(x, "args")] if has_tensors else x.args), *_changing(x.keywords)]
    if isinstance(x, types.MethodType):
        return [x.__self__, x.__func__]
    if isinstance(x, (list, dict)):
        return _changing(x)
    if isinstance(x, tuple):
        return list(x)
    if isinstance(x, types.FunctionType):
        # Thousands of objects lie behind those of this package's functions, and none is a user's.
        is_ours = (x.__module__ or "").startswith("primitives.")
        names = [] if is_ours else _globals(x.__code__)
        variables = [_Place(x.__globals__, name) for name in names if name in x.__globals__]
        kept = () if is_ours else ("__defaults__", "__kwdefaults__")
        defaults = [_Place(x, name) for name in kept if getattr(x, name)]
        return [*variables, *(_Place(cell, _CELL) for cell in x.__closure__ or ()), *defaults]
    # What stands for a function.
    wrapped = getattr(x, "__wrapped__", None) if callable(x) and not isinstance(x, type) else None
    call = inspect.getattr_static(type(x), "__call__", None) if _has_attributes(x) else None
    return [each for each in (wrapped, call) if each is not None]


def _own_attributes(owner: nn.Module) -> list[tuple[_Place, Any]]:
    """Attributes that not every module has, with their values."""
    return [(_Place(owner, name), value) for name, value in vars(owner).items() if name not in _REGISTRIES]


def no_torchscript() -> LeafError:
    """The error for a module that no call can lend other parameters."""
    return LeafError(
        "a module of TorchScript (torch.jit.script or trace) is reached, which runs outside of Python and cannot be "
        "given the parameters of one call. Use the original module."
    )


def _changing(x: list[Any] | dict[Any, Any]) -> list[Any]:
    """Entries of a container, by their places where these hold tensors."""
    pairs = [(key, value) for key, value in _items(x) if not _is_constant(value)]
    return [_Place(x, key) if isinstance(value, (torch.Tensor, tuple)) else value for key, value in pairs]


def _items(x: Any) -> list[tuple[Any, Any]]:
    """Keys or numbers of the entries of a container, and what they are."""
    return [*(x.items() if isinstance(x, dict) else enumerate(x))]


def _entries(x: Any) -> list[Any]:
    """Entries of a list, or keys and values."""
    return [*x, *x.values()] if isinstance(x, dict) else [*x]


def _has_other_values(x: Any, y: Any) -> bool:
    """Whether a tensor or a constant is an entry of one of two containers, and not of the other."""
    x, y = dict(_items(x)), dict(_items(y))
    pairs = [(x.get(key, _MISSING), y.get(key, _MISSING)) for key in x | y]
    return any(a is not b and (isinstance(z, torch.Tensor) or _is_constant(z)) for a, b in pairs for z in (a, b))


def _are_same(x: list[Any], y: list[Any]) -> bool:
    return len(x) == len(y) and all(map(operator.is_, x, y))


def _is_constant(x: Any) -> bool:
    return type(x) in _NUMBERS or (isinstance(x, tuple) and all(map(_is_constant, x)))


def _number(x: Any) -> Any:
    """What tells a value from another, where no place does: that of a constant, the identity of an object."""
    if _is_constant(x):
        return repr(x)
    return None if isinstance(x, torch.Tensor) else len(x) if isinstance(x, tuple) else id(x)


def _read_in(kind: type, names: Iterable[str]) -> set[str]:
    """Names in the methods of a class of modules that `forward` leads to, or code with these names."""
    bases = [vars(base) for base in kind.__mro__[::-1] if not issubclass(nn.Module, base)]
    methods = {name: x for base in bases for name, x in base.items() if isinstance(x, types.FunctionType)}
    found, stack = set(), ["forward", *names]
    while stack:
        name = stack.pop()
        if name not in found:
            found.add(name)
            stack += _names(inspect.unwrap(methods[name]).__code__) if name in methods else []
    return found


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """Code, and that of functions in it."""
    return [code, *(each for x in code.co_consts if isinstance(x, types.CodeType) for each in _codes(x))]


def _names(code: types.CodeType) -> list[str]:
    """Names of attributes and globals in code."""
    return [name for each in _codes(code) for name in each.co_names]


def _globals(code: types.CodeType) -> list[str]:
    """Names of globals, or of what is built in."""
    return [x.argval for each in _codes(code) for x in dis.get_instructions(each) if x.opname in _READS]


_READS = ("LOAD_GLOBAL", "LOAD_NAME")
# Modules whose functions are not looked into.
_OPAQUE = ("torch.", "primitives._compiled.")


def _has_attributes(x: Any) -> bool:
    """Whether `x` is an object of a class of somebody's, in whose attributes a function may find values."""
    no_objects = torch.Tensor, type, types.ModuleType, types.MethodType, functools.partial
    return isinstance(getattr(x, "__dict__", None), dict) and not isinstance(x, no_objects)
