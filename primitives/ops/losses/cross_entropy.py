r"""Cross-entropy of rows of logits x with class labels, or with probabilities of the classes.

With t = (1 - smoothing) * target + smoothing / C, where a label stands for the probability 1 of its class,

    lse = log(sum(exp(x))),      loss = lse * sum(t) - sum(t * x)

    p = exp(x - lse),      a = loss_bar * sum(t) + lse_bar

    jvp   m = sum(p * x_dot)
          lse_dot = m,      loss_dot = m * sum(t) + lse * sum(t_dot) - sum(t * x_dot + t_dot * x)
    vjp   x_bar = a * p - loss_bar * t,      target_bar = (1 - smoothing) * loss_bar * (lse - x)

All sums run over the classes. Reverse mode keeps x, target and lse, one number a row: probabilities of classes are
never in memory. A z-loss is a function of lse, and a weight of a labeled row one of loss, both outside of here.

Shapes: x `[*, C, *]` with the classes along `dim`; target is like x, of any floating dtype, or int64 without that axis:
a label that is negative ignores its row, whose loss is 0. Loss and lse lack that axis; they are float32, or float64 for
float64 x, in which all sums are taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from primitives._core import LabelError, Primitive, value_and_jvp
from primitives.ops.losses import cpu_cross_entropy as cpu
from primitives.ops.rules import accumulation_dtype, batch_all, bind_kernels, empty_output, first_order

if TYPE_CHECKING:
    from torch import Tensor

cross_entropy_p = Primitive(
    "cross_entropy",
    "(Tensor x, Tensor target, int dim, float smoothing) -> (Tensor loss, Tensor lse)",
    residuals=("x", "target", "lse"),
)
cross_entropy_bwd_p = Primitive(
    "cross_entropy_bwd",
    "(Tensor? loss_bar, Tensor? lse_bar, Tensor x, Tensor target, Tensor lse, int dim, float smoothing, bool[] wanted)"
    " -> (Tensor x_bar, Tensor target_bar)",
    residuals=("loss_bar", "lse_bar", "x", "target", "lse"),
    cached=("lse",),
    decomposable=True,
)
cross_entropy_jvp_p = Primitive(
    "cross_entropy_jvp",
    "(Tensor x, Tensor target, Tensor lse, Tensor? x_dot, Tensor? target_dot, int dim, float smoothing)"
    " -> (Tensor loss_dot, Tensor lse_dot)",
    residuals=("x", "target", "lse", "x_dot", "target_dot"),
    cached=("lse",),
    decomposable=True,
)
cross_entropy_fwd_jvp_p = value_and_jvp(cross_entropy_p, cross_entropy_jvp_p)


# Reference.


class Terms(NamedTuple):
    """Common parts of the formulas, in the dtype of sums; of one number a row, the axis of the classes stays.

    `shifted` is x minus the maximum of its row, `log_sum` the logarithm of the sum of its exponentials. The target is
    true in the places of labels, or probabilities. Without labels, nothing says which rows are `kept`: all are.
    """

    shifted: Tensor
    log_sum: Tensor
    lse: Tensor
    target: Tensor
    kept: Tensor | None

    @property
    def has_labels(self) -> bool:
        """Whether the target are labels."""
        return self.target.dtype == torch.bool


def terms_of(x: Tensor, target: Tensor, dim: int) -> Terms:
    """`Terms`, all functions of x."""
    acc = accumulation_dtype(x.dtype)
    x = x.contiguous().to(acc)
    # No derivative goes through the maximum: the results are the same whatever is subtracted first.
    top = x.detach().amax(dim, keepdim=True)
    shifted = x - top
    log_sum = shifted.exp().sum(dim, keepdim=True).log()
    if target.is_floating_point():
        return Terms(shifted, log_sum, log_sum + top, target.contiguous().to(acc), None)
    labels = target.contiguous().unsqueeze(dim)
    classes = torch.arange(x.shape[dim], device=x.device).reshape([-1, *[1] * (x.dim() - dim - 1)])
    return Terms(shifted, log_sum, log_sum + top, labels == classes, labels >= 0)


def dot(terms: Terms, v: Tensor, dim: int, smoothing: float) -> Tensor:
    """Sum of t * v; a class of probability 0 adds nothing by its label, whatever v is there."""
    if terms.has_labels:
        total = (1.0 - smoothing) * torch.where(terms.target, v, 0.0).sum(dim, keepdim=True)
    else:
        total = (1.0 - smoothing) * (terms.target * v).sum(dim, keepdim=True)
    return total + smoothing / v.shape[dim] * v.sum(dim, keepdim=True) if smoothing else total


def of_target(factor: Any, terms: Terms, dim: int, smoothing: float) -> Any:
    """The product of `factor` and the sum of t; of rows with labels, which are kept, that is 1."""
    if terms.has_labels:
        # A product by the number 1 is a tensor that no compiler has seen, below three levels of forward mode.
        return factor
    return factor * ((1.0 - smoothing) * terms.target.sum(dim, keepdim=True) + smoothing)


def scaled_target(factor: Tensor | float, terms: Terms, dim: int, smoothing: float) -> Tensor:
    """The product of `factor` and t."""
    share = smoothing / terms.shifted.shape[dim]
    if terms.has_labels:
        return torch.where(terms.target, (1.0 - smoothing + share) * factor, share * factor)
    return factor * ((1.0 - smoothing) * terms.target + share)


def per_row(bar: Tensor | None, terms: Terms, dim: int, *, of_loss: bool) -> Tensor | float:
    """A cotangent of loss or of lse, or a tangent of one, beside the classes; that of a loss that is ignored is 0."""
    if bar is None:
        return 0.0
    bar = bar.contiguous().to(terms.lse.dtype).unsqueeze(dim)
    return torch.where(terms.kept, bar, 0.0) if of_loss and terms.kept is not None else bar


@cross_entropy_p.def_reference
def _cross_entropy_reference(x: Tensor, target: Tensor, dim: int, smoothing: float) -> tuple[Tensor, Tensor]:
    terms = terms_of(x, target, dim)
    loss = of_target(terms.log_sum, terms, dim, smoothing) - dot(terms, terms.shifted, dim, smoothing)
    if terms.kept is not None:
        loss = torch.where(terms.kept, loss, 0.0)
    return loss.squeeze(dim), terms.lse.squeeze(dim)


@cross_entropy_bwd_p.def_reference
def _cross_entropy_bwd_reference(
    loss_bar: Tensor | None,
    lse_bar: Tensor | None,
    x: Tensor,
    target: Tensor,
    lse: Tensor,
    dim: int,
    smoothing: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor]:
    # lse is a value of x: taken from x again, so that a derivative of this function reaches it.
    terms = terms_of(x, target, dim)
    u, v = (per_row(bar, terms, dim, of_loss=i == 0) for i, bar in enumerate((loss_bar, lse_bar)))
    log_p = terms.shifted - terms.log_sum
    x_bar, target_bar = empty_output(x), empty_output(x)
    if wanted[0]:
        x_bar = (of_target(u, terms, dim, smoothing) + v) * log_p.exp()
        x_bar = (x_bar if loss_bar is None else x_bar - scaled_target(u, terms, dim, smoothing)).to(x.dtype)
    if wanted[1] and not terms.has_labels:
        target_bar = ((smoothing - 1.0) * u * log_p).to(target.dtype)
    return x_bar, target_bar


@cross_entropy_jvp_p.def_reference
def _cross_entropy_jvp_reference(
    x: Tensor,
    target: Tensor,
    lse: Tensor,
    x_dot: Tensor | None,
    target_dot: Tensor | None,
    dim: int,
    smoothing: float,
) -> tuple[Tensor, Tensor]:
    terms = terms_of(x, target, dim)
    log_p = terms.shifted - terms.log_sum
    loss_dot = lse_dot = torch.zeros_like(terms.lse)
    if x_dot is not None:
        x_dot = x_dot.contiguous().to(terms.lse.dtype)
        lse_dot = (log_p.exp() * x_dot).sum(dim, keepdim=True)
        loss_dot = of_target(lse_dot, terms, dim, smoothing) - dot(terms, x_dot, dim, smoothing)
        if terms.kept is not None:
            loss_dot = torch.where(terms.kept, loss_dot, 0.0)
    if target_dot is not None:
        target_dot = target_dot.contiguous().to(terms.lse.dtype)
        loss_dot = loss_dot + (smoothing - 1.0) * (target_dot * log_p).sum(dim, keepdim=True)
    return loss_dot.squeeze(dim).contiguous(), lse_dot.squeeze(dim).clone()


# Kernels: Triton's and those for the CPU.

bind_kernels(
    cross_entropy_p, "losses.cross_entropy", "cross_entropy_fwd", cpu.in_blocks(_cross_entropy_reference, cpu.value)
)
bind_kernels(
    cross_entropy_bwd_p,
    "losses.cross_entropy",
    "cross_entropy_bwd",
    cpu.in_blocks(_cross_entropy_bwd_reference, cpu.vjp),
)
bind_kernels(
    cross_entropy_jvp_p,
    "losses.cross_entropy",
    "cross_entropy_jvp",
    cpu.in_blocks(_cross_entropy_jvp_reference, cpu.jvp),
)
bind_kernels(cross_entropy_fwd_jvp_p, "losses.cross_entropy", "cross_entropy_fwd_jvp")


# Derivatives.

first_order(cross_entropy_p, cross_entropy_bwd_p, cross_entropy_jvp_p)


# Batching: the batch is one more axis beside that of the classes.

batch_all(cross_entropy_p, cross_entropy_bwd_p, cross_entropy_jvp_p, cross_entropy_fwd_jvp_p, counter="dim")


# Labels.

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


@class_labels_p.def_vmap
def _class_labels_vmap(batch: Any, primals: Any) -> tuple[Tensor, Any]:
    return class_labels_p(*primals), batch.axes.target
