"""Functional API: the signatures, defaults and errors of `torch.nn.functional`, over tensors and pytrees of tensors.

Each function is differentiable in forward and reverse mode to any order, under every transform of `torch.func`,
`torch.autograd.forward_ad`, and `torch.compile`. A `PyTree` is a tensor or a pytree of tensors; a `Prefix` is a tensor,
or a tree prefix of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from primitives._attention import MAX_SEED, attention, scaled_dot_product_attention
from primitives._batch_norm import batch_norm_of_tensors
from primitives._checks import arguments
from primitives._core.trees.leaves import map_tensors
from primitives._group_norms import group_norm, instance_norm
from primitives._losses import cross_entropy, linear_cross_entropy, nll_loss
from primitives._norms import ada_layer_norm, rms_norm
from primitives._ops._shared import weight_beside
from primitives._ops.dropout import dropout_p
from primitives._ops.layer_norm import layer_norm_p
from primitives._repair.nodes import mark
from primitives._repair.plain import is_left_to_torch
from primitives._residual_norms import add_layer_norm, add_rms_norm
from primitives._softmax import log_softmax, softmax, softmin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from primitives._core.typing import Prefix, PyTree

__all__ = [
    "BatchNormOutput",
    "ada_layer_norm",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "batch_norm",
    "batch_norm_relu",
    "cross_entropy",
    "dropout",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "nll_loss",
    "pure_batch_norm",
    "rms_norm",
    "scaled_dot_product_attention",
    "softmax",
    "softmin",
]

# torch.fx records a call of these as one node. It swaps the names of this module while it traces, at no cost else.
for _name in __all__[1:]:
    torch.fx.wrap(_name)


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


class BatchNormOutput(NamedTuple):
    """The result of `pure_batch_norm`.

    Attributes:
        output: The normalized input.
        running_mean: The running mean after this batch, or `None` if there was none.
        running_var: The running variance after this batch, or `None` if there was none.
    """

    output: Any
    running_mean: Any
    running_var: Any


def pure_batch_norm(
    input: Tensor | Any,
    running_mean: Prefix | None,
    running_var: Prefix | None,
    weight: Prefix | None = None,
    bias: Prefix | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    *,
    namespace: str = "",
) -> BatchNormOutput:
    """Batch normalization that returns the new running statistics and writes nothing.

    The arguments, errors and the output are those of `batch_norm`. Because nothing is written, it works where an
    in-place update cannot: under `vmap` over samples or models, and in purely functional training loops.

    Returns:
        `BatchNormOutput(output, running_mean, running_var)`. In training the statistics are new tensors in the dtype
        of the given ones; in evaluation they are the given ones. They are state, as torch's buffers are: constant to
        every derivative.

    Raises:
        ShapeError, DtypeError, DeviceError, TreeError: As `batch_norm` does.

    Derivatives:
        As for `batch_norm`.

    Example:
        >>> import torch, primitives as pr
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> out = pr.functional.pure_batch_norm(x, torch.zeros(1), torch.ones(1), training=True)
        >>> out.running_mean
        tensor([0.2000])
    """
    given = (input, running_mean, running_var, weight, bias, training, momentum, eps)
    return _batch_norm_tree("pure_batch_norm", given, namespace)


def _batch_norm_tree(name: str, given: tuple, namespace: str, residual: Any = None) -> BatchNormOutput:
    """The function of this name over a pytree; but for the pure one, new running statistics are written too."""
    input, running_mean, running_var, weight, bias, training, momentum, eps = given
    in_place, relu = name != "pure_batch_norm", name == "batch_norm_relu"
    arguments.momentum(name, momentum)
    arguments.number(name, "eps", eps)
    if training:
        arguments.positive_eps(name, eps)

    def check(label: str, x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, residual: Any) -> None:
        arguments.batch_norm(name, label, x, mean, var, weight, bias, training=training)
        if residual is not None:
            arguments.added(name, label, x, residual)
        if in_place and training:
            arguments.written(name, mean, var)

    def compute(x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, residual: Any) -> tuple[Tensor, Any, Any]:
        weight = weight_beside(bias, weight, x)
        # An empty tensor of one axis has the channels of what comes with it.
        rows = x.reshape(0, arguments.channels_of_nothing(mean, weight, bias)) if x.dim() == 1 else x
        residual = None if residual is None else residual.reshape(rows.shape)
        last = {"in_place": in_place, "relu": relu, "residual": residual}
        y, mean, var = batch_norm_of_tensors(rows, mean, var, weight, bias, training, momentum, eps, **last)
        return y.reshape(x.shape) if x.dim() == 1 else y, mean, var

    prefixes = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    prefixes["residual"] = residual
    trees = map_tensors(name, check, compute, input, prefixes, namespace=namespace, num_results=3)
    return BatchNormOutput(*trees)


def batch_norm(
    input: PyTree,
    running_mean: Prefix | None,
    running_var: Prefix | None,
    weight: Prefix | None = None,
    bias: Prefix | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    *,
    namespace: str = "",
) -> PyTree:
    r"""Batch normalization of `input`, channel by channel.

    $$ y = \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} \, w + b $$

    In training `μ` and `σ²` (biased) are the statistics of each channel in this batch; the running statistics are
    moved towards them in place, the variance by its unbiased value:
    `running = (1 - momentum) * running + momentum * batch`. In evaluation `μ` and `σ²` are the running statistics.

    Args:
        input: Tensor of shape `[N, C, *]`, or `[0]`, float16, bfloat16, float32 or float64, any strides; or a
            pytree of such tensors, which is mapped leaf by leaf.
        running_mean: Shape `[C]`, dtype of `input`, or float32 for float16 and bfloat16 `input`; written in
            training. `None`, together with `running_var`, for none: then only training is possible.
        running_var: Like `running_mean`.
        weight: Scale `w`, shape `[C]`, dtype of `input`, or float32 for float16 and bfloat16 `input`. `None` means 1.
        bias: Shift `b`, like `weight`, and in its dtype. `None` means 0.
        training: Whether to normalize by the statistics of this batch.
        momentum: Weight of this batch in the new running statistics, a number, or a tensor of one number, which
            `vmap` may batch.
        eps: Added to the variance, in the unit of `input` squared.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        `y`, with the shape, dtype and device of `input`; channels_last where `input` is, else contiguous.

    Raises:
        ShapeError: If shapes do not agree, running statistics are missing in evaluation, or a channel has a single
            value in training.
        DtypeError: If a dtype is not one of the above, or `momentum` is not one real number.
        ValueError: If `eps` is not positive in training.
        DeviceError: If the tensors are on different devices.
        TreeError: If a parameter is not a prefix of the tree `input`.
        RuntimeError: Under `vmap`, if `input` is batched and the running statistics are not: see `pure_batch_norm`.

    Derivatives:
        Forward and reverse mode, to any order, in `input`, `weight` and `bias`; in evaluation also in the running
        statistics.

    Example:
        >>> import torch, primitives as pr
        >>> pr.functional.batch_norm(torch.tensor([[1.0], [3.0]]), None, None, training=True)
        tensor([[-1.0000],
                [ 1.0000]])

    References:
        Ioffe, Szegedy, "Batch Normalization", arXiv:1502.03167, 2015.
    """
    given: Any = (input, running_mean, running_var, weight, bias, training, momentum, eps)
    if not arguments.is_plain_batch_norm(*given):
        return _batch_norm_tree("batch_norm", given, namespace).output
    return batch_norm_of_tensors(*given, in_place=True)[0]


def batch_norm_relu(
    input: PyTree,
    running_mean: Prefix | None,
    running_var: Prefix | None,
    weight: Prefix | None = None,
    bias: Prefix | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    *,
    residual: Prefix | None = None,
    namespace: str = "",
) -> PyTree:
    r"""Batch normalization of `input`, a residual added, and the positive part: the end of a block of a ResNet.

    $$ y = \max(\operatorname{BatchNorm}(x) + r, 0) $$

    On CUDA tensors the kernel that normalizes reads the residual beside `input` and writes `y` alone, and a backward
    masks the cotangent as it reads it. timm's `BatchNormAct2d` computes it without a residual.

    Args:
        input: As for `batch_norm`, like all arguments not named below.
        running_mean: Likewise.
        running_var: Likewise.
        weight: Likewise.
        bias: Likewise.
        training: Likewise.
        momentum: Likewise.
        eps: Likewise.
        residual: `r`, of the shape of `input` and its dtype, or float32 for float16 and bfloat16 `input`; for a pytree
            `input` a tensor or a tree prefix of it. `None` means 0.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        `y`, with the shape, dtype and device of `input`.

    Raises:
        ShapeError, DtypeError, ValueError, DeviceError, TreeError, RuntimeError: As `batch_norm` does, and for a
            `residual` that does not fit; nothing is written then.

    Derivatives:
        As for `batch_norm`, and in `residual`; where the sum is 0 they are 0, as of `torch.relu`. Reverse mode keeps
        what `batch_norm` keeps, and `y`.

    Example:
        >>> import torch, primitives as pr
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> pr.functional.batch_norm_relu(x, None, None, training=True, residual=torch.full((2, 1), 0.5))
        tensor([[0.0000],
                [1.5000]])
    """
    given: Any = (input, running_mean, running_var, weight, bias, training, momentum, eps)
    if arguments.is_plain_batch_norm(*given, residual=residual):
        return batch_norm_of_tensors(*given, in_place=True, relu=True, residual=residual)[0]
    return _batch_norm_tree("batch_norm_relu", given, namespace, residual).output


def dropout(
    input: PyTree, p: float = 0.5, training: bool = True, inplace: bool = False, *, namespace: str = ""
) -> PyTree:
    r"""Zero elements of `input` at random, with probability `p`, and divide the others by `1 - p`.

    Args:
        input: Tensor of any shape, float16, bfloat16, float32 or float64, any strides; or a pytree of such tensors,
            which is mapped leaf by leaf, each with random numbers of its own.
        p: Probability of zero, in `[0, 1]`.
        training: Whether to drop anything; `input` is returned as it is if not.
        inplace: Whether to write the result into `input` and return that.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        `y`, with the shape, dtype, device and strides of `input` (dense ones where `input` has gaps or repeats); for a
        pytree, in its structure.

    Raises:
        ValueError: If `p` is not in `[0, 1]`.
        DtypeError: If a dtype is not one of the above, or `p` is not a number.
        MutationError: If `inplace` would write into a leaf that requires grad.
        RuntimeError: Under `vmap` with `randomness="error"`, as torch raises it.

    Derivatives:
        Forward and reverse mode, to any order, in `input`. Kept are 8 bytes: the seed of the noise, which every
        derivative draws anew.

    Numerics:
        One seed is drawn from torch's generator of the device, so that `torch.manual_seed`, activation checkpointing
        and vmap's `randomness` mean what they mean for any random operation. The noise of a seed is the same on
        every device, and does not depend on strides.

    Example:
        >>> import torch, primitives as pr
        >>> _ = torch.manual_seed(0)
        >>> pr.functional.dropout(torch.ones(6), p=0.25).unique()
        tensor([0.0000, 1.3333])

    References:
        Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", JMLR 15, 2014.
    """
    arguments.probability("dropout", p)

    def check(label: str, x: Tensor) -> None:
        arguments.dropout(label, x, inplace=inplace and training)

    def compute(x: Tensor) -> Tensor:
        # Where nothing is left to chance, torch draws nothing either.
        if not training or p == 0.0 or x.numel() == 0:
            return x
        seed = (
            torch.zeros((), dtype=torch.int64, device=x.device)
            if p == 1.0
            else torch.randint(MAX_SEED, (), device=x.device)
        )
        y = dropout_p(x, seed, None, float(p), 0)
        return x.copy_(y) if inplace else y

    return map_tensors("dropout", check, compute, input, {}, namespace=namespace)
