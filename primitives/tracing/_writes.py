"""What an operation writes to."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import arg_tree_leaves

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BATCH_NORMS", "WriteWatcher", "has_aliases", "is_hidden", "written_by"]

_aten = torch.ops.aten
# Their schemas do not say that they update the running statistics, in training.
BATCH_NORMS = (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default)


@functools.cache
def _written_slots(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = func._schema.arguments if isinstance(func, torch._ops.OpOverload) else ()
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def written_by(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes to."""
    slots = _written_slots(func)
    if not slots and func not in BATCH_NORMS:
        return []
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name in slots]
    if func in BATCH_NORMS and args[5]:
        values = [args[3], args[4]]
    return [x for x in arg_tree_leaves(*values) if isinstance(x, torch.Tensor)]


@functools.cache
def has_aliases(func: Any) -> bool:
    """Whether a result may share memory with an argument."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    schema = func._schema
    return any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))


def is_hidden(func: Any, x: Tensor) -> bool:
    """Whether autograd does not see that `func` writes to `x`, which stands for something that requires grad."""
    return not (torch.is_grad_enabled() and x.requires_grad) or func._schema.name == "aten::set_"


class WriteWatcher(TorchDispatchMode):
    """Context that learns what is written to."""

    def on_written_copy(self, x: Tensor) -> None:
        """Called when a function of `functionalize_mutations` has written to a copy of its input `x`."""
