"""Arguments as Python code, for the program that shows a fault."""

from __future__ import annotations

import ast
import dataclasses
import enum
import math
import operator
import sys
from typing import TYPE_CHECKING, Any

import optree
import torch

if TYPE_CHECKING:
    from torch import Tensor

# Tensors up to this size are written out.
MAX_WRITTEN = 8

_PRINT_AS_CODE = (torch.dtype, torch.layout, torch.memory_format, torch.Size)


def code_of(value: Any, modules: dict[str, None], remarks: dict[str, None]) -> str:
    """Python code for a tree of tensors.

    Args:
        value: The tree.
        modules: Takes the names of the modules that the code needs.
        remarks: Takes a comment for each value that no code gives; `None` is in its place.
    """
    if isinstance(value, torch.Tensor):
        return _tensor_code(value)
    kind = type(value)
    if kind in (list, tuple):
        inside = ", ".join(code_of(v, modules, remarks) for v in value)
        return f"[{inside}]" if kind is list else f"({inside}{',' if len(value) == 1 else ''})"
    if kind is dict:
        pairs = [f"{code_of(k, modules, remarks)}: {code_of(v, modules, remarks)}" for k, v in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if kind is float and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, _PRINT_AS_CODE):
        return repr(value)
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    return _object_code(value, modules, remarks)


def _object_code(value: Any, modules: dict[str, None], remarks: dict[str, None]) -> str:
    """Code for a value of a class that some module defines, or for a literal."""
    kind, fields = type(value), _fields(value)
    if isinstance(value, enum.Enum) and _is_importable(kind):
        modules.setdefault(kind.__module__)
        name = f"{kind.__module__}.{kind.__qualname__}"
        # Flags that are combined have no name of their own.
        return f"{name}.{value.name}" if value.name in kind.__members__ else f"{name}({value.value!r})"
    if fields is not None and _is_importable(kind):
        modules.setdefault(kind.__module__)
        inside = ", ".join(f"{name}={code_of(getattr(value, name), modules, remarks)}" for name in fields)
        return f"{kind.__module__}.{kind.__qualname__}({inside})"
    if callable(value) and _is_importable(value):
        modules.setdefault(value.__module__)
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError):
        remarks.setdefault(f"# None stands for {' '.join(text.split())}, which cannot be written as code.")
        return "None"
    return text


def _is_importable(value: Any) -> bool:
    """Whether a module holds the class or function under its name."""
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", "<>")
    try:
        return module not in (None, "__main__") and operator.attrgetter(path)(sys.modules[module]) is value
    except (AttributeError, KeyError):
        return False


def _fields(value: Any) -> list[str] | None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [field.name for field in dataclasses.fields(value) if field.init]
    return [*getattr(value, "_fields", ())] if optree.is_namedtuple_instance(value) else None


def _tensor_code(x: Tensor) -> str:
    """Values where there are few, else random ones of the same shape, dtype, strides and range."""
    x = x.detach()
    device = "" if x.device.type == "cpu" else f", device={x.device.type!r}"
    shape = tuple(x.shape)
    if 0 < x.numel() <= MAX_WRITTEN:
        values = x.tolist() if x.is_complex() or not x.is_floating_point() else _rounded(x.tolist())
        return f"torch.tensor({values!r}, dtype={x.dtype}{device})"
    if x.dtype is torch.bool:
        return f"torch.rand({shape}{device}) < 0.5"
    if x.is_complex():
        return f"torch.randn({shape}, dtype={x.dtype}{device})"
    if not x.is_floating_point():
        low, high = (int(x.min()), int(x.max()) + 1) if x.numel() else (0, 1)
        return f"torch.randint({low}, {high}, {shape}, dtype={x.dtype}{device})"
    positive = x.numel() > 0 and bool((x > 0).all())
    return f"torch.{'rand' if positive else 'randn'}({shape}{device}).to({x.dtype})" + (" + 0.25" if positive else "")


def _rounded(values: Any) -> Any:
    return [_rounded(v) for v in values] if isinstance(values, list) else float(f"{values:.6g}")
