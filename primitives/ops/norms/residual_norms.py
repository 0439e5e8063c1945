"""Norms of a residual stream to which the output of a layer is added: one pass instead of three."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from primitives._core.trees.leaves import map_tensors
from primitives._core.typing import Prefix, PyTree
from primitives.ops import arguments
from primitives.ops.dropout.philox import MAX_SEED
from primitives.ops.norms.add_layer_norm import add_layer_norm_p
from primitives.ops.norms.layer_norm import NormOptions
from primitives.ops.norms.rms_norm import rms_options


def add_layer_norm(
    input: PyTree,
    residual: Prefix,
    normalized_shape: Sequence[int],
    weight: Prefix | None = None,
    bias: Prefix | None = None,
    eps: float = 1e-5,
    *,
    dropout_p: float = 0.0,
    training: bool = True,
    namespace: str = "",
) -> tuple[PyTree, PyTree]:
    r"""Add `input`, after dropout, to a residual stream, and normalize the sum: a transformer block's way in and out.

    $$ s = r + \operatorname{dropout}(x), \qquad y = \operatorname{LayerNorm}(s) \, w + b $$

    It is `dropout_add_layer_norm` of flash-attention with `prenorm=True`, in one pass over memory each way.

    Args:
        input: Output of a layer, of shape `[*, *normalized_shape]`, float16, bfloat16, float32 or float64, any strides;
            or a pytree of such tensors, which is mapped leaf by leaf.
        residual: The stream `r`, of the shape of `input` and its dtype, or float32 for float16 and bfloat16 `input`.
            For a pytree `input`, a tensor or a tree prefix of it.
        normalized_shape: Sizes of the normalized axes, at least one.
        weight: Scale `w`, shape `normalized_shape`, dtype of `input`, or float32 for float16 and bfloat16 `input`.
            `None` means 1. For a pytree `input`, a tensor or a tree prefix of it.
        bias: Shift `b`, like `weight`, of its dtype. `None` means 0.
        eps: Added to the variance, in the unit of `s` squared.
        dropout_p: Probability with which an element of `input` is dropped; the others are divided by `1 - dropout_p`.
        training: Whether to drop anything.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        `(y, s)`: the normalized sum, with the shape, dtype and device of `input`; and the sum, the next layer's
        residual, in the dtype of `residual`. Both are contiguous; for a pytree, each in its structure.

    Raises:
        ShapeError: If `input` does not end in `normalized_shape`, `residual` has not its shape, or `weight` or `bias`
            differs from `normalized_shape`.
        DtypeError: If a dtype is not one of the above.
        DeviceError: If the tensors are on different devices.
        TreeError: If `residual`, `weight` or `bias` is not a prefix of the tree `input`.
        ValueError: If `dropout_p` is not in `[0, 1]`.
        RuntimeError: With dropout under `vmap` with `randomness="error"`, as torch raises it.

    Derivatives:
        Forward and reverse mode, to any order, in `input`, `residual`, `weight` and `bias`. Reverse mode keeps `s`,
        `weight`, two numbers per row and the seed of the noise: neither `input`, nor `residual`, nor a mask.

    Numerics:
        `s` is added up in float32 (float64 for float64 `input`) and rounded once; what is normalized is `s` as it was
        rounded, as by models that add first. Dropout draws as `dropout` does.

    Example:
        >>> import torch, primitives as pr
        >>> x, residual = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 3.0]])
        >>> pr.functional.add_layer_norm(x, residual, (2,), eps=0.0)
        (tensor([[-1.,  1.]]), tensor([[1., 5.]]))

    References:
        Dao et al., "FlashAttention", NeurIPS 2022 (whose repository has the fused operation).
    """
    shape = arguments.normalized_shape("add_layer_norm", normalized_shape)
    arguments.number("add_layer_norm", "eps", eps)
    arguments.probability("add_layer_norm", dropout_p, "dropout_p")

    check = functools.partial(arguments.add_layer_norm, "add_layer_norm", shape=shape)

    def compute(x: Tensor, residual: Tensor, weight: Any, bias: Any) -> tuple[Tensor, Tensor]:
        seed, p = _noise(x, dropout_p, training)
        options = NormOptions(len(shape), eps)
        return add_layer_norm_p(x, residual, weight, bias, seed, p, x.dtype, *options)[:2]

    prefixes = {"residual": residual, "weight": weight, "bias": bias}
    return map_tensors("add_layer_norm", check, compute, input, prefixes, namespace=namespace, num_results=2)


def add_rms_norm(
    input: PyTree,
    residual: Prefix,
    normalized_shape: Sequence[int],
    weight: Prefix | None = None,
    eps: float | None = None,
    *,
    add_one: bool = False,
    cast_first: bool = False,
    dropout_p: float = 0.0,
    training: bool = True,
    namespace: str = "",
) -> tuple[PyTree, PyTree]:
    r"""Add `input`, after dropout, to a residual stream, and take the sum's RMS norm.

    $$ s = r + \operatorname{dropout}(x), \qquad y = \frac{s}{\sqrt{\operatorname{mean}(s^2) + \varepsilon}} \, w $$

    It is `fused_add_rms_norm` of vLLM, Liger's `LigerFusedAddRMSNorm`, which return `(y, s)` too.

    Args:
        input: As for `add_layer_norm`.
        residual: Likewise.
        normalized_shape: Sizes of the normalized axes, at least one.
        weight: Scale `w`, as for `add_layer_norm`.
        eps: Added to the mean square, as for `rms_norm`: `None` means `eps` of the dtype that the mean is taken in.
        add_one: Whether the scale is `1 + weight`, as for `rms_norm`.
        cast_first: Whether the normalized sum is rounded to the dtype of `input` before it is multiplied by the weight.
        dropout_p: Probability with which an element of `input` is dropped; the others are divided by `1 - dropout_p`.
        training: Whether to drop anything.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        `(y, s)`, as `add_layer_norm` does.

    Raises:
        ShapeError, DtypeError, DeviceError, TreeError, ValueError, RuntimeError: As `add_layer_norm` does.

    Derivatives:
        As for `add_layer_norm`; one number per row is kept. The rounding of `cast_first` is not differentiated.

    Numerics:
        As for `add_layer_norm`.

    Example:
        >>> import torch, primitives as pr
        >>> pr.functional.add_rms_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]]), (2,))
        (tensor([[0.8485, 1.1314]]), tensor([[3., 4.]]))

    References:
        Zhang, Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467, 2019.
    """
    shape = arguments.normalized_shape("add_rms_norm", normalized_shape)
    arguments.number("add_rms_norm", "eps", 0.0 if eps is None else eps)
    arguments.probability("add_rms_norm", dropout_p, "dropout_p")

    check = functools.partial(arguments.add_layer_norm, "add_rms_norm", shape=shape)

    def compute(x: Tensor, residual: Tensor, weight: Any) -> tuple[Tensor, Tensor]:
        seed, p = _noise(x, dropout_p, training)
        weight, number, rounded = rms_options(x, weight, eps, add_one, cast_first)
        options = NormOptions(len(shape), number, centered=False, rounded=rounded)
        return add_layer_norm_p(x, residual, weight, None, seed, p, x.dtype, *options)[:2]

    prefixes = {"residual": residual, "weight": weight}
    return map_tensors("add_rms_norm", check, compute, input, prefixes, namespace=namespace, num_results=2)


def _noise(x: Tensor, p: float, training: bool) -> tuple[Tensor | None, float]:
    """A seed for the noise, or None for none, and the probability that goes with it."""
    # Where nothing is left to chance, torch draws nothing either.
    if not training or p == 0.0 or x.numel() == 0:
        return None, 0.0
    if p == 1.0:
        return torch.zeros((), dtype=torch.int64, device=x.device), 1.0
    return torch.randint(MAX_SEED, (), device=x.device), float(p)
