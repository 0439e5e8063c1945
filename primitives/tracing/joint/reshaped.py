"""Shapes that change in place while views exist, whose derivatives torch gets wrong for tensors without memory.

Autograd makes the history of a view anew after each write to its memory: by position in memory, where there is one. For
fake and functionalized tensors the steps from base to view are made once more: from a base that has another shape by
then, or without a later step of the view's own. The shapes may fit all the same.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils._pytree import arg_tree_leaves

from primitives.tracing.lines import TraceError, current_line
from primitives.tracing.memory import memories
from primitives.tracing.watching import has_aliases

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["ReshapedViews"]


class ReshapedViews:
    """Tensors that share memory, and which of them must not be used any more.

    Args:
        function: Name of the public function, for errors.
    """

    def __init__(self, function: str) -> None:
        self._function = function
        self._by_memory: dict[int, list[weakref.ref]] = {}
        self._reshaped: list[tuple[weakref.ref, str]] = []
        self._stale: list[tuple[weakref.ref, str]] = []

    def before(self, func: Any, args: tuple, kwargs: dict[str, Any], written: Sequence[Tensor]) -> None:
        """Look at an operation that is about to run.

        Args:
            func: The operator.
            args: Its arguments.
            kwargs: Its keyword arguments.
            written: Those of them that it writes to.

        Raises:
            TraceError: If it uses a tensor whose history would be made anew in a wrong way.
        """
        used = [x for x in arg_tree_leaves(*args, **kwargs) if isinstance(x, torch.Tensor)]
        if not any(map(is_fake, used)):
            return
        if torch.Tag.inplace_view in getattr(func, "tags", ()):
            self._reshape(args[0])
            return
        if not torch.is_grad_enabled() or func is torch.ops.aten.detach.default:
            return
        self.check(used)
        if self._reshaped and any(x.requires_grad for x in used):
            for x in written:
                self._write(x)

    def after(self, func: Any, result: Any) -> None:
        """Remember views.

        Args:
            func: The operator.
            result: Its result.
        """
        if has_aliases(func):
            for x in arg_tree_leaves(result):
                for number in memories(x) if isinstance(x, torch.Tensor) and is_fake(x) else ():
                    self._by_memory.setdefault(number, []).append(weakref.ref(x))

    def check(self, used: Sequence[Any]) -> None:
        """Raise if one of these must not be used.

        Args:
            used: Anything.

        Raises:
            TraceError: If so.
        """
        for reference, line in self._stale:
            x = reference()
            if x is not None and x.requires_grad and any(x is y for y in used):
                raise self._error(line)

    def _reshape(self, x: Tensor) -> None:
        line = current_line()
        if x._base is not None:
            self._reshaped.append((weakref.ref(x), line))
        for number in memories(x):
            for reference in self._by_memory.get(number, ()):
                y = reference()
                if y is not None and y is not x and y._base is x:
                    self._stale.append((reference, line))

    def _write(self, x: Tensor) -> None:
        for reference, line in self._reshaped:
            y = reference()
            if y is x:
                raise self._error(line)
            if y is not None and set(memories(x)) & set(memories(y)):
                self._stale.append((reference, line))

    def _error(self, line: str) -> TraceError:
        return TraceError(
            f"{self._function}: the shape of a tensor is changed in place, at {line}, while another shares its memory "
            f"and takes part in derivatives; one of them is used or written to later, at {current_line()}, and a graph "
            "would have the wrong gradient. Change the shape out of place."
        )
