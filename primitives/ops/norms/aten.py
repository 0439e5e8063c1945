"""Norms by ATen's kernels on the CPU: values, and P, which ATen's backwards are without a weight.

ATen's sums here are running sums of float32, of which n numbers of one sign lose up to n * 2**-26: additions of numbers
that are alike are all rounded to one side. Its values multiply x by 1 / std and subtract mean / std, which loses
mean / std units in the last place. The constants say how much of both is allowed; beyond them the formulas serve, which
add in pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from primitives.ops.norms.channels import memory_format
from primitives.ops.norms.formulas import Norm, Running
from primitives.ops.rules import accumulation_dtype, empty_output

# As many units in the last place as the tests allow (`tests/support.py`).
LARGEST_OFFSET = 64.0
# Along a row ATen has one running sum for each lane of a vector, eight in AVX2: at this length P loses 3e-5 of a v of
# one sign. Sums over rows, one for each parameter, lose as much at the other.
LONGEST_ROW = 2**14
MOST_ROWS = 2**11
# The same of a channel: of rows, where channels lie side by side, and of one image otherwise. At the first ATen's
# backward loses 5e-4 and 3e-5 of a sum of one sign, as torch's own does, at the second P loses 8e-6.
LONGEST_CHANNEL = 2**15, 2**14
LONGEST_IN_P = 2**9, 2**12


def is_well_conditioned(mean: Tensor, rstd: Tensor, limit: float = LARGEST_OFFSET) -> bool:
    """Whether no mean is so far from 0, in standard deviations, that ATen's formulas lose accuracy; false for NaN."""
    if mean.numel() == 0:
        return True
    offset = mean * rstd
    # Squared, by the code that has just run: the absolute value would have to be fetched into the cache first.
    return offset.mul_(offset).max().item() <= limit * limit


class RowsByAten(Norm):
    """A norm of rows, or of groups, by given statistics."""

    def project(self, v: Tensor) -> Tensor:
        """`P(v)`; of a norm that is not centered that of the mean 0, and what it subtracts added again."""
        if self._cols().numel() > LONGEST_ROW:
            return super().project(v)
        found = self._aten(v, None, (True, False, False))[0]
        return found if self.centered else found.add_(self.rstd * self.mean_of(v))

    def bwd(
        self, y_bar: Tensor, weight: Tensor | None, output_mask: Sequence[bool], dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """By one call of ATen, where its sums are short."""
        has_sums, num_rows, channel_axes = (
            output_mask[1] or output_mask[2],
            self.rstd.numel(),
            range(self.x.dim() - 3, self.x.dim() - 1),
        )
        is_short = self._cols().numel() <= LONGEST_ROW and not (has_sums and num_rows > MOST_ROWS)
        is_grouped = self.param_axes == list(channel_axes)
        if not (is_short and self.centered and (is_grouped or self.param_axes == self.norm_axes)):
            return super().bwd(y_bar, weight, output_mask, dtype)
        shape = self.x.shape[-3:-1] if is_grouped else self._cols()
        scale = self.x.new_ones(shape, dtype=self.dtype) if weight is None and has_sums else weight
        scale = None if scale is None else scale.to(self.dtype).contiguous()
        by_aten = self._of_groups if is_grouped else self._aten
        bars = by_aten(self.wide(y_bar), scale, output_mask)
        x_bar, weight_bar, bias_bar = _finished(self, bars, weight, output_mask, dtype)
        return self.layout(x_bar) if output_mask[0] else x_bar, weight_bar, bias_bar

    def _cols(self) -> torch.Size:
        return self.x.shape[self.x.dim() - len(self.norm_axes) :]

    def _aten(self, v: Tensor, weight: Tensor | None, output_mask: Sequence[bool]) -> tuple[Tensor, ...]:
        rstd = self.rstd.contiguous()
        mean = self.mean.contiguous() if self.centered else torch.zeros_like(rstd)
        given = v.contiguous(), self.rest.contiguous(), self._cols(), mean, rstd
        return torch.ops.aten.native_layer_norm_backward.default(*given, weight, weight, output_mask)

    def _of_groups(self, v: Tensor, weight: Tensor | None, output_mask: Sequence[bool]) -> tuple[Any, ...]:
        groups, channels, positions = self.x.shape[-3:]
        sizes: Any = self.x.numel() // (groups * channels * positions), groups * channels, positions
        # Of three axes: of four ATen takes some for channels_last.
        flat = (t.contiguous().view(sizes) for t in (v, self.rest))
        given = *flat, self.mean.contiguous(), self.rstd.contiguous(), weight, *sizes, groups, output_mask
        bars: Any = torch.ops.aten.native_group_norm_backward.default(*given)
        shapes = self.x.shape, (groups, channels), (groups, channels)
        return tuple(bar if bar is None else bar.view(like) for bar, like in zip(bars, shapes, strict=True))


class ChannelsByAten(Norm):
    """A norm of channels by given statistics."""

    in_training = True

    def project(self, v: Tensor) -> Tensor:
        """`P(v)`."""
        return self._aten(v, None, (True, False, False))[0] if self._sums_within(*LONGEST_IN_P) else super().project(v)

    def bwd(
        self, y_bar: Tensor, weight: Tensor | None, output_mask: Sequence[bool], dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """By one call of ATen, where its sums are short."""
        if not self._sums_within(*LONGEST_CHANNEL):
            return super().bwd(y_bar, weight, output_mask, dtype)
        scale = None if weight is None else weight.to(self.dtype).contiguous()
        return _finished(self, self._aten(self.wide(y_bar), scale, output_mask), weight, output_mask, dtype)

    def _sums_within(self, rows: int, image: int) -> bool:
        """Whether one call serves, and has no running sum over more than so many rows, or so large an image."""
        if len(self.param_axes) > 1 or self.x.numel() == 0:
            return False
        positions = self.x.shape[2:].numel()
        if positions > 1 and self.rest.is_contiguous():
            return positions <= image
        return self.x.shape[0] * positions <= rows

    def _aten(self, v: Tensor, weight: Tensor | None, output_mask: Sequence[bool]) -> tuple[Tensor, ...]:
        weight = self.x.new_ones(self.x.shape[1], dtype=self.dtype) if weight is None else weight
        mean, rstd = (v.flatten().contiguous() for v in (self.mean, self.rstd))
        running = (None, None) if self.in_training else (mean, rstd.square().reciprocal_())
        # Where it lies right, as it is: strides of axes of size 1 show in the result as in torch's.
        x = self.x.contiguous(memory_format=memory_format(self.x, 0)).to(self.dtype)
        return torch.ops.aten.native_batch_norm_backward.default(
            v, x, weight, *running, mean, rstd, self.in_training, 0.0, output_mask
        )


class RunningByAten(Running, ChannelsByAten):
    """The same by statistics that do not depend on x."""

    in_training = False


def _finished(
    norm: Norm, bars: Sequence[Tensor], weight: Tensor | None, output_mask: Sequence[bool], dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """ATen's cotangents in their dtypes, with stand-ins for what `output_mask` leaves out."""
    dtype = dtype or (norm.dtype if weight is None else weight.dtype)
    x_bar = bars[0].to(norm.x.dtype) if output_mask[0] else empty_output(norm.x)
    weight_bar, bias_bar = (
        bar.to(dtype) if want else empty_output(norm.x) for bar, want in zip(bars[1:], output_mask[1:], strict=True)
    )
    return x_bar, weight_bar, bias_bar


def in_dtype_of_sums(x: Tensor, *params: Tensor | None) -> list[Any]:
    """Parameters in the dtype of sums, in which ATen keeps statistics in float32 at least."""
    return [p if p is None else p.to(accumulation_dtype(x.dtype)).contiguous() for p in params]
