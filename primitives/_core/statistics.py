"""Statistics outputs (mean, rstd, lse): cached values of an input, whose own derivative is refused, never dropped.

A rule that receives a statistic recomputes it from the input wherever it is differentiated again, so nothing inside the
package ever needs the derivative of one. Somebody who builds on a statistic directly would; they get an error:
in reverse mode from the backward pass, in forward mode from the first operation that touches the tangent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_leaves, tree_map

from primitives._core.errors import MissingRuleError


def _message(op_name: str, output: str, mode: str) -> str:
    return (
        f"{op_name}: output {output!r} is a statistic cached for the derivative rules and has no {mode} of its own. "
        "Compute it from the input with torch operations if its derivative is needed, or detach it if it is not."
    )


class _RefusedTangent(torch.Tensor):
    """Tangent without values: every operation on it raises, but for what autograd does to attach it to its primal."""

    _message: str

    @staticmethod
    def __new__(cls: type, primal: Tensor, message: str, device: torch.device | None = None) -> _RefusedTangent:
        """A refused tangent with the layout of `primal`."""
        tangent = torch.Tensor._make_wrapper_subclass(
            cls, primal.shape, strides=primal.stride(), dtype=primal.dtype, device=device or primal.device
        )
        tangent._message = message
        return tangent

    def __repr__(self) -> str:  # type: ignore[override] - without the option that torch has
        """Shape only, without values."""
        return f"{type(self).__name__}({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Answer questions about layout, take views (batching rules move axes), refuse everything else."""
        aten = torch.ops.aten
        if func is aten.is_same_size.default:
            return args[0].shape == args[1].shape
        if func is aten._has_same_storage_numel.default:
            return True
        if func is aten._new_zeros_with_same_feature_meta.default and isinstance(args[0], cls):
            return cls(args[1], args[0]._message)
        if func is aten.copy_.default and isinstance(args[0], cls):
            return args[0]
        if isinstance(args[0], cls) and func.is_view:
            layout = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype, device="meta")
            views = func(layout, *args[1:], **(kwargs or {}))
            return tree_map(lambda view: cls(view, args[0]._message, args[0].device), views)
        leaves = tree_leaves((args, kwargs))
        raise MissingRuleError(next(leaf._message for leaf in leaves if isinstance(leaf, cls)))


def refused_tangent(op_name: str, output: str, primal: Tensor) -> Tensor:
    """Tangent for a statistic that cannot be used unnoticed.

    Eagerly it raises on use. A tracer that sees fake tensors has no values to refuse, and the compiled program must not
    contain a Python exception: there the tangent is NaN, which reaches whatever is computed from it.
    """
    if detect_fake_mode(primal) is not None:
        return torch.full_like(primal, float("nan"))
    return _RefusedTangent(primal, _message(op_name, output, "tangent"))


def refuse_cotangent(op_name: str, output: str) -> None:
    """Raise for a cotangent that arrives at a statistic."""
    raise MissingRuleError(_message(op_name, output, "cotangent"))
