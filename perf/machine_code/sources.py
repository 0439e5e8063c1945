"""Text of a kernel as the compiler sees it: without comments, docstrings and line numbers, with all that it calls."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from typing import Any

import torch
import triton.language as tl
from triton.runtime.jit import JITCallable, KernelInterface

# Values of these types are compiled into the kernels that name them.
_VALUES = (int, float, str, bool, tuple, type(None), tl.constexpr, tl.dtype, torch.dtype)

# These ask the compiler for nothing but what the launch says as well; any other, or one with arguments, is text.
_PLAIN_DECORATORS = {
    "triton.jit",
    "batch_independent_jit",
    "aligned_by_constants_jit",
    "stride_independent_jit",
    "unspecialized_jit",
}


class UnknownGlobalError(TypeError):
    """A kernel names something whose effect on the machine code is unknown."""


@functools.cache
def source_text(function: Any) -> str:
    """Text of a `triton.jit` function, of all device functions that it calls, and of the constants that they name.

    It does not say in which modules they are: a file that moves changes no code.

    Raises:
        UnknownGlobalError: If one of them names a value that is neither.
    """
    texts: dict[tuple[str, str], str] = {}
    _collect(function, texts)
    return "\n".join(sorted(f"# {name[1]}\n{text}" for name, text in texts.items()))


def _collect(function: Any, texts: dict[tuple[str, str], str]) -> None:
    own, called = _own_texts(function)
    if not own.keys() <= texts.keys():
        texts |= own
        for each in called:
            _collect(each, texts)


# Most kernels share most of their device functions.
@functools.cache
def _own_texts(function: Any) -> tuple[dict[tuple[str, str], str], list[Any]]:
    """Texts of a function and of the constants that it names, and the device functions that it calls."""
    name = function.fn.__module__, function.fn.__qualname__
    tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = [d for d in node.decorator_list if ast.unparse(d) not in _PLAIN_DECORATORS]
            node.body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
    texts, called = {name: ast.unparse(tree)}, []
    namespace = function.fn.__globals__ | inspect.getclosurevars(function.fn).nonlocals
    # An assigned or declared name is the function's own.
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        dotted = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        if not dotted.replace(".", "").isidentifier() or dotted.split(".")[0] in own:
            continue
        value = _resolved(dotted, namespace)
        if isinstance(value, (JITCallable, KernelInterface)) and not _is_tritons(value):
            called.append(value)
        elif isinstance(value, _VALUES):
            texts[function.fn.__module__, dotted] = repr(value)
        elif not (value is _UNKNOWN or isinstance(value, types.ModuleType) or _is_tritons(value)):
            raise UnknownGlobalError(
                f"{'.'.join(name)}: names {dotted} of type {type(value).__name__}; constants and device functions only "
                "are followed, so that the table of machine code knows of every change."
            )
    return texts, called


_UNKNOWN = object()


def _resolved(dotted: str, namespace: dict[str, Any]) -> Any:
    """The value of a name of a module, or of a module in it; attributes of anything else belong to that value."""
    name, *attributes = dotted.split(".")
    value = namespace.get(name, _UNKNOWN)
    for attribute in attributes:
        value = getattr(value, attribute, _UNKNOWN) if isinstance(value, types.ModuleType) else _UNKNOWN
    return value


def _is_tritons(value: Any) -> bool:
    """Whether it comes with Triton, whose version is part of every key, or with Python."""
    module = getattr(getattr(value, "fn", value), "__module__", None) or ""
    return module.split(".")[0] == "triton" or module == "builtins"
