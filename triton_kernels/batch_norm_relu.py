"""Launchers of batch norm, a residual and ReLU, `y = max(batch_norm(x) + residual, 0)`, on the kernels of batch norm.

The transform, which writes y, reads the residual beside x. Derivatives take y, and are those of the sum where it is not
0: the kernel that sums masks y_bar, and stores it as the cotangent of the residual, which the transform then reads for
x_bar. Arguments are those of `batch_norm`, and

    y                         what the forward returned
    residual, residual_dot    `[*batch, N, C, *spatial]`, any strides; None is 0

y, y_bar of a backward, and both of a residual are copied where they lie otherwise in memory than the output for `x`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton_kernels._batch_norm_operands import Operands, Params, Relu, Results
from triton_kernels._batch_norm_steps import derivatives, forward
from triton_kernels._runtime import accumulation_dtype
from triton_kernels.tuning import tunable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "batch_norm_relu_bwd",
    "batch_norm_relu_eval_bwd",
    "batch_norm_relu_eval_fwd",
    "batch_norm_relu_eval_jvp",
    "batch_norm_relu_fwd",
    "batch_norm_relu_fwd_jvp",
    "batch_norm_relu_jvp",
]


@tunable
def batch_norm_relu_fwd(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batch_ndim: int,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """With the statistics of `x`: y, mean and rstd in the dtype of sums, the new running mean and variance."""
    params, running, relu = (weight, bias, None, None), (running_mean, running_var), Relu(None, residual, follows=True)
    return forward(x, None, params, running, batch_ndim, momentum, eps, has_tangent=False, relu=relu)[:5]


@tunable
def batch_norm_relu_fwd_jvp(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    x_dot: Tensor | None,
    residual_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    batch_ndim: int,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Results of `batch_norm_relu_fwd`, and y_dot."""
    params, running = (weight, bias, weight_dot, bias_dot), (running_mean, running_var)
    relu = Relu(None, residual, residual_dot, follows=True)
    return forward(x, x_dot, params, running, batch_ndim, momentum, eps, has_tangent=True, relu=relu)


@tunable
def batch_norm_relu_bwd(
    y_bar: Tensor,
    y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    batch_ndim: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of `x`, residual, weight and bias, with the statistics of `x`."""
    x_bar, residual_bar, weight_bar, bias_bar = wanted
    want = Results(x_bar=x_bar, weight_bar=weight_bar, bias_bar=bias_bar, residual_bar=residual_bar)
    dtype = accumulation_dtype(x.dtype) if weight is None else weight.dtype
    out = derivatives(x, Operands(y_bar, x), Params(mean, rstd, weight), want, batch_ndim, dtype, relu=Relu(y))
    return out.x_bar, out.residual_bar, out.weight_bar, out.bias_bar


@tunable
def batch_norm_relu_jvp(
    y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    x_dot: Tensor | None,
    residual_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    batch_ndim: int,
) -> Tensor:
    """Tangent of y, with the statistics of `x`."""
    params, relu = Params(mean, rstd, weight, None, weight_dot, bias_dot), Relu(y, None, residual_dot)
    return derivatives(x, Operands(None, x, x_dot), params, Results(y_dot=True), batch_ndim, relu=relu).y_dot


@tunable
def batch_norm_relu_eval_fwd(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    batch_ndim: int,
    eps: float,
) -> Tensor:
    """With given statistics: y."""
    params, relu = Params(running_mean, running_var, weight, bias), Relu(None, residual, follows=True)
    return derivatives(x, Operands(x=x), params, Results(y=True), batch_ndim, eps=eps, relu=relu).y


@tunable
def batch_norm_relu_eval_bwd(
    y_bar: Tensor,
    y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    batch_ndim: int,
    eps: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Cotangents of x, residual, weight, bias, mean and variance, with given statistics."""
    x_bar, residual_bar, weight_bar, bias_bar, mean_bar, var_bar = wanted
    per_channel = {"weight_bar": weight_bar, "bias_bar": bias_bar, "mean_bar": mean_bar, "var_bar": var_bar}
    want = Results(x_bar=x_bar, residual_bar=residual_bar, **per_channel)
    dtype = accumulation_dtype(x.dtype) if weight is None else weight.dtype
    params = Params(running_mean, running_var, weight)
    out = derivatives(x, Operands(y_bar, x), params, want, batch_ndim, dtype, eps, Relu(y))
    return out.x_bar, out.residual_bar, out.weight_bar, out.bias_bar, out.mean_bar, out.var_bar


@tunable
def batch_norm_relu_eval_jvp(
    y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    x_dot: Tensor | None,
    residual_dot: Tensor | None,
    weight_dot: Tensor | None,
    bias_dot: Tensor | None,
    running_mean_dot: Tensor | None,
    running_var_dot: Tensor | None,
    batch_ndim: int,
    eps: float,
) -> Tensor:
    """Tangent of y, with given statistics."""
    dots = (weight_dot, bias_dot, running_mean_dot, running_var_dot)
    params, relu = Params(running_mean, running_var, weight, None, *dots), Relu(y, None, residual_dot)
    return derivatives(x, Operands(None, x, x_dot), params, Results(y_dot=True), batch_ndim, eps=eps, relu=relu).y_dot
