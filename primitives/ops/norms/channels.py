"""Norms of channels: axes and layout, for the references of batch norm in training and in evaluation.

x is [*batch, N, C, *spatial] with `batch_ndim` batch axes; everything per channel is [*batch, C].
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from primitives.ops.norms.formulas import Norm
from primitives.ops.rules import empty_output


class ChannelOptions(NamedTuple):
    """Options of batch norm and of its derivatives, in the order of the schemas; `batch_ndim` as above."""

    eps: float
    batch_ndim: int = 0


# The axes of their tensors.
AXES = "x y residual: *batch samples channels *spatial, weight bias mean rstd running_mean running_var: *batch channels"
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


def contiguous_like(x: Tensor, like: Tensor, batch_ndim: int) -> Tensor:
    """Return x in the output layout for `like`."""
    layout = memory_format(like, batch_ndim)
    if x.numel() == 0 or (layout is not torch.contiguous_format and 1 in x.shape):
        # It may pass for contiguous with strides of another layout, which a copy has not.
        return x.clone(memory_format=layout)
    return x.contiguous(memory_format=layout)


def channels(
    x: Tensor, options: ChannelOptions, statistics: tuple[Tensor, Tensor] | None = None, of: type[Norm] = Norm
) -> Norm:
    """The norm of each channel: by its own statistics, or `of` given ones, mean and rstd `[*batch, C]`."""
    eps, batch_ndim = options
    norm_axes = [batch_ndim, *range(batch_ndim + 2, x.dim())]
    axes = norm_axes, [*range(batch_ndim), batch_ndim + 1]
    layout = functools.partial(contiguous_like, like=x, batch_ndim=batch_ndim)
    if statistics is None:
        return Norm(x, *axes, layout, eps)
    mean, rstd = (per_channel(v, x, batch_ndim) for v in statistics)
    return of(x, *axes, layout, statistics=(mean, rstd))


def per_channel(param: Tensor, x: Tensor, batch_ndim: int) -> Tensor:
    """A parameter [*batch, C], shaped to broadcast against x [*batch, N, C, *spatial]."""
    return param.reshape(*param.shape[:-1], 1, param.shape[-1], *[1] * (x.dim() - batch_ndim - 2))


def update_running(running: Tensor | None, batch: Tensor, momentum: float, x: Tensor) -> Tensor:
    """The next running statistic; an empty batch leaves it as it is."""
    if running is None:
        return empty_output(x)
    if x.numel() == 0:
        return running.clone()
    return (momentum * batch + (1 - momentum) * running.to(batch.dtype)).to(running.dtype)
