"""The functions that stand for the losses of torch inside `override_torch`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.nn import functional as torch_functional

from primitives import functional
from primitives._checks.losses import REDUCTIONS
from primitives._core.overrides import OverrideMode, register_override
from primitives._serving import is_plain, served

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__: list[str] = []

_MATRIX = 2


def _serve(ours: Callable[..., Any], of_torch: Callable[..., Any]) -> None:
    @register_override(of_torch)
    def stand_in(
        mode: OverrideMode,
        input: Any,
        target: Any,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        is_served = size_average is None and reduce is None and reduction in REDUCTIONS
        if not is_served or not 0.0 <= label_smoothing <= 1.0 or not is_plain(input, target, weight):
            return NotImplemented
        # nll_loss has no such argument, and torch lets none through.
        smoothing = {"label_smoothing": label_smoothing} if label_smoothing else {}
        call = functools.partial(ours, ignore_index=ignore_index, reduction=reduction, **smoothing)
        return served(call, input, target, weight)


_serve(functional.cross_entropy, torch_functional.cross_entropy)
_serve(functional.nll_loss, torch_functional.nll_loss)


def _linear_cross_entropy(
    mode: OverrideMode, input: Any, linear_weight: Any, target: Any, *, options: Any = None, **others: Any
) -> Any:
    reduction, smoothing = others.get("reduction", "mean"), others.get("label_smoothing", 0.0)
    is_served = reduction in REDUCTIONS and 0.0 <= smoothing <= 1.0
    tensors = (input, linear_weight, target, others.get("linear_bias"), others.get("weight"))
    # More axes are this package's own.
    if not is_served or not is_plain(*tensors) or input.dim() > _MATRIX:
        return NotImplemented
    # Torch's own options say how large its chunks are, and how it adds gradients up as it computes the loss.
    chunk = None if options is None else options.batch_chunk_size
    call = functools.partial(functional.linear_cross_entropy, chunk_rows=chunk, **others)
    return served(call, input, linear_weight, target)


# Torch has it from 2.13 on.
if hasattr(torch_functional, "linear_cross_entropy"):
    register_override(torch_functional.linear_cross_entropy)(_linear_cross_entropy)
