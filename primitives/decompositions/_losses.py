"""Decompositions of ATen operators around losses, softmax and sums, differentiable in forward and reverse mode."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from primitives._core.decomposition import register_decomposition
from primitives.decompositions._norms import require
from primitives.decompositions._statistics import accumulated, constant_p, decomposes, of_part

aten = torch.ops.aten

REDUCTION_NONE, REDUCTION_MEAN = 0, 1  # as in ATen's enumeration


def _reduced(losses: Tensor, reduction: int) -> Tensor:
    if reduction == REDUCTION_NONE:
        return losses
    return losses.mean() if reduction == REDUCTION_MEAN else losses.sum()


@register_decomposition(aten.mse_loss)
def mse_loss(self: Tensor, target: Tensor, reduction: int = REDUCTION_MEAN) -> Tensor:
    """Squared error; torch's backward has no jvp where the target is a constant and the mean is taken."""
    return _reduced((self - target).square(), reduction)


@register_decomposition(aten.huber_loss)
def huber_loss(self: Tensor, target: Tensor, reduction: int = REDUCTION_MEAN, delta: float = 1.0) -> Tensor:
    """Half the squared error where that is at most `delta`, and linear beyond; torch's backward has no jvp."""
    error = self - target
    if delta <= 0 or not error.is_floating_point():
        return aten.huber_loss(self, target, reduction, delta)  # which raises
    # `e**2 / 2` within, `delta * (|e| - delta / 2)` beyond. Dynamo does not trace two `jvp` of a choice of these.
    # Where they meet `clamp` has the derivative 0 from torch 2.15 on.
    clipped = torch.where(error.abs() > delta, error.clamp(-delta, delta), error)
    return _reduced(0.5 * clipped.square() + delta * (error - clipped).abs(), reduction)


@register_decomposition(aten.soft_margin_loss)
def soft_margin_loss(self: Tensor, target: Tensor, reduction: int = REDUCTION_MEAN) -> Tensor:
    """`log(1 + exp(-x y))`; torch's backward has no jvp, and Dynamo of torch 2.11 does not trace its decomposition."""
    return _reduced((-target * self).exp().log1p(), reduction)


@decomposes(aten.multi_margin_loss)
def multi_margin_loss(c: Any) -> Tensor:
    """`max(0, margin - x[target] + x) ** p` of the other classes, by the number of all.

    The derivative at the kink is 0, as ATen has it; torch's own decomposition has 1.
    """
    x, labels = torch.atleast_2d(c.self), torch.atleast_1d(c.target)
    require(c.p in (1, 2), f"multi_margin_loss: p must be 1 or 2, got {c.p}.")
    fits = x.dim() == 2 and x.shape[1] > 0 and labels.shape == x.shape[:1]
    fits = fits and (c.weight is None or c.weight.numel() == x.shape[1])
    require(fits, f"multi_margin_loss: labels {[*c.target.shape]} or weights do not fit scores {[*c.self.shape]}.")
    labels = labels.unsqueeze(1)
    margins = (c.margin - x.gather(1, labels) + x).relu()
    margins = margins if c.p == 1 else margins.square()
    if c.weight is not None:
        margins = margins * c.weight.flatten()[labels]
    is_other = torch.arange(x.shape[1], device=x.device) != labels
    return _reduced(torch.where(is_other, margins, 0).mean(1).reshape(c.target.shape), c.reduction)


@register_decomposition(aten.multilabel_margin_loss_forward)
def multilabel_margin_loss(self: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """Loss of scores `[N, C]` or `[C]` and of the classes before the first -1 of each row, and which classes these are.

    Torch's own decomposition takes classes behind the first -1 too.
    """
    x, labels = torch.atleast_2d(self), torch.atleast_2d(target)
    counts = (labels >= 0).to(torch.int64).cumprod(1)
    labels = labels.clamp(min=0)
    is_target = torch.zeros_like(counts).scatter_add(1, labels, counts) > 0
    margins = (1 - x.gather(1, labels).unsqueeze(2) + x.unsqueeze(1)).relu()
    losses = (margins * counts.unsqueeze(2) * ~is_target.unsqueeze(1)).sum((1, 2)) / x.shape[1]
    return _reduced(losses.reshape(self.shape[:-1]), reduction), is_target.to(self.dtype).reshape(target.shape)


@register_decomposition(aten.trace)
def trace(self: Tensor) -> Tensor:
    """Sum of the diagonal of a matrix `[n, m]`."""
    if self.dim() != 2:
        raise RuntimeError(f"trace: expected a matrix, got a tensor of {self.dim()} axes.")
    return self.diagonal().sum()


@register_decomposition(aten.log_sigmoid_forward)
def log_sigmoid_forward(self: Tensor) -> tuple[Tensor, Tensor]:
    """`log(sigmoid(x)) = min(x, 0) - log(1 + exp(-|x|))`, and the buffer `exp(-|x|)` (empty on CUDA, as in ATen)."""
    # |x| by sign of x, so that the derivative at 0 is that of the formula from both sides: 1/2.
    small = torch.exp(torch.where(self < 0, self, -self))
    output = torch.where(self < 0, self, torch.zeros_like(self)) - torch.log1p(small)
    return output, self.new_zeros(0) if self.is_cuda else small


of_part(aten.log_sigmoid, aten.log_sigmoid_forward.default, 0)


@decomposes([aten.nll_loss_backward, aten.nll_loss2d_backward])
def nll_loss_backward(c: Any) -> Tensor:
    """Cotangent of the log-probabilities `self`, `[C]` or `[N, C, *]`: minus the class weight where the target is."""
    axis = 0 if c.self.dim() < 2 else 1
    grad_output = c.grad_output / c.total_weight if c.reduction == REDUCTION_MEAN else c.grad_output
    # Labels may be uint8, which neither holds a negative ignore_index nor indexes.
    target = c.target.to(torch.int64).unsqueeze(axis)
    kept = target != c.ignore_index
    picked = torch.zeros_like(c.self).scatter(axis, torch.where(kept, target, 0), -1.0)
    if c.weight is not None:
        picked = picked * c.weight.reshape([c.weight.shape[0], *[1] * (c.self.dim() - 1 - axis)])
    if 0 < grad_output.dim() < c.self.dim():
        grad_output = grad_output.unsqueeze(axis)
    return picked * torch.where(kept, grad_output, 0)


def _largest(x: Tensor, dim: Any) -> Tensor:
    """Largest numbers along `dim`, of complex ones the largest real parts."""
    return constant_p(x.real.amax(dim, keepdim=True) if x.numel() else x.real.sum(dim, keepdim=True))


@register_decomposition(aten.logsumexp)
def logsumexp(self: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """Torch writes into what its tangent saves, so that no reverse mode goes back through `forward_ad`.

    That holds for the two operators below, too.
    """
    wide = accumulated(self)
    largest = _largest(wide, dim)
    largest = torch.where(largest.isfinite(), largest, 0)
    y = ((wide - largest).exp().sum(dim, keepdim=True).log() + largest).to(self.dtype)
    return y if keepdim else y.squeeze(dim)


@register_decomposition(torch.ops.aten._softmax)
def softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Exponentials by their sum along an axis."""
    if self.is_complex():
        return torch._softmax(self, dim, half_to_float)  # which raises
    wide = accumulated(self)
    # A row with inf, or of -inf, is NaN.
    exponentials = (wide - _largest(wide, dim)).exp()
    return (exponentials / exponentials.sum(dim, keepdim=True)).to(wide.dtype if half_to_float else self.dtype)


@register_decomposition(aten._log_softmax)
def log_softmax(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Logarithm of `softmax`."""
    if self.is_complex():
        return torch._log_softmax(self, dim, half_to_float)
    wide = accumulated(self)
    return (wide - logsumexp(wide, dim, True)).to(wide.dtype if half_to_float else self.dtype)


@decomposes(aten.cosine_embedding_loss)
def cosine_embedding_loss(c: Any) -> Tensor:
    """1 - cosine for pairs of target 1, cosine above the margin for those of -1; torch's writes in place."""
    # Torch's own checks.
    torch.cosine_embedding_loss(c.input1.detach(), c.input2.detach(), c.target, c.margin, c.reduction)
    products = (c.input1 * c.input2, c.input1.square(), c.input2.square())
    dot, one, two = (product.sum(c.target.dim()) for product in products)
    cosine = dot / ((one + 1e-12) * (two + 1e-12)).sqrt()
    far = torch.where(c.target == -1, (cosine - c.margin).clamp(min=0), 0.0)
    return _reduced(torch.where(c.target == 1, 1 - cosine, far), c.reduction)


@register_decomposition(aten._log_softmax_backward_data)
def log_softmax_backward_data(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """`x_bar = y_bar - exp(y) * sum(y_bar)`."""
    return (grad_output - output.exp() * grad_output.sum(dim, keepdim=True)).to(input_dtype)


@register_decomposition(aten._softmax_backward_data)
def softmax_backward_data(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """`x_bar = y * (y_bar - sum(y * y_bar))`."""
    weighted = grad_output * output
    return (weighted - output * weighted.sum(dim, keepdim=True)).to(input_dtype)


def _root(variance: Tensor) -> Tensor:
    """Square root, whose derivatives at zero are 0, as those of torch's deviation are."""
    is_zero = variance == 0
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, variance).sqrt())


@register_decomposition(aten.std)
def std(*args: Any, **kwargs: Any) -> Tensor:
    """Standard deviation; torch's own derivative of it raises at the third order."""
    return _root(torch.var(*args, **kwargs))


@register_decomposition(aten.std_mean)
def std_mean(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Standard deviation, and the mean."""
    variance, mean = torch.var_mean(*args, **kwargs)
    return _root(variance), mean


def _linear_cross_entropy(c: Any) -> Any:
    """Cross-entropy of `input @ linear_weight.T`, which has no jvp in torch: the tangent is silently 0.

    Torch returns gradients beside a loss that is one number, for its own backward alone: here they are zeros.
    """
    wide: list[Any] = [
        None if x is None else accumulated(x) for x in (c.input, c.linear_weight, c.linear_bias, c.weight)
    ]
    x, w, bias, weight = wide
    how = {n: getattr(c, n) for n in ("reduction", "ignore_index", "label_smoothing") if n in c._fields}
    loss = F.cross_entropy(F.linear(x, w, bias), c.target, weight, **{"reduction": "none", **how})
    loss = loss.to(c.input.dtype)
    if "reduction" not in how:
        return loss
    shapes = {"input": x.shape, "linear_weight": w.shape, "linear_bias": w.shape[:-1]}
    sizes = [shape if getattr(c, f"compute_{n}_grad") else [0] * len(shape) for n, shape in shapes.items()]
    return loss, *map(c.input.new_zeros, sizes)


if importlib.util.find_spec("torch.nn.modules.linear_cross_entropy") is not None:  # torch 2.13
    # It defines them; torch imports it at the first call.
    importlib.import_module("torch.nn.modules.linear_cross_entropy")
    for _name in ("_linear_cross_entropy_batch_chunked", "_linear_cross_entropy_batch_chunked_no_reduction"):
        if hasattr(torch.ops.torch_nn, _name):
            decomposes(getattr(torch.ops.torch_nn, _name).default)(_linear_cross_entropy)
