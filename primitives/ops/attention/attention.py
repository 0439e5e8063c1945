r"""Attention: each row of q takes the mean of the rows of v, weighted by the softmax of its products with those of k.

    S = scale * q k^T + bias,      lse = log(sum(exp(S))),      P = exp(S - lse),      o = (P.Z) v

Sums run over the keys, a dot between matrices multiplies element by element, and Z is the noise of dropout (1 without):
`1 / (1 - p)` or 0, see `_attention.Rows.noise`. Along q_dot, k_dot, v_dot, bias_dot,

    S_dot   = scale * (q_dot k^T + q k_dot^T) + bias_dot
    lse_dot = sum(P.S_dot)
    o_dot   = (P.Z) v_dot + (P.(S_dot - lse_dot).Z) v

and with G = Z.(o_bar v^T), g = <o_bar, o> - lse_bar for each row, R = P.(G - g),

    q_bar = scale * R k,      k_bar = scale * R^T q,      v_bar = (P.Z)^T o_bar,      bias_bar = R

Both keep q, k, v, bias, o and lse, and never P: what they need of it is computed again, some rows at a time. The sum
`P.(S_dot - lse_dot)` loses no digits to a part of S_dot that all keys of a row share, as time has it in a model that
is modulated by it: the difference is taken before P is rounded.

Second order. All are derivatives of one scalar, the tangent of the pairing of (o, lse) with their cotangents when
everything moves,

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

Shapes: q [*batch, H, N, D], k [*batch, K, M, D], v [*batch, K, M, E] with H a multiple of K; head h of q sees head
h // (H / K) of k and v. bias and mask have as many axes as q and are broadcast to [*batch, H, N, M]; mask is true where
a row sees a key, and `causal` hides key j from row i < j. seed and offset have the first axes of the batch (or none),
int64. o is [*batch, H, N, E], lse [*batch, H, N], float32, float64 for float64 q. A row that sees no key has o = 0,
lse = -inf and derivatives of zero.

References:
    Vaswani et al., "Attention is all you need", NeurIPS 2017. Rabe, Staats, "Self-attention does not need O(n^2)
    memory", arXiv:2112.05682. Dao et al., "FlashAttention", NeurIPS 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from primitives._core import Primitive
from primitives.ops.attention.cpu_attention import flash, flash_bwd
from primitives.ops.attention.rows import Problem, Rows, flipped, in_blocks, noised
from primitives.ops.axes import Axes, def_axes
from primitives.ops.rules import bind_family, derivatives, empty_output, second_order

# The arguments that say what attends to what, and what no derivative reaches.
OPTIONS = "Tensor? mask, Tensor? seed, Tensor? offset, float scale, bool causal, float dropout_p"
NAMES = ("q", "k", "v", "bias")

attention_p = Primitive(
    "attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor? bias, {OPTIONS}) -> (Tensor o, Tensor lse)",
    residuals=("q", "k", "v", "bias", "mask", "seed", "offset", "o", "lse"),
)
attention_bwd_p, attention_jvp_p = derivatives(
    attention_p, "q k v bias o lse", "q k v bias", OPTIONS, keeps="mask seed offset o_dot lse_dot"
)
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
_ops = (attention_p, attention_bwd_p, attention_jvp_p)


# For a block of rows at a time, on whose length no result depends; `in_blocks` puts results together.


def forward(rows: Rows, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """O and lse."""
    p, lse = rows.probabilities()
    return torch.bmm(noised(p, rows.noise()), rows.x.v), lse


def bwd(rows: Rows, output_mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """q_bar, k_bar, v_bar and bias_bar; o and lse are computed where the problem does not have them."""
    x, noise, p = rows.x, rows.noise(), rows.probabilities()[0]
    noisy_p = noised(p, noise)
    r = rows.times(turning(rows, torch.bmm(noisy_p, x.v) if x.o is None else x.o, noise), p)
    return (
        rows.plus(None, r, x.k) if output_mask[0] else None,
        rows.plus(None, flipped(r), x.q) if output_mask[1] else None,
        rows.plus(None, noisy_p.mT, x.o_bar) if output_mask[2] else None,
        r,
    )


def turning(rows: Rows, o: Tensor, noise: Tensor | None) -> Tensor | None:
    """G - g; None without cotangents."""
    x = rows.x
    less = None if x.lse_bar is None else -x.lse_bar
    if x.o_bar is not None:
        less = products(x.o_bar, o, less)
    return rows.minus(noised(rows.plus(None, x.o_bar, x.v.mT), noise), less)


def products(x: Tensor, y: Tensor, total: Tensor | None = None) -> Tensor:
    """`total` plus the sum over each row of x.y."""
    found = (x * y).sum(-1, keepdim=True)
    return found if total is None else found + total


def jvp(rows: Rows, output_mask: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """o_dot and lse_dot; lse as in `bwd`."""
    p, lse_dot, centered = moving(rows)
    noise = rows.noise()
    o_dot = rows.plus(None, noised(p, noise), rows.x.v_dot)
    if centered is not None:
        o_dot = rows.plus(o_dot, noised(rows.times(centered, p), noise), rows.x.v)
    return o_dot, lse_dot


def moving(rows: Rows) -> tuple[Tensor, Tensor, Tensor | None]:
    """P, lse_dot, and S_dot - lse_dot, None where the scores do not move."""
    p, scores_dot, lse_dot = rows.probabilities()[0], rows.scores_dot(), rows.x.lse_dot
    if scores_dot is None:
        return p, p.new_zeros((*p.shape[:-1], 1)), None
    if lse_dot is None:
        lse_dot = products(p, scores_dot)
    return p, lse_dot, rows.minus(scores_dot, lse_dot)


def double_backward(rows: Rows, output_mask: Sequence[bool]) -> list[Tensor | None]:
    """The derivatives of L; o, lse, o_dot and lse_dot are computed where the problem does not have them."""
    needs_t = any(output_mask[i] for i in (2, 3, 5))
    needs_r = any(output_mask[i] for i in (2, 3, 6, 7, 9))
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


def stand_in(problem: Problem, kind: str) -> Tensor:
    """Stands for a result of one of the kinds of `in_blocks`."""
    if kind == "s":
        return problem.q.new_empty(problem.q.shape[:-1], dtype=problem.dtype)
    x = getattr(problem, {"o": "q", "b": "bias"}.get(kind, kind))
    if kind == "b":
        return x.new_empty(x.shape)
    width = (problem.v if kind == "o" else x).shape[-1]
    return x.new_empty((*x.shape[:-3], x.shape[-2], x.shape[-3], width)).transpose(-2, -3)


def define_attention(
    op: Primitive,
    kinds: str,
    formula: Callable[[Rows, Sequence[bool]], Sequence[Tensor | None]],
    by_aten: Callable[[Problem, Sequence[bool]], tuple[Tensor, ...] | None] = lambda problem, output_mask: None,
) -> None:
    """Define `op` by a formula for some rows, whose results are of `kinds`, those of `in_blocks`.

    On the CPU temporaries stay inside, and one call of ATen's comes first.
    """

    def given(args: Sequence[Any], *, in_place: bool = False) -> tuple[Problem, Sequence[bool]]:
        by_name = dict(zip(op.spec.arguments, args, strict=True))
        output_mask = by_name.pop("output_mask", (True,) * len(kinds))
        return Problem(**by_name, in_place=in_place), output_mask

    def run(problem: Problem, output_mask: Sequence[bool]) -> tuple[Tensor, ...]:
        return in_blocks(problem, lambda rows: formula(rows, output_mask), kinds, output_mask)

    def reference(*args: Any) -> tuple[Tensor, ...]:
        problem, output_mask = given(args)
        # Values of other arguments are taken from these again, so that a derivative reaches them.
        return run(problem._replace(**dict.fromkeys(op.spec.cached)), output_mask)

    def on_cpu(*args: Any) -> tuple[Tensor, ...]:
        problem, output_mask = given(args, in_place=True)
        if problem.dtype != problem.q.dtype:
            # Of rounded results the roundings would be left where a row's terms cancel.
            problem = problem._replace(o=None, o_dot=None)
        return by_aten(problem, output_mask) or run(problem, output_mask)

    def fake(*args: Any) -> tuple[Tensor, ...]:
        problem, output_mask = given(args)
        pairs = zip(kinds, output_mask, strict=True)
        return tuple(stand_in(problem, kind) if want else empty_output(problem.q) for kind, want in pairs)

    op.def_reference(reference)
    op.def_kernel("cpu")(on_cpu)
    op.def_fake(fake)


def _bwd_by_aten(problem: Problem, output_mask: Sequence[bool]) -> tuple[Tensor, ...] | None:
    served = None if output_mask[3] else flash_bwd(problem)
    if served is None:
        return None
    bars = [x if want else empty_output(problem.q) for x, want in zip(served, output_mask, strict=False)]
    return (*bars, empty_output(problem.q))


define_attention(attention_p, "os", forward, lambda problem, _: flash(problem))
define_attention(attention_bwd_p, "qkvb", bwd, _bwd_by_aten)
define_attention(attention_jvp_p, "os", jvp)
define_attention(attention_double_backward_p, "osqkvbqkvb", double_backward)
bind_family("attention.attention", "attention", *_ops, attention_double_backward_p)


@attention_p.def_autocast("cpu")
@attention_p.def_autocast("cuda")
def _attention_autocast(primals: Any) -> Any:
    """Torch runs attention in autocast's own dtype."""
    dtype = torch.get_autocast_dtype(primals.q.device.type)
    cast = {
        name: x.to(dtype) for name, x in zip(NAMES, primals, strict=False) if x is not None and x.dtype != torch.float64
    }
    return primals._replace(**cast)


def _axes(given: dict[str, Any]) -> Axes:
    # Heads of q that share one of k and v would have to stay with it, and all of them share the noise of a seed.
    heads = "heads" if given["q"].shape[-3] == given["k"].shape[-3] else "groups"
    of = (
        f"q: *batch heads rows width, k: *batch {heads} keys width, v: *batch {heads} keys values,"
        " o: *batch heads rows values, lse: *batch heads rows, bias mask: *batch heads rows keys, seed offset: *batch"
    )
    free = f"batch {heads if heads == 'heads' else ''} {'' if given['causal'] else 'rows'}"
    return Axes(of, free if given["seed"] is None else "")


def_axes(_axes, *_ops, attention_double_backward_p)


def _bwd_jvp(output_mask: Sequence[bool], call: Any) -> tuple[Tensor, ...]:
    """Tangents of the cotangents of q, k, v and bias, which are derivatives of L, too."""
    given = {name: getattr(call, name) for name in attention_double_backward_p.spec.arguments[:-1]}
    # o and lse move as the other arguments say: where their tangents are at hand, they are not computed again.
    if given["o_dot"] is None or given["lse_dot"] is None:
        given |= {"o_dot": None, "lse_dot": None}
    mask = (False, False, *output_mask, *[False] * 4)
    return attention_double_backward_p(*given.values(), mask)[2:6]


second_order(attention_bwd_p, attention_jvp_p, _bwd_jvp, attention_double_backward_p)
