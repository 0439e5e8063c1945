"""The losses of the functional API over classes: what surrounds the primitives are numbers of rows, in plain torch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import _reduction
from torch.nn import functional as of_torch

from primitives._core.trees.leaves import map_tensors
from primitives._core.typing import Prefix, PyTree
from primitives._repair.plain import is_plain_on_cpu
from primitives.ops.arguments import LOW_PRECISION
from primitives.ops.losses import checks
from primitives.ops.losses.cross_entropy import class_labels_p, cross_entropy_p
from primitives.ops.losses.linear_cross_entropy import linear_cross_entropy_p
from primitives.ops.rules import accumulation_dtype

# Loss and lse of each row, of a target and its smoothing.
_Losses = Callable[[Tensor, float], tuple[Tensor, Tensor]]


def cross_entropy(
    input: PyTree,
    target: Prefix,
    weight: Prefix | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    namespace: str = "",
) -> PyTree:
    r"""Cross-entropy of logits with class indices or with probabilities of the classes.

    $$ \ell = \log \sum_c \exp(x_c) \sum_c t_c - \sum_c t_c \, x_c + z \left( \log \sum_c \exp(x_c) \right)^2 $$

    Here `t` is the target, `(1 - label_smoothing) * target + label_smoothing / C`, times `weight`; an index stands for
    the probability 1 of its class, which is weighted by itself, as in torch.

    Args:
        input: Logits of shape `[C]` or `[N, C, *]`, float16, bfloat16, float32 or float64, any strides; or a pytree of
            such tensors, each of which gives a loss of its own.
        target: Class indices of shape `[]` or `[N, *]`, of an integer dtype, or probabilities of the shape of `input`,
            of any floating dtype. For a pytree `input`, a tensor or a tree prefix of it; `weight` likewise.
        weight: Weights of the classes, shape `[C]`, dtype of `input`, or float32 for float16 and bfloat16 `input`.
        size_average: As torch's: deprecated, see `reduction`.
        ignore_index: A class index whose rows have no loss and no gradient; it need not be that of a class. One of a
            class does not go with probabilities.
        reduce: As torch's: deprecated, see `reduction`.
        reduction: `"none"`, `"sum"`, or `"mean"`, which divides by the sum of the weights of the rows that are not
            ignored, or for probabilities by the number of rows.
        label_smoothing: Share of the target that is spread over all classes.
        z_loss: Factor of the squared logarithm of the sum, which keeps logits from drifting; not weighted.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        The loss, of shape `[]`, or that of the class indices with `reduction="none"`; in the dtype of `input` (of the
        widest of `input`, probabilities and their weight), in float32 under autocast. NaN for `"mean"` where all rows
        are ignored.

    Raises:
        ShapeError: If shapes do not go together.
        DtypeError: If a dtype is not one of the above.
        DeviceError: If the tensors are on different devices.
        LabelError: If a class index is out of range, on the CPU; on a GPU, which runs behind, a device
            assertion fails.
        ValueError: If `reduction` or `label_smoothing` is not one of the above.
        TreeError: If `target` or `weight` is not a prefix of the tree `input`.

    Derivatives:
        Forward and reverse mode, to any order, in `input`, in `weight` and in probabilities. Reverse mode keeps
        `input`, `target` and one number a row.

    Numerics:
        Accumulated in float32, in float64 for float64 `input`, with the maximum subtracted before exponentiation.
        Logits in half precision are never copied to float32. A class of logit `-inf` has probability 0; a row that is
        all `-inf`, or has `+inf` or NaN in it, gives NaN.

    Example:
        >>> import torch, primitives as pr
        >>> pr.functional.cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]))
        tensor(1.3863)

    References:
        Szegedy et al., "Rethinking the Inception architecture for computer vision", 2015 (label smoothing);
        Chowdhery et al., "PaLM", arXiv:2204.02311, 2022 (z-loss).
    """
    reduction = _by_legacy(reduction, size_average, reduce)
    checks.options("cross_entropy", reduction, ignore_index, label_smoothing, z_loss)
    if not z_loss and _is_left_to_torch(input, target, weight):
        # Else a check of this package says what is wrong.
        with contextlib.suppress(RuntimeError, IndexError, ValueError):
            options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
            return cast("PyTree", of_torch.cross_entropy(cast("Any", input), target, weight, **options))

    check = functools.partial(checks.loss, "cross_entropy", takes_probabilities=True, ignore_index=ignore_index)

    def compute(x: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        axis, shape, options = checks.class_axis(x), tuple(x.shape), (weight, label_smoothing, z_loss)
        has_probabilities = checks.has_probabilities(shape, target)
        if not axis:
            # Rows with an axis: of the product of a number and a tensor without one, torch makes float64 tangents.
            return compute(
                x.unsqueeze(0), target.unsqueeze(0) if has_probabilities else target.reshape(1), weight
            ).reshape(())
        dtype = _promoted(x, target, weight) if has_probabilities else x.dtype
        wide = x.double() if dtype == torch.float64 else x

        def losses(target: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
            return cross_entropy_p(wide, target, axis, smoothing)

        if not has_probabilities:
            labels = _labels("cross_entropy", x, target, ignore_index)
            rows, total = _of_labels(losses, shape, labels, *options) if shape[axis] else (x.sum(axis), 0)
        elif shape[axis]:
            rows, total = _of_probabilities(losses, shape, target, *options)
        else:
            each = target if weight is None else target * _per_class(weight, shape)
            rows, total = (wide * each).sum(axis), 0
        return _in_result_dtype(_reduced(rows, total, reduction), dtype)

    prefixes = {"target": target, "weight": weight}
    return map_tensors("cross_entropy", check, compute, input, prefixes, namespace=namespace)


def nll_loss(
    input: PyTree,
    target: Prefix,
    weight: Prefix | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    *,
    namespace: str = "",
) -> PyTree:
    r"""Negative log-likelihood of class indices: minus the entry of `input` for the class of each row, weighted.

    Args:
        input: Logarithms of probabilities, of shape `[C]` or `[N, C, *]`, float16, bfloat16, float32 or float64, any
            strides; or a pytree of such tensors, each of which gives a loss of its own.
        target: Class indices of shape `[]` or `[N, *]`, of an integer dtype. For a pytree `input`, a tensor or a tree
            prefix of it; `weight` likewise.
        weight: Weights of the classes, as for `cross_entropy`.
        size_average: As torch's: deprecated, see `reduction`.
        ignore_index: As for `cross_entropy`.
        reduce: As torch's: deprecated, see `reduction`.
        reduction: As for `cross_entropy`.
        namespace: optree namespace of custom pytree nodes.

    Returns:
        The loss, of shape `[]`, or that of `target` with `reduction="none"`, as `cross_entropy` returns it.

    Raises:
        ShapeError, DtypeError, DeviceError, LabelError, ValueError, TreeError: As `cross_entropy` does.

    Derivatives:
        Forward and reverse mode, to any order, in `input` and `weight`, of plain torch operations.

    Example:
        >>> import torch, primitives as pr
        >>> pr.functional.nll_loss(torch.tensor([[-1.0, -2.0]]), torch.tensor([1]))
        tensor(2.)
    """
    reduction = _by_legacy(reduction, size_average, reduce)
    checks.options("nll_loss", reduction, ignore_index)
    # Torch's backward takes no other layout of an image.
    if _is_left_to_torch(input, target, weight) and cast("Any", input).is_contiguous():
        with contextlib.suppress(RuntimeError, IndexError, ValueError):
            options = {"ignore_index": ignore_index, "reduction": reduction}
            return cast("PyTree", of_torch.nll_loss(cast("Any", input), target, weight, **options))

    check = functools.partial(checks.loss, "nll_loss", takes_probabilities=False)

    def compute(x: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        labels, axis = _labels("nll_loss", x, target, ignore_index), checks.class_axis(x)
        # Without a class every row is ignored.
        of_label = x.gather(axis, labels.clamp(min=0).unsqueeze(axis)).squeeze(axis) if x.shape[axis] else x.sum(axis)
        picked = of_label.to(accumulation_dtype(x.dtype))
        rows = (-picked).masked_fill(labels < 0, 0.0)
        of_rows = _row_weights(labels, weight if x.shape[axis] else None, picked.dtype)
        rows = rows if weight is None else rows * of_rows
        return _in_result_dtype(_reduced(rows, of_rows.sum(), reduction), x.dtype)

    prefixes = {"target": target, "weight": weight}
    return map_tensors("nll_loss", check, compute, input, prefixes, namespace=namespace)


def _is_left_to_torch(x: Any, target: Any, weight: Any) -> bool:
    """Whether torch's own loss is taken: of labels, without a gradient of class weights, which torch has not."""
    if not (isinstance(x, torch.Tensor) and isinstance(target, torch.Tensor) and target.dtype == torch.int64):
        return False
    if weight is not None and not (isinstance(weight, torch.Tensor) and not weight.requires_grad):
        return False
    return x.dim() > 1 and x.numel() > 0 and is_plain_on_cpu(x, target, weight)


def _by_legacy(reduction: str, size_average: bool | None, reduce: bool | None) -> str:
    """The reduction that torch's deprecated arguments stand for, with torch's warning."""
    if size_average is None and reduce is None:
        return reduction
    return _reduction.legacy_get_string(size_average, reduce)


def _in_result_dtype(loss: Tensor, dtype: torch.dtype) -> Tensor:
    """`loss` in `dtype`, or in float32 where torch's autocast runs losses in it."""
    if dtype in LOW_PRECISION and torch.is_autocast_enabled(loss.device.type):
        dtype = torch.float32
    # Subclasses of tensors (PINA's LabelTensor) may override `to`, which torch's own losses never call.
    return loss if loss.dtype == dtype else loss.to(dtype)


def _promoted(x: Tensor, target: Tensor, weight: Tensor | None) -> torch.dtype:
    """The dtype of a loss of probabilities."""
    dtype = torch.promote_types(x.dtype, target.dtype)
    return dtype if weight is None else torch.promote_types(dtype, weight.dtype)


def _labels(function: str, x: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Class indices in int64, -1 where they are ignored; errors name the function."""
    # Torch takes one label in a list of one for logits without a batch.
    target = target.reshape(()) if x.dim() == 1 else target
    return class_labels_p(target, x.shape[checks.class_axis(x)], ignore_index, function)


def _row_weights(labels: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight of each row, that of its class; 0 where it is ignored."""
    if weight is None:
        return (labels >= 0).to(dtype)
    found = weight.to(dtype).gather(0, labels.clamp(min=0).flatten())
    return found.reshape(labels.shape).masked_fill(labels < 0, 0.0)


def _per_class(weight: Tensor, shape: Sequence[int]) -> Tensor:
    """Weights of the classes beside logits of this shape."""
    return weight.reshape([-1, *[1] * (len(shape) - 1 - min(len(shape) - 1, 1))])


def _of_labels(
    losses: _Losses, shape: Sequence[int], labels: Tensor, weight: Tensor | None, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """The loss of each row of logits of this shape, and the sum of the weights of all."""
    rows, lse = losses(labels, smoothing if weight is None else 0.0)
    of_rows = _row_weights(labels, weight, rows.dtype)
    if weight is not None:
        rows = (1.0 - smoothing) * of_rows * rows
        if smoothing:
            # The share of all classes is one target, which is repeated in no memory.
            shares = smoothing / weight.shape[0] * _per_class(weight.to(rows.dtype), shape)
            rows = rows + losses(shares.expand(shape), 0.0)[0].masked_fill(labels < 0, 0.0)
    if z_loss:
        rows = torch.add(rows, lse.square().masked_fill(labels < 0, 0.0), alpha=z_loss)
    return rows, of_rows.sum()


def _of_probabilities(
    losses: _Losses, shape: Sequence[int], target: Tensor, weight: Tensor | None, smoothing: float, z_loss: float
) -> tuple[Tensor, int]:
    """The loss of each row of logits of this shape, and their number."""
    if weight is not None:
        target = (1.0 - smoothing) * target + smoothing / weight.shape[0]
        target, smoothing = target * _per_class(weight, shape), 0.0
    rows, lse = losses(target, smoothing)
    return torch.add(rows, lse.square(), alpha=z_loss) if z_loss else rows, rows.numel()


def _reduced(rows: Tensor, total: Tensor | int, reduction: str) -> Tensor:
    if reduction == "none":
        return rows
    return rows.sum() if reduction == "sum" else rows.sum() / total


# The most logits of a chunk that is not asked for: 256 MiB in half precision, and many rows beside any vocabulary.
_CHUNK_ELEMENTS = 2**27


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    shift: bool = False,
    chunk_rows: int | None = None,
) -> Tensor:
    r"""`cross_entropy` of the logits `input linear_weight^T + linear_bias`, which are never in memory as a whole.

    They are made by chunks of rows, and again for each derivative.

    Args:
        input: Shape `[D]` or `[*, D]`, float16, bfloat16, float32 or float64.
        linear_weight: Shape `[C, D]`, or `[C, *, D]` for `input` of one or two axes; dtype of `input`.
        target: Class indices, of an integer dtype, or probabilities, as `cross_entropy` takes them for logits of shape
            `[C]`, `[N, C]` or `[N, C, *]`. For `input` of more than two axes, class indices of shape `[*]`.
        linear_bias: Shape `[C]`, or `[C, *]`; dtype of `input`.
        weight: As for `cross_entropy`.
        reduction: Likewise.
        ignore_index: Likewise; `None` means -100. With probabilities it must be `None`.
        label_smoothing: Likewise.
        z_loss: Likewise.
        softcap: Bounds the logits: `softcap * tanh(logits / softcap)`. `None` leaves them as they are.
        shift: Whether a row of `input` is held to the next label along the last axis of class indices, as tokens of a
            language model are; the last row of each has none.
        chunk_rows: Rows of a chunk. `None` takes those of at most 2**27 logits.

    Returns:
        The loss, as `cross_entropy` returns it.

    Raises:
        ShapeError, DtypeError, DeviceError, LabelError, ValueError: As `cross_entropy` does.

    Derivatives:
        Forward and reverse mode, to any order, in `input`, `linear_weight`, `linear_bias`, `weight` and probabilities.
        Kept are the arguments and one number a row; to the second order, no derivative holds more than a few tensors of
        the size of a chunk, the third order those of all chunks.

    Numerics:
        Logits are rounded to the dtype of `input`, as a linear layer rounds them. The cotangent of `linear_weight` is
        added up over the chunks in its own dtype.

    Example:
        >>> import torch, primitives as pr
        >>> hidden, weight, labels = torch.zeros(3, 2), torch.ones(4, 2), torch.tensor([0, 1, 3])
        >>> pr.functional.linear_cross_entropy(hidden, weight, labels, chunk_rows=2)
        tensor(1.3863)

    References:
        Wijmans et al., "Cut your losses in large-vocabulary language models", arXiv:2411.09009, 2024.
    """
    is_default, ignore_index = ignore_index is None, -100 if ignore_index is None else ignore_index
    checks.options("linear_cross_entropy", reduction, ignore_index, label_smoothing, z_loss)
    shape = checks.linear_loss(input, linear_weight, target, linear_bias, weight, shift=shift)
    checks.linear_options(softcap, chunk_rows)
    # Labels of one token each have the shape of probabilities of one class.
    flat = target.flatten() if input.dim() > 2 else target
    if not is_default:
        checks.class_indices("linear_cross_entropy", shape, flat)
    x, rest = (input if input.dim() > 1 else input.unsqueeze(0)).flatten(0, -2), tuple(linear_weight.shape[1:-1])
    of_rows = (x.shape[0], linear_weight.shape[0], *rest)
    most = max(_CHUNK_ELEMENTS // max(linear_weight.shape[:-1].numel(), 1), 1)
    # Not those of x alone: a batch adds rows.
    rows_at_once = chunk_rows or most

    def losses(target: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
        return linear_cross_entropy_p(x, linear_weight, linear_bias, target, softcap or 0.0, smoothing, rows_at_once)

    options = (weight, label_smoothing, z_loss)
    if checks.has_probabilities(shape, flat):
        rows, total = _of_probabilities(losses, of_rows, target.reshape(of_rows), *options)
        dtype = _promoted(input, target, weight)
    else:
        if shift:
            target = torch.cat([target[..., 1:], torch.full_like(target[..., :1], ignore_index)], -1)
        labels = class_labels_p(target.reshape(of_rows[0], *rest), of_rows[1], ignore_index, "linear_cross_entropy")
        rows, total = _of_labels(losses, of_rows, labels, *options)
        dtype = input.dtype
    rows = rows.reshape((*input.shape[:-1], *rest))
    return _in_result_dtype(_reduced(rows, total, reduction), dtype)
