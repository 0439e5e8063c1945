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

from typing import TYPE_CHECKING

from primitives._core import Primitive
from primitives.ops.losses import cpu_cross_entropy as cpu
from primitives.ops.losses.cross_entropy import (
    cross_entropy_bwd_p,
    cross_entropy_jvp_p,
    of_target,
    per_row,
    scaled_target,
    terms_of,
)
from primitives.ops.rules import batch_all, bind_kernels, empty_output, second_order

if TYPE_CHECKING:
    from torch import Tensor

cross_entropy_bwd_jvp_p = Primitive(
    "cross_entropy_bwd_jvp",
    "(Tensor? loss_bar, Tensor? lse_bar, Tensor x, Tensor target, Tensor lse, Tensor? loss_bar_dot,"
    " Tensor? lse_bar_dot, Tensor? x_dot, Tensor? target_dot, int dim, float smoothing, bool[] wanted)"
    " -> (Tensor x_bar_dot, Tensor target_bar_dot)",
    cached=("lse",),
    decomposable=True,
)


@cross_entropy_bwd_jvp_p.def_reference
def _cross_entropy_bwd_jvp_reference(
    loss_bar: Tensor | None,
    lse_bar: Tensor | None,
    x: Tensor,
    target: Tensor,
    lse: Tensor,
    loss_bar_dot: Tensor | None,
    lse_bar_dot: Tensor | None,
    x_dot: Tensor | None,
    target_dot: Tensor | None,
    dim: int,
    smoothing: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor]:
    terms = terms_of(x, target, dim)
    u, v, u_dot, v_dot = (
        per_row(bar, terms, dim, of_loss=i % 2 == 0)
        for i, bar in enumerate((loss_bar, lse_bar, loss_bar_dot, lse_bar_dot))
    )
    log_p = terms.shifted - terms.log_sum
    p, keep = log_p.exp(), 1.0 - smoothing
    change = p * (of_target(u_dot, terms, dim, smoothing) + v_dot)
    target_change = -keep * u_dot * log_p
    if loss_bar_dot is not None:
        change = change - scaled_target(u_dot, terms, dim, smoothing)
    if x_dot is not None:
        centered = x_dot.contiguous().to(p.dtype)
        centered = centered - (p * centered).sum(dim, keepdim=True)
        change = change + (of_target(u, terms, dim, smoothing) + v) * p * centered
        target_change = target_change - keep * u * centered
    if target_dot is not None:
        t_dot = keep * target_dot.contiguous().to(p.dtype)
        change = change + u * (p * t_dot.sum(dim, keepdim=True) - t_dot)
    return (
        change.to(x.dtype) if wanted[0] else empty_output(x),
        target_change.to(target.dtype) if wanted[1] and not terms.has_labels else empty_output(x),
    )


bind_kernels(
    cross_entropy_bwd_jvp_p,
    "losses.cross_entropy",
    "cross_entropy_bwd_jvp",
    cpu.in_blocks(_cross_entropy_bwd_jvp_reference, cpu.vjp_jvp),
)


second_order(cross_entropy_bwd_p, cross_entropy_jvp_p, cross_entropy_bwd_jvp_p)
batch_all(cross_entropy_bwd_jvp_p, counter="dim")
