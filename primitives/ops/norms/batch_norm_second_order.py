r"""Second-order rules of batch normalization in training: derivatives of its backward and of its jvp.

Notation as in `batch_norm.py`, per channel: x_hat, rstd, and P(v) = rstd * (v - mean(v) - x_hat * mean(v * x_hat)).
As for layer norm, both first-order operators are partial derivatives of one scalar, the pairing of a cotangent with a
tangent of y,

    L = <y_bar, y_dot> = weight * <y_bar, P(x_dot)> + weight_dot * <y_bar, x_hat> + bias_dot * sum(y_bar)

so one operator, `batch_norm_pairing_p`, serves double backward and the reverse-mode derivative of a jvp. With
A = mean(x_dot * x_hat), B = mean(y_bar * x_hat), S = mean(x_dot * P(y_bar)), and a prime for the derivative of L,

    y_bar'  = weight * P(x_dot) + weight_dot * x_hat + bias_dot
    x'      = weight_dot * P(y_bar) - weight * (P(rstd * (B * x_dot + A * y_bar)) + rstd * S * x_hat)
    weight' = sum(y_bar * P(x_dot))
    x_dot'  = weight * P(y_bar),    weight_dot' = sum(y_bar * x_hat),    bias_dot' = sum(y_bar)

Forward over reverse, `batch_norm_bwd_jvp_p`: with h = P(x_dot) the tangent of x_hat,

    x_bar_dot      = weight * (P(y_bar_dot) - rstd * (A * P(y_bar) + x_hat * mean(y_bar * h) + h * B))
                     + weight_dot * P(y_bar)
    weight_bar_dot = sum(y_bar_dot * x_hat + y_bar * h),        bias_bar_dot = sum(y_bar_dot)

Third and higher orders, the jvp of a jvp, and evaluation mode differentiate the references.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from primitives._core import Primitive
from primitives.ops.norms import cpu_batch_norm as cpu
from primitives.ops.norms.batch_norm import batch_norm_bwd_p, batch_norm_jvp_p, project, statistics
from primitives.ops.norms.channels import axes_of, dense, normalized, per_channel, sum_of_terms
from primitives.ops.rules import batch_all, bind_kernels, norm_second_order, unwanted

if TYPE_CHECKING:
    from torch import Tensor

batch_norm_pairing_p = Primitive(
    "batch_norm_pairing",
    "(Tensor y_bar, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, Tensor? x_dot, Tensor? weight_dot,"
    " Tensor? bias_dot, int batch_ndim, float eps, bool[] wanted)"
    " -> (Tensor y_bar_bar, Tensor x_bar, Tensor weight_bar, Tensor x_dot_bar, Tensor weight_dot_bar,"
    " Tensor bias_dot_bar)",
    cached=("mean", "rstd"),
    decomposable=True,
)
batch_norm_bwd_jvp_p = Primitive(
    "batch_norm_bwd_jvp",
    "(Tensor y_bar, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, Tensor? y_bar_dot, Tensor? x_dot,"
    " Tensor? weight_dot, int batch_ndim, float eps, bool[] wanted)"
    " -> (Tensor x_bar_dot, Tensor weight_bar_dot, Tensor bias_bar_dot)",
    cached=("mean", "rstd"),
    decomposable=True,
)


# Reference.


def _scaled(v: Tensor, param: Tensor | None, batch_ndim: int) -> Tensor:
    return v if param is None else v * per_channel(param, v, batch_ndim)


@batch_norm_pairing_p.def_reference
def _batch_norm_pairing_reference(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    batch_ndim: int,
    eps: float,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    want_y_bar, want_x, want_weight, want_x_dot, want_weight_dot, want_bias_dot = wanted
    x_acc, y_bar = dense(x, x, batch_ndim), dense(y_bar, x, batch_ndim)
    # mean and rstd are values of x: taken from x again, so that a derivative of this function reaches it.
    mean, _, rstd = statistics(x_acc, batch_ndim, eps)
    x_hat, rstd_x = normalized(x_acc, mean, rstd, batch_ndim), per_channel(rstd, x, batch_ndim)
    axes, dtype = axes_of(x, batch_ndim), x.dtype if weight is None else weight.dtype

    def mean_of(v: Tensor) -> Tensor:
        return v.mean(axes, keepdim=True)

    y_bar_terms, x_terms = [], []
    h, projected_y_bar = None, project(y_bar, x_hat, rstd, batch_ndim)
    if x_dot is not None:
        x_dot = dense(x_dot, x, batch_ndim)
        h = project(x_dot, x_hat, rstd, batch_ndim)
        y_bar_terms.append(_scaled(h, weight, batch_ndim))
        twisted = rstd_x * (mean_of(y_bar * x_hat) * x_dot + mean_of(x_dot * x_hat) * y_bar)
        bent = project(twisted, x_hat, rstd, batch_ndim) + rstd_x * mean_of(x_dot * projected_y_bar) * x_hat
        x_terms.append(-_scaled(bent, weight, batch_ndim))
    if weight_dot is not None:
        y_bar_terms.append(_scaled(x_hat, weight_dot, batch_ndim))
        x_terms.append(_scaled(projected_y_bar, weight_dot, batch_ndim))
    if bias_dot is not None:
        y_bar_terms.append(per_channel(bias_dot, x, batch_ndim))
    # A derivative with respect to what L does not depend on is zero.
    zero = [x_acc.new_zeros(())]
    weight_bar = unwanted(x)
    if want_weight:
        weight_bar = rstd.new_zeros(rstd.shape, dtype=dtype) if h is None else (y_bar * h).sum(axes).to(dtype)
    return (
        sum_of_terms(y_bar_terms or zero, x, batch_ndim) if want_y_bar else unwanted(x),
        sum_of_terms(x_terms or zero, x, batch_ndim) if want_x else unwanted(x),
        weight_bar,
        sum_of_terms([_scaled(projected_y_bar, weight, batch_ndim)], x, batch_ndim) if want_x_dot else unwanted(x),
        (y_bar * x_hat).sum(axes).to(dtype) if want_weight_dot else unwanted(x),
        y_bar.sum(axes).to(dtype) if want_bias_dot else unwanted(x),
    )


@batch_norm_bwd_jvp_p.def_reference
def _batch_norm_bwd_jvp_reference(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    y_bar_dot: Tensor | None,
    x_dot: Tensor | None,
    weight_dot: Tensor | None,
    batch_ndim: int,
    eps: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    x_acc, y_bar = dense(x, x, batch_ndim), dense(y_bar, x, batch_ndim)
    mean, _, rstd = statistics(x_acc, batch_ndim, eps)
    x_hat, rstd_x = normalized(x_acc, mean, rstd, batch_ndim), per_channel(rstd, x, batch_ndim)
    axes, dtype = axes_of(x, batch_ndim), x.dtype if weight is None else weight.dtype
    projected_y_bar = project(y_bar, x_hat, rstd, batch_ndim)
    zero = x_acc.new_zeros(x.shape)
    x_terms, weight_sum, bias_sum = [], zero, zero
    if y_bar_dot is not None:
        y_bar_dot = dense(y_bar_dot, x, batch_ndim)
        x_terms.append(_scaled(project(y_bar_dot, x_hat, rstd, batch_ndim), weight, batch_ndim))
        weight_sum, bias_sum = weight_sum + y_bar_dot * x_hat, y_bar_dot
    if weight_dot is not None:
        x_terms.append(_scaled(projected_y_bar, weight_dot, batch_ndim))
    if x_dot is not None:
        x_dot = dense(x_dot, x, batch_ndim)
        h = project(x_dot, x_hat, rstd, batch_ndim)
        means = [(v * u).mean(axes, keepdim=True) for v, u in ((x_dot, x_hat), (y_bar, h), (y_bar, x_hat))]
        bent = rstd_x * (means[0] * projected_y_bar + x_hat * means[1] + h * means[2])
        x_terms.append(-_scaled(bent, weight, batch_ndim))
        weight_sum = weight_sum + y_bar * h
    return (
        sum_of_terms(x_terms or [zero], x, batch_ndim) if wanted[0] else unwanted(x),
        weight_sum.sum(axes).to(dtype) if wanted[1] else unwanted(x),
        bias_sum.sum(axes).to(dtype) if wanted[2] else unwanted(x),
    )


# Kernels: Triton's and those for the CPU.

bind_kernels(batch_norm_pairing_p, "batch_norm.batch_norm", "batch_norm_pairing", cpu.pairing)
bind_kernels(batch_norm_bwd_jvp_p, "batch_norm.batch_norm", "batch_norm_bwd_jvp", cpu.bwd_jvp)


# Rules of the first-order operators.

norm_second_order(batch_norm_bwd_p, batch_norm_jvp_p, batch_norm_pairing_p, batch_norm_bwd_jvp_p)


# Batching: the batch multiplies the channels.

batch_all(batch_norm_pairing_p, batch_norm_bwd_jvp_p, counter="batch_ndim")
