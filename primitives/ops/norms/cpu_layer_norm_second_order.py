"""Second-order layer norm on CPU tensors: one pass over blocks of rows, with three calls of ATen's backward in each.

P is linear, and a factor per row moves in and out of it. So what `formulas.py` writes as several
projections is one, of a sum: with A = mean(x_dot * x_hat), B = mean(g * x_hat), D = mean(g * P(x_dot)), g =
y_bar * weight,

    x' = P(r - rstd * (B * x_dot + A * g)) - rstd * D * x_hat

where r = y_bar * weight_dot in the pairing, and y_bar_dot * weight + y_bar * weight_dot in the jvp of the backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from primitives.ops.norms import cpu_layer_norm as first_order
from primitives.ops.rules import empty_output, with_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def pairing(
    y_bar: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, *args: Any
) -> tuple[Tensor, ...] | None:
    """The derivatives of L: y_bar' is a jvp, x_dot', weight_dot' and bias_dot' are what the backward returns."""
    x_dot, weight_dot, bias_dot, norm_ndim, batch_ndim, eps, centered, grouped, wanted = args
    params, sums = (weight, weight_dot, bias_dot), (wanted[2], wanted[4], wanted[5])
    rows = first_order.rows_of(x, params, mean, rstd, norm_ndim, batch_ndim, centered, grouped, has_sums=any(sums))
    if rows is None:
        return None
    options = (norm_ndim, batch_ndim, eps, centered, grouped)
    y_bar_bar = empty_output(x)
    if wanted[0]:
        y_bar_bar = first_order.jvp(x, weight, mean, rstd, x_dot, weight_dot, bias_dot, *options)
    x_bar = weight_bar = empty_output(x)
    if wanted[1] or wanted[2]:
        x_bar, weight_bar, _ = _along(rows, y_bar, weight, None, x_dot, weight_dot, (wanted[1], wanted[2], False))
    rest = (
        first_order.bwd(y_bar, x, weight, mean, rstd, *options, wanted[3:])
        if any(wanted[3:])
        else [empty_output(x)] * 3
    )
    if y_bar_bar is None or rest is None:
        return None
    out = [y_bar_bar, x_bar, weight_bar, *rest]
    return _finished(out, wanted, (0, 1, 3), x, weight, norm_ndim, grouped)


def bwd_jvp(
    y_bar: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, *args: Any
) -> tuple[Tensor, ...] | None:
    """x_bar_dot, weight_bar_dot and bias_bar_dot."""
    y_bar_dot, x_dot, weight_dot, norm_ndim, batch_ndim, _eps, centered, grouped, wanted = args
    has_sums = wanted[1] or wanted[2]
    options = (norm_ndim, batch_ndim, centered, grouped)
    rows = first_order.rows_of(x, (weight, weight_dot), mean, rstd, *options, has_sums=has_sums)
    if rows is None:
        return None
    out = _along(rows, y_bar, weight, y_bar_dot, x_dot, weight_dot, wanted)
    return _finished(out, wanted, (0,), x, weight, norm_ndim, grouped)


def _finished(
    out: Sequence[Tensor],
    wanted: Sequence[bool],
    like_x: Sequence[int],
    x: Tensor,
    weight: Tensor | None,
    norm_ndim: int,
    grouped: int,
) -> tuple[Tensor, ...]:
    """Outputs in their shapes and dtypes, those in `like_x` as x and the others as a parameter."""
    shape = x.shape[-3:-1] if grouped else x.shape[x.dim() - norm_ndim :]
    dtype = x.dtype if weight is None else weight.dtype
    return tuple(
        empty_output(x)
        if not want
        else with_layout(value.view(x.shape), grouped)
        if i in like_x
        else value.view(shape).to(dtype)
        for i, (value, want) in enumerate(zip(out, wanted, strict=True))
    )


def _along(
    rows: first_order.Rows,
    y_bar: Tensor,
    weight: Tensor | None,
    y_bar_dot: Tensor | None,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """x', sum(y_bar * P(x_dot) + y_bar_dot * x_hat) and sum(y_bar_dot), as far as wanted."""
    want_x, want_weight, want_bias = wanted
    weight, weight_dot = rows.param(weight), rows.param(weight_dot)
    y_bar, y_bar_dot, x_dot = map(rows.like_x, (y_bar, y_bar_dot, x_dot))
    out = torch.empty_like(rows.x) if want_x else rows.x
    weight_sum, bias_sum = rows.zeros(), rows.zeros()
    most = first_order.LONGEST_BLOCK if want_weight or want_bias else None
    for block in rows.blocks(most):
        x, v = rows.x[block].to(rows.acc), y_bar[block].to(rows.acc)
        v_dot, u = (None if t is None else t[block].to(rows.acc) for t in (y_bar_dot, x_dot))
        if v_dot is not None and (want_weight or want_bias):
            part, bias_part = rows.sums_with_x_hat(v_dot, x, block)
            weight_sum += part
            bias_sum += bias_part
        paired = None
        if u is not None:
            # Its sums over rows are weight', those over columns D.
            paired = rows.project(u, x, block, None)[0].mul_(v)
            if want_weight:
                weight_sum += rows.sums(paired)
        if want_x:
            out[block] = _x_along(rows, block, (x, v, v_dot, u, paired), weight, weight_dot)
    return out, weight_sum, bias_sum


def _x_along(
    rows: first_order.Rows, block: slice, tensors: Sequence, weight: Tensor | None, weight_dot: Tensor | None
) -> Tensor:
    """The derivative x' of some rows; `tensors` are x, y_bar, y_bar_dot, x_dot and y_bar * P(x_dot) there."""
    x, y_bar, y_bar_dot, x_dot, paired = tensors
    r = None if y_bar_dot is None else rows.scaled(y_bar_dot, weight)
    if weight_dot is not None:
        moved = rows.scaled(y_bar, weight_dot)
        r = moved if r is None else moved.add_(r)
    if x_dot is None:
        return torch.zeros_like(x) if r is None else rows.project(r, x, block, None)[0]
    rstd = rows.rstd[block]
    scale = rstd / -x.shape[1]
    x_hat = rows.x_hat(x, block)
    g = rows.scaled(y_bar, weight)
    a = (x_dot * x_hat).sum(1, keepdim=True).mul_(scale)
    b = (g * x_hat).sum(1, keepdim=True).mul_(scale)
    d = rows.scaled(paired, weight).sum(1, keepdim=True).mul_(scale)
    r = x_dot * b if r is None else torch.addcmul(r, x_dot, b)
    return rows.project(r.addcmul_(g, a), x, block, None)[0].addcmul_(x_hat, d)
