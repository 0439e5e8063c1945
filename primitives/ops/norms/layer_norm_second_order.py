r"""Second-order rules of layer normalization: derivatives of its backward and of its jvp.

Notation as in `layer_norm.py`: x_hat, rstd, and P(v) = rstd * (v - mean(v) - x_hat * mean(v * x_hat)). Along x_dot,

    x_hat_dot = P(x_dot) =: h,        rstd_dot = -rstd**2 * mean(x_hat * x_dot)

Both first-order operators are partial derivatives of one scalar, the pairing of a cotangent with a tangent of y,

    L = <y_bar, y_dot> = <y_bar * weight, P(x_dot)> + <y_bar, x_hat * weight_dot> + <y_bar, bias_dot>

    dL/d(x_dot, weight_dot, bias_dot) = (x_bar, weight_bar, bias_bar),        dL/d(y_bar) = y_dot

so the vjp of either one is the gradient of L, and one operator, `layer_norm_pairing_p`, serves double backward (vjp
of the vjp) and the reverse-mode derivative of a jvp. With g = y_bar * weight, A = mean(x_dot * x_hat),
B = mean(g * x_hat), S = mean(x_dot * P(g)), and a prime for the derivative of L with respect to what is primed,

    y_bar'  = P(x_dot) * weight + x_hat * weight_dot + bias_dot
    x'      = P(y_bar * weight_dot - rstd * (B * x_dot + A * g)) - rstd * S * x_hat
    weight' = sum(y_bar * P(x_dot))
    x_dot'  = P(g),    weight_dot' = sum(y_bar * x_hat),    bias_dot' = sum(y_bar)

Forward over reverse, `layer_norm_bwd_jvp_p`: with g_dot = y_bar_dot * weight + y_bar * weight_dot,

    x_bar_dot      = P(g_dot) - rstd * (A * P(g) + x_hat * mean(g * h) + h * B)
    weight_bar_dot = sum(y_bar_dot * x_hat + y_bar * h),        bias_bar_dot = sum(y_bar_dot)

All of it holds for a norm that is not centered, with its P. Third and higher orders, and the jvp of a jvp,
differentiate the references.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from primitives._core import Primitive
from primitives.ops.norms import cpu_layer_norm_second_order as cpu
from primitives.ops.norms.layer_norm import (
    layer_norm_bwd_p,
    layer_norm_jvp_p,
    norm_axes,
    normalized,
    param_shape,
    per_row,
    project,
    sum_rows,
)
from primitives.ops.rules import batch_rows, bind_kernels, laid_out, norm_second_order, unwanted

if TYPE_CHECKING:
    from torch import Tensor

layer_norm_pairing_p = Primitive(
    "layer_norm_pairing",
    "(Tensor y_bar, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, Tensor? x_dot, Tensor? weight_dot,"
    " Tensor? bias_dot, int norm_ndim, int batch_ndim, float eps, bool centered, int grouped, bool[] wanted)"
    " -> (Tensor y_bar_bar, Tensor x_bar, Tensor weight_bar, Tensor x_dot_bar, Tensor weight_dot_bar,"
    " Tensor bias_dot_bar)",
    cached=("mean", "rstd"),
    decomposable=True,
)
layer_norm_bwd_jvp_p = Primitive(
    "layer_norm_bwd_jvp",
    "(Tensor y_bar, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, Tensor? y_bar_dot, Tensor? x_dot,"
    " Tensor? weight_dot, int norm_ndim, int batch_ndim, float eps, bool centered, int grouped, bool[] wanted)"
    " -> (Tensor x_bar_dot, Tensor weight_bar_dot, Tensor bias_bar_dot)",
    cached=("mean", "rstd"),
    decomposable=True,
)


# Reference.


@layer_norm_pairing_p.def_reference
def _layer_norm_pairing_reference(  # noqa: C901 - one branch for each operand that may be absent
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    norm_ndim: int,
    batch_ndim: int,
    eps: float,
    centered: bool,
    grouped: int,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    want_y_bar, want_x, want_weight, want_x_dot, want_weight_dot, want_bias_dot = wanted
    x = x.contiguous()
    # mean and rstd are values of x: taken from x again, so that a derivative of this function reaches it.
    x_hat, rstd = normalized(x, norm_ndim, eps, centered)
    y_bar = y_bar.contiguous().to(x_hat.dtype)
    axes, dtype = norm_axes(norm_ndim), x.dtype if weight is None else weight.dtype

    def scaled(v: Tensor, param: Tensor | None) -> Tensor:
        return v if param is None else v * per_row(param, x, norm_ndim, batch_ndim, grouped)

    def mean_of(v: Tensor) -> Tensor:
        return v.mean(axes, keepdim=True)

    def sums(v: Tensor | None) -> Tensor:
        if v is None:
            return x.new_zeros(param_shape(x, norm_ndim, batch_ndim, grouped), dtype=dtype)
        return sum_rows(v, norm_ndim, batch_ndim, grouped).to(dtype)

    def total(terms: list[Tensor]) -> Tensor:
        found = sum(terms[1:], terms[0]).expand(x.shape).to(x.dtype) if terms else x.new_zeros(x.shape)
        return laid_out(found, grouped)

    g = scaled(y_bar, weight)
    h = projected_g = None
    if x_dot is not None:
        x_dot = x_dot.contiguous().to(x_hat.dtype)
        h = project(x_dot, x_hat, rstd, norm_ndim, centered)
    if want_x_dot or x_dot is not None:
        projected_g = project(g, x_hat, rstd, norm_ndim, centered)

    y_bar_terms, x_terms = [], []
    if h is not None and x_dot is not None and projected_g is not None:
        y_bar_terms.append(scaled(h, weight))
        twisted = rstd * (mean_of(g * x_hat) * x_dot + mean_of(x_dot * x_hat) * g)
        x_terms.append(
            -project(twisted, x_hat, rstd, norm_ndim, centered) - rstd * mean_of(x_dot * projected_g) * x_hat
        )
    if weight_dot is not None:
        y_bar_terms.append(scaled(x_hat, weight_dot))
        x_terms.append(project(scaled(y_bar, weight_dot), x_hat, rstd, norm_ndim, centered))
    if bias_dot is not None:
        y_bar_terms.append(per_row(bias_dot, x, norm_ndim, batch_ndim, grouped))
    return (
        total(y_bar_terms) if want_y_bar else unwanted(x),
        total(x_terms) if want_x else unwanted(x),
        sums(None if h is None else y_bar * h) if want_weight else unwanted(x),
        laid_out(projected_g.to(x.dtype, copy=True), grouped)
        if want_x_dot and projected_g is not None
        else unwanted(x),
        sums(y_bar * x_hat) if want_weight_dot else unwanted(x),
        sums(y_bar) if want_bias_dot else unwanted(x),
    )


@layer_norm_bwd_jvp_p.def_reference
def _layer_norm_bwd_jvp_reference(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    y_bar_dot: Tensor | None,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    norm_ndim: int,
    batch_ndim: int,
    eps: float,
    centered: bool,
    grouped: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    x_hat, rstd = normalized(x, norm_ndim, eps, centered)
    y_bar = y_bar.contiguous().to(x_hat.dtype)
    axes, dtype = norm_axes(norm_ndim), x.dtype if weight is None else weight.dtype

    def scaled(v: Tensor, param: Tensor | None) -> Tensor:
        return v if param is None else v * per_row(param, x, norm_ndim, batch_ndim, grouped)

    def total(terms: list[Tensor]) -> Tensor:
        return sum(terms[1:], terms[0]) if terms else y_bar.new_zeros(x.shape)

    x_terms, weight_terms, g_dot_terms = [], [], []
    if y_bar_dot is not None:
        y_bar_dot = y_bar_dot.contiguous().to(x_hat.dtype)
        g_dot_terms.append(scaled(y_bar_dot, weight))
        weight_terms.append(y_bar_dot * x_hat)
    if weight_dot is not None:
        g_dot_terms.append(scaled(y_bar, weight_dot))
    if g_dot_terms:
        x_terms.append(project(total(g_dot_terms), x_hat, rstd, norm_ndim, centered))
    if x_dot is not None:
        x_dot = x_dot.contiguous().to(x_hat.dtype)
        g, h = scaled(y_bar, weight), project(x_dot, x_hat, rstd, norm_ndim, centered)
        means = [(v * u).mean(axes, keepdim=True) for v, u in ((x_dot, x_hat), (g, h), (g, x_hat))]
        x_terms.append(
            -rstd * (means[0] * project(g, x_hat, rstd, norm_ndim, centered) + x_hat * means[1] + h * means[2])
        )
        weight_terms.append(y_bar * h)
    return (
        laid_out(total(x_terms).to(x.dtype, copy=True), grouped) if wanted[0] else unwanted(x),
        sum_rows(total(weight_terms), norm_ndim, batch_ndim, grouped).to(dtype) if wanted[1] else unwanted(x),
        sum_rows(total([] if y_bar_dot is None else [y_bar_dot]), norm_ndim, batch_ndim, grouped).to(dtype)
        if wanted[2]
        else unwanted(x),
    )


# Kernels: Triton's and those for the CPU.

bind_kernels(layer_norm_pairing_p, "norms.layer_norm_second_order", "layer_norm_pairing", cpu.pairing)
bind_kernels(layer_norm_bwd_jvp_p, "norms.layer_norm_second_order", "layer_norm_bwd_jvp", cpu.bwd_jvp)


# Rules of the first-order operators.

norm_second_order(layer_norm_bwd_p, layer_norm_jvp_p, layer_norm_pairing_p, layer_norm_bwd_jvp_p)


# Batching: as in first order.

batch_rows(layer_norm_pairing_p, layer_norm_bwd_jvp_p)
