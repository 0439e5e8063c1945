"""Sums and combinations per channel for batch norm on CPU tensors.

In every derivative of batch norm a channel is a linear combination of a few tensors with the shape of x, whose
coefficients follow from a few sums. The sums are what ATen's backward returns as parameter cotangents.

Where the layout is channels_last, ATen adds up row by row in one running sum of float32, which loses 1e-5 over 100,000
rows. So long sums are taken over pieces of the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from primitives.ops._channels import memory_format
from primitives.ops._cpu import block_elements
from primitives.ops._shared import accumulation_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

__all__ = ["Channels", "is_channels_last"]

# Rows of channels_last that ATen may add up in one call. A backward loses up to 1e-5 of its largest sum over this many;
# an error of a mean is multiplied by the mean over the standard deviation, so statistics take smaller pieces.
LONGEST_BACKWARD = 2**17
LONGEST_SUM = 2**12


def is_channels_last(x: Tensor) -> bool:
    """Whether `x`, which is not contiguous, surely is channels_last: asked before torch works it out in Python.

    Where a size is 1, strides may fit both formats, and torch has rules of its own.
    """
    return 1 not in x.shape and x.is_contiguous(memory_format=torch.channels_last)


class Channels(NamedTuple):
    """The layout of x [N, C, *spatial], which all outputs of its shape have.

    Attributes:
        shape: [N, C, *spatial].
        dtype: That of x.
        format: Memory format: contiguous or one of the channels_last.
    """

    shape: torch.Size
    dtype: torch.dtype
    format: torch.memory_format

    @classmethod
    def of(cls, x: Tensor) -> Channels:
        """The layout of the output for `x`."""
        if x.is_contiguous():
            return cls(x.shape, x.dtype, torch.contiguous_format)
        return cls(x.shape, x.dtype, torch.channels_last if is_channels_last(x) else memory_format(x, 0))

    @property
    def acc(self) -> torch.dtype:
        """Dtype of sums."""
        return accumulation_dtype(self.dtype)

    @property
    def num_values(self) -> int:
        """Values per channel."""
        return self.shape[0] * self.shape[2:].numel()

    @property
    def backward_is_accurate(self) -> bool:
        """Whether ATen's backward adds up each channel accurately; in contiguous tensors it always does."""
        return self.format == torch.contiguous_format or self.num_values <= LONGEST_BACKWARD

    def arranged(self, t: Tensor) -> Tensor:
        """`t` in this layout."""
        return t.contiguous(memory_format=self.format)

    def filled(self, value: float) -> Tensor:
        """A value per channel."""
        return torch.full(self.shape[1:2], value, dtype=self.acc)

    def _pieces(self, *ts: Tensor) -> Iterator[list[Tensor]]:
        """The same pieces of tensors in this layout, each of few enough rows."""
        if self.is_planar or self.num_values <= LONGEST_SUM:
            yield list(ts)
            return
        yield from map(list, zip(*(self._rows(t).split(LONGEST_SUM) for t in ts), strict=True))

    def _rows(self, t: Tensor) -> Tensor:
        """`t`, in this layout, as [values per channel, C]: a view where the layout is not planar."""
        return t.movedim(1, -1).reshape(-1, self.shape[1])

    @property
    def is_planar(self) -> bool:
        """Whether the values of a channel lie side by side, sample by sample."""
        return self.format == torch.contiguous_format and self.shape[2:].numel() > 1

    def mean(self, x: Tensor) -> Tensor:
        """Mean of each channel, in the dtype of sums, from sums of sums."""
        x = self.arranged(x)
        if self.is_planar:
            total = x.view(*self.shape[:2], -1).sum(2, dtype=self.acc).sum(0)
        else:
            total = self._rows(x).sum(0, dtype=self.acc)
        return total / self.num_values

    def planar_statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of each channel where the layout is planar, in a fifth of the time of `statistics`.

        The variance is mean(x * (x - mean)), so its relative error is a unit in the last place times mean**2 / var.
        """
        x, one, mean = self.arranged(x), self.filled(1.0), self.mean(x)
        paired = self.bwd(x, x, one, mean, one, (False, True, False))[1]
        return mean, (paired / self.num_values).clamp_(min=0.0)

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of each channel, in the dtype of sums."""
        # Running statistics in float32 keep ATen from rounding those of a low-precision x.
        zero, means, variances, counts = self.filled(0.0), [], [], []
        for (piece,) in self._pieces(self.arranged(x)):
            mean, variance = torch.batch_norm_update_stats(piece, zero, zero, 0.0)
            means.append(mean)
            variances.append(variance)
            counts.append(piece.numel() // self.shape[1])
        if len(means) == 1:
            return means[0], variances[0]
        mean_of, variance_of = torch.stack(means).double(), torch.stack(variances).double()
        share = torch.tensor(counts, dtype=torch.float64)[:, None] / self.num_values
        mean = (share * mean_of).sum(0)
        variance = (share * (variance_of + (mean_of - mean).square())).sum(0)
        return mean.to(self.acc), variance.to(self.acc)

    def sums(self, t: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Per channel sum(t) and sum(t * (x - mean))."""
        one, total, paired = self.filled(1.0), self.filled(0.0), self.filled(0.0)
        for t_piece, x_piece in self._pieces(self.arranged(t), self.arranged(x)):
            _, with_x, alone = self.bwd(t_piece, x_piece, one, mean, one, (False, True, True))
            total += alone
            paired += with_x
        return total, paired

    def bwd(
        self,
        y_bar: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        rstd: Tensor,
        mask: Sequence[bool],
        running: Sequence[Tensor] | None = None,
        eps: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """ATen's backward: P(y_bar) * weight, sum(y_bar * x_hat) and sum(y_bar), as far as `mask` says.

        With running mean and variance it is the backward of evaluation, and takes y_bar * rstd for P(y_bar).
        """
        weight = self.filled(1.0) if weight is None else weight
        return torch.ops.aten.native_batch_norm_backward.default(
            y_bar, x, weight, *(running or (None, None)), mean, rstd, running is None, eps, mask
        )

    def combined(self, terms: Sequence[tuple[Tensor, Tensor]], constant: Tensor | None = None) -> Tensor:
        """Sum of t * coefficient over `terms`, one at least, plus `constant`; all but t are values per channel."""
        tensors, factors = [self.arranged(t) for t, _ in terms], [self._spread(c) for _, c in terms]
        start = (terms[0][1], self.filled(0.0) if constant is None else constant)
        if self.dtype == self.acc or len(terms) == 1:
            return self._combination(tensors, factors, start)
        out = torch.empty(self.shape, dtype=self.dtype, memory_format=self.format)
        samples = max(1, block_elements() // self.shape[1:].numel())
        for target, *parts in zip(*(t.split(samples) for t in (out, *tensors)), strict=True):
            target.copy_(self._combination([part.to(self.acc) for part in parts], factors, start))
        return out

    def _combination(
        self, tensors: Sequence[Tensor], factors: Sequence[Tensor], start: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Sum of t * factor, plus a constant; `start` are the first factor and the constant."""
        # What ATen's evaluation does to a channel, in one pass, is to scale and shift it.
        zero, one = self.filled(0.0), self.filled(1.0)
        total = torch.native_batch_norm(tensors[0], *start, zero, one, False, 0.0, 0.0)[0]
        for t, factor in zip(tensors[1:], factors[1:], strict=True):
            total.addcmul_(t, factor)
        return total

    def _spread(self, param: Tensor) -> Tensor:
        """A value per channel, shaped to broadcast against x."""
        return param.to(self.acc).view(-1, *[1] * (len(self.shape) - 2))
