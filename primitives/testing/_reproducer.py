"""Text of a program that shows a fault: it makes the arguments again and checks the one property that failed."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import pickle
import sys
from typing import Any

import torch
from torch import Tensor

from primitives._core.dtypes import has_derivatives
from primitives._core.primitive import Primitive
from primitives.custom import CustomOp
from primitives.testing._subject import Subject

# Tensors up to this size are written out.
MAX_WRITTEN = 8
_PRINT_AS_CODE = (torch.dtype, torch.layout, torch.memory_format, torch.Size)


def program(subject: Subject, property: str, backend: str, options: dict[str, Any]) -> str:
    """The whole program, with the options of `check_rule` that the user has set."""
    writer = _Writer()
    args = [writer.code(subject.args), *([writer.code(subject.static)] if subject.static else [])]
    keywords = [f"{name}={writer.code(value)}" for name, value in options.items()]
    call = f"check_rule({', '.join(['op', repr(property), *args, *keywords])})"
    modules = [f"import {module}" for module in sorted(writer.modules)]
    lines = ["import torch", "", "import primitives as pr", *modules, "from primitives.testing import check_rule"]
    lines += [*_import_of(subject.op), "", "torch.manual_seed(0)"]
    lines += writer.remarks
    lines += [call] if backend == "auto" else [f"with pr.use_backend({backend!r}):", f"    {call}"]
    return "\n".join(lines) + "\n"


def _import_of(op: Any) -> list[str]:
    """Lines that give the operator the name `op`."""
    function = op.rule("reference") if isinstance(op, Primitive) else getattr(op, "__wrapped__", op)
    module, path = function.__module__, getattr(function, "__qualname__", "")
    if isinstance(op, (Primitive, CustomOp)):
        # Defined when its module is imported.
        lines = [] if module == "__main__" or module.startswith("primitives.") else [f"import {module}"]
        if isinstance(op, CustomOp):
            return [*lines, "from primitives.custom import operators", "", f"op = operators[{op.qualified_name!r}]"]
        find = f"op = registered_primitives()[{op.qualified_name!r}]"
        return [*lines, "from primitives._core import registered_primitives", "", find]
    if path and getattr(sys.modules.get(module), path, None) is op and module != "__main__":
        return [f"from {module} import {path}", "", f"op = {path}"]
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)
    return [f"# op is {path} of {place}, which no import reaches."]


class _Writer:
    """Writes trees of tensors as code, and keeps the modules that it needs and a comment for each value without any."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.remarks: list[str] = []

    def code(self, value: Any) -> str:
        """Python code for `value`; `None` stands for what has none."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach())
        kind, text = type(value), repr(value)
        if kind in (list, tuple):
            inside = ", ".join(map(self.code, value))
            return f"[{inside}]" if kind is list else f"({inside}{',' if len(value) == 1 else ''})"
        if kind is dict:
            return "{" + ", ".join(f"{self.code(k)}: {self.code(v)}" for k, v in value.items()) + "}"
        fields = getattr(value, "_fields", None)
        if dataclasses.is_dataclass(value):
            fields = [field.name for field in dataclasses.fields(value) if field.init]
        if fields is not None and not isinstance(value, type):
            self.modules.add(kind.__module__)
            inside = ", ".join(f"{name}={self.code(getattr(value, name))}" for name in fields)
            return f"{kind.__module__}.{kind.__qualname__}({inside})"
        if isinstance(value, _PRINT_AS_CODE):
            return text
        with contextlib.suppress(SyntaxError, ValueError):
            ast.literal_eval(text)
            return text
        try:
            pickled = f"pickle.loads({pickle.dumps(value)!r})"
        except Exception:
            self.remarks.append(f"# None stands for {' '.join(text.split())}, which cannot be written as code.")
            return "None"
        self.modules.add("pickle")
        return pickled

    def _tensor(self, x: Tensor) -> str:
        """Values where there are few, else random ones of the same shape, dtype, device and range."""
        device = "" if x.device.type == "cpu" else f", device={x.device.type!r}"
        if 0 < x.numel() <= MAX_WRITTEN:
            return f"torch.tensor({self.code(x.tolist())}, dtype={x.dtype}{device})"
        shape = f"{tuple(x.shape)}"
        if not has_derivatives(x.dtype):
            low, high = (int(x.min()), int(x.max()) + 1) if x.numel() else (0, 1)
            return f"torch.randint({low}, {high}, {shape}, dtype={x.dtype}{device})"
        if not x.is_complex() and x.numel() and bool((x > 0).all()):
            return f"torch.rand({shape}{device}).to({x.dtype}) + 0.25"
        return f"torch.randn({shape}{device}).to({x.dtype})"
