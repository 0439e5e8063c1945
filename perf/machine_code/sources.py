"""Text of a kernel as the compiler sees it: without comments, docstrings and line numbers, with all that it calls."""

from __future__ import annotations

import ast
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
_PLAIN_DECORATORS = {"triton.jit", "batch_independent_jit", "stride_independent_jit", "unspecialized_jit"}


class UnknownGlobalError(TypeError):
    """A kernel names something of which nobody knows how it changes the machine code."""


def source_text(function: Any) -> str:
    """Text of a `triton.jit` function, of all device functions that it calls, and of the constants that they name.

    Raises:
        UnknownGlobalError: If one of them names a value that is neither.
    """
    texts: dict[str, str] = {}
    _collect(function, texts)
    return "\n".join(f"# {name}\n{text}" for name, text in sorted(texts.items()))


def _collect(function: Any, texts: dict[str, str]) -> None:
    name = f"{function.fn.__module__}.{function.fn.__qualname__}"
    if name in texts:
        return
    tree = _without_docstrings(ast.parse(textwrap.dedent(inspect.getsource(function.fn))))
    texts[name] = ast.unparse(tree)
    namespace = function.fn.__globals__ | inspect.getclosurevars(function.fn).nonlocals
    # An assigned or declared name is the function's own.
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        dotted = _dotted(node)
        if dotted is None or dotted[0] in own:
            continue
        found, value = _resolve(dotted, namespace)
        if not found or isinstance(value, types.ModuleType) or _is_tritons(value):
            continue
        if isinstance(value, (JITCallable, KernelInterface)):
            _collect(value, texts)
        elif isinstance(value, _VALUES):
            texts[f"{function.fn.__module__}: {'.'.join(dotted)}"] = repr(value)
        else:
            raise UnknownGlobalError(
                f"{name}: names {'.'.join(dotted)} of type {type(value).__name__}; constants and device functions only "
                "are followed, so that the table of machine code knows of every change."
            )


def _dotted(node: ast.AST) -> tuple[str, ...] | None:
    """The parts of a name that is read, with all that comes after dots; None for any other expression."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return None if owner is None else (*owner, node.attr)
    return None


def _resolve(dotted: tuple[str, ...], namespace: dict[str, Any]) -> tuple[bool, Any]:
    """Whether a name of a module, or of a module in it, is there, and its value."""
    name, *attributes = dotted
    if name not in namespace:
        return False, None
    value = namespace[name]
    for attribute in attributes:
        # Attributes of anything else belong to a value that is followed by itself.
        if not isinstance(value, types.ModuleType) or not hasattr(value, attribute):
            return False, None
        value = getattr(value, attribute)
    return True, value


def _is_tritons(value: Any) -> bool:
    """Whether it comes with Triton, whose version is part of every key, or with Python."""
    function = getattr(value, "fn", value)
    module = getattr(function, "__module__", None) or ""
    return (module.split(".")[0] == "triton" and not isinstance(value, _VALUES)) or module == "builtins"


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = [d for d in node.decorator_list if ast.unparse(d) not in _PLAIN_DECORATORS]
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(node.body) > 1:
                node.body = node.body[1:]
    return tree
