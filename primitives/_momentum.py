"""One training step of batch norm whose momentum may be a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from primitives._checks import LOW_PRECISION
from primitives.ops.batch_norm import batch_norm_p

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["batch_norm_step"]


def batch_norm_step(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | Tensor,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The normalized `x`, and both running statistics after this batch, or `None` where there are none.

    Args:
        x: Input, `[N, C, *spatial]`.
        weight: Scale, `[C]`, or `None`.
        bias: Shift, `[C]`, or `None`.
        running_mean: Running mean before this batch, `[C]`, or `None` together with `running_var`.
        running_var: Running variance before this batch.
        momentum: Weight of this batch; a tensor is one number, which may differ along the axes of `vmap`.
        eps: Added to the variance.
    """
    if running_mean is None or running_var is None:
        return batch_norm_p(x, weight, bias, None, None, 0, 0.0, eps)[0], None, None
    if not isinstance(momentum, torch.Tensor):
        y, _, _, new_mean, new_var = batch_norm_p(x, weight, bias, running_mean, running_var, 0, momentum, eps)
        return y, new_mean, new_var
    # The operator takes a Python number. Moved all the way from zero, a running statistic is that of the batch.
    dtype = torch.float32 if x.dtype in LOW_PRECISION else x.dtype
    zeros = [torch.zeros_like(running, dtype=dtype) for running in (running_mean, running_var)]
    y, _, _, batch_mean, batch_var = batch_norm_p(x, weight, bias, *zeros, 0, 1.0, eps)
    if x.numel() == 0:
        return y, running_mean.clone(), running_var.clone()
    momentum = momentum.detach()
    blended = [
        (momentum * batch + (1 - momentum) * running).to(running.dtype).detach()
        for batch, running in ((batch_mean, running_mean), (batch_var, running_var))
    ]
    return y, blended[0], blended[1]
