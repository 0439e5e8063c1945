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

of which `attention_pairing_p` returns those that are wanted:

    vjp of the jvp       o_bar, lse_bar: the cotangents of o_dot and lse_dot; o_bar_dot = lse_bar_dot = 0
    vjp of the backward  the tangents: the cotangents of q_bar, k_bar, v_bar and bias_bar; o_bar_dot = lse_bar_dot = 0
    jvp of the backward  dL/dq and so on, which are the tangents of q_bar and so on, since derivatives commute

so that one pair of kernels serves every mode. Third and higher orders, and the jvp of a jvp, differentiate the
references.
"""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, Any

import torch

from primitives.core import Primitive
from primitives.ops._attention import Dots, Problem, Rows, across, in_blocks, noised, sum_terms, with_keys
from primitives.ops._shared import bind_kernels, of_wanted, unwanted
from primitives.ops.attention import (
    NAMES,
    OPTIONS,
    attention_bwd_p,
    attention_jvp_p,
    batch_first,
    empty_rows,
    empty_statistic,
    moving,
    options_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["attention_pairing_p"]

DOTS = tuple(f"{name}_dot" for name in NAMES)

attention_pairing_p = Primitive(
    "attention_pairing",
    "(Tensor? o_bar, Tensor? lse_bar, Tensor? o_bar_dot, Tensor? lse_bar_dot, Tensor q, Tensor k, Tensor v,"
    " Tensor? bias, Tensor o, Tensor lse, Tensor? q_dot, Tensor? k_dot, Tensor? v_dot, Tensor? bias_dot,"
    f" Tensor? o_dot, Tensor? lse_dot, {OPTIONS}, bool[] wanted)"
    " -> (Tensor o_bar_bar, Tensor lse_bar_bar, Tensor q_bar, Tensor k_bar, Tensor v_bar, Tensor bias_bar,"
    " Tensor q_dot_bar, Tensor k_dot_bar, Tensor v_dot_bar, Tensor bias_dot_bar)",
    cached=("o", "lse", "o_dot", "lse_dot"),
    decomposable=True,
)


# Reference.


def pairing(
    problem: Problem,
    bars: Sequence[Tensor | None],
    dots: Dots,
    wanted: Sequence[bool],
    o: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The derivatives of L.

    Args:
        problem: The arguments of attention.
        bars: o_bar, lse_bar, o_bar_dot, lse_bar_dot.
        dots: The tangents of q, k, v, bias.
        wanted: For each derivative, whether it is asked for.
        o: Output, computed where it is not given.
        lse: The same.
    """
    k_dot, v_dot = (None if x is None else x.to(problem.dtype) for x in (dots.k, dots.v))

    def of_rows(rows: Rows) -> list[Tensor | None]:
        p, p_dot, lse_dot, centered = moving(rows, dots, lse)
        noise, q_dot = rows.noise(), rows.of(dots.q)
        noisy_p, noisy_p_dot = noised(p, noise), None if p_dot is None else noised(p_dot, noise)
        o_bar, o_bar_dot = rows.of(bars[0]), rows.of(bars[2])
        o_rows = with_keys(noisy_p, rows.v) if o is None else rows.of(o)
        o_dot = sum_terms(product(with_keys, noisy_p, v_dot), product(with_keys, noisy_p_dot, rows.v))
        o_dot = torch.zeros_like(o_rows) if o_dot is None else o_dot

        def pairs_with(x: Tensor | None, values: Tensor | None, minus: Tensor) -> Tensor | None:
            """Z.(x values^T), less the products of x with `minus`, row by row."""
            if x is None:
                return None
            less = (x * minus).sum(-1, keepdim=True)
            return -less if values is None else noised(with_keys(x, values.mT), noise) - less

        turned = sum_terms(pairs_with(o_bar, rows.v, o_rows), rows.of_statistic(bars[1]))
        moved = sum_terms(
            pairs_with(o_bar, v_dot, o_dot), pairs_with(o_bar_dot, rows.v, o_rows), rows.of_statistic(bars[3])
        )
        r = product(torch.mul, p, turned)
        t = sum_terms(product(torch.mul, r, centered), product(torch.mul, p, moved))
        derivatives = (
            lambda: o_dot,
            lambda: lse_dot,
            lambda: scaled(product(with_keys, t, rows.k), product(with_keys, r, k_dot)),
            lambda: scaled(product(across, t, rows.q), product(across, r, q_dot)),
            lambda: sum_terms(product(across, noisy_p_dot, o_bar), product(across, noisy_p, o_bar_dot)),
            lambda: t,
            lambda: scaled(product(with_keys, r, rows.k)),
            lambda: scaled(product(across, r, rows.q)),
            lambda: product(across, noisy_p, o_bar),
            lambda: r,
        )
        return [make() if want else None for make, want in zip(derivatives, wanted, strict=True)]

    def scaled(*terms: Tensor | None) -> Tensor | None:
        return product(torch.mul, sum_terms(*terms), problem.scale)

    return in_blocks(problem, of_rows, "rsrkvbrkvb", wanted)


def product(multiply: Callable[..., Tensor], x: Any, y: Any) -> Any:
    """`multiply(x, y)`; None where one of them is not there."""
    return None if x is None or y is None else multiply(x, y)


@attention_pairing_p.def_reference
def _attention_pairing_reference(
    o_bar: Tensor | None,
    lse_bar: Tensor | None,
    o_bar_dot: Tensor | None,
    lse_bar_dot: Tensor | None,
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
    o_dot: Tensor | None,
    lse_dot: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    offset: Tensor | None,
    scale: float,
    causal: bool,
    dropout_p: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    problem = Problem(q, k, v, bias, mask, seed, offset, scale, causal, dropout_p)
    bars = (o_bar, lse_bar, o_bar_dot, lse_bar_dot)
    return pairing(problem, bars, Dots(q_dot, k_dot, v_dot, bias_dot), wanted)


def _attention_pairing_cpu(*args: Any) -> tuple[Tensor, ...]:
    problem, bars, dots, (o, lse), wanted = _parts(args)
    return pairing(problem, bars, dots, wanted, o, lse)


def _parts(args: Sequence[Any]) -> tuple[Problem, Sequence[Any], Dots, Sequence[Any], Sequence[bool]]:
    """The problem, its cotangents and their tangents, the tangents of its arguments, o with lse, and what is wanted."""
    bars, primals, results, dots, options = args[:4], args[4:8], args[8:10], args[10:14], args[16:-1]
    return Problem(*primals, *options), bars, Dots(*dots), results, args[-1]


@attention_pairing_p.def_fake
def _attention_pairing_fake(*args: Any) -> tuple[Tensor, ...]:
    problem, _, _, _, wanted = _parts(args)
    q, k, v, bias = problem[:4]

    def bars() -> list[Any]:
        return [*[empty_rows(x, x.shape[-1]) for x in (q, k, v)], None if bias is None else bias.new_empty(bias.shape)]

    made = (empty_rows(q, v.shape[-1]), empty_statistic(q), *bars(), *bars())
    return tuple(x if want else unwanted(q) for x, want in zip(made, wanted, strict=True))


# Kernels.

bind_kernels(attention_pairing_p, "attention", "attention_pairing", _attention_pairing_cpu)


# Rules of the first-order operators.

BARS = ("o_bar", "lse_bar")


@attention_bwd_p.def_vjp
def _attention_bwd_vjp(residuals: Any, cotangents: Any, wanted: Any) -> dict[str, Tensor]:
    r, names = residuals, (*BARS, *NAMES)
    mask = tuple(getattr(wanted, name) for name in names)
    dots = of_wanted(cotangents, r.wanted)
    out = attention_pairing_p(
        r.o_bar,
        r.lse_bar,
        None,
        None,
        r.q,
        r.k,
        r.v,
        r.bias,
        r.o,
        r.lse,
        *dots,
        None,
        None,
        *options_of(r),
        (*mask, False, False, False, False),
    )  # fmt: skip - the arguments in groups
    return dict(compress(zip(names, out, strict=False), mask))


@attention_bwd_p.def_jvp
def _attention_bwd_jvp(residuals: Any, tangents: Any) -> tuple[Tensor, ...]:
    r, t = residuals, tangents
    out = attention_pairing_p(
        r.o_bar,
        r.lse_bar,
        t.o_bar,
        t.lse_bar,
        r.q,
        r.k,
        r.v,
        r.bias,
        r.o,
        r.lse,
        t.q,
        t.k,
        t.v,
        t.bias,
        None,
        None,
        *options_of(r),
        (False, False, *r.wanted, False, False, False, False),
    )  # fmt: skip - as above
    return tuple(out[2:6])


@attention_jvp_p.def_vjp
def _attention_jvp_vjp(residuals: Any, cotangents: Any, wanted: Any) -> dict[str, Tensor]:
    r, c, names = residuals, cotangents, (*NAMES, *DOTS)
    mask = tuple(getattr(wanted, name) for name in names)
    out = attention_pairing_p(
        c.o_dot,
        c.lse_dot,
        None,
        None,
        r.q,
        r.k,
        r.v,
        r.bias,
        r.o,
        r.lse,
        r.q_dot,
        r.k_dot,
        r.v_dot,
        r.bias_dot,
        r.o_dot,
        r.lse_dot,
        *options_of(r),
        (False, False, *mask),
    )  # fmt: skip - as above
    return dict(compress(zip(names, out[2:], strict=True), mask))


batch_first(attention_pairing_p)
