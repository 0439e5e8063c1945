"""Names that code reads, of attributes and of globals, and the functions that its names lead to."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from typing import Any

from torch import nn

_READS = ("LOAD_GLOBAL", "LOAD_NAME")


def is_opaque(x: types.FunctionType) -> bool:
    """Whether a function is not looked into."""
    return (x.__module__ or "").startswith(("torch.", "primitives._compiled."))


def is_of_users(x: Any) -> bool:
    """Whether `x` is a class or a module of Python outside of installed packages."""
    name = getattr(x, "__module__" if isinstance(x, type) else "__name__", None)
    return isinstance(x, (type, types.ModuleType)) and isinstance(name, str) and not _is_installed(name.split(".")[0])


@functools.cache
def _is_installed(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return name in _LIBRARIES or "site-packages" in file or "dist-packages" in file


_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "primitives", "triton_kernels"})


def members(kind: type) -> dict[str, Any]:
    """Functions in a class and in its bases, those of properties included, and slots; not what only makes objects."""
    spaces = [vars(base) for base in kind.__mro__[::-1] if base not in nn.Module.__mro__]
    found = {name: _function_in(x) for space in spaces for name, x in space.items() if name != "__init__"}
    return {name: x for name, x in found.items() if isinstance(x, (types.FunctionType, types.MemberDescriptorType))}


def _function_in(x: Any) -> Any:
    """The function of a property, or of a method of a class."""
    return next((found for name in ("fget", "func", "__func__") if (found := getattr(x, name, None)) is not None), x)


def read_in(kind: type, names: set[str]) -> tuple[set[str], list[types.FunctionType]]:
    """Names in the methods of a class of modules that `forward` leads to, or code with these names; those methods."""
    methods = {name: x for name, x in members(kind).items() if isinstance(x, types.FunctionType)}
    found, stack = set(), ["forward", *(names & methods.keys())]
    while stack:
        name = stack.pop()
        if name not in found:
            found.add(name)
            stack += names_in(inspect.unwrap(methods[name]).__code__) if name in methods else []
    return found | names, [methods[name] for name in found & methods.keys() if not is_opaque(methods[name])]


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """Code, and that of functions in it."""
    return [code, *(each for x in code.co_consts if isinstance(x, types.CodeType) for each in _codes(x))]


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> list[str]:
    """Names of attributes and globals in code, and strings that may be, for `getattr`."""
    found = [name for each in _codes(code) for name in (*each.co_names, *each.co_consts)]
    return [name for name in found if isinstance(name, str) and name.isidentifier()]


@functools.lru_cache(maxsize=4096)
def globals_in(code: types.CodeType) -> list[str]:
    """Names of globals, or of what is built in."""
    return [x.argval for each in _codes(code) for x in dis.get_instructions(each) if x.opname in _READS]
