"""Which calls of the functional API take the fast path: plain numbers, and tensors of one dtype and device that fit.

It is asked first, since a training step asks it for every layer: what passes here passes `arguments` too, and needs no
look at trees. Everything else, wrong calls among them, goes the long way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from primitives.checks.arguments import BATCH_NORM_MAX_DIM, BATCH_NORM_MIN_DIM, FLOATING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["batch_norm", "layer_norm", "log_softmax"]


def _go_with(x: Tensor, shape: Any, *values: Any) -> bool:
    """Whether every value is `None` or a tensor of this shape, with the dtype and device of `x`."""
    dtype, device = x.dtype, x.device
    for value in values:
        if value is not None and not (
            isinstance(value, torch.Tensor) and value.dtype == dtype and value.shape == shape and value.device == device
        ):
            return False
    return dtype in FLOATING


def layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: Any) -> bool:
    """Whether this is on the fast path of `layer_norm`."""
    if not (
        type(eps) is float and isinstance(x, torch.Tensor) and isinstance(shape, tuple) and shape and not x.is_nested
    ):
        return False
    for size in shape:
        if type(size) is not int:
            return False
    return x.shape[-len(shape) :] == shape and _go_with(x, shape, weight, bias)


def batch_norm(
    x: Any, running_mean: Any, running_var: Any, weight: Any, bias: Any, training: Any, momentum: Any, eps: Any
) -> bool:
    """Whether this is on the fast path of `batch_norm`.

    In training that has more than one sample, a positive eps, and running statistics that do not require grad.
    """
    if not (
        type(eps) is float
        and type(momentum) is float
        and isinstance(x, torch.Tensor)
        and not x.is_nested
        and BATCH_NORM_MIN_DIM <= x.dim() <= BATCH_NORM_MAX_DIM
        and (running_mean is None) == (running_var is None)
        and (eps > 0.0 and x.shape[0] > 1 if training else running_mean is not None)
        and _go_with(x, x.shape[1:2], running_mean, running_var, weight, bias)
    ):
        return False
    return not training or running_mean is None or not (running_mean.requires_grad or running_var.requires_grad)


def log_softmax(x: Any, dim: Any, dtype: Any) -> bool:
    """Whether this is on the fast path of `log_softmax`."""
    return (
        dtype is None
        and type(dim) is int
        and isinstance(x, torch.Tensor)
        and not x.is_nested
        and -x.dim() <= dim < x.dim()
        and x.dtype in FLOATING
    )
