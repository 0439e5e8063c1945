r"""Cross-entropy of rows of logits x with class labels, or with probabilities of the classes.

With t = (1 - smoothing) * target + smoothing / C, where a label stands for the probability 1 of its class,

    lse = log(sum(exp(x))),      loss = lse * sum(t) - sum(t * x)

    p = exp(x - lse),      a = loss_bar * sum(t) + lse_bar

    jvp   m = sum(p * x_dot)
          lse_dot = m,      loss_dot = m * sum(t) + lse * sum(t_dot) - sum(t * x_dot + t_dot * x)
    vjp   x_bar = a * p - loss_bar * t,      target_bar = (1 - smoothing) * loss_bar * (lse - x)

Second order. Both first-order operators are partial derivatives of one scalar, the pairing of cotangents with tangents,

    L = loss_bar * loss_dot + lse_bar * lse_dot

of which dL/d(x_dot) = x_bar, dL/d(target_dot) = target_bar, and dL/d(loss_bar), dL/d(lse_bar) are the tangents. The
rest is symmetric in x: with t_dot = (1 - smoothing) * target_dot,

    dL/dx = p * (a * (x_dot - m) + loss_bar * sum(t_dot)) - loss_bar * t_dot
    dL/d(target) = (1 - smoothing) * loss_bar * (m - x_dot)

which are also what the tangents of x and of the target add to those of x_bar and target_bar. So one operator serves
both: `cross_entropy_bwd_jvp_p`, the jvp of the backward, is dL/dx and dL/d(target) where the cotangents have no
tangent. Third and higher orders, and the jvp of a jvp, differentiate the references.

All sums run over the classes. Reverse mode keeps x, target and lse, one number a row: probabilities of classes are
never in memory. A z-loss is a function of lse, and a weight of a labeled row one of loss, both outside of here.

Shapes: x `[*, C, *]` with the classes along `dim`; target is like x, of any floating dtype, or int64 without that axis:
a label that is negative ignores its row, whose loss is 0. Loss and lse lack that axis; they are float32, or float64 for
float64 x, in which all sums are taken.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from primitives._core import Primitive, value_and_jvp
from primitives._core.errors import LabelError
from primitives.ops.axes import Axes, def_axes
from primitives.ops.rules import (
    accumulation_dtype,
    bind_family,
    define,
    derivatives,
    empty_output,
    second_order,
)

cross_entropy_p = Primitive(
    "cross_entropy",
    "(Tensor x, Tensor target, int dim, float smoothing) -> (Tensor loss, Tensor lse)",
    residuals=("x", "target", "lse"),
)
cross_entropy_bwd_p, cross_entropy_jvp_p, cross_entropy_bwd_jvp_p = derivatives(
    cross_entropy_p, "x target lse", "x target", "int dim, float smoothing", second="x target"
)
cross_entropy_fwd_jvp_p = value_and_jvp(cross_entropy_p, cross_entropy_jvp_p)


class _Terms:
    """Common parts of the formulas, in the dtype of sums; of one number a row, the axis of the classes stays.

    Args:
        x: The logits.
        target: Labels or probabilities.
        dim: The axis of the classes.
        smoothing: Of the target.
        lse: As a value, which no derivative goes through; without it all is a function of x.

    Attributes:
        lse: Of each row.
        has_labels: Whether the target are labels.
        kept: Which rows count; all do without labels, and nothing says so.
    """

    def __init__(self, x: Tensor, target: Tensor, dim: int, smoothing: float, lse: Tensor | None = None) -> None:
        acc = accumulation_dtype(x.dtype)
        self.dim, self.smoothing, self.count = dim, smoothing, x.shape[dim]
        self.shifted = x.contiguous().to(acc)
        if lse is None:
            # No derivative goes through the maximum: the results are the same whatever is subtracted first.
            top = self.shifted.detach().amax(dim, keepdim=True)
            self.shifted = self.shifted - top
            self.log_sum = self.shifted.exp().sum(dim, keepdim=True).log()
            self.lse = self.log_sum + top
        else:
            self.lse = self.log_sum = lse.unsqueeze(dim)
        self.has_labels, self.kept = not target.is_floating_point(), None
        if self.has_labels:
            self.target = target.contiguous().unsqueeze(dim)
            self.kept = self.target >= 0
        else:
            self.target = target.contiguous().to(acc)

    @functools.cached_property
    def log_p(self) -> Tensor:
        """The logarithm of p."""
        return self.shifted - self.log_sum

    def probabilities(self) -> Tensor:
        """The p, in memory of their own."""
        return self.log_p.exp()

    def times(self, x: Tensor, factor: Any) -> Tensor:
        """`x * factor`, where x is needed no more."""
        return x * factor

    @functools.cached_property
    def _is_target(self) -> Tensor:
        classes = torch.arange(self.count, device=self.target.device)
        return self.target == classes.reshape([-1, *[1] * (self.target.dim() - self.dim - 1)])

    def _with_target(self, v: Tensor) -> Tensor:
        """Sum of target * v; a class of probability 0 adds nothing by its label, whatever v is there."""
        product = torch.where(self._is_target, v, 0.0) if self.has_labels else self.target * v
        return product.sum(self.dim, keepdim=True)

    def dot(self, v: Tensor) -> Tensor:
        """Sum of t * v."""
        total = (1.0 - self.smoothing) * self._with_target(v)
        return total + self.smoothing / self.count * v.sum(self.dim, keepdim=True) if self.smoothing else total

    def of_target(self, factor: Any) -> Any:
        """The product of `factor` and the sum of t; of rows with labels, which are kept, that is 1."""
        if self.has_labels:
            # A product by the number 1 is a tensor that no compiler has seen, below three levels of forward mode.
            return factor
        return factor * ((1.0 - self.smoothing) * self.target.sum(self.dim, keepdim=True) + self.smoothing)

    def less_target(self, total: Tensor, factor: Any) -> Tensor:
        """`total - factor * t`."""
        share = self.smoothing / self.count
        if self.has_labels:
            return total - torch.where(self._is_target, (1.0 - self.smoothing + share) * factor, share * factor)
        return total - factor * ((1.0 - self.smoothing) * self.target + share)

    def per_row(self, bar: Tensor | None, *, of_loss: bool) -> Tensor | float:
        """A cotangent of loss or of lse, or a tangent of one, beside the classes; that of an ignored loss is 0."""
        if bar is None:
            return 0.0
        bar = bar.contiguous().to(self.lse.dtype).unsqueeze(self.dim)
        return torch.where(self.kept, bar, 0.0) if of_loss and self.kept is not None else bar


class _Gathered(_Terms):
    """Terms beside labels as values: no class is compared with a label, and what is needed no more is written over."""

    def probabilities(self) -> Tensor:
        return (self.shifted - self.log_sum).exp_()

    def times(self, x: Tensor, factor: Any) -> Tensor:
        return x.mul_(factor)

    def _with_target(self, v: Tensor) -> Tensor:
        return v.gather(self.dim, self.target.clamp(min=0))

    def less_target(self, total: Tensor, factor: Any) -> Tensor:
        total = total.sub_(self.smoothing / self.count * factor) if self.smoothing else total
        return total.scatter_add_(self.dim, self.target.clamp(min=0), (self.smoothing - 1.0) * factor)


def _terms(call: Any) -> _Terms:
    """All functions of x."""
    return _Terms(call.x, call.target, call.dim, call.smoothing)


def _terms_on_cpu(call: Any) -> _Terms | None:
    """Values, by lse where it is at hand."""
    kind = _Terms if call.target.is_floating_point() else _Gathered
    return kind(call.x, call.target, call.dim, call.smoothing, getattr(call, "lse", None)) if call.x.numel() else None


def _value(terms: _Terms, call: Any) -> tuple[Tensor, Tensor]:
    loss = terms.of_target(terms.log_sum) - terms.dot(terms.shifted)
    if terms.kept is not None:
        loss = torch.where(terms.kept, loss, 0.0)
    return loss.squeeze(call.dim), terms.lse.squeeze(call.dim)


def _cotangents(terms: _Terms, call: Any) -> tuple[Tensor, Tensor]:
    u, v = terms.per_row(call.loss_bar, of_loss=True), terms.per_row(call.lse_bar, of_loss=False)
    x_bar, target_bar = empty_output(call.x), empty_output(call.x)
    if call.output_mask[0]:
        x_bar = terms.times(terms.probabilities(), terms.of_target(u) + v)
        x_bar = (x_bar if call.loss_bar is None else terms.less_target(x_bar, u)).to(call.x.dtype)
    if call.output_mask[1] and not terms.has_labels:
        target_bar = ((call.smoothing - 1.0) * u * terms.log_p).to(call.target.dtype)
    return x_bar, target_bar


def _tangents(terms: _Terms, call: Any) -> tuple[Tensor, Tensor]:
    loss_dot = lse_dot = torch.zeros_like(terms.lse)
    if call.x_dot is not None:
        x_dot = call.x_dot.contiguous().to(terms.lse.dtype)
        lse_dot = terms.times(terms.probabilities(), x_dot).sum(call.dim, keepdim=True)
        loss_dot = terms.of_target(lse_dot) - terms.dot(x_dot)
        if terms.kept is not None:
            loss_dot = torch.where(terms.kept, loss_dot, 0.0)
    if call.target_dot is not None:
        target_dot = call.target_dot.contiguous().to(terms.lse.dtype)
        loss_dot = loss_dot + (call.smoothing - 1.0) * (target_dot * terms.log_p).sum(call.dim, keepdim=True)
    return loss_dot.squeeze(call.dim).contiguous(), lse_dot.squeeze(call.dim).clone()


def _tangents_of_cotangents(terms: _Terms, call: Any) -> tuple[Tensor, Tensor]:
    given = (call.loss_bar, call.lse_bar, call.loss_bar_dot, call.lse_bar_dot)
    u, v, u_dot, v_dot = (terms.per_row(bar, of_loss=i % 2 == 0) for i, bar in enumerate(given))
    p, keep, change, target_change = terms.probabilities(), 1.0 - call.smoothing, None, empty_output(call.x)
    wants_target = call.output_mask[1] and not terms.has_labels
    if wants_target:
        target_change = -keep * u_dot * terms.log_p
    a_dot = terms.of_target(u_dot) + v_dot
    if call.x_dot is not None:
        x_dot = call.x_dot.contiguous().to(p.dtype)
        centered = x_dot - (p * x_dot).sum(call.dim, keepdim=True)
        if wants_target:
            target_change = target_change - keep * u * centered
        change = terms.times(centered, terms.of_target(u) + v)
    change = terms.times(p, a_dot if change is None else change + a_dot)
    if call.loss_bar_dot is not None:
        change = terms.less_target(change, u_dot)
    if call.target_dot is not None:
        t_dot = keep * call.target_dot.contiguous().to(p.dtype)
        change = change + u * (p * t_dot.sum(call.dim, keepdim=True) - t_dot)
    return (
        change.to(call.x.dtype) if call.output_mask[0] else empty_output(call.x),
        target_change.to(call.target.dtype) if wants_target else empty_output(call.x),
    )


for _op, _formula in (
    (cross_entropy_p, _value),
    (cross_entropy_bwd_p, _cotangents),
    (cross_entropy_jvp_p, _tangents),
    (cross_entropy_bwd_jvp_p, _tangents_of_cotangents),
):
    define(_op, _formula, _terms, _terms_on_cpu)
second_order(cross_entropy_bwd_p, cross_entropy_jvp_p, cross_entropy_bwd_jvp_p)


# Kernels, and axes.

_ops = (cross_entropy_p, cross_entropy_bwd_p, cross_entropy_jvp_p, cross_entropy_fwd_jvp_p, cross_entropy_bwd_jvp_p)
bind_family("losses.cross_entropy", "cross_entropy", *_ops)
_AXES = "x: *before classes *after, target: *before classes? *after, loss lse: *before *after"
def_axes(Axes(_AXES, "before after", can_compose=True), *_ops)


# Not among the primitives, whose kernels are Triton's: it has integers alone, one a row, and no derivative.
class_labels_p = Primitive(
    "class_labels",
    "(Tensor target, int num_classes, int ignore_index, str function) -> Tensor labels",
    namespace="primitives_composed",
    decomposable=True,
)


@class_labels_p.def_reference
def _class_labels_reference(target: Tensor, num_classes: int, ignore_index: int, function: str) -> Tensor:
    return torch.where(target == ignore_index, -1, target.to(torch.int64))


def _are_labels(target: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    return (((target >= 0) & (target < num_classes)) | (target == ignore_index)).all()


@class_labels_p.def_kernel("cpu")
def _class_labels_on_cpu(target: Tensor, num_classes: int, ignore_index: int, function: str) -> Tensor:
    if not _are_labels(target, num_classes, ignore_index).item():
        wrong = target[(target != ignore_index) & ((target < 0) | (target >= num_classes))]
        raise LabelError(
            f"{function}: target must have class indices in [0, {num_classes - 1}] or ignore_index={ignore_index}, "
            f"got {wrong[0].item()}."
        )
    return _class_labels_reference(target, num_classes, ignore_index, function)


@class_labels_p.def_kernel("cuda")
def _class_labels_on_a_gpu(target: Tensor, num_classes: int, ignore_index: int, function: str) -> Tensor:
    # Without waiting for the device, as torch does.
    is_right = _are_labels(target, num_classes, ignore_index)
    torch._assert_async(is_right, f"{function}: target must have class indices in [0, {num_classes - 1}].")
    return _class_labels_reference(target, num_classes, ignore_index, function)


def_axes(Axes("target labels: *all", "all"), class_labels_p)
