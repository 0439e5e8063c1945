"""Sums and combinations per channel for batch norm on CPU tensors.

In every derivative of batch norm a channel is a linear combination of a few tensors with the shape of x, whose
coefficients follow from a few sums. The sums are what ATen's backward returns as parameter cotangents.

ATen adds up in running sums of float32: where channels lie side by side, one for each over all rows, else one for each
image and lane of a vector, eight in AVX2. Such a sum of n numbers of one sign loses up to n * 2**-26 of itself, since
additions of numbers that are alike are all rounded to the same side; numbers of both signs lose next to nothing. So
long sums are folded: a channel is taken for several, whose sums are then added in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from primitives.ops.cpu import block_elements
from primitives.ops.norms.channels import memory_format
from primitives.ops.rules import accumulation_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor


# ATen's whole backward may add these up: the rows of channels that lie side by side, or one image. At these sizes
# numbers of one sign lose up to 5e-4 and 3e-5 of their sum: so much is then wrong in the parameters' cotangents, and in
# what x_bar has subtracted. With sums apart from x_bar a backward takes up to 1.8 times as long, so that batches of
# convolutions stay below.
LONGEST_BACKWARD = 2**15
LONGEST_IMAGE = 2**14
# The same of a folded sum, which loses 8e-6 at most: as much as the tests allow (`tests/support.py`).
LONGEST_SUM = 2**9
LANES = 8
# Channels that folding makes of few: their sums stay in the cache of first level.
WIDEST_FOLD = 2**12
# Parts of an image are as many as divide it; those of one that has no such divisor are copied.
MOST_PARTS = 64


def is_channels_last(x: Tensor) -> bool:
    """Whether `x`, which is not contiguous, surely is channels_last: asked before torch works it out in Python.

    Where a size is 1, strides may fit both formats, and torch has rules of its own.
    """
    return 1 not in x.shape and x.is_contiguous(memory_format=torch.channels_last)


class Channels(NamedTuple):
    """The layout of x [N, C, *spatial], which all outputs of its shape have: contiguous or one of the channels_last."""

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

    def sums_within(self, rows: int, image: int) -> bool:
        """Whether ATen's backward has no running sum over more than so many rows, or so large an image."""
        return self.shape[2:].numel() <= image if self.is_planar else self.num_values <= rows

    @property
    def sums_are_short(self) -> bool:
        """Whether ATen's own sums lose nothing."""
        return self.sums_within(LONGEST_SUM, LANES * LONGEST_SUM)

    def contiguous_like(self, t: Tensor) -> Tensor:
        """`t` in this layout."""
        return t.contiguous(memory_format=self.format)

    def filled(self, value: float) -> Tensor:
        """A value per channel."""
        return torch.full(self.shape[1:2], value, dtype=self.acc)

    def _pieces(self, *ts: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """The same pieces of tensors in this layout, with short sums: each channel is folded into several."""
        return self._parts_of_images(ts) if self.is_planar else self._folded_rows(ts)

    def _folded_rows(self, ts: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        channels, rows = self.shape[1], [self._rows(t) for t in ts]
        folds = max(1, min(WIDEST_FOLD // channels, self.num_values // LONGEST_SUM))
        whole = self.num_values // folds * folds
        yield from zip(*(t[:whole].view(-1, folds * channels).split(LONGEST_SUM) for t in rows), strict=True)
        if whole < self.num_values:
            yield tuple(t[whole:] for t in rows)

    def _parts_of_images(self, ts: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        samples, channels, longest = self.shape[0], self.shape[1], LANES * LONGEST_SUM
        size = self.shape[2:].numel()
        fewest = -(-size // longest)
        for parts in range(fewest, MOST_PARTS * fewest):
            if size % parts == 0:
                yield tuple(t.view(samples, channels * parts, -1) for t in ts)
                return
        pieces = (t.view(samples, channels, -1).split(longest, 2) for t in ts)
        yield from (tuple(t.contiguous() for t in piece) for piece in zip(*pieces, strict=True))

    def _folded(self, param: Tensor, piece: Tensor) -> Tensor:
        """A value per channel for each channel of a piece."""
        folds = piece.shape[1] // self.shape[1]
        return param if folds == 1 else param.repeat_interleave(folds) if self.is_planar else param.repeat(folds)

    def _unfolded(self, values: Tensor) -> Tensor:
        """Values per channel of a piece, [folds, C]."""
        return values.view(self.shape[1], -1).t() if self.is_planar else values.view(-1, self.shape[1])

    def _rows(self, t: Tensor) -> Tensor:
        """`t`, in this layout, as [values per channel, C]: a view where the layout is not planar."""
        return t.movedim(1, -1).reshape(-1, self.shape[1])

    @property
    def is_planar(self) -> bool:
        """Whether the values of a channel lie side by side, sample by sample."""
        return self.format == torch.contiguous_format and self.shape[2:].numel() > 1

    def mean(self, x: Tensor) -> Tensor:
        """Mean of each channel, in the dtype of sums, from sums of sums."""
        x = self.contiguous_like(x)
        if self.is_planar:
            total = x.view(*self.shape[:2], -1).sum(2, dtype=self.acc).sum(0)
        else:
            total = self._rows(x).sum(0, dtype=self.acc)
        return total / self.num_values

    def planar_statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of each channel where the layout is planar, in a fifth of the time of `statistics`.

        The variance is mean(x * (x - mean)), so its relative error is a unit in the last place times mean**2 / var.
        """
        x, mean = self.contiguous_like(x), self.mean(x)
        return mean, (self.sums(x, x, mean)[1] / self.num_values).clamp_(min=0.0)

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of each channel, in the dtype of sums."""
        # Running statistics in float32 keep ATen from rounding those of a low-precision x.
        zero, x = self.filled(0.0), self.contiguous_like(x)
        # ATen adds up a channel of a planar x in float64.
        if self.is_planar or self.num_values <= LONGEST_SUM:
            return torch.batch_norm_update_stats(x, zero, zero, 0.0)
        means, variances, shares = [], [], []
        for (piece,) in self._pieces(x):
            running = self._folded(zero, piece)
            mean, variance = map(self._unfolded, torch.batch_norm_update_stats(piece, running, running, 0.0))
            means.append(mean)
            variances.append(variance)
            shares.append(torch.full((len(mean), 1), len(piece) / self.num_values, dtype=torch.float64))
        mean_of, variance_of, share = (torch.cat(values).double() for values in (means, variances, shares))
        mean = (share * mean_of).sum(0)
        variance = (share * (variance_of + (mean_of - mean).square())).sum(0)
        return mean.to(self.acc), variance.to(self.acc)

    def sums(self, t: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Per channel sum(t) and sum(t * (x - mean))."""
        t, x, one = self.contiguous_like(t), self.contiguous_like(x), self.filled(1.0)
        if self.sums_are_short:
            _, paired, total = self.bwd(t, x, one, mean, one, (False, True, True))
            return total, paired
        totals, pairs, ones, center = [], [], one, mean
        for t_piece, x_piece in self._pieces(t, x):
            # Most pieces are of one size.
            if len(ones) != x_piece.shape[1]:
                ones, center = self._folded(one, x_piece), self._folded(mean, x_piece)
            _, paired, total = self.bwd(t_piece, x_piece, ones, center, ones, (False, True, True))
            totals.append(self._unfolded(total))
            pairs.append(self._unfolded(paired))
        total, paired = (torch.cat(values).sum(0, dtype=torch.float64).to(self.acc) for values in (totals, pairs))
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
        tensors, factors = [self.contiguous_like(t) for t, _ in terms], [self._spread(c) for _, c in terms]
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
        # ATen's evaluation scales and shifts a channel, in one pass.
        zero, one = self.filled(0.0), self.filled(1.0)
        total = torch.native_batch_norm(tensors[0], *start, zero, one, False, 0.0, 0.0)[0]
        for t, factor in zip(tensors[1:], factors[1:], strict=True):
            total.addcmul_(t, factor)
        return total

    def _spread(self, param: Tensor) -> Tensor:
        """A value per channel, shaped to broadcast against x."""
        return param.to(self.acc).view(-1, *[1] * (len(self.shape) - 2))
