"""The names by which users know what the package offers."""

from __future__ import annotations

import functools
import types
from typing import Any


def published(value: Any, module: str) -> Any:
    """A class or function of the package, which tracebacks, reprs and pickles then name by the public module."""
    if isinstance(value, (type, types.FunctionType)) and value.__module__.split(".")[0] == "primitives":
        value.__module__ = module
    return value


def publish(*modules: types.ModuleType) -> None:
    """Do so with what modules offer, and let `dir` show that alone; a name in several of them is that of the last."""
    for module in modules:
        dunder = [name for name in vars(module) if name.startswith("__")]
        vars(module)["__dir__"] = functools.partial(sorted, {*module.__all__, *dunder})
        for name in module.__all__:
            # Not what a module loads when it is asked for.
            published(vars(module).get(name), module.__name__)
