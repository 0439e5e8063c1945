"""RMS norm and adaptive layer norm: layer norm's primitives, not centered, and with parameters for each sample."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from primitives._core.trees.leaves import map_tensors
from primitives._core.typing import Prefix, PyTree
from primitives._repair.plain import is_plain_on_cpu
from primitives.ops import arguments
from primitives.ops.norms.layer_norm import NormOptions, layer_norm_p
from primitives.ops.rules import accumulation_dtype


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
