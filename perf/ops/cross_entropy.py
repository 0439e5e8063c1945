"""Cross-entropy with labels, and with probabilities. A tensor repeated along the classes has the shape of x."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

import primitives as pr
from perf.calls import Call, Operands, randoms
from perf.ops.record import Op
from perf.ops.samples import make_samples, sample, shaped
from perf.ops.workload import Workload
from primitives.ops.losses.cross_entropy import cross_entropy_p


def _call(functional: Any, x: Tensor, target: Tensor, dim: int = 1) -> Tensor:
    return functional.cross_entropy(x, target, reduction="none")


def _formula(x: Tensor, target: Tensor, dim: int = 1) -> Tensor:
    return x.logsumexp(dim) - x.gather(dim, target.unsqueeze(dim)).squeeze(dim)


def _linear_call(functional: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """By chunks, or composed of functions of torch."""
    if functional is pr.functional:
        return functional.linear_cross_entropy(x, weight, target, reduction="none")
    return functional.cross_entropy(functional.linear(x, weight), target, reduction="none")


def _classes_of(workload: Workload, draw: Callable[..., Tensor]) -> tuple[Tensor]:
    """Labels that the bench draws, one a row."""
    numbers = draw(workload.row_shape, torch.float32).mul_(1e4).long()
    return (numbers.remainder(workload.classes or workload.shape[workload.dim]),)


def _labels(x: Tensor, dim: int) -> Tensor:
    """Class labels of x: never the last one, so that a test may add one; every fourth row is ignored."""
    shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    rows = torch.arange(math.prod(shape), device=x.device)
    return torch.where(rows % 4 == 2, -1, (7 * rows + 2) % max(x.shape[dim] - 1, 1)).reshape(shape)


def _loss(x: Tensor, target: Tensor, dim: int, smoothing: float = 0.0, z_loss: float = 0.25) -> Tensor:
    loss, lse = cross_entropy_p(x, target, dim, smoothing)
    if not target.is_floating_point():
        lse = lse.masked_fill(target < 0, 0.0)
    # Neither a product by a number, nor a sum that broadcasts: in forward mode torch fixes the sizes of both.
    return torch.add(loss, lse.square(), alpha=z_loss).unsqueeze(dim).expand_as(x).to(x.dtype)


def _true_loss(x: Tensor, target: Tensor, dim: int, smoothing: float = 0.0, z_loss: float = 0.25) -> Tensor:
    labels = None if target.is_floating_point() else target.unsqueeze(dim)
    if labels is not None:
        places = torch.arange(x.shape[dim], device=x.device).reshape([-1, *[1] * (x.dim() - dim - 1)])
        target = (labels == places).to(x.dtype)
    lse = x.logsumexp(dim, keepdim=True)
    t = (1 - smoothing) * target + smoothing / x.shape[dim]
    y = ((t * (lse - x)).sum(dim, keepdim=True) + z_loss * lse.square()).expand(x.shape)
    return y if labels is None else torch.where(labels >= 0, y, 0.0)


def _torch_loss(x: Tensor, target: Tensor, dim: int, smoothing: float = 0.0, z_loss: float = 0.25) -> Tensor:
    loss = F.cross_entropy(x, target, reduction="none", label_smoothing=smoothing, ignore_index=-1)
    lse = x.logsumexp(dim)
    lse = lse if target.is_floating_point() else torch.where(target >= 0, lse, 0.0)
    return (loss + z_loss * lse.square()).unsqueeze(dim).expand(x.shape)


def _of_labels(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss of x alone, whose labels follow from its shape."""
    return lambda x, dim, **options: loss(x, _labels(x, dim), dim, **options)


class CrossEntropy(Operands):
    """Operands of cross-entropy along `dim`; its derivatives take its result lse. A target of integers has labels."""

    MODULES: ClassVar = ("losses.cross_entropy",)

    @classmethod
    def draw(
        cls, shape: Sequence[int], dim: int, dtype: torch.dtype = torch.float32, *, labels: bool = True,
        smoothing: float = 0.0,
    ) -> Any:  # fmt: skip
        """Random operands."""
        drawn = randoms("x target x_dot target_dot", shape, torch.float64)
        drawn["target"].abs_()
        full_size: dict[str, Any] = {name: x.to(dtype) for name, x in drawn.items()}
        if labels:
            full_size |= {"target": _labels(full_size["x"], dim), "target_dot": None}
        names = "loss_bar lse_bar loss_bar_dot lse_bar_dot"
        bars = randoms(names, (*shape[:dim], *shape[dim + 1 :]), torch.promote_types(dtype, torch.float32))
        return cls(**full_size, **bars, dim=dim, smoothing=smoothing)

    @classmethod
    def of(cls, workload: Workload) -> Any:
        """With labels, as of a language model."""
        return cls.draw(workload.shape, workload.dim % len(workload.shape), workload.torch_dtype)

    def steps(self, op: str, mode: str) -> list[Call]:
        """As for all, without z-loss; and with one and probabilities, which are smoothed."""
        soft = CrossEntropy.draw(self.x.shape, self.dim, self.x.dtype, labels=False, smoothing=0.1)
        return [*super().steps(op, mode), *Operands.steps(soft, f"soft_{op}", mode)]


_SHAPED = [
    *shaped((13, 31), (0, 5), (1, 1), (2, 5, 3, 4), dim=1),
    *(sample((3, 257), dim=1, smoothing=0.1), sample((9,), dim=0, smoothing=0.2), sample((31, 5), dim=0)),
]

CROSS_ENTROPY = Op(
    name="cross_entropy",
    call=_call,
    formula=_formula,
    function=_of_labels(_loss),
    truth=_of_labels(_true_loss),
    torch_function=_of_labels(_torch_loss),
    arguments=("x",),
    samples=make_samples(_SHAPED),
    small=sample((2, 3, 2), dim=1, smoothing=0.1),
    tiny=sample((1, 3), dim=1, smoothing=0.1),
    large=(sample((3, 8195), dim=1), sample((3, 66_000), dim=1, smoothing=0.1), sample((8200, 17), dim=0)),
    not_kept=("y",),
    rounds_once=False,
    passes={"forward": 1, "backward": 2, "jvp": 2, "hvp": 3, "double_backward": 3, "forward_backward": 3},
    constants=_classes_of,
    operands=CrossEntropy.of,
)
SOFT_CROSS_ENTROPY = CROSS_ENTROPY.sibling(
    "soft_cross_entropy",
    ("x", "target"),
    function_name="cross_entropy",
    function=_loss,
    truth=_true_loss,
    torch_function=_torch_loss,
    differentiable=("x", "target"),
    parameter_shape=lambda sample, name: sample.shape,
    samples=(
        *make_samples(_SHAPED, [()], ["transposed", "expanded"]),
        sample((5, 12), mixed=True, dim=1),
    ),
    tiny=sample((1, 2), dim=1, smoothing=0.1),
    large=CROSS_ENTROPY.large[1:2],
    num_kept=2,
)
# It has no kernels of its own, and is tested by itself: of the bench alone, with labels.
LINEAR_CROSS_ENTROPY = dataclasses.replace(
    CROSS_ENTROPY,
    name="linear_cross_entropy",
    call=_linear_call,
    formula=lambda x, weight, target: _formula(F.linear(x, weight), target),
    passes={},
    num_params=1,
)
