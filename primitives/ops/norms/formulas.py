r"""What all norms share: x_hat, P, and the formulas of every derivative, over the axes that a norm says.

x_hat = (x - mean) * rstd with rstd = 1 / sqrt(var + eps), all means over the normalized axes, and

    y = x_hat * weight + bias

where weight and bias have some axes of x, and are constant along the others. P is the derivative of x_hat with respect
to x; it is symmetric, so one map serves both modes:

    P(v) = rstd * (v - mean(v) - x_hat * mean(v * x_hat))

    jvp   y_dot = P(x_dot) * weight + x_hat * weight_dot + bias_dot
    vjp   x_bar = P(y_bar * weight),   weight_bar = sum(y_bar * x_hat),   bias_bar = sum(y_bar)

The sums run over the axes that a parameter lacks. Without `centered` x_hat = x * rstd, rstd = 1 / sqrt(mean(x**2) +
eps), and P(v) = rstd * (v - x_hat * mean(v * x_hat)). With statistics that are no functions of x, P(v) = rstd * v.

Second order. Along x_dot,

    x_hat_dot = P(x_dot) =: h,        rstd_dot = -rstd**2 * mean(x_hat * x_dot)

Both first-order operators are partial derivatives of one scalar, the pairing of a cotangent with a tangent of y,

    L = <y_bar, y_dot> = <y_bar * weight, P(x_dot)> + <y_bar, x_hat * weight_dot> + <y_bar, bias_dot>

    dL/d(x_dot, weight_dot, bias_dot) = (x_bar, weight_bar, bias_bar),        dL/d(y_bar) = y_dot

so the vjp of either one is the gradient of L, and one operator, `double_backward`, serves the vjp of the vjp and that
of the jvp. With g = y_bar * weight, A = mean(x_dot * x_hat), B = mean(g * x_hat), S = mean(g * P(x_dot)), and a prime
for the derivative of L with respect to what is primed,

    y_bar'  = P(x_dot) * weight + x_hat * weight_dot + bias_dot
    x'      = P(r - rstd * (B * x_dot + A * g)) - rstd * S * x_hat,        r = y_bar * weight_dot
    weight' = sum(y_bar * P(x_dot))
    x_dot'  = P(g),    weight_dot' = sum(y_bar * x_hat),    bias_dot' = sum(y_bar)

Forward over reverse is the same x' of r = y_bar_dot * weight + y_bar * weight_dot:

    x_bar_dot      = x'
    weight_bar_dot = sum(y_bar_dot * x_hat) + weight',        bias_bar_dot = sum(y_bar_dot)

Third and higher orders, and the jvp of a jvp, differentiate these formulas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from primitives.ops.rules import accumulation_dtype, empty_output


class Norm:
    """A norm of one x: its statistics, which are functions of x that derivatives reach, and all formulas.

    Args:
        x: The input.
        norm_axes: The normalized axes.
        param_axes: The axes that weight and bias have, in order.
        layout: Lays out what has the shape of x: `(v) -> v` in the order of memory of the result.
        eps: Added to the variance.
        centered: Whether the mean is subtracted.
        statistics: Values of mean and rstd, shaped to broadcast against x, which no derivative goes through.

    Attributes:
        rest: x in the dtype of sums, less the mean if that is its own.
        mean: The mean, with axes of size 1 for the normalized ones.
        variance: The biased variance, likewise.
        rstd: Likewise.
    """

    def __init__(
        self, x: Tensor, norm_axes: Sequence[int], param_axes: Sequence[int], layout: Callable[[Tensor], Tensor],
        eps: float = 0.0, *, centered: bool = True, statistics: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        self.x, self.layout, self.centered = x, layout, centered
        self._tangent: Tensor | None = None
        self.dtype = accumulation_dtype(x.dtype)
        self.norm_axes, self.param_axes = ([axis % x.dim() for axis in axes] for axes in (norm_axes, param_axes))
        self.sum_axes = [axis for axis in range(x.dim()) if axis not in self.param_axes]
        rest = self.wide(x)
        self.rest = rest
        if statistics is not None:
            self.mean, self.rstd = statistics
            self._less = self.mean if centered else None
            return
        self.mean, self._less = empty_output(rest), None
        if centered:
            self.mean = self.mean_of(rest)
            rest = rest - self.mean
            # Less the rounding error of the mean, rows of one value become 0. Its derivative in x is 0.
            error = self.mean_of(rest.detach())
            self.mean, self.rest = self.mean + error, rest - error
        self.variance = self.mean_of(self.rest.square())
        self.rstd = (self.variance + eps).rsqrt()

    @functools.cached_property
    def x_hat(self) -> Tensor:
        """`x`, normalized, in the dtype of sums."""
        return (self.rest if self._less is None else self.rest - self._less) * self.rstd

    def wide(self, v: Any) -> Any:
        """`v`, of the shape of x, in the layout of the result and the dtype of sums; or None."""
        return None if v is None else self.layout(v).to(self.dtype)

    def mean_of(self, v: Tensor) -> Tensor:
        """Mean over the normalized axes."""
        return v.mean(self.norm_axes, keepdim=True)

    def statistic(self, v: Tensor) -> Tensor:
        """A statistic as an output: without the normalized axes."""
        return v.squeeze(self.norm_axes) if v.dim() == self.x.dim() else v

    def param(self, param: Tensor) -> Tensor:
        """A parameter, shaped to broadcast against x."""
        shape = self.x.shape
        return param.reshape([shape[axis] if axis in self.param_axes else 1 for axis in range(len(shape))])

    def scaled(self, v: Tensor, param: Tensor | None) -> Tensor:
        """`v * param`; None for 1."""
        return v if param is None else v * self.param(param)

    def project(self, v: Tensor) -> Tensor:
        """`P(v)`, the derivative of x_hat with respect to x along v."""
        # Not by addcmul, which broadcasts neither symbolic sizes nor shards.
        along = self.x_hat * self.mean_of(v * self.x_hat)
        return self.rstd * ((v - self.mean_of(v) if self.centered else v) - along)

    def tangent(self, x_dot: Tensor) -> Tensor:
        """`P(x_dot)`, once for all results of a call: it has one tangent of x."""
        if self._tangent is None:
            self._tangent = self.project(self.wide(x_dot))
        return self._tangent

    def sums(self, v: Tensor | None, dtype: torch.dtype, *, wanted: bool = True) -> Tensor:
        """Sum of v over all axes that a parameter lacks: a cotangent of one; None for 0."""
        if not wanted:
            return empty_output(self.x)
        if v is None:
            return self.x.new_zeros([self.x.shape[axis] for axis in self.param_axes], dtype=dtype)
        # No axes at all would mean every axis to torch.
        return v.sum(self.sum_axes).to(dtype) if self.sum_axes else v.to(dtype, copy=True)

    def result(self, *terms: Tensor, wanted: bool = True) -> Tensor:
        """The sum of terms that broadcast to x, in its shape, dtype and layout."""
        if not wanted:
            return empty_output(self.x)
        total = sum(terms[1:], terms[0]) if terms else self.x.new_zeros(self.x.shape)
        return self.layout(total.expand(self.x.shape).to(self.x.dtype))

    # The value and its derivatives. A tangent that is None is absent.

    def value(self, weight: Tensor | None, bias: Tensor | None, *, rounded: bool = False) -> Tensor:
        """`x_hat * weight + bias`; `rounded` takes x_hat in the dtype of x."""
        x_hat = self.x_hat.to(self.x.dtype).to(self.dtype) if rounded else self.x_hat
        return self.result(self.scaled(x_hat, weight), *[] if bias is None else [self.param(bias)])

    def bwd(
        self, y_bar: Tensor, weight: Tensor | None, output_mask: Sequence[bool], dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Cotangents of x, weight and bias, these in `dtype`; without one in that of the weight."""
        y_bar = self.wide(y_bar)
        # A bias without a weight may be wider than x, so its sum is left wide; autograd casts to the dtype of the bias.
        dtype = dtype or (self.dtype if weight is None else weight.dtype)
        return (
            self.result(self.project(self.scaled(y_bar, weight))) if output_mask[0] else empty_output(self.x),
            self.sums(y_bar * self.x_hat, dtype) if output_mask[1] else empty_output(self.x),
            self.sums(y_bar, dtype, wanted=output_mask[2]),
        )

    def jvp(
        self, weight: Tensor | None, x_dot: Tensor | None, weight_dot: Tensor | None, bias_dot: Tensor | None
    ) -> list[Tensor]:
        """Terms of the tangent of y."""
        terms = []
        if x_dot is not None:
            terms.append(self.scaled(self.tangent(x_dot), weight))
        if weight_dot is not None:
            terms.append(self.scaled(self.x_hat, weight_dot))
        if bias_dot is not None:
            # Alone it becomes the result, which must not be a view of an argument.
            terms.append(self.param(bias_dot.to(self.dtype, copy=True)))
        return terms

    def along(
        self, y_bar: Tensor, weight: Tensor | None, y_bar_dot: Tensor | None, x_dot: Tensor | None,
        weight_dot: Tensor | None,
    ) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
        """Terms of x' and, before the sum, of weight', or of x_bar_dot and weight_bar_dot."""
        inner, of_x, of_weight = [], [], []
        if y_bar_dot is not None:
            inner.append(self.scaled(y_bar_dot, weight))
            of_weight.append(y_bar_dot * self.x_hat)
        if weight_dot is not None:
            inner.append(self.scaled(y_bar, weight_dot))
        if x_dot is not None:
            g, h = self.scaled(y_bar, weight), self.tangent(x_dot)
            a, b, s = (-self.rstd * self.mean_of(v) for v in (x_dot * self.x_hat, g * self.x_hat, g * h))
            inner.append(b * x_dot + a * g)
            of_x.append(s * self.x_hat)
            of_weight.append(y_bar * h)
        if inner:
            of_x.append(self.project(sum(inner[1:], inner[0])))
        return of_x, of_weight

    def double_backward(
        self, y_bar: Tensor, weight: Tensor | None, x_dot: Tensor | None, weight_dot: Tensor | None,
        bias_dot: Tensor | None, output_mask: Sequence[bool],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Gradient of L in y_bar, x, weight, x_dot, weight_dot and bias_dot."""
        y_bar_bar = self.jvp(weight, x_dot, weight_dot, bias_dot) if output_mask[0] else []
        return (
            self.result(*y_bar_bar, wanted=output_mask[0]),
            *self.bwd_jvp(y_bar, weight, None, x_dot, weight_dot, (output_mask[1], output_mask[2], False))[:2],
            *self.bwd(y_bar, weight, output_mask[3:], self.x.dtype if weight is None else weight.dtype),
        )

    def bwd_jvp(
        self, y_bar: Tensor, weight: Tensor | None, y_bar_dot: Tensor | None, x_dot: Tensor | None,
        weight_dot: Tensor | None, output_mask: Sequence[bool],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Tangents of the cotangents of x, weight and bias."""
        y_bar, y_bar_dot, x_dot = self.wide(y_bar), self.wide(y_bar_dot), self.wide(x_dot)
        dtype, of_x, of_weight = self.x.dtype if weight is None else weight.dtype, [], []
        if output_mask[0] or output_mask[1]:
            of_x, of_weight = self.along(y_bar, weight, y_bar_dot, x_dot, weight_dot)
        return (
            self.result(*of_x, wanted=output_mask[0]),
            self.sums(sum(of_weight[1:], of_weight[0]) if of_weight else None, dtype, wanted=output_mask[1]),
            self.sums(y_bar_dot, dtype, wanted=output_mask[2]),
        )


class Running(Norm):
    """A norm by given statistics that do not depend on x."""

    def project(self, v: Tensor) -> Tensor:
        """`P(v)`."""
        return self.rstd * v
