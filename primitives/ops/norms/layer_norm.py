r"""Layer normalization over the last axes of x, and RMS norm, which is layer norm that is not `centered`.

With x_hat = (x - mean) * rstd, rstd = 1 / sqrt(var + eps), all means over the normalized axes,

    y = x_hat * weight + bias

Write P(v) = rstd * (v - mean(v) - x_hat * mean(v * x_hat)). P is the derivative of x_hat with respect to x; it is
symmetric, so one map serves both modes:

    jvp   y_dot = P(x_dot) * weight + x_hat * weight_dot + bias_dot
    vjp   x_bar = P(y_bar * weight),   weight_bar = sum(y_bar * x_hat),   bias_bar = sum(y_bar)

The sums run over all axes of x but the normalized ones. Without `centered` x_hat = x * rstd, rstd =
1 / sqrt(mean(x**2) + eps), and P(v) = rstd * (v - x_hat * mean(v * x_hat)); all else is as it was. With `rounded` the
value takes x_hat in the dtype of x, as models do that cast before they multiply; derivatives do not look at that.

Shapes: x is [*batch, *rest, *norm] with `norm_ndim` normalized axes and `batch_ndim` batch axes, which vmap adds.
weight and bias are [*batch, *norm]; mean and rstd are [*batch, *rest], float32 (float64 for float64 x). A norm that is
not centered has a mean without elements.

Group norm is `grouped`: x is [*batch, *rest, groups, channels, positions] with the last two axes normalized, and weight
and bias, [*batch, groups, channels], have one number for each channel of each group. With 2 (`CHANNELS_LAST`) for 1,
what is shaped as x lies in memory as [*batch, *rest, positions, groups, channels], as of channels_last.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch

from primitives._core import Primitive, value_and_jvp
from primitives._core.trees.leaves import map_tensors
from primitives._repair.nodes import mark
from primitives._repair.plain import is_left_to_torch
from primitives.ops import arguments
from primitives.ops.norms import cpu_layer_norm as cpu
from primitives.ops.rules import (
    accumulation_dtype,
    batch_rows,
    bind_kernels,
    cast_to_float32,
    first_order,
    laid_out,
    unwanted,
    weight_beside,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from primitives._core.typing import Prefix, PyTree

layer_norm_p = Primitive(
    "layer_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, int norm_ndim, int batch_ndim, float eps, bool centered,"
    " bool rounded, int grouped) -> (Tensor y, Tensor mean, Tensor rstd)",
    residuals=("x", "weight", "mean", "rstd"),
    statistics=("mean", "rstd"),
    recomputable=True,
)
layer_norm_bwd_p = Primitive(
    "layer_norm_bwd",
    "(Tensor y_bar, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, int norm_ndim, int batch_ndim, float eps,"
    " bool centered, int grouped, bool[] wanted) -> (Tensor x_bar, Tensor weight_bar, Tensor bias_bar)",
    residuals=("y_bar", "x", "weight", "mean", "rstd"),
    cached=("mean", "rstd"),
    decomposable=True,
)
layer_norm_jvp_p = Primitive(
    "layer_norm_jvp",
    "(Tensor x, Tensor? weight, Tensor mean, Tensor rstd, Tensor? x_dot, Tensor? weight_dot, Tensor? bias_dot,"
    " int norm_ndim, int batch_ndim, float eps, bool centered, int grouped) -> Tensor y_dot",
    residuals=("x", "weight", "mean", "rstd", "x_dot", "weight_dot", "bias_dot"),
    cached=("mean", "rstd"),
    decomposable=True,
)
layer_norm_fwd_jvp_p = value_and_jvp(layer_norm_p, layer_norm_jvp_p)


# Reference.


def norm_axes(norm_ndim: int) -> list[int]:
    """The normalized axes, counted from the end."""
    return list(range(-norm_ndim, 0))


def _statistics(x: Tensor, norm_ndim: int, eps: float, centered: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and rstd of x [*rows, *norm], each [*rows], in the accumulation dtype, and x less its mean."""
    axes = norm_axes(norm_ndim)
    x = x.to(accumulation_dtype(x.dtype))
    mean = x.mean(axes) if centered else unwanted(x)
    if centered:
        x = x - _per_feature(mean, norm_ndim)
        # Less the rounding error of the mean, rows of one value become 0. Its derivative in x is 0.
        rest = x.detach().mean(axes)
        mean, x = mean + rest, x - _per_feature(rest, norm_ndim)
    return mean, (x.square().mean(axes) + eps).rsqrt(), x


def _per_feature(statistic: Tensor, norm_ndim: int) -> Tensor:
    """A statistic [*rows], shaped to broadcast against x [*rows, *norm]."""
    return statistic.reshape(*statistic.shape, *[1] * norm_ndim)


def normalized(x: Tensor, norm_ndim: int, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """x_hat and rstd (shaped to broadcast against x), both functions of x."""
    _, rstd, x = _statistics(x, norm_ndim, eps, centered)
    rstd = _per_feature(rstd, norm_ndim)
    return x * rstd, rstd


def project(v: Tensor, x_hat: Tensor, rstd: Tensor, norm_ndim: int, centered: bool) -> Tensor:
    """`P(v)`, the derivative of x_hat with respect to x along v."""
    axes = norm_axes(norm_ndim)
    along = x_hat * (v * x_hat).mean(axes, keepdim=True)
    return rstd * ((v - v.mean(axes, keepdim=True) if centered else v) - along)


def param_shape(x: Tensor, norm_ndim: int, batch_ndim: int, grouped: int) -> tuple[int, ...]:
    """Shape of a parameter."""
    return (*x.shape[:batch_ndim], *(x.shape[-3:-1] if grouped else x.shape[x.dim() - norm_ndim :]))


def per_row(param: Tensor, x: Tensor, norm_ndim: int, batch_ndim: int, grouped: int = 0) -> Tensor:
    """A parameter, shaped to broadcast against x."""
    shape = param_shape(x, norm_ndim, batch_ndim, grouped)
    last = [1] * (grouped > 0)
    rest = x.dim() - len(shape) - len(last)
    return param.reshape(*shape[:batch_ndim], *[1] * rest, *shape[batch_ndim:], *last)


def sum_rows(v: Tensor, norm_ndim: int, batch_ndim: int, grouped: int) -> Tensor:
    """Sum of v over all axes that a parameter has not."""
    v = v.sum(-1) if grouped else v
    stop = v.dim() - norm_ndim
    return v.reshape(*v.shape[:batch_ndim], math.prod(v.shape[batch_ndim:stop]), *v.shape[stop:]).sum(batch_ndim)


@layer_norm_p.def_reference
def _layer_norm_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    norm_ndim: int,
    batch_ndim: int,
    eps: float,
    centered: bool,
    rounded: bool,
    grouped: int,
) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    mean, rstd, y = _statistics(x, norm_ndim, eps, centered)
    y = y * _per_feature(rstd, norm_ndim)
    if rounded:
        y = y.to(x.dtype).to(rstd.dtype)
    if weight is not None:
        y = y * per_row(weight, x, norm_ndim, batch_ndim, grouped)
    if bias is not None:
        y = y + per_row(bias, x, norm_ndim, batch_ndim, grouped)
    return laid_out(y.to(x.dtype), grouped), mean, rstd


@layer_norm_bwd_p.def_reference
def _layer_norm_bwd_reference(
    y_bar: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    norm_ndim: int,
    batch_ndim: int,
    eps: float,
    centered: bool,
    grouped: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    x, y_bar = x.contiguous(), y_bar.contiguous()
    # mean and rstd are values of x: taken from x again, so that a derivative of this function reaches it.
    x_hat, rstd = normalized(x, norm_ndim, eps, centered)
    y_bar_acc = y_bar.to(x_hat.dtype)
    v = y_bar_acc if weight is None else y_bar_acc * per_row(weight, x, norm_ndim, batch_ndim, grouped)
    x_bar = unwanted(x)
    if wanted[0]:
        x_bar = laid_out(project(v, x_hat, rstd, norm_ndim, centered).to(x.dtype), grouped)
    # A bias without a weight may be wider than x, so its sum is left wide; autograd casts to the dtype of the bias.
    dtype = x_hat.dtype if weight is None else weight.dtype
    weight_bar = sum_rows(y_bar_acc * x_hat, norm_ndim, batch_ndim, grouped).to(dtype) if wanted[1] else unwanted(x)
    bias_bar = sum_rows(y_bar_acc, norm_ndim, batch_ndim, grouped).to(dtype) if wanted[2] else unwanted(x)
    return x_bar, weight_bar, bias_bar


@layer_norm_jvp_p.def_reference
def _layer_norm_jvp_reference(
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
) -> Tensor:
    x = x.contiguous()
    x_hat, rstd = normalized(x, norm_ndim, eps, centered)
    terms = []
    if x_dot is not None:
        projected = project(x_dot.contiguous().to(x_hat.dtype), x_hat, rstd, norm_ndim, centered)
        terms.append(projected if weight is None else projected * per_row(weight, x, norm_ndim, batch_ndim, grouped))
    if weight_dot is not None:
        terms.append(x_hat * per_row(weight_dot, x, norm_ndim, batch_ndim, grouped))
    if bias_dot is not None:
        terms.append(per_row(bias_dot, x, norm_ndim, batch_ndim, grouped).expand(x.shape).contiguous())
    return laid_out(sum(terms[1:], terms[0]).to(x.dtype, copy=True), grouped)


# Kernels: Triton's and those for the CPU.

bind_kernels(layer_norm_p, "norms.layer_norm", "layer_norm_fwd", cpu.forward)
bind_kernels(layer_norm_bwd_p, "norms.layer_norm", "layer_norm_bwd", cpu.bwd)
bind_kernels(layer_norm_jvp_p, "norms.layer_norm", "layer_norm_jvp", cpu.jvp)
bind_kernels(layer_norm_fwd_jvp_p, "norms.layer_norm", "layer_norm_fwd_jvp")


# Derivatives.

first_order(layer_norm_p, layer_norm_bwd_p, layer_norm_jvp_p)


# Batching: the batch becomes more rows, and where parameters have it too, one more batch axis.

batch_rows(layer_norm_p, layer_norm_bwd_p, layer_norm_jvp_p, layer_norm_fwd_jvp_p)


# Torch runs both norms in float32 under CUDA's autocast and leaves them alone under the CPU's.
layer_norm_p.def_autocast("cuda")(cast_to_float32)


def layer_norm(
    input: PyTree,
    normalized_shape: Sequence[int],
    weight: Prefix | None = None,
    bias: Prefix | None = None,
    eps: float = 1e-5,
    *,
    namespace: str = "",
) -> PyTree:
    r"""Layer normalization of `input` over its last axes.

    $$ y = \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} \, w + b, \qquad
       \mu = \operatorname{mean}(x), \quad \sigma^2 = \operatorname{mean}\left((x - \mu)^2\right) $$

    The means run over the normalized axes; the variance is the biased one.

    Args:
        input: Tensor of shape `[*, *normalized_shape]`, float16, bfloat16, float32 or float64, any strides; or a
            pytree of such tensors, which is mapped leaf by leaf.
        normalized_shape: Sizes of the normalized axes, at least one.
        weight: Scale `w`, shape `normalized_shape`, dtype of `input`, or float32 for float16 and bfloat16 `input`.
            `None` means 1. For a pytree `input`, a tensor or a tree prefix of it.
        bias: Shift `b`, like `weight`, and in its dtype. `None` means 0.
        eps: Added to the variance, in the unit of `input` squared.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        `y`, with the shape, dtype and device of `input`, contiguous; for a pytree, in its structure.

    Raises:
        ShapeError: If `input` does not end in `normalized_shape`, or `weight` or `bias` differ from it.
        DtypeError: If a dtype is not one of the above.
        DeviceError: If the tensors are on different devices.
        TreeError: If `weight` or `bias` is not a prefix of the tree `input`.

    Derivatives:
        Forward and reverse mode, to any order, in `input`, `weight` and `bias`. Reverse mode keeps `input`, `weight`
        and, per row, mean and reciprocal standard deviation.

    Numerics:
        Accumulated in float32 (float64 for float64 `input`), the variance from centered values, so that a large
        common offset does no harm. A constant row gives `bias` for positive `eps`.

    Example:
        >>> import torch, primitives as pr
        >>> pr.functional.layer_norm(torch.tensor([[1.0, 3.0], [2.0, 6.0]]), (2,), eps=0.0)
        tensor([[-1.,  1.],
                [-1.,  1.]])

    References:
        Ba, Kiros, Hinton, "Layer Normalization", arXiv:1607.06450, 2016.
    """
    if arguments.is_plain_layer_norm(input, normalized_shape, weight, bias, eps):
        x: Any = input
        if is_left_to_torch(x, weight, bias):
            return cast("PyTree", mark(torch.layer_norm(x, normalized_shape, weight, bias, eps), eps))
        return layer_norm_p(input, weight, bias, len(normalized_shape), 0, eps, True, False, 0)[0]
    shape = arguments.normalized_shape("layer_norm", normalized_shape)
    arguments.number("layer_norm", "eps", eps)

    def check(label: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
        arguments.layer_norm("layer_norm", label, x, shape, weight=weight, bias=bias)

    def compute(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return layer_norm_p(x, weight_beside(bias, weight, x), bias, len(shape), 0, eps, True, False, 0)[0]

    return map_tensors("layer_norm", check, compute, input, {"weight": weight, "bias": bias}, namespace=namespace)
