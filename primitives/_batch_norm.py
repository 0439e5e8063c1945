"""Batch norm of tensors, on the operators: evaluation, or a training step whose momentum may be a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from primitives._checks.arguments import LOW_PRECISION
from primitives._core.write_back import write_back
from primitives._ops.batch_norm import batch_norm_p
from primitives._ops.batch_norm_eval import batch_norm_eval_p
from primitives._ops.batch_norm_relu import batch_norm_relu_p
from primitives._ops.batch_norm_relu_eval import batch_norm_relu_eval_p
from primitives._repair.nodes import mark
from primitives._repair.plain import is_left_to_torch

if TYPE_CHECKING:
    from torch import Tensor

    from primitives._core import Primitive

__all__ = ["batch_norm_of_tensors"]


def batch_norm_of_tensors(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float | Tensor,
    eps: float,
    *,
    in_place: bool,
    relu: bool = False,
    residual: Tensor | None = None,
) -> tuple[Any, Tensor | None, Tensor | None]:
    """The normalized `x`, and the running statistics after this batch; `in_place` also writes these.

    Args:
        x: Input, `[N, C, *spatial]`.
        running_mean: Running mean before this batch, `[C]`, or `None` together with `running_var`.
        running_var: Running variance before this batch.
        weight: Scale, `[C]`, or `None`.
        bias: Shift, `[C]`, or `None`.
        training: Whether to normalize by the statistics of this batch.
        momentum: Weight of this batch; a tensor is one number, which may differ along the axes of `vmap`.
        eps: Added to the variance.
        in_place: Whether to write the new running statistics into the given ones.
        relu: Whether `residual` is added, if it is not None, and a ReLU follows.
        residual: Like `x`.
    """
    if in_place and not relu and type(momentum) is float and _is_torchs(x, weight, bias, running_mean, running_var):
        statistics: Any = running_mean, running_var
        options: Any = *statistics, training, momentum, eps, False
        return mark(torch.batch_norm(x, weight, bias, *options)), running_mean, running_var
    train, evaluate = (batch_norm_relu_p, batch_norm_relu_eval_p) if relu else (batch_norm_p, batch_norm_eval_p)
    given = (x, residual, weight, bias) if relu else (x, weight, bias)
    if not training and running_mean is not None:
        return evaluate(*given, running_mean, running_var, 0, eps), running_mean, running_var
    # In evaluation, only what has no elements has no statistics.
    if running_mean is None or running_var is None:
        return train(*given, None, None, 0, 0.0, eps)[0], None, None
    if isinstance(momentum, torch.Tensor):
        y, new_mean, new_var = _blended(train, given, running_mean, running_var, momentum, eps)
    else:
        y, _, _, new_mean, new_var = train(*given, running_mean, running_var, 0, momentum, eps)
    if in_place:
        write_back([running_mean, running_var], [new_mean, new_var])
    return y, new_mean, new_var


def _is_torchs(x: Tensor, weight: Any, bias: Any, *statistics: Any) -> bool:
    """Whether torch's own kernel computes this: it differentiates no statistics, and a mode may see what is written."""
    has_gradients = any(value is not None and value.requires_grad for value in statistics)
    is_alike = all(p is None or p.dtype == x.dtype for p in (weight, bias, *statistics))
    is_unseen = torch._C._len_torch_function_stack() == 0 and x.dim() > 1 and x.numel() > 0
    return is_alike and is_unseen and not has_gradients and is_left_to_torch(x, weight, bias, *statistics)


def _blended(
    train: Primitive,
    given: tuple[Any, ...],
    running_mean: Tensor,
    running_var: Tensor,
    momentum: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """A training step with a tensor for `momentum`: the normalized `x`, and the new running statistics."""
    x = given[0]
    # The operator takes a Python number. Moved all the way from zero, a running statistic is that of the batch.
    dtype = torch.float32 if x.dtype in LOW_PRECISION else x.dtype
    zeros = [torch.zeros_like(running, dtype=dtype) for running in (running_mean, running_var)]
    y, _, _, batch_mean, batch_var = train(*given, *zeros, 0, 1.0, eps)
    if x.numel() == 0:
        return y, running_mean.clone(), running_var.clone()
    momentum = momentum.detach()
    blended = [
        (momentum * batch + (1 - momentum) * running).to(running.dtype).detach()
        for batch, running in ((batch_mean, running_mean), (batch_var, running_var))
    ]
    return y, blended[0], blended[1]
