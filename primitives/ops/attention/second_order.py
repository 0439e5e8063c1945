r"""Second-order rules of attention: derivatives of its backward and of its jvp.

Notation as in `attention.py`. All of them are derivatives of one scalar, the tangent of the pairing of (o, lse) with
their cotangents when everything moves,

    L = <o_bar, o_dot> + <lse_bar, lse_dot> + <o_bar_dot, o> + <lse_bar_dot, lse>

With G and R as in first order (of o_bar and lse_bar), w = <o_bar, o_dot> + <o_bar_dot, o> - lse_bar_dot for each row,
C = S_dot - lse_dot, P_dot = P.C, H = Z.(o_bar v_dot^T + o_bar_dot v^T) and T = P.(C.(G - g) + H - w),

    dL/do_bar   = o_dot                                           dL/dlse_bar = lse_dot
    dL/dq       = scale * (T k + R k_dot)                         dL/dq_dot    = scale * R k
    dL/dk       = scale * (T^T q + R^T q_dot)                     dL/dk_dot    = scale * R^T q
    dL/dv       = (P_dot.Z)^T o_bar + (P.Z)^T o_bar_dot           dL/dv_dot    = (P.Z)^T o_bar
    dL/dbias    = T                                               dL/dbias_dot = R

of which `attention_double_backward_p` returns what its `output_mask` asks for:

    vjp of the jvp       o_bar, lse_bar: the cotangents of o_dot and lse_dot; o_bar_dot = lse_bar_dot = 0
    vjp of the backward  the tangents: the cotangents of q_bar, k_bar, v_bar and bias_bar; o_bar_dot = lse_bar_dot = 0
    jvp of the backward  dL/dq and so on, which are the tangents of q_bar and so on, since derivatives commute

so that one pair of kernels serves every mode. Third and higher orders, and the jvp of a jvp, differentiate the
references, whose blocks of rows are recomputed: memory grows with the number of rows at every order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from primitives._core import Primitive
from primitives.ops.attention.attention import (
    NAMES,
    OPTIONS,
    attention_bwd_p,
    attention_jvp_p,
    define_attention,
    empty_bars,
    empty_rows,
    empty_statistic,
    moving,
    products,
    turning,
)
from primitives.ops.attention.blocks import in_blocks
from primitives.ops.attention.rows import Problem, Rows, flipped, noised
from primitives.ops.rules import batch_all, bind_kernels, called, empty_output, second_order

attention_double_backward_p = Primitive(
    "attention_double_backward",
    "(Tensor? o_bar, Tensor? lse_bar, Tensor? o_bar_dot, Tensor? lse_bar_dot, Tensor q, Tensor k, Tensor v,"
    " Tensor? bias, Tensor o, Tensor lse, Tensor? q_dot, Tensor? k_dot, Tensor? v_dot, Tensor? bias_dot,"
    f" Tensor? o_dot, Tensor? lse_dot, {OPTIONS}, bool[] output_mask)"
    " -> (Tensor o_bar_bar, Tensor lse_bar_bar, Tensor q_bar, Tensor k_bar, Tensor v_bar, Tensor bias_bar,"
    " Tensor q_dot_bar, Tensor k_dot_bar, Tensor v_dot_bar, Tensor bias_dot_bar)",
    cached=("o", "lse", "o_dot", "lse_dot"),
    decomposable=True,
)


# Reference.


def double_backward(problem: Problem, output_mask: Sequence[bool]) -> tuple[Tensor, ...]:
    """The derivatives of L; o, lse, o_dot and lse_dot are computed where the problem does not have them."""
    needs_t = any(output_mask[i] for i in (2, 3, 5))
    needs_r = any(output_mask[i] for i in (2, 3, 6, 7, 9))

    def of_rows(rows: Rows) -> list[Tensor | None]:
        x, noise, (p, lse_dot, centered) = rows.x, rows.noise(), moving(rows)
        noisy_p = noised(p, noise)
        noisy_p_dot = None if centered is None else noised(p * centered, noise)
        o = torch.bmm(noisy_p, x.v) if x.o is None else x.o
        o_dot = x.o_dot
        if o_dot is None and (output_mask[0] or needs_t):
            o_dot = rows.plus(rows.plus(None, noisy_p, x.v_dot), noisy_p_dot, x.v)
        turned = turning(rows, o, noise) if needs_r or needs_t else None
        t = moved(rows, o, o_dot, centered, turned, noise) if needs_t else None
        t, r = rows.times(t, p), rows.times(turned, p)
        derivatives: tuple[Callable[[], Tensor | None], ...] = (
            lambda: o_dot,
            lambda: lse_dot,
            lambda: rows.plus(rows.plus(None, t, x.k), r, x.k_dot),
            lambda: rows.plus(rows.plus(None, flipped(t), x.q), flipped(r), x.q_dot),
            lambda: rows.plus(rows.plus(None, flipped(noisy_p_dot), x.o_bar), noisy_p.mT, x.o_bar_dot),
            lambda: t,
            lambda: rows.plus(None, r, x.k),
            lambda: rows.plus(None, flipped(r), x.q),
            lambda: rows.plus(None, noisy_p.mT, x.o_bar),
            lambda: r,
        )
        return [make() if want else None for make, want in zip(derivatives, output_mask, strict=True)]

    return in_blocks(problem, of_rows, "osqkvbqkvb", output_mask)


def moved(
    rows: Rows, o: Tensor, o_dot: Tensor | None, centered: Tensor | None, turned: Tensor | None, noise: Tensor | None
) -> Tensor | None:
    """C.(G - g) + H - w; None where all of it is zero."""
    x = rows.x
    w = None if x.lse_bar_dot is None else -x.lse_bar_dot
    w = w if x.o_bar is None or o_dot is None else products(x.o_bar, o_dot, w)
    w = w if x.o_bar_dot is None else products(x.o_bar_dot, o, w)
    h = rows.plus(rows.plus(None, x.o_bar, flipped(x.v_dot)), x.o_bar_dot, x.v.mT)
    total = rows.minus(noised(h, noise), w)
    if total is None:
        return rows.times(centered, turned)
    if centered is None or turned is None:
        return total
    return torch.addcmul(total, centered, turned, out=rows.over(total))


define_attention(attention_double_backward_p, double_backward)


@attention_double_backward_p.def_fake
def _fake(*args: Any) -> tuple[Tensor, ...]:
    q, output_mask, bars = args[4], args[-1], [empty_bars(*args[4:8]) for _ in range(2)]
    made = (empty_rows(q, args[6].shape[-1]), empty_statistic(q), *bars[0], *bars[1])
    return tuple(x if want else empty_output(q) for x, want in zip(made, output_mask, strict=True))


bind_kernels(attention_double_backward_p, "attention.attention", "attention_double_backward")
batch_all(attention_double_backward_p)


# The tangents of the backward are derivatives of L, too.

second_order(attention_bwd_p, attention_jvp_p, None, attention_double_backward_p)


@attention_bwd_p.def_jvp
def _attention_bwd_jvp(residuals: Any, tangents: Any) -> tuple[Tensor, ...]:
    t = tangents
    dots = {f"{name}_dot": getattr(t, name) for name in ("o_bar", "lse_bar", *NAMES)}
    # o and lse move as the other arguments say: where their tangents are at hand, they are not computed again.
    if t.o is not None and t.lse is not None:
        dots |= {"o_dot": t.o, "lse_dot": t.lse}
    mask = (False, False, *residuals.output_mask, *[False] * 4)
    return tuple(called(attention_double_backward_p, residuals, mask, **dots)[2:6])
