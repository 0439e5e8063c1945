"""Names that code reads, of attributes and of globals, and the functions that its names lead to."""

from __future__ import annotations

import argparse
import dis
import functools
import inspect
import re
import sys
import types
from collections.abc import Iterable
from typing import Any

from torch import nn

_READS = ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")
# The last two are of Python 3.14.
_VALUES = ("LOAD_CONST", "LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_SMALL_INT", "LOAD_FAST_BORROW")
_SPREAD = "**"
_LOADED = r"LOAD_(?:FAST|FAST_BORROW|FAST_CHECK|DEREF|GLOBAL|NAME|CONST|SMALL_INT) (?:LOAD_ATTR )*"
_BY_NAME = rf"{_LOADED}TEXT (?:{_LOADED}|TEXT )?(?:PRECALL |CALL)"
CACHE = type(functools.lru_cache(repr))
FUNCTIONS = (types.FunctionType, CACHE)
# Methods of containers that tell nothing of what these hold.
_WRITERS = frozenset({"append", "appendleft", "add", "extend", "update", "clear", "insert", "__setitem__"})
# Methods that make, print, compare or copy an object, of which dataclasses have some that name each attribute.
_ASIDE = frozenset({
    "__init__", "__post_init__", "__init_subclass__", "__class_getitem__", "__repr__", "__str__",
    "__format__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__exit__", "__del__",
    "__dir__", "__setattr__", "__delattr__", "__setitem__", "__delitem__", "__copy__", "__deepcopy__",
    "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__sizeof__",
})  # fmt: skip


# What of torch's reads attributes: distributions, schedules, scalers, and the hooks of older parametrizations.
READERS = ("torch.distributions.", "torch.optim.lr_scheduler", "torch.amp.", "torch.nn.utils.")


def is_opaque(x: types.FunctionType) -> bool:
    """Whether a function is not looked into."""
    return (x.__module__ or "").startswith(("torch.", "primitives._compiled.", "logging"))


def is_of_users(x: Any) -> bool:
    """Whether `x` is a class, a function or a module of Python outside of installed packages."""
    if not issubclass(type(x), (type, types.FunctionType, types.ModuleType)):
        return False
    name = getattr(x, "__name__" if issubclass(type(x), types.ModuleType) else "__module__", None)
    return isinstance(name, str) and not _is_installed(name.split(".")[0])


@functools.cache
def _is_installed(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return name in _LIBRARIES or "site-packages" in file or "dist-packages" in file


# Not `collections`: operators of `UserDict` and `ChainMap` lead to what these hold.
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "primitives", "triton_kernels"} - {"collections"})


def runs_unnamed(name: str, x: types.FunctionType) -> bool:
    """Whether a member of a class is a user's operator, index, or the like, which code runs without its name."""
    is_special = name.startswith("__") and name.endswith("__") and name not in _ASIDE
    return is_special and is_of_users(x)


def members(kind: type) -> list[tuple[str, Any]]:
    """Functions in a class and in its bases, hidden ones too, as `super` finds them, and slots; not `__init__`."""
    spaces = [vars(base) for base in kind.__mro__[::-1] if base not in nn.Module.__mro__]
    found = [(name, _function_in(x)) for space in spaces for name, x in space.items() if name != "__init__"]
    return [(name, x) for name, x in found if isinstance(x, (*FUNCTIONS, types.MemberDescriptorType))]


def _function_in(x: Any) -> Any:
    """The function of a property, or of a method of a class."""
    return next((found for name in ("fget", "func", "__func__") if (found := getattr(x, name, None)) is not None), x)


def read_in(kind: type, names: set[str]) -> tuple[set[str], list[Any]]:
    """Names in the methods of a class of modules that `forward` leads to, or code with these names; those methods."""
    methods: dict[str, list[Any]] = {}
    for name, x in members(kind):
        methods.setdefault(name, []).extend([x] if isinstance(x, FUNCTIONS) else [])
    special = [name for name, xs in methods.items() if any(runs_unnamed(name, x) for x in xs)]
    found, stack = set(), ["forward", *special, *(names & methods.keys())]
    while stack:
        name = stack.pop()
        if name not in found:
            found.add(name)
            stack += [each for x in methods.get(name, ()) for each in names_in(inspect.unwrap(x).__code__)]
            stack += named_by_text(methods.get(name, ()), methods)
    functions = [x for name in found & methods.keys() for x in methods[name] if not is_opaque(x)]
    return found | _hidden_in(kind), functions


def puts_names_together(x: types.FunctionType) -> bool:
    """Whether a function may read attributes by names that its code does not tell, as `getattr(self, "x", 1)` does."""
    code = inspect.unwrap(x).__code__
    is_joined = re.search(rf"getattr (?!{_BY_NAME})", _steps_in(code)) is not None
    return is_joined or not {"vars", "__dict__"}.isdisjoint(names_in(code))


@functools.lru_cache(maxsize=4096)
def _steps_in(code: types.CodeType) -> str:
    """The instructions of code, with `getattr` and texts told from others."""
    steps = (x for each in _codes(code) for x in dis.get_instructions(each) if x.opname != "EXTENDED_ARG")
    pairs = (("TEXT" if x.opname == "LOAD_CONST" and isinstance(x.argval, str) else x.opname, x.argval) for x in steps)
    return " ".join("getattr" if value == "getattr" else name for name, value in pairs)


def spread_in(code: types.CodeType) -> frozenset[str]:
    """A name that stands for those of all entries of a configuration, if code may read them: `vars(x)`, `asdict(x)`."""
    is_joined = re.search(r"getattr (?:(?!CALL)\S+ )*BUILD_STRING", _steps_in(code)) is not None
    spreading = {"vars", "__dict__", "asdict", "astuple", "fields", "model_dump", *(["getattr"] * is_joined)}
    # What tells containers by their methods looks at dictionaries of classes.
    is_aside = "collections" in code.co_filename
    return frozenset({_SPREAD} if not (is_aside or spreading.isdisjoint(names_in(code))) else ())


def entries_of(x: Any, names: set[str]) -> Iterable[str]:
    """Names of the entries of a configuration, a dataclass or a namespace, where code spreads it."""
    if _SPREAD not in names:
        return ()
    if issubclass(type(x), (types.SimpleNamespace, argparse.Namespace)):
        return vars(x)
    # A metaclass may raise for other names.
    fields = (inspect.getattr_static(type(x), name, ()) for name in ("__dataclass_fields__", "__pydantic_fields__"))
    return [name for each in fields for name in each]


def named_by_text(functions: Iterable[Any], names: Iterable[str]) -> list[str]:
    """Those of some names that functions may put together: all that begin with the text of `f"loss_{kind}"`."""
    codes = [each for x in functions if puts_names_together(x) for each in _codes(inspect.unwrap(x).__code__)]
    texts = [x for each in codes for x in each.co_consts if isinstance(x, str) and x.isidentifier()]
    first, last = (tuple(x for x in texts if x[k] == "_") for k in (-1, 0))
    return [x for x in names if not x.startswith("__") and (x.startswith(first) or x.endswith(last))]


def _hidden_in(kind: type) -> set[str]:
    """Names in the bases that are of torch or this package: these hand the module on to functions not looked into."""
    bases = [base for base in kind.__mro__ if base not in nn.Module.__mro__]
    own = [base for base in bases if base.__module__.startswith(("torch.", "primitives."))]
    functions = (x for base in own for x in vars(base).values() if isinstance(x, types.FunctionType))
    return {name for x in functions for name in x.__code__.co_names}


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """Code, and that of functions in it."""
    return [code, *(each for x in code.co_consts if isinstance(x, types.CodeType) for each in _codes(x))]


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> list[str]:
    """Names of attributes and globals that code reads, and strings that may be names, for `getattr` and in patterns."""
    found = [x for each in _codes(code) for x in (*each.co_names, *each.co_consts)]
    for x in found:
        found += x if isinstance(x, (tuple, frozenset)) else ()
    return [x for x in found if isinstance(x, str) and x.isidentifier() and x not in written_in(code)]


@functools.lru_cache(maxsize=4096)
def written_in(code: types.CodeType) -> frozenset[str]:
    """Names of attributes and variables that code writes to, or adds to, and does not read: counters, histories."""
    read, written = set(), set()
    for each in _codes(code):
        steps = [x for x in dis.get_instructions(each) if x.opname != "EXTENDED_ARG"]
        for k, x in enumerate(steps):
            if isinstance(x.argval, str) and not any(kind in x.opname for kind in ("FAST", "CLOSURE", "MAKE_CELL")):
                (written if _is_write(steps, k) else read).add(x.argval)
    return frozenset(written - read)


def _is_write(steps: list[dis.Instruction], k: int) -> bool:
    """Whether an instruction stores, or loads what is only written to: `a.n += 1`, `n.append(x)`, `n[k] = x`."""
    x, (first, second, third) = steps[k], (*steps[k + 1 : k + 4], *[steps[-1]] * 3)[:3]
    if x.opname.startswith(("STORE_", "DELETE_")):
        return True
    if x.opname == "LOAD_ATTR" and steps[k - 1].opname in ("COPY", "DUP_TOP"):
        return True
    if first.opname in ("LOAD_METHOD", "LOAD_ATTR"):
        return first.argval in _WRITERS
    if first.opname not in _VALUES:
        return False
    is_sum = second.opname.startswith("INPLACE_") or (second.opname == "BINARY_OP" and second.argrepr.endswith("="))
    is_kept = third.opname.startswith("STORE_") and third.argval == x.argval
    # Of `n[k] += 1` the entry is copied, with its place.
    is_entry = (second.opname, second.argval) in (("COPY", 2), ("DUP_TOP_TWO", None))
    return second.opname == "STORE_SUBSCR" or is_entry or (is_sum and is_kept)


@functools.lru_cache(maxsize=4096)
def globals_in(code: types.CodeType) -> list[str]:
    """Names of globals, of what is built in, or of modules that it imports."""
    found = {x.argval: None for each in _codes(code) for x in dis.get_instructions(each) if x.opname in _READS}
    return [name for name in found if name not in written_in(code)]
