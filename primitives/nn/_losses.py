"""Modules of losses."""

import torch
from torch import Tensor

from primitives import functional
from primitives.nn._base import OfThisPackage


class CrossEntropyLoss(OfThisPackage, torch.nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` on `primitives.functional.cross_entropy`.

    Shape:
        Logits `[C]` or `[N, C, *]`, class indices `[]` or `[N, *]`, or probabilities of the shape of the logits.

    Example:
        >>> import torch, primitives as pr
        >>> pr.nn.CrossEntropyLoss()(torch.zeros(1, 4), torch.tensor([3]))
        tensor(1.3863)
    """

    @torch.jit.ignore()
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of the logits `input`."""
        return functional.cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class NLLLoss(OfThisPackage, torch.nn.NLLLoss):
    """`torch.nn.NLLLoss` on `primitives.functional.nll_loss`.

    Shape:
        Logarithms of probabilities `[C]` or `[N, C, *]`, class indices `[]` or `[N, *]`.

    Example:
        >>> import torch, primitives as pr
        >>> pr.nn.NLLLoss()(torch.tensor([[-1.0, -2.0]]), torch.tensor([1]))
        tensor(2.)
    """

    @torch.jit.ignore()
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of the logarithms of probabilities `input`."""
        return functional.nll_loss(input, target, self.weight, ignore_index=self.ignore_index, reduction=self.reduction)
