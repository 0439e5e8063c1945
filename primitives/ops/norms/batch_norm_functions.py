"""Batch norm, of tensors and pytrees: evaluation, or a training step whose momentum may be a tensor."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from primitives._core import Primitive
from primitives._core.trees.leaves import map_tensors
from primitives._core.typing import Prefix, PyTree
from primitives._core.write_back import write_back
from primitives._repair.nodes import recorded
from primitives._repair.plain import is_plain_on_cpu
from primitives.ops import arguments
from primitives.ops.norms.batch_norm import batch_norm_p
from primitives.ops.norms.batch_norm_eval import batch_norm_eval_p
from primitives.ops.norms.batch_norm_relu import batch_norm_relu_eval_p, batch_norm_relu_p
from primitives.ops.norms.channels import ChannelOptions
from primitives.ops.rules import weight_beside


def batch_norm_of_tensors(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, momentum: float | Tensor, eps: float, *, in_place: bool, relu: bool = False,
    residual: Tensor | None = None,
) -> tuple[Any, Tensor | None, Tensor | None]:  # fmt: skip
    """The normalized `x`, and the running statistics after this batch; `in_place` also writes these.

    Arguments are those of `batch_norm`; with `relu` a `residual` is added, if it is not None, and a ReLU follows.
    """
    train, evaluate = (batch_norm_relu_p, batch_norm_relu_eval_p) if relu else (batch_norm_p, batch_norm_eval_p)
    given = (x, residual, weight, bias) if relu else (x, weight, bias)
    if not training and running_mean is not None:
        return evaluate(*given, running_mean, running_var, *ChannelOptions(eps)), running_mean, running_var
    # In evaluation, only what has no elements has no statistics.
    if running_mean is None or running_var is None:
        return train(*given, None, None, 0.0, *ChannelOptions(eps))[0], None, None
    if isinstance(momentum, torch.Tensor):
        y, new_mean, new_var = _blended(train, given, running_mean, running_var, momentum, eps)
    else:
        y, _, _, new_mean, new_var = train(*given, running_mean, running_var, momentum, *ChannelOptions(eps))
    if in_place:
        write_back([running_mean, running_var], [new_mean, new_var])
    return y, new_mean, new_var


def _is_torchs(x: Any, mean: Any, var: Any, weight: Any, bias: Any, training: Any, momentum: Any, eps: Any) -> bool:
    """Whether torch's own kernel computes this: it differentiates no statistics, and a mode may see what is written."""
    if not (type(eps) is float and type(momentum) is float and is_plain_on_cpu(x, mean, var, weight, bias)):
        return False
    if (mean is None) != (var is None) or (mean is not None and (mean.requires_grad or var.requires_grad)):
        return False
    is_enough = eps > 0.0 and x.shape[0] > 1 if training else mean is not None
    is_unseen = torch._C._len_torch_function_stack() == 0
    return is_enough and is_unseen and x.is_contiguous() and x.dim() > 1 and x.numel() > 0


def _blended(
    train: Primitive, given: tuple[Any, ...], running_mean: Tensor, running_var: Tensor, momentum: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A training step with a tensor for `momentum`: the normalized `x`, and the new running statistics."""
    x = given[0]
    # The operator takes a Python number. Moved all the way from zero, a running statistic is that of the batch.
    dtype = torch.float32 if x.dtype in arguments.LOW_PRECISION else x.dtype
    zeros = [torch.zeros_like(running, dtype=dtype) for running in (running_mean, running_var)]
    y, _, _, batch_mean, batch_var = train(*given, *zeros, 1.0, *ChannelOptions(eps))
    if x.numel() == 0:
        return y, running_mean.clone(), running_var.clone()
    momentum = momentum.detach()
    blended = [
        (momentum * batch + (1 - momentum) * running).to(running.dtype).detach()
        for batch, running in ((batch_mean, running_mean), (batch_var, running_var))
    ]
    return y, blended[0], blended[1]


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
    return batch_norm_tree("pure_batch_norm", given, namespace, in_place=False)


def batch_norm_tree(
    name: str, given: tuple, namespace: str = "", residual: Any = None, *, in_place: bool = True
) -> BatchNormOutput:
    """The function of this name over a pytree; `in_place`, new running statistics are written too."""
    input, running_mean, running_var, weight, bias, training, momentum, eps = given
    is_of_samples = name == "instance_norm"
    arguments.number(name, "momentum", momentum) if is_of_samples else arguments.momentum(name, momentum)
    arguments.number(name, "eps", eps)
    if training:
        arguments.positive_eps(name, eps)

    check = functools.partial(arguments.batch_norm, name, training=training, writes=in_place and training)

    def compute(x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, residual: Any) -> tuple[Any, ...]:
        weight = weight_beside(bias, weight, x)
        if is_of_samples and training:
            return _of_samples(x, mean, var, weight, bias, momentum, eps, in_place=in_place)
        # An empty tensor of one axis has the channels of what comes with it.
        rows = x.reshape(0, arguments.channels_of_nothing(mean, weight, bias)) if x.dim() == 1 else x
        residual = None if residual is None else residual.reshape(rows.shape)
        last = {"in_place": in_place, "relu": name == "batch_norm_relu", "residual": residual}
        y, mean, var = batch_norm_of_tensors(rows, mean, var, weight, bias, training, momentum, eps, **last)
        return y.reshape(x.shape) if x.dim() == 1 else y, mean, var

    prefixes = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    prefixes["residual"] = residual
    trees = map_tensors(name, check, compute, input, prefixes, namespace=namespace, num_results=3)
    return BatchNormOutput(*trees)


def _of_samples(
    x: Tensor, mean: Any, var: Any, weight: Any, bias: Any, momentum: float, eps: float, *, in_place: bool
) -> tuple[Any, ...]:
    """Batch norm in which every channel of every sample is a channel, and the mean of its statistics over samples."""
    samples, channels = x.shape[:2]
    each: Any = [None if p is None else p.repeat(samples) for p in (mean, var, weight, bias)]
    flat = x.reshape(1, samples * channels, math.prod(x.shape[2:]))
    found: Any = batch_norm_of_tensors(flat, *each, training=True, momentum=momentum, eps=eps, in_place=False)
    y, *moved = found
    if samples and mean is not None:
        moved = [value.reshape(samples, channels).mean(0) for value in moved]
        if in_place:
            write_back([mean, var], moved)
    return in_shape(y, x), *(moved if samples else (mean, var))


def in_shape(y: Tensor, x: Tensor) -> Tensor:
    """`y`, for its one owner, in the shape of `x`: not as a view, which `ReLU(inplace=True)` may not write to."""
    if torch.jit.is_tracing():
        # Its tracer takes the sizes of an operator's call for constants.
        return y.reshape(x.shape)
    return torch.ops.aten._unsafe_view(y, x.shape)


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
    if _is_torchs(*given):
        options: Any = weight, bias, running_mean, running_var, training, momentum, eps, False
        try:
            return cast("PyTree", recorded(torch.batch_norm(cast("Tensor", input), *options)))
        except RuntimeError:
            pass  # A check of this package says what is wrong.
    return batch_norm_tree("batch_norm", given, namespace).output


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
    return batch_norm_tree("batch_norm_relu", given, namespace, residual).output
