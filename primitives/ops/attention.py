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

from itertools import compress
from typing import TYPE_CHECKING, Any

import torch

from primitives.core import Primitive
from primitives.ops._attention import Dots, Problem, Rows, across, in_blocks, noised, sum_terms, with_keys
from primitives.ops._cpu_attention import flash, flash_bwd
from primitives.ops._shared import accumulation_dtype, bind_kernels, fold_batch, output_axes, unwanted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["attention_bwd_p", "attention_jvp_p", "attention_p"]

# The arguments that say what attends to what, and what no derivative reaches.
OPTIONS = "Tensor? mask, Tensor? seed, Tensor? offset, float scale, bool causal, float dropout_p"
NAMES = ("q", "k", "v", "bias")

attention_p = Primitive(
    "attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor? bias, {OPTIONS}) -> (Tensor o, Tensor lse)",
    residuals=("q", "k", "v", "bias", "mask", "seed", "offset", "o", "lse"),
)
attention_bwd_p = Primitive(
    "attention_bwd",
    "(Tensor? o_bar, Tensor? lse_bar, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor o, Tensor lse,"
    f" {OPTIONS}, bool[] wanted) -> (Tensor q_bar, Tensor k_bar, Tensor v_bar, Tensor bias_bar)",
    residuals=("o_bar", "lse_bar", "q", "k", "v", "bias", "o", "lse", "mask", "seed", "offset"),
    cached=("o", "lse"),
    decomposable=True,
)
attention_jvp_p = Primitive(
    "attention_jvp",
    "(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor o, Tensor lse, Tensor? q_dot, Tensor? k_dot, Tensor? v_dot,"
    f" Tensor? bias_dot, {OPTIONS}) -> (Tensor o_dot, Tensor lse_dot)",
    residuals=(*NAMES, "o", "lse", "q_dot", "k_dot", "v_dot", "bias_dot", "mask", "seed", "offset", "o_dot", "lse_dot"),
    cached=("o", "lse"),
    decomposable=True,
)


# Reference: the same for a block of rows at a time, whose results do not depend on how rows are cut into blocks.


def forward(problem: Problem) -> tuple[Tensor, ...]:
    """O and lse."""

    def of_rows(rows: Rows) -> tuple[Tensor, Tensor]:
        p, lse = rows.probabilities()
        return with_keys(noised(p, rows.noise()), rows.v), lse

    return in_blocks(problem, of_rows, "rs", (True, True))


def bwd(
    problem: Problem,
    o_bar: Tensor | None,
    lse_bar: Tensor | None,
    wanted: Sequence[bool],
    o: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """q_bar, k_bar, v_bar and bias_bar; o and lse are computed where they are not given."""

    def of_rows(rows: Rows) -> tuple[Tensor | None, ...]:
        p = rows.probabilities(lse)[0]
        noise, o_bar_rows, lse_bar_rows = rows.noise(), rows.of(o_bar), rows.of_statistic(lse_bar)
        noisy_p = noised(p, noise)
        terms = [] if lse_bar_rows is None else [lse_bar_rows]
        if o_bar_rows is not None:
            o_rows = with_keys(noisy_p, rows.v) if o is None else rows.of(o)
            terms.append(noised(with_keys(o_bar_rows, rows.v.mT), noise) - (o_bar_rows * o_rows).sum(-1, keepdim=True))
        r = p * sum_terms(*terms)
        return (
            with_keys(r, rows.k) * problem.scale if wanted[0] else None,
            across(r, rows.q) * problem.scale if wanted[1] else None,
            (problem.v.new_zeros(rows.v.shape) if o_bar_rows is None else across(noisy_p, o_bar_rows))
            if wanted[2]
            else None,
            r if wanted[3] else None,
        )

    return in_blocks(problem, of_rows, "rkvb", wanted)


def jvp(problem: Problem, dots: Dots, lse: Tensor | None = None) -> tuple[Tensor, ...]:
    """o_dot and lse_dot; lse as in `bwd`."""

    def of_rows(rows: Rows) -> tuple[Tensor, Tensor]:
        p, p_dot, lse_dot, _ = moving(rows, dots, lse)
        noise = rows.noise()
        v_dot = None if dots.v is None else dots.v.to(rows.v.dtype)
        o_dot = sum_terms(
            None if v_dot is None else with_keys(noised(p, noise), v_dot),
            None if p_dot is None else with_keys(noised(p_dot, noise), rows.v),
        )
        return o_dot, lse_dot

    return in_blocks(problem, of_rows, "rs", (True, True))


def moving(rows: Rows, dots: Dots, lse: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """P, P_dot, lse_dot, and S_dot - lse_dot; None where the scores do not move."""
    p, _ = rows.probabilities(lse)
    scores_dot = rows.scores_dot(dots)
    if scores_dot is None:
        return p, None, p.new_zeros((*p.shape[:-1], 1)), None
    lse_dot = (p * scores_dot).sum(-1, keepdim=True)
    centered = scores_dot - lse_dot
    return p, p * centered, lse_dot, centered


@attention_p.def_reference
def _attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    offset: Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
) -> tuple[Tensor, ...]:
    return forward(Problem(q, k, v, bias, mask, seed, offset, scale, causal, dropout_p))


@attention_bwd_p.def_reference
def _attention_bwd_reference(
    o_bar: Tensor | None,
    lse_bar: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    o: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    offset: Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    # o and lse are values of the other arguments: taken from these again, so that a derivative reaches them.
    return bwd(Problem(q, k, v, bias, mask, seed, offset, scale, causal, dropout_p), o_bar, lse_bar, wanted)


@attention_jvp_p.def_reference
def _attention_jvp_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    o: Tensor,
    lse: Tensor,
    q_dot: Tensor | None,
    k_dot: Tensor | None,
    v_dot: Tensor | None,
    bias_dot: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    offset: Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
) -> tuple[Tensor, ...]:
    return jvp(
        Problem(q, k, v, bias, mask, seed, offset, scale, causal, dropout_p), Dots(q_dot, k_dot, v_dot, bias_dot)
    )


# Shapes.


def empty_rows(q: Tensor, width: Any) -> Tensor:
    """Stands for rows [*batch, H, N, width] like those of o."""
    return q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3], width)).transpose(-2, -3)


def empty_statistic(q: Tensor) -> Tensor:
    """Stands for a statistic [*batch, H, N]."""
    return q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))


@attention_p.def_fake
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_rows(q, v.shape[-1]), empty_statistic(q)


@attention_bwd_p.def_fake
def _attention_bwd_fake(
    o_bar: Any, lse_bar: Any, q: Tensor, k: Tensor, v: Tensor, bias: Any, *rest: Any
) -> tuple[Tensor, ...]:
    made = (*[empty_rows(x, x.shape[-1]) for x in (q, k, v)], None if bias is None else bias.new_empty(bias.shape))
    return tuple(x if want else unwanted(q) for x, want in zip(made, rest[-1], strict=True))


@attention_jvp_p.def_fake
def _attention_jvp_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_rows(q, v.shape[-1]), empty_statistic(q)


# Kernels.


def _attention_cpu(*args: Any) -> tuple[Tensor, ...]:
    problem = Problem(*args)
    return flash(problem) or forward(problem)


def _attention_bwd_cpu(
    o_bar: Tensor | None,
    lse_bar: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    o: Tensor,
    lse: Tensor,
    *options: Any,
) -> tuple[Tensor, ...]:
    *options, wanted = options
    problem = Problem(q, k, v, bias, *options)
    served = None
    if o_bar is not None and lse_bar is None and not wanted[3]:
        served = flash_bwd(problem, o_bar, o, lse)
    if served is None:
        return bwd(problem, o_bar, lse_bar, wanted, o, lse)
    bars = [x if want else unwanted(q) for x, want in zip(served, wanted, strict=False)]
    return (*bars, unwanted(q))


def _attention_jvp_cpu(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, o: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return jvp(Problem(q, k, v, bias, *rest[4:]), Dots(*rest[:4]), lse)


bind_kernels(attention_p, "attention", "attention_fwd", _attention_cpu)
bind_kernels(attention_bwd_p, "attention", "attention_bwd", _attention_bwd_cpu)
bind_kernels(attention_jvp_p, "attention", "attention_jvp", _attention_jvp_cpu)


# Derivatives.


def options_of(residuals: Any) -> tuple[Any, ...]:
    """Mask, noise, scale and so on, as every operator of the family takes them."""
    r = residuals
    return r.mask, r.seed, r.offset, r.scale, r.causal, r.dropout_p


@attention_p.def_vjp
def _attention_vjp(residuals: Any, cotangents: Any, wanted: Any) -> dict[str, Tensor]:
    r, c, mask = residuals, cotangents, tuple(getattr(wanted, name) for name in NAMES)
    out = attention_bwd_p(c.o, c.lse, r.q, r.k, r.v, r.bias, r.o, r.lse, *options_of(r), mask)
    return dict(compress(zip(NAMES, out, strict=True), mask))


@attention_p.def_jvp
def _attention_jvp(residuals: Any, tangents: Any) -> tuple[Tensor, Tensor]:
    r, t = residuals, tangents
    return attention_jvp_p(r.q, r.k, r.v, r.bias, r.o, r.lse, t.q, t.k, t.v, t.bias, *options_of(r))


@attention_p.def_autocast("cpu")
@attention_p.def_autocast("cuda")
def _attention_autocast(primals: Any) -> Any:
    """Torch runs attention in autocast's own dtype."""
    dtype = torch.get_autocast_dtype(primals.q.device.type)
    cast = {
        name: x.to(dtype) for name, x in zip(NAMES, primals, strict=False) if x is not None and x.dtype != torch.float64
    }
    return primals._replace(**cast)


# Batching: the batch is one more first axis of every tensor.


def batch_first(*ops: Primitive) -> None:
    """Give `ops` a vmap rule that makes the batch the first axis of every tensor."""
    for op in ops:

        @op.def_vmap
        def rule(batch: Any, primals: Any, op: Primitive = op) -> tuple[Any, Any]:
            return op(*fold_batch(batch, primals, op.spec.tensors)), output_axes(op, primals)


batch_first(attention_p, attention_bwd_p, attention_jvp_p)
