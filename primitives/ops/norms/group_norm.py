"""Group norm and instance norm: layer norm's primitives on groups of channels, and batch norm's on single samples."""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import torch
from torch import Tensor

from primitives._core.trees.leaves import map_tensors
from primitives._core.typing import Prefix, PyTree
from primitives._repair.nodes import recorded
from primitives._repair.plain import is_plain_on_cpu
from primitives.ops import arguments
from primitives.ops.norms.batch_norm_functions import batch_norm_tree, in_shape
from primitives.ops.norms.group_norm_silu import group_norm_silu_p
from primitives.ops.norms.layer_norm import NormOptions, layer_norm_p
from primitives.ops.rules import CHANNELS_LAST, weight_beside


def group_norm(
    input: PyTree,
    num_groups: int,
    weight: Prefix | None = None,
    bias: Prefix | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    namespace: str = "",
) -> PyTree:
    r"""Group normalization of `input`: of each sample, each group of channels by its own mean and variance.

    $$ y = \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} \, w + b $$

    `μ` and `σ²` (biased) are those of the `C / num_groups` channels of a group in all positions, `w` and `b` those of a
    channel.

    Args:
        input: Tensor of shape `[N, C, *]`, float16, bfloat16, float32 or float64, any strides; or a pytree of such
            tensors, which is mapped leaf by leaf.
        num_groups: Number of groups, which divides `C`.
        weight: Scale `w`, shape `[C]`, dtype of `input`, or float32 for float16 and bfloat16 `input`. `None` means 1.
            For a pytree `input`, a tensor or a tree prefix of it.
        bias: Shift `b`, like `weight`, and in its dtype. `None` means 0.
        eps: Added to the variance, in the unit of `input` squared.
        activation: `"silu"` for `y * sigmoid(y)` in the place of `y`, as between the layers of a U-Net, fused with the
            norm. `None` for none.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        `y`, with the shape, dtype and device of `input`, channels_last where `input` is, else contiguous; for a pytree,
        in its structure.

    Raises:
        ShapeError: If `input` has less than 2 axes, `num_groups` does not divide its channels, a parameter does not fit
            these, or there is a single value per group (as torch counts them, over all samples).
        DtypeError: If a dtype is not one of the above.
        DeviceError: If the tensors are on different devices.
        ValueError: If `activation` is not one of the above.
        TreeError: If `weight` or `bias` is not a prefix of the tree `input`.

    Derivatives:
        Forward and reverse mode, to any order, in `input`, `weight` and `bias`. Reverse mode keeps `input`, `weight`
        and, per group of a sample, mean and reciprocal standard deviation; with an activation `bias` too.

    Numerics:
        Accumulated in float32 (float64 for float64 `input`), the variance from centered values. A constant group gives
        `bias` for positive `eps`. A channels_last `input` is read where it lies, on a GPU.

    Example:
        >>> import torch, primitives as pr
        >>> pr.functional.group_norm(torch.tensor([[[1.0, 3.0], [2.0, 6.0]]]), 2, eps=0.0)
        tensor([[[-1.,  1.],
                 [-1.,  1.]]])

    References:
        Wu, He, "Group Normalization", arXiv:1803.08494, 2018.
    """
    if activation not in (None, "silu"):
        raise ValueError(f'group_norm: activation must be None or "silu", got {activation!r}.')
    # Torch's backward fails for a bias without a weight, and its function takes a single value in a group.
    is_torchs = type(eps) is float and type(num_groups) is int and activation is None
    if is_torchs and (weight is None) == (bias is None) and is_plain_on_cpu(input, weight, bias):
        x: Any = input
        if x.numel() > num_groups and x.is_contiguous():
            try:
                return cast("PyTree", recorded(torch.group_norm(x, num_groups, weight, bias, eps)))
            except (RuntimeError, IndexError):
                pass  # A check of this package says what is wrong.
    arguments.number("group_norm", "eps", eps)

    check = functools.partial(arguments.group_norm, num_groups=num_groups)

    def compute(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return group_norm_of_tensors(x, num_groups, weight_beside(bias, weight, x), bias, eps, activation)[0]

    return map_tensors("group_norm", check, compute, input, {"weight": weight, "bias": bias}, namespace=namespace)


def group_norm_of_tensors(
    x: Any, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str | None
) -> tuple[Any, Tensor, Tensor]:
    """Y, and mean and rstd of each group `[N, groups]`, of tensors that were checked."""
    samples, channels = x.shape[:2]
    sizes = num_groups, channels // num_groups
    groups = x.reshape(samples, *sizes, math.prod(x.shape[2:]))
    # Torch reads numbers several times as fast as a shape.
    weight, bias = (None if p is None else p.reshape(*sizes) for p in (weight, bias))
    # Not by a memory format, of which vmap has no notion.
    grouped = CHANNELS_LAST if x.dim() in (4, 5) and x.stride(1) == 1 and not x.is_contiguous() else 1
    op = layer_norm_p if activation is None else group_norm_silu_p
    out = op(groups, weight, bias, *NormOptions(2, eps, grouped=grouped))
    return in_shape(out[0], x), out[1], out[2]


def instance_norm(
    input: PyTree,
    running_mean: Prefix | None = None,
    running_var: Prefix | None = None,
    weight: Prefix | None = None,
    bias: Prefix | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    namespace: str = "",
) -> PyTree:
    r"""Instance normalization of `input`: each channel of each sample by its own mean and variance.

    $$ y = \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} \, w + b $$

    With `use_input_stats`, `μ` and `σ²` (biased) are those of the positions of a channel of a sample; running
    statistics, if given, are moved in place towards the mean of these over the samples, the variance by its unbiased
    value, as `batch_norm` moves them. Without, `μ` and `σ²` are the running statistics.

    Args:
        input: Tensor of shape `[N, C, *]`, float16, bfloat16, float32 or float64, any strides; or a pytree of such
            tensors, which is mapped leaf by leaf.
        running_mean: Shape `[C]`, dtype of `input`, or float32 for float16 and bfloat16 `input`. `None`, together with
            `running_var`, for none.
        running_var: Like `running_mean`.
        weight: Scale `w`, shape `[C]`, dtype of `input`, or float32 for float16 and bfloat16 `input`. `None` means 1.
        bias: Shift `b`, like `weight`, and in its dtype. `None` means 0.
        use_input_stats: Whether to normalize by the statistics of `input`.
        momentum: Weight of this batch in the new running statistics.
        eps: Added to the variance, in the unit of `input` squared.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        `y`, with the shape, dtype and device of `input`, contiguous; by running statistics, in the layout that
        `batch_norm` gives it. For a pytree, in its structure.

    Raises:
        ShapeError: If shapes do not agree, running statistics are missing without `use_input_stats`, or a channel has a
            single position with it.
        DtypeError: If a dtype is not one of the above, or `momentum` is not a number.
        ValueError: If `eps` is not positive with `use_input_stats`.
        DeviceError: If the tensors are on different devices.
        TreeError: If a parameter is not a prefix of the tree `input`.
        RuntimeError: Under `vmap`, if `input` is batched and the running statistics that would be written are not.

    Derivatives:
        As for `batch_norm`, whose primitives compute it.

    Example:
        >>> import torch, primitives as pr
        >>> pr.functional.instance_norm(torch.tensor([[[1.0, 3.0], [2.0, 6.0]]]), eps=1e-12)
        tensor([[[-1.,  1.],
                 [-1.,  1.]]])

    References:
        Ulyanov, Vedaldi, Lempitsky, "Instance Normalization", arXiv:1607.08022, 2016.
    """
    given = (input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    return batch_norm_tree("instance_norm", given, namespace).output


def pure_instance_norm(*given: Any) -> tuple[Any, Any, Any]:
    """`instance_norm` of these arguments, and the new running statistics, of which none is written."""
    return batch_norm_tree("instance_norm", given, in_place=False)
