"""Batch norm in training on CPU tensors, built from ATen's kernels.

Notation as in `batch_norm.py`. Given the sums that ATen's backward takes, a channel of any derivative is a linear
combination of its inputs. For v with the sums (M, R) = (mean(v), mean(v * x_hat)),

    P(v) = rstd * (v - M - x_hat * R)

which serves vjp and jvp alike, being symmetric. P is linear, so with (A, B, C) = R of (x_dot, y_bar, y_bar_dot) and
S = mean(x_dot * P(y_bar)) = rstd * (cov(x_dot, y_bar) - A * B) both derivatives of second order
(`formulas.py`) are one projection and a multiple of x_hat:

    x' or x_bar_dot = P(v) - rstd * weight * S * x_hat
    v = weight * y_bar_dot + (weight_dot - weight * rstd * A) * y_bar - weight * rstd * B * x_dot
    weight' = n * S,    weight_bar_dot = n * (C + S),    n values per channel

where the pairing has no y_bar_dot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from primitives.ops.cpu import cast, in_accumulation_dtype, is_well_conditioned, ready, served
from primitives.ops.norms.channels import update_running
from primitives.ops.norms.cpu_channels import LONGEST_BACKWARD, LONGEST_IMAGE, Channels, is_channels_last
from primitives.ops.rules import LOW_PRECISION, accumulation_dtype, empty_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


# How many standard deviations a mean may be away from 0. The variance of planar_statistics loses offset**2 units in the
# last place, half of which reach rstd. Where a channel is strided, ATen has one running sum per channel, whose error
# reaches the output times the offset. For numbers that differ at random it grows with the square root of how many they
# are, and at the limits it is 4e-5 standard deviations. Of few different values, whose additions are all rounded to one
# side, the mean may lose n * 2**-26 of itself: 5e-4 at once, 8e-6 in pieces.
LARGEST_PLANAR_OFFSET = 8.0
LARGEST_OFFSET_OF_SUM = 16.0
LENGTH_OF_LARGEST_OFFSET = 2**12
LONGEST_AT_ONCE = 2**15
# Axes of [N, C], whose channels always lie side by side.
ROWS_DIM = 2


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batch_ndim: int,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...] | None:
    """y, mean, rstd and the new running statistics."""
    params = ready(x, weight, bias)
    if batch_ndim or params is None:
        return None
    weight, bias = params
    layout = None if _lies_in_rows(x) else Channels.of(x)
    x = x if layout is None else layout.contiguous_like(x)
    if layout is None or not layout.is_planar:
        out = _at_once(x, weight, bias, running_mean, running_var, momentum, eps)
        if out is not None:
            return out
    layout = layout or Channels.of(x)
    mean, variance, rstd = _statistics(x, layout, eps)
    if not is_well_conditioned(mean, rstd):
        return None
    y = torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]
    unbiased = variance * (layout.num_values / max(layout.num_values - 1, 1))
    new_mean, new_var = (
        update_running(running_mean, mean, momentum, x),
        update_running(running_var, unbiased, momentum, x),
    )
    return y, mean, rstd, new_mean, new_var


def _lies_in_rows(x: Tensor) -> bool:
    """Whether the channels of each position lie side by side and close together, with no gaps."""
    return x.dim() == ROWS_DIM if x.is_contiguous() else is_channels_last(x)


def _at_once(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...] | None:
    """The result of `forward`, by one call of ATen; `None` where that would not do."""
    num_values = x.numel() // x.shape[1]
    if not 1 < num_values <= LONGEST_AT_ONCE or (running_mean is None) != (running_var is None):
        return None
    new_mean, new_var = _copied(running_mean, running_var, x)
    y, mean, rstd = torch.native_batch_norm(x, weight, bias, new_mean, new_var, True, momentum, eps)
    shortness = min(1.0, (LENGTH_OF_LARGEST_OFFSET / num_values) ** 0.5)
    if not is_well_conditioned(mean, rstd, LARGEST_OFFSET_OF_SUM * shortness):
        return None
    if running_mean is None or running_var is None or new_mean is None or new_var is None:
        return y, mean, rstd, empty_output(x), empty_output(x)
    return y, mean, rstd, cast(new_mean, running_mean.dtype), cast(new_var, running_var.dtype)


def _copied(mean: Tensor | None, var: Tensor | None, x: Tensor) -> Sequence[Tensor | None]:
    """Running statistics that ATen may write, in the dtype of sums; it needs none but where it would round others."""
    acc = accumulation_dtype(x.dtype)
    if mean is None or var is None:
        # Without any in float32, ATen rounds the statistics of a low-precision x to its dtype.
        return [x.new_zeros(x.shape[1], dtype=acc) for _ in range(2)] if x.dtype in LOW_PRECISION else (None, None)
    # A clone costs a fifth of a conversion.
    return [running.clone() if running.dtype == acc else running.to(acc) for running in (mean, var)]


def _statistics(x: Tensor, layout: Channels, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and rstd of each channel."""
    if layout.is_planar:
        mean, variance = layout.planar_statistics(x)
        # Without eps: the running variance has to be right where eps hides the error from the output.
        if not (mean.square() > LARGEST_PLANAR_OFFSET**2 * variance).any():
            return mean, variance, (variance + eps).rsqrt()
    mean, variance = layout.statistics(x)
    rstd = (variance + eps).rsqrt()
    if not layout.is_planar and not is_well_conditioned(mean, rstd, LARGEST_OFFSET_OF_SUM):
        mean = layout.mean(x)
    return mean, variance, rstd


class _Moments(NamedTuple):
    """mean(v) and mean(v * x_hat) of each channel."""

    mean: Tensor
    with_x_hat: Tensor


class _Batch(NamedTuple):
    """x with its statistics, and what is made of both."""

    x: Tensor
    mean: Tensor
    rstd: Tensor
    layout: Channels

    def moments(self, v: Tensor) -> _Moments:
        total, paired = self.layout.sums(v, self.x, self.mean)
        return _Moments(total / self.layout.num_values, paired * self.rstd / self.layout.num_values)

    def projected(
        self,
        terms: Sequence[tuple[Tensor, Tensor, _Moments]],
        x_hat: Tensor | None = None,
        constant: Tensor | None = None,
    ) -> Tensor:
        """P(sum of v * coefficient) + x_hat * the coefficient `x_hat` + `constant`, given the moments of each v."""
        zero = self.layout.filled(0.0)
        start = zero if constant is None else constant
        slope = zero if x_hat is None else x_hat
        for _, coefficient, moments in terms:
            start = start - self.rstd * coefficient * moments.mean
            slope = slope - self.rstd * coefficient * moments.with_x_hat
        slope = self.rstd * slope
        scaled = [(v, self.rstd * coefficient) for v, coefficient, _ in terms]
        return self.layout.combined([(self.x, slope), *scaled], start - slope * self.mean)

    def factor(self, param: Tensor | None) -> Tensor:
        """A parameter in the dtype of sums; without one, ones."""
        return self.layout.filled(1.0) if param is None else cast(param.contiguous(), self.layout.acc)


def _batch(x: Tensor, mean: Tensor, rstd: Tensor, batch_ndim: int, *params: Tensor | None) -> _Batch | None:
    """The batch, unless the reference has to serve the call."""
    if batch_ndim or not served(x, *params) or not is_well_conditioned(mean, rstd):
        return None
    return _Batch(x, mean.contiguous(), rstd.contiguous(), Channels.of(x))


def bwd(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    batch_ndim: int,
    eps: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor] | None:
    """x_bar, weight_bar and bias_bar: by one call of ATen for the usual call, x in float32 or float64 and dense."""
    if batch_ndim or not served(x, weight) or not is_well_conditioned(mean, rstd):
        return None
    mean, rstd = mean.contiguous(), rstd.contiguous()
    is_contiguous = x.is_contiguous()
    count = x.numel() // x.shape[1]
    if count > LONGEST_IMAGE and is_contiguous and count != len(x):
        is_usual = count // len(x) <= LONGEST_IMAGE
    else:
        is_usual = count <= LONGEST_BACKWARD and (is_contiguous or is_channels_last(x))
    if weight is None or x.dtype in LOW_PRECISION or not is_usual:
        return _bwd_in_general(_Batch(x, mean, rstd, Channels.of(x)), y_bar, weight, wanted)
    y_bar = y_bar.contiguous() if is_contiguous else y_bar.contiguous(memory_format=torch.channels_last)
    bars = torch.ops.aten.native_batch_norm_backward.default(
        y_bar, x, weight.contiguous(), None, None, mean, rstd, True, 0.0, wanted
    )
    if all(wanted):
        return bars
    x_bar, weight_bar, bias_bar = [bar if want else empty_output(x) for bar, want in zip(bars, wanted, strict=True)]
    return x_bar, weight_bar, bias_bar


def _bwd_in_general(
    batch: _Batch, y_bar: Tensor, weight: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """The result of `bwd` for any call that it serves."""
    x, layout = batch.x, batch.layout
    dtype = layout.acc if weight is None else weight.dtype
    if layout.sums_within(LONGEST_BACKWARD, LONGEST_IMAGE):
        y_bar, dense = layout.contiguous_like(y_bar), layout.contiguous_like(x)
        out = layout.bwd(y_bar, dense, batch.factor(weight), batch.mean, batch.rstd, wanted)
    else:
        moments = batch.moments(y_bar)
        x_bar = batch.projected([(y_bar, batch.factor(weight), moments)]) if wanted[0] else empty_output(x)
        out = x_bar, moments.with_x_hat * layout.num_values, moments.mean * layout.num_values
    dtypes = (x.dtype, dtype, dtype)
    x_bar, weight_bar, bias_bar = [
        cast(value, dtype) if want else empty_output(x) for value, dtype, want in zip(out, dtypes, wanted, strict=True)
    ]
    return x_bar, weight_bar, bias_bar


def jvp(x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, *args: Any) -> Tensor | None:
    """y_dot = P(x_dot) * weight + x_hat * weight_dot + bias_dot."""
    x_dot, weight_dot, bias_dot, batch_ndim, _eps = args
    batch = _batch(x, mean, rstd, batch_ndim, weight, weight_dot, bias_dot)
    if batch is None:
        return None
    terms = [] if x_dot is None else [(x_dot, batch.factor(weight), batch.moments(x_dot))]
    return batch.projected(terms, *in_accumulation_dtype(weight_dot, bias_dot))


# Second order.


def pairing(
    y_bar: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, *args: Any
) -> tuple[Tensor, ...] | None:
    """The derivatives of L: y_bar' is a jvp, x_dot', weight_dot' and bias_dot' are what the backward returns."""
    x_dot, weight_dot, bias_dot, batch_ndim, _eps, wanted = args
    batch = _batch(x, mean, rstd, batch_ndim, weight, weight_dot, bias_dot)
    if batch is None:
        return None
    y_bar_moments, count = batch.moments(y_bar), batch.layout.num_values
    x_dot_term = [] if x_dot is None else [(x_dot, batch.factor(weight), batch.moments(x_dot))]
    slope, s = _along(batch, weight, (y_bar, y_bar_moments), None, x_dot_term, weight_dot)
    out = [
        batch.projected(x_dot_term, *in_accumulation_dtype(weight_dot, bias_dot)) if wanted[0] else None,
        batch.projected(slope, -batch.rstd * batch.factor(weight) * s) if wanted[1] else None,
        s * count,
        batch.projected([(y_bar, batch.factor(weight), y_bar_moments)]) if wanted[3] else None,
        y_bar_moments.with_x_hat * count,
        y_bar_moments.mean * count,
    ]
    return _finished(out, wanted, x, weight)


def bwd_jvp(
    y_bar: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, *args: Any
) -> tuple[Tensor, ...] | None:
    """x_bar_dot, weight_bar_dot and bias_bar_dot."""
    y_bar_dot, x_dot, weight_dot, batch_ndim, _eps, wanted = args
    batch = _batch(x, mean, rstd, batch_ndim, weight, weight_dot)
    if batch is None:
        return None
    count, zero = batch.layout.num_values, batch.layout.filled(0.0)
    y_bar_dot_term = None if y_bar_dot is None else (y_bar_dot, batch.moments(y_bar_dot))
    x_dot_term = [] if x_dot is None else [(x_dot, batch.factor(weight), batch.moments(x_dot))]
    slope, s = _along(batch, weight, (y_bar, batch.moments(y_bar)), y_bar_dot_term, x_dot_term, weight_dot)
    moments = _Moments(zero, zero) if y_bar_dot_term is None else y_bar_dot_term[1]
    x_bar_dot = batch.projected(slope, -batch.rstd * batch.factor(weight) * s) if wanted[0] else None
    return _finished([x_bar_dot, (moments.with_x_hat + s) * count, moments.mean * count], wanted, x, weight)


def _along(
    batch: _Batch,
    weight: Tensor | None,
    y_bar: tuple[Tensor, _Moments],
    y_bar_dot: tuple[Tensor, _Moments] | None,
    x_dot_term: Sequence[tuple[Tensor, Tensor, _Moments]],
    weight_dot: Tensor | None,
) -> tuple[list[tuple[Tensor, Tensor, _Moments]], Tensor]:
    """The terms of v, and S."""
    factor, layout = batch.factor(weight), batch.layout
    terms = [] if y_bar_dot is None else [(y_bar_dot[0], factor, y_bar_dot[1])]
    of_y_bar = layout.filled(0.0) if weight_dot is None else weight_dot.contiguous().to(layout.acc)
    s = layout.filled(0.0)
    for x_dot, _, moments in x_dot_term:
        a, b = moments.with_x_hat, y_bar[1].with_x_hat
        covariance = layout.sums(x_dot, y_bar[0], y_bar[1].mean)[1] / layout.num_values
        s = batch.rstd * (covariance - a * b)
        of_y_bar = of_y_bar - factor * batch.rstd * a
        terms.append((x_dot, -factor * batch.rstd * b, moments))
    return [*terms, (y_bar[0], of_y_bar, y_bar[1])], s


def _finished(
    out: Sequence[Tensor | None], wanted: Sequence[bool], x: Tensor, weight: Tensor | None
) -> tuple[Tensor, ...]:
    """Outputs, those per channel in the dtype of parameters, with stand-ins for the unwanted."""
    dtype = x.dtype if weight is None else weight.dtype
    return tuple(
        empty_output(x) if value is None or not want else value.to(dtype) if value.dim() == 1 else value
        for value, want in zip(out, wanted, strict=True)
    )
