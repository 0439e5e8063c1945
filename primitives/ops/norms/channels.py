"""Per-channel arithmetic in plain torch, for the references of batch norm in training and in evaluation.

x is [*batch, N, C, *spatial] with `batch_ndim` batch axes; everything per channel is [*batch, C].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._prims_common import suggest_memory_format

from primitives.ops.rules import accumulation_dtype, unwanted

if TYPE_CHECKING:
    from torch import Tensor

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory_format(x: Tensor, batch_ndim: int) -> torch.memory_format:
    """Layout of the output, as torch chooses it: channels_last where the strides of x are, else contiguous."""
    last = _CHANNELS_LAST.get(x.dim())
    if batch_ndim or last is None:
        return torch.contiguous_format
    if x.numel() == 0:
        # It is contiguous in every layout: only its strides tell which one it was made in.
        made_last = x.stride() == torch.empty(x.shape, device="meta", memory_format=last).stride()
        return last if made_last else torch.contiguous_format
    if x.is_contiguous():
        return torch.contiguous_format
    return last if x.is_contiguous(memory_format=last) else suggest_memory_format(x)


def arranged(x: Tensor, like: Tensor, batch_ndim: int) -> Tensor:
    """Return x in the output layout for `like`."""
    layout = memory_format(like, batch_ndim)
    if x.numel() == 0 or (layout is not torch.contiguous_format and 1 in x.shape):
        # It may pass for contiguous with strides of another layout, which a copy has not.
        return x.clone(memory_format=layout)
    return x.contiguous(memory_format=layout)


def dense(x: Tensor, like: Tensor, batch_ndim: int) -> Tensor:
    """Return x in the accumulation dtype and in the output layout for `like`."""
    return arranged(x, like, batch_ndim).to(accumulation_dtype(like.dtype))


def axes_of(x: Tensor, batch_ndim: int) -> list[int]:
    """Axes that a channel's statistics run over: all but [*batch] and C."""
    return [batch_ndim, *range(batch_ndim + 2, x.dim())]


def per_channel(param: Tensor, x: Tensor, batch_ndim: int) -> Tensor:
    """A parameter [*batch, C], shaped to broadcast against x [*batch, N, C, *spatial]."""
    return param.reshape(*param.shape[:-1], 1, param.shape[-1], *[1] * (x.dim() - batch_ndim - 2))


def normalized(x: Tensor, mean: Tensor, rstd: Tensor, batch_ndim: int) -> Tensor:
    """x_hat."""
    return (x - per_channel(mean, x, batch_ndim)) * per_channel(rstd, x, batch_ndim)


def affine(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None, batch_ndim: int) -> Tensor:
    """`x_hat * weight + bias`."""
    y = x_hat if weight is None else x_hat * per_channel(weight, x_hat, batch_ndim)
    return y if bias is None else y + per_channel(bias, x_hat, batch_ndim)


def parameter_cotangents(
    y_bar: Tensor, x_hat: Tensor, x: Tensor, weight: Tensor | None, batch_ndim: int, wanted: list[bool]
) -> tuple[Tensor, Tensor]:
    """Cotangents of weight and bias, where they are `wanted`."""
    axes, dtype = axes_of(x, batch_ndim), accumulation_dtype(x.dtype) if weight is None else weight.dtype
    weight_bar = (y_bar * x_hat).sum(axes).to(dtype) if wanted[1] else unwanted(x)
    bias_bar = y_bar.sum(axes).to(dtype) if wanted[2] else unwanted(x)
    return weight_bar, bias_bar


def sum_of_terms(terms: list[Tensor], x: Tensor, batch_ndim: int) -> Tensor:
    """The sum, in the shape, dtype and layout of `x`."""
    total = sum(terms[1:], terms[0]).expand(x.shape).to(x.dtype, copy=True)
    return arranged(total, x, batch_ndim)


def moved_on(running: Tensor | None, batch: Tensor, momentum: float, x: Tensor) -> Tensor:
    """The next running statistic; an empty batch leaves it as it is."""
    if running is None:
        return unwanted(x)
    if x.numel() == 0:
        return running.clone()
    return (momentum * batch + (1 - momentum) * running.to(batch.dtype)).to(running.dtype)
