r"""Second-order rules of cross-entropy: derivatives of its backward and of its jvp.

Notation as in `cross_entropy.py`. Both first-order operators are partial derivatives of one scalar, the pairing of
cotangents with tangents,

    L = loss_bar * loss_dot + lse_bar * lse_dot

of which dL/d(x_dot) = x_bar, dL/d(target_dot) = target_bar, and dL/d(loss_bar), dL/d(lse_bar) are the tangents. The
rest is symmetric in x: with t_dot = (1 - smoothing) * target_dot,

    dL/dx = p * (a * (x_dot - m) + loss_bar * sum(t_dot)) - loss_bar * t_dot
    dL/d(target) = (1 - smoothing) * loss_bar * (m - x_dot)

which are also what the tangents of x and of the target add to those of x_bar and target_bar. So one operator
serves both: `cross_entropy_bwd_jvp_p`, the jvp of the backward, is dL/dx and dL/d(target) where the cotangents have no
tangent.

Third and higher orders, and the jvp of a jvp, differentiate the references.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from primitives.ops.losses.cross_entropy import (
    Terms,
    cross_entropy_bwd_jvp_p,
    cross_entropy_bwd_p,
    cross_entropy_jvp_p,
    terms_of,
    terms_on_cpu,
)
from primitives.ops.rules import define, empty_output, second_order


def _tangents_of_cotangents(terms: Terms, call: Any) -> tuple[Tensor, Tensor]:
    given = (call.loss_bar, call.lse_bar, call.loss_bar_dot, call.lse_bar_dot)
    u, v, u_dot, v_dot = (terms.per_row(bar, of_loss=i % 2 == 0) for i, bar in enumerate(given))
    p, keep, change, target_change = terms.probabilities(), 1.0 - call.smoothing, None, empty_output(call.x)
    wants_target = call.output_mask[1] and not terms.has_labels
    if wants_target:
        target_change = -keep * u_dot * terms.log_p
    a_dot = terms.of_target(u_dot) + v_dot
    if call.x_dot is not None:
        x_dot = call.x_dot.contiguous().to(p.dtype)
        centered = x_dot - (p * x_dot).sum(call.dim, keepdim=True)
        if wants_target:
            target_change = target_change - keep * u * centered
        change = terms.times(centered, terms.of_target(u) + v)
    change = terms.times(p, a_dot if change is None else change + a_dot)
    if call.loss_bar_dot is not None:
        change = terms.less_target(change, u_dot)
    if call.target_dot is not None:
        t_dot = keep * call.target_dot.contiguous().to(p.dtype)
        change = change + u * (p * t_dot.sum(call.dim, keepdim=True) - t_dot)
    return (
        change.to(call.x.dtype) if call.output_mask[0] else empty_output(call.x),
        target_change.to(call.target.dtype) if wants_target else empty_output(call.x),
    )


define(cross_entropy_bwd_jvp_p, _tangents_of_cotangents, terms_of, terms_on_cpu)
second_order(cross_entropy_bwd_p, cross_entropy_jvp_p, cross_entropy_bwd_jvp_p)
