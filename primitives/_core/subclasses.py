"""The way of calls whose tensors are of a class of torch that is not always imported."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from primitives._core.rules import RuleTable

__all__ = ["handle_with", "handled"]

_loaders: dict[str, Callable[[], Callable[[RuleTable, tuple], Any]]] = {}


def handle_with(module: str, loader: Callable[[], Callable[[RuleTable, tuple], Any]]) -> None:
    """Have calls below autograd handled by what `loader` returns, as soon as somebody has imported `module`.

    A handler is `(rules, args) -> outputs`, or `NotImplemented` for a call that goes on as it is.
    """
    _loaders[module] = loader


def handled(rules: RuleTable, args: tuple) -> Any:
    """Outputs of a call, by a handler; `NotImplemented` without one."""
    for module, loader in _loaders.items():
        if module in sys.modules and (outputs := loader()(rules, args)) is not NotImplemented:
            return outputs
    return NotImplemented
