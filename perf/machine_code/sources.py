"""Text of a kernel as the compiler sees it: without comments, docstrings and line numbers, with all that it calls."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

from triton.runtime.jit import DependenciesFinder


class _Finder(DependenciesFinder):
    """Triton's own finder of what a kernel names, which keeps the device functions and the constants."""

    def __init__(self, function: Any) -> None:
        nonlocals = inspect.getclosurevars(function).nonlocals
        super().__init__(function.__qualname__, function.__globals__, nonlocals, "")
        self.called: list[Any] = []

    def _update_hash(self, func: Any) -> None:
        self.called.append(func)


@functools.cache
def source_text(function: Any) -> str:
    """Text of a `triton.jit` function, of all device functions that it calls, and of the constants that they name.

    It does not say in which modules they are: a file that moves changes no code. Triton's own functions come with its
    version, and its decorators ask the compiler for nothing but what the launch says as well.

    Raises:
        RuntimeError: If one of them calls a function that is not compiled with it.
    """
    texts: set[str] = set()
    _collect(function, texts)
    return "\n".join(sorted(texts))


def _collect(function: Any, texts: set[str]) -> None:
    own, called = _own_texts(function)
    if not own <= texts:
        texts |= own
        for each in called:
            _collect(each, texts)


# Most kernels share most of their device functions.
@functools.cache
def _own_texts(function: Any) -> tuple[set[str], list[Any]]:
    """Texts of a function and of the constants that it names, and the device functions that it calls."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            node.body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
    finder = _Finder(function.fn)
    finder.visit(tree)
    constants = {f"# {name}\n{value!r}" for (name, _), (value, _) in finder.used_global_vals.items()}
    called = [each for each in finder.called if not each.__module__.startswith("triton.")]
    return {f"# {function.fn.__qualname__}\n{ast.unparse(tree)}", *constants}, called
