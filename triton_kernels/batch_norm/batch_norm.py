"""Launchers of batch norm, with the statistics of the batch or with running statistics, and of its second order.

Arguments and formulas are those of `primitives.ops.norms`: `batch_norm`, `batch_norm_eval` and `formulas`. Launchers of
first order also serve the end of a residual block, `max(batch_norm(x) + residual, 0)`, with `relu`, or for derivatives
with y, what came out of the ReLU; the cotangent of the residual follows that of x.

Tensors may have any strides, and mix float16, bfloat16, float32 and float64. Results of full size have dtype and layout
of `x`, the others are `[*batch, C]`, cotangents of parameters in the dtype of the weight, or without one in that of `x`
or of sums; what `output_mask` leaves out is empty, and only what the others take is read. One kernel reads each operand
once and sums, one merges the sums into coefficients and results per channel, one reads each operand once more and
writes, with the factors that `_transform_kernels` names. No term assumes that the mean square of `x_hat` is 1, so eps
enters through rstd alone. The mean of `y_bar~ * x_dot~` is a difference of means: two operands whose means are both
large against their spread lose digits there.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..runtime.numbers import accumulation_dtype
from ..tuning import tunable
from ._steps import Operands, Params, Relu, Results, derivatives, forward


@tunable
def batch_norm_train_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    batch_ndim: int, momentum: float, eps: float, residual: Tensor | None = None, relu: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Batch norm with the statistics of `x`: y, mean and rstd in the dtype of sums, the new running mean and variance.

    Without elements, mean and rstd are 0 and the running statistics stay.
    """
    params, running, after = (weight, bias, None, None), (running_mean, running_var), Relu(None, residual, None, relu)
    return forward(x, None, params, running, batch_ndim, momentum, eps, has_tangent=False, relu=after)[:5]


@tunable
def batch_norm_train_fwd_jvp(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    x_dot: Tensor | None, weight_dot: Tensor | None, bias_dot: Tensor | None,
    batch_ndim: int, momentum: float, eps: float, residual: Tensor | None = None, residual_dot: Tensor | None = None,
    relu: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Results of `batch_norm_train_fwd`, and y_dot, in one sweep for all sums and one that writes both."""
    params, running = (weight, bias, weight_dot, bias_dot), (running_mean, running_var)
    after = Relu(None, residual, residual_dot, relu)
    return forward(x, x_dot, params, running, batch_ndim, momentum, eps, has_tangent=True, relu=after)


@tunable
def batch_norm_train_bwd(
    y_bar: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    batch_ndim: int, output_mask: Sequence[bool], y: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Cotangents of `x`, weight and bias for batch norm with the statistics of `x`."""
    return _cotangents(("weight_bar", "bias_bar"), y_bar, x, Params(mean, rstd, weight), batch_ndim, output_mask, y)


def _cotangents(
    per_channel: Sequence[str], y_bar: Tensor, x: Tensor, params: Params, batch_ndim: int, output_mask: Sequence[bool],
    y: Tensor | None, eps: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Cotangents of `x`, of a residual where there is a ReLU, and these."""
    names = ("x_bar", *["residual_bar"] * (y is not None), *per_channel)
    want = Results(**dict(zip(names, output_mask, strict=True)))
    dtype = accumulation_dtype(x.dtype) if params.weight is None else params.weight.dtype
    out = derivatives(x, Operands(y_bar, x), params, want, batch_ndim, dtype, eps, Relu(y))
    return tuple([getattr(out, name) for name in names])


@tunable
def batch_norm_train_jvp(
    x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    x_dot: Tensor | None, weight_dot: Tensor | None, bias_dot: Tensor | None,
    batch_ndim: int, y: Tensor | None = None, residual_dot: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Tangent of y for batch norm with the statistics of `x`."""
    params, relu = Params(mean, rstd, weight, None, weight_dot, bias_dot), Relu(y, None, residual_dot)
    return derivatives(x, Operands(None, x, x_dot), params, Results(y_dot=True), batch_ndim, relu=relu).y_dot


@tunable
def batch_norm_eval_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor,
    batch_ndim: int, eps: float, residual: Tensor | None = None, relu: bool = False,
) -> Tensor:  # fmt: skip
    """Batch norm with given statistics: y."""
    params, after = Params(running_mean, running_var, weight, bias), Relu(None, residual, None, relu)
    return derivatives(x, Operands(x=x), params, Results(y=True), batch_ndim, eps=eps, relu=after).y


@tunable
def batch_norm_eval_bwd(
    y_bar: Tensor, x: Tensor, weight: Tensor | None, running_mean: Tensor, running_var: Tensor,
    batch_ndim: int, eps: float, output_mask: Sequence[bool], y: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Cotangents of x, weight, bias, mean and variance for batch norm with given statistics."""
    names, params = ("weight_bar", "bias_bar", "mean_bar", "var_bar"), Params(running_mean, running_var, weight)
    return _cotangents(names, y_bar, x, params, batch_ndim, output_mask, y, eps)


@tunable
def batch_norm_eval_jvp(
    x: Tensor, weight: Tensor | None, running_mean: Tensor, running_var: Tensor,
    x_dot: Tensor | None, weight_dot: Tensor | None, bias_dot: Tensor | None, running_mean_dot: Tensor | None,
    running_var_dot: Tensor | None,
    batch_ndim: int, eps: float, y: Tensor | None = None, residual_dot: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Tangent of y for batch norm with given statistics."""
    dots = (weight_dot, bias_dot, running_mean_dot, running_var_dot)
    params, relu = Params(running_mean, running_var, weight, None, *dots), Relu(y, None, residual_dot)
    return derivatives(x, Operands(None, x, x_dot), params, Results(y_dot=True), batch_ndim, eps=eps, relu=relu).y_dot


@tunable
def batch_norm_double_backward(
    y_bar: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    x_dot: Tensor | None, weight_dot: Tensor | None, bias_dot: Tensor | None,
    batch_ndim: int, output_mask: Sequence[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradient of `<y_bar, y_dot>` of batch norm in training; zeros where that does not depend on an argument."""
    y_bar_bar, x_bar, weight_bar, x_dot_bar, weight_dot_bar, bias_dot_bar = output_mask
    # The pairing is linear in y_bar and in the tangents: its gradients there are the jvp and the vjp.
    want = Results(
        y_dot=y_bar_bar,
        x_bar=x_dot_bar,
        x_bar_dot=x_bar,
        weight_bar=weight_dot_bar,
        bias_bar=bias_dot_bar,
        weight_bar_dot=weight_bar,
    )
    params = Params(mean, rstd, weight, None, weight_dot, bias_dot)
    out = derivatives(x, Operands(y_bar, x, x_dot), params, want, batch_ndim, (x if weight is None else weight).dtype)
    return out.y_dot, out.x_bar_dot, out.weight_bar_dot, out.x_bar, out.weight_bar, out.bias_bar


@tunable
def batch_norm_bwd_jvp(
    y_bar: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    y_bar_dot: Tensor | None, x_dot: Tensor | None, weight_dot: Tensor | None,
    batch_ndim: int, output_mask: Sequence[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Tangents `(x_bar_dot, weight_bar_dot, bias_bar_dot)` of the cotangents that `batch_norm_train_bwd` computes."""
    x_bar_dot, weight_bar_dot, bias_bar_dot = output_mask
    want = Results(x_bar_dot=x_bar_dot, weight_bar_dot=weight_bar_dot, bias_bar_dot=bias_bar_dot)
    params, dtype = Params(mean, rstd, weight, None, weight_dot), (x if weight is None else weight).dtype
    out = derivatives(x, Operands(y_bar, x, x_dot, y_bar_dot), params, want, batch_ndim, dtype)
    return out.x_bar_dot, out.weight_bar_dot, out.bias_bar_dot
