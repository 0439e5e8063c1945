r"""Layer normalization over the last axes of x; RMS norm, which is layer norm that is not `centered`; adaptive ones.

`formulas.py` has the formulas. With `rounded` the value takes x_hat in the dtype of x, as models do that cast before
they multiply; derivatives do not look at that.

Shapes: x is [*batch, *rest, *norm] with `norm_ndim` normalized axes and `batch_ndim` batch axes, which vmap adds.
weight and bias are [*batch, *norm]; mean and rstd are [*batch, *rest], float32 (float64 for float64 x). A norm that is
not centered has a mean without elements.

Group norm is `grouped`: x is [*batch, *rest, groups, channels, positions] with the last two axes normalized, and weight
and bias, [*batch, groups, channels], have one number for each channel of each group. With 2 (`CHANNELS_LAST`) for 1,
what is shaped as x lies in memory as [*batch, *rest, positions, groups, channels], as of channels_last.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from primitives._core import Primitive
from primitives._core.trees.leaves import map_tensors
from primitives._core.typing import Prefix, PyTree
from primitives._repair.nodes import recorded
from primitives._repair.plain import is_plain_on_cpu
from primitives.ops import arguments
from primitives.ops.axes import Axes, def_axes
from primitives.ops.norms.aten import RowsByAten, in_dtype_of_sums, is_well_conditioned
from primitives.ops.norms.formulas import Norm
from primitives.ops.norms.norm_map import norm_map
from primitives.ops.rules import (
    accumulation_dtype,
    bind_family,
    bind_kernels,
    cast_to_float32,
    define,
    schema_of,
    weight_beside,
    with_layout,
)


class NormOptions(NamedTuple):
    """Options of a norm of rows and of its derivatives, in the order of the schemas; see above."""

    norm_ndim: int
    eps: float
    batch_ndim: int = 0
    centered: bool = True
    rounded: bool = False
    grouped: int = 0


options_of = attrgetter(*NormOptions._fields)

layer_norm_p = Primitive(
    "layer_norm",
    f"(Tensor x, Tensor? weight, Tensor? bias, {schema_of(NormOptions)}) -> (Tensor y, Tensor mean, Tensor rstd)",
    residuals=("x", "weight", "mean", "rstd"),
    statistics=("mean", "rstd"),
    recomputable=True,
)


def rows(x: Tensor, options: NormOptions, statistics: tuple[Tensor, Tensor] | None = None) -> Norm:
    """The norm over the last axes; by given statistics, as values, for kernels."""
    norm_axes = range(-options.norm_ndim, 0)
    param_axes = [*range(options.batch_ndim), *((-3, -2) if options.grouped else norm_axes)]
    layout = functools.partial(with_layout, grouped=options.grouped)
    if statistics is None:
        return Norm(x, norm_axes, param_axes, layout, options.eps, centered=options.centered)
    mean, rstd = (v.view(*v.shape, *[1] * options.norm_ndim) for v in statistics)
    return RowsByAten(x, norm_axes, param_axes, layout, centered=options.centered, statistics=(mean, rstd))


def _value(norm: Norm, c: Any) -> tuple[Tensor, Tensor, Tensor]:
    return norm.value(c.weight, c.bias, rounded=c.rounded), norm.statistic(norm.mean), norm.statistic(norm.rstd)


define(layer_norm_p, _value, lambda c: rows(c.x, NormOptions(*options_of(c))))


@layer_norm_p.def_kernel("cpu")
def _layer_norm_by_aten(x: Tensor, weight: Tensor | None, bias: Tensor | None, *args: Any) -> Any:
    """y, mean and rstd of layer norm and group norm."""
    norm_ndim, eps, batch_ndim, centered, rounded, grouped = NormOptions(*args)
    has_params = weight is not None or bias is not None
    if x.numel() == 0 or not centered or rounded or (batch_ndim and has_params):
        return None
    weight, bias = in_dtype_of_sums(x, weight, bias)
    rest = x.shape[: x.dim() - norm_ndim]
    shape = rest[-1:] + x.shape[-2:-1] if grouped else x.shape[len(rest) :]
    if weight is None and x.dtype in arguments.LOW_PRECISION:
        # Without parameters in float32, ATen rounds the statistics to the dtype of x.
        weight = torch.ones(shape, dtype=torch.float32)
    if grouped:
        # Of three axes: of four ATen takes some for channels_last, whose variance is from a sum of squares.
        groups, channels, positions = x.shape[-3:]
        flat = x.contiguous().view(-1, groups * channels, positions)
        weight, bias = (None if p is None else p.flatten() for p in (weight, bias))
        sizes = flat.shape[0], flat.shape[1], flat.shape[2], groups
        y, mean, rstd = torch.native_group_norm(flat, weight, bias, *sizes, eps)
        y = with_layout(y.view_as(x), grouped)
    else:
        y, mean, rstd = torch.native_layer_norm(x.contiguous(), shape, weight, bias, eps)
    return (y, mean.view(rest), rstd.view(rest)) if is_well_conditioned(mean, rstd) else None


operators = norm_map(layer_norm_p, NormOptions, rows)
layer_norm_bwd_p, layer_norm_jvp_p, layer_norm_fwd_jvp_p, layer_norm_double_backward_p, layer_norm_bwd_jvp_p = operators

bind_family("norms.layer_norm", "layer_norm", layer_norm_p, *operators[:3])
bind_kernels(layer_norm_double_backward_p, "norms.layer_norm_second_order", "layer_norm_double_backward")
bind_kernels(layer_norm_bwd_jvp_p, "norms.layer_norm_second_order", "layer_norm_bwd_jvp")

_ROWS = Axes(
    "x y: *batch *rest *norm, weight bias: *batch *norm, mean rstd: *batch *rest", "batch rest", can_compose=True
)
GROUPS = Axes(
    "x y: *batch *rest groups channels positions, weight bias: *batch groups channels, mean rstd: *batch *rest groups",
    "batch rest groups",
)
def_axes(lambda given: GROUPS if given["grouped"] else _ROWS, layer_norm_p, *operators)
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
    if type(eps) is float and isinstance(normalized_shape, tuple) and is_plain_on_cpu(input, weight, bias):
        given: Any = input, normalized_shape, weight, bias, eps
        try:
            return cast("PyTree", recorded(torch.layer_norm(*given)))
        except (RuntimeError, TypeError):
            pass  # A check of this package says what is wrong.
    shape = arguments.normalized_shape("layer_norm", normalized_shape)
    arguments.number("layer_norm", "eps", eps)

    check = functools.partial(arguments.layer_norm, "layer_norm", shape=shape)

    def compute(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return layer_norm_p(x, weight_beside(bias, weight, x), bias, *NormOptions(len(shape), eps))[0]

    return map_tensors("layer_norm", check, compute, input, {"weight": weight, "bias": bias}, namespace=namespace)


def rms_norm(
    input: PyTree,
    normalized_shape: Sequence[int],
    weight: Prefix | None = None,
    eps: float | None = None,
    *,
    add_one: bool = False,
    cast_first: bool = False,
    namespace: str = "",
) -> PyTree:
    r"""Root mean square normalization of `input` over its last axes.

    $$ y = \frac{x}{\sqrt{\operatorname{mean}(x^2) + \varepsilon}} \, w $$

    Args:
        input: Tensor of shape `[*, *normalized_shape]`, float16, bfloat16, float32 or float64, any strides; or a
            pytree of such tensors, which is mapped leaf by leaf.
        normalized_shape: Sizes of the normalized axes, at least one.
        weight: Scale `w`, shape `normalized_shape`, dtype of `input`, or float32 for float16 and bfloat16 `input`.
            `None` means 1. For a pytree `input`, a tensor or a tree prefix of it.
        eps: Added to the mean square, in the unit of `input` squared. `None` means, as for torch, `eps` of the dtype
            that the mean is taken in: float64 for float64 `input`, else float32.
        add_one: Whether the scale is `1 + weight`, as in Gemma, added in the dtype that the mean is taken in. A weight
            of `None` means 1 still.
        cast_first: Whether the normalized `input` is rounded to its dtype before it is multiplied by the weight, as in
            Llama. Torch and Gemma round once, at the end.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        `y`, with the shape, dtype and device of `input`, contiguous; for a pytree, in its structure.

    Raises:
        ShapeError: If `input` does not end in `normalized_shape`, or `weight` differs from it.
        DtypeError: If a dtype is not one of the above.
        DeviceError: If the tensors are on different devices.
        TreeError: If `weight` is not a prefix of the tree `input`.

    Derivatives:
        Forward and reverse mode, to any order, in `input` and `weight`. Reverse mode keeps `input`, `weight` and, per
        row, the reciprocal root. The rounding of `cast_first` is not differentiated.

    Numerics:
        Accumulated in float32 (float64 for float64 `input`).

    Example:
        >>> import torch, primitives as pr
        >>> pr.functional.rms_norm(torch.tensor([[3.0, 4.0]]), (2,))
        tensor([[0.8485, 1.1314]])

    References:
        Zhang, Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467, 2019.
    """
    number = 0.0 if eps is None else eps
    is_torchs = type(number) is float and isinstance(normalized_shape, tuple) and not (add_one or cast_first)
    if is_torchs and is_plain_on_cpu(input, weight):
        x: Any = input
        if x.is_contiguous() and (weight is None or cast("Any", weight).dtype == x.dtype):
            try:
                return cast("PyTree", torch.rms_norm(x, normalized_shape, weight, eps))
            except (RuntimeError, TypeError):
                pass  # A check of this package says what is wrong.
    shape = arguments.normalized_shape("rms_norm", normalized_shape)
    arguments.number("rms_norm", "eps", number)

    check = functools.partial(arguments.layer_norm, "rms_norm", shape=shape)

    def compute(x: Tensor, weight: Tensor | None) -> Tensor:
        weight, number, rounded = rms_options(x, weight, eps, add_one, cast_first)
        return layer_norm_p(x, weight, None, *NormOptions(len(shape), number, centered=False, rounded=rounded))[0]

    return map_tensors("rms_norm", check, compute, input, {"weight": weight}, namespace=namespace)


def rms_options(
    x: Tensor, weight: Tensor | None, eps: float | None, add_one: bool, cast_first: bool
) -> tuple[Tensor | None, float, bool]:
    """The scale, eps, and whether the normalized `x` is rounded, for layer norm's primitives."""
    dtype = accumulation_dtype(x.dtype)
    eps = torch.finfo(dtype).eps if eps is None else eps
    if weight is not None and add_one:
        weight = 1.0 + weight.to(dtype)
    # Without a weight, or in a wide dtype, the result is rounded at the same place anyway.
    return weight, eps, cast_first and weight is not None and x.dtype in arguments.LOW_PRECISION


def ada_layer_norm(
    input: PyTree,
    scale: Prefix,
    shift: Prefix,
    normalized_shape: Sequence[int] | None = None,
    eps: float = 1e-5,
    *,
    namespace: str = "",
) -> PyTree:
    r"""Layer normalization of `input`, scaled and shifted by parameters of each sample, as in DiT.

    $$ y = \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} \, (1 + s) + t $$

    Args:
        input: Tensor of shape `[*batch, *tokens, *normalized_shape]`, float16, bfloat16, float32 or float64, any
            strides; or a pytree of such tensors, which is mapped leaf by leaf.
        scale: `s`, shape `[*batch, *normalized_shape]`, or with axes of size 1 for `tokens`; dtype of `input`, or
            float32 for float16 and bfloat16 `input`. For a pytree `input`, a tensor or a tree prefix of it.
        shift: `t`, like `scale`, of its shape and dtype.
        normalized_shape: Sizes of the normalized axes, at least one. `None` means the last axis.
        eps: Added to the variance, in the unit of `input` squared.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        `y`, with the shape, dtype and device of `input`, contiguous; for a pytree, in its structure.

    Raises:
        ShapeError: If `input` does not end in `normalized_shape`, or `scale` or `shift` does not fit it.
        DtypeError: If a dtype is not one of the above.
        DeviceError: If the tensors are on different devices.
        TreeError: If `scale` or `shift` is not a prefix of the tree `input`.

    Derivatives:
        Forward and reverse mode, to any order, in `input`, `scale` and `shift`, which are summed over the tokens of
        each sample. Reverse mode keeps what `layer_norm` keeps.

    Numerics:
        As `layer_norm`; `1 + s` is not rounded to float16 or bfloat16.

    Example:
        >>> import torch, primitives as pr
        >>> x = torch.tensor([[[1.0, 3.0], [2.0, 6.0]]])
        >>> pr.functional.ada_layer_norm(x, torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 5.0]]), eps=0.0)
        tensor([[[-2.,  6.],
                 [-2.,  6.]]])

    References:
        Peebles, Xie, "Scalable Diffusion Models with Transformers", arXiv:2212.09748, 2022.
    """
    given = None if normalized_shape is None else arguments.normalized_shape("ada_layer_norm", normalized_shape)
    arguments.number("ada_layer_norm", "eps", eps)

    def check(label: str, x: Tensor, scale: Tensor, shift: Tensor) -> None:
        shape = arguments.normalized_shape("ada_layer_norm", tuple(x.shape[-1:])) if given is None else given
        arguments.layer_norm("ada_layer_norm", label, x, shape)
        arguments.of_samples("ada_layer_norm", label, x, len(shape), scale=scale, shift=shift)

    def compute(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        norm_ndim = 1 if given is None else len(given)
        lead = arguments.batch_axes(scale, norm_ndim)
        shape, dtype = (*lead, *x.shape[x.dim() - norm_ndim :]), accumulation_dtype(x.dtype)
        weight, bias = 1.0 + scale.to(dtype).reshape(shape), shift.to(dtype).reshape(shape)
        return layer_norm_p(x, weight, bias, *NormOptions(norm_ndim, eps, len(lead)))[0]

    prefixes = {"scale": scale, "shift": shift}
    return map_tensors("ada_layer_norm", check, compute, input, prefixes, namespace=namespace)
