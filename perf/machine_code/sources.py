"""Text of a kernel as the compiler sees it: without comments, docstrings and line numbers, with all that it calls."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import triton
import triton.language as tl

# Module-level values of these types are compiled into the kernels that name them.
_VALUES = (int, float, str, bool, tuple, type(None), tl.constexpr, tl.dtype)

_texts: dict[Any, str] = {}


def source_text(function: Any) -> str:
    """Text of a `triton.jit` function, of all device functions that it calls, and of the constants that they name."""
    texts: dict[str, str] = {}
    _collect(function, texts)
    return "\n".join(f"# {name}\n{text}" for name, text in sorted(texts.items()))


def _collect(function: Any, texts: dict[str, str]) -> None:
    name = f"{function.fn.__module__}.{function.fn.__qualname__}"
    if name in texts:
        return
    tree = _without_docstrings(ast.parse(textwrap.dedent(inspect.getsource(function.fn))))
    texts[name] = ast.unparse(tree)
    for node in ast.walk(tree):
        value = _resolve(node, function.fn.__globals__)
        if isinstance(value, triton.runtime.JITFunction):
            # Triton's own library is pinned by its version.
            if not value.fn.__module__.startswith("triton."):
                _collect(value, texts)
        elif isinstance(node, ast.Name) and node.id in function.fn.__globals__ and isinstance(value, _VALUES):
            texts[f"{function.fn.__module__}.{node.id}"] = repr(value)


def _resolve(node: ast.AST, namespace: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return namespace.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _resolve(node.value, namespace)
        return getattr(owner, node.attr, None) if inspect.ismodule(owner) else None
    return None


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            # Decorators say how the function is compiled, which the launch says as well.
            node.decorator_list = []
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(node.body) > 1:
                node.body = node.body[1:]
    return tree
