"""Sizes with symbols, as torch's shape environment has them: their values, their hints, and what a graph assumes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses import fake_tensor


def num_guards(mode: fake_tensor.FakeTensorMode) -> int:
    """How many conditions on sizes a graph was traced and compiled under."""
    return 0 if mode.shape_env is None else len(mode.shape_env.guards)


def failing_guards(mode: fake_tensor.FakeTensorMode, symbols: dict[Any, int]) -> list[str]:
    """Those conditions that do not hold, as text in terms of the symbols."""
    shape_env: Any = mode.shape_env
    guards = [guard.expr for guard in shape_env.guards] if shape_env is not None else ()
    texts = [str(guard) for guard in guards if str(guard.xreplace(symbols)) == "False"]
    # Torch takes each symbol for 2 at least.
    return list(dict.fromkeys([*(f"{symbol} >= 2" for symbol, n in symbols.items() if n < 2), *texts]))


def bindings(fakes: Sequence[Any], values: Sequence[Any]) -> dict[Any, int]:
    """The values of the symbols in sizes where `values` are passed for tensors without memory and symbolic sizes."""
    found: dict[Any, int] = {}
    for fake, value in zip(fakes, values, strict=True):
        tensors = isinstance(fake, torch.Tensor) and isinstance(value, torch.Tensor)
        pairs = zip(fake.shape, value.shape, strict=False) if tensors else [(fake, value)]
        found.update({n.node.expr: int(m) for n, m in pairs if isinstance(n, torch.SymInt) and n.node.expr.is_symbol})
    return found


def bound_sizes(sizes: Sequence[Any], symbols: dict[Any, int]) -> list[int | None]:
    """Sizes for given values of the symbols in them; `None` for one with another symbol, not known to be a number."""
    bound = [n.node.expr.xreplace(symbols) if isinstance(n, torch.SymInt) else n for n in sizes]
    return [int(n) if isinstance(n, int) or n.is_number else None for n in bound]


def hinted_size(n: Any) -> int:
    """A size, as it was in the example that was traced."""
    return int(n.node.hint) if isinstance(n, torch.SymInt) else int(n)
