"""The way of calls whose tensors are of a class of torch that is not always imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from primitives._core.rules import RuleTable

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
