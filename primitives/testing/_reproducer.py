"""Text of a program that shows a fault: it makes the arguments again and checks the one property that failed."""

from __future__ import annotations

import inspect
import sys
import types
from typing import TYPE_CHECKING, Any

from primitives.core.primitive import Primitive
from primitives.custom import CustomOp
from primitives.testing._code import code_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from primitives.testing._subject import Subject


def program(subject: Subject, property: str, backend: str, options: dict[str, Any]) -> str:
    """The whole program.

    Args:
        subject: The call.
        property: Name of the property that failed.
        backend: Backend that it was checked under.
        options: Options of `check_rule` that the user has set.
    """
    modules: dict[str, None] = {}
    remarks: dict[str, None] = {}
    args = [code_of(arg, modules, remarks) for arg in subject.args]
    keywords = [f"{name}={code_of(value, modules, remarks)}" for name, value in {**options, **subject.static}.items()]
    call = f"check_rule({', '.join(['op', repr(property), *args, *keywords])})"
    lines = ["import torch", "", "import primitives as pr"]
    lines += [f"import {module}" for module in sorted(modules)]
    lines += [
        "from primitives.testing import check_rule",
        *_import_of(subject.op),
        "",
        "torch.manual_seed(0)",
        *remarks,
    ]
    lines += [call] if backend == "auto" else [f"with pr.use_backend({backend!r}):", f"    {call}"]
    return "\n".join(lines) + "\n"


def _import_of(op: Any) -> list[str]:
    """Lines that give the operator the name `op`."""
    function: Callable = op.__wrapped__ if isinstance(op, CustomOp) else op
    if isinstance(op, Primitive):
        function = op.rule("reference")
    module, path = function.__module__, getattr(function, "__qualname__", "")
    if isinstance(op, Primitive):
        lines = [] if module.startswith("primitives.") else [f"import {module}"]
        return [
            *lines,
            "from primitives.core import registered_primitives",
            "",
            f"op = registered_primitives()[{op.qualified_name!r}]",
        ]
    name = _name_in(module, path, op)
    if name is not None:
        return [f"from {module} import {name}", "", f"op = {name}"]
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)
    if isinstance(op, CustomOp):
        find = f"op = operators[{op.qualified_name!r}]"
        return ["from primitives.custom import operators", "", f"# Defined at {place}.", find]
    return [f"# op is {path} of {place}, which no import reaches."]


def _name_in(module: str, path: str, op: Any) -> str | None:
    """Name under which a module holds the operator, first of all that of its function."""
    names = {} if module == "__main__" else vars(sys.modules.get(module, types))
    if names.get(path) is op:
        return path
    return next((name for name, value in names.items() if value is op), None)
