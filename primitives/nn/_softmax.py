"""Modules of softmax and its kin."""

import torch
from torch import Tensor

from primitives import functional
from primitives._core.errors import ShapeError
from primitives.nn._base import OfThisPackage, namespace_of


class _OverAxis(OfThisPackage):
    def __init__(self, dim: int | None = None, *, namespace: str = "") -> None:
        super().__init__(dim)
        self._over(namespace)


class LogSoftmax(_OverAxis, torch.nn.LogSoftmax):
    """`torch.nn.LogSoftmax` on `primitives.functional.log_softmax`.

    Shape:
        Input and output `[*]`, or a pytree of such tensors.

    Example:
        >>> import torch, primitives as pr
        >>> pr.nn.LogSoftmax(dim=0)(torch.zeros(2))
        tensor([-0.6931, -0.6931])
    """

    @torch.jit.ignore()
    def forward(self, input: Tensor) -> Tensor:
        """Logarithm of the softmax of `input` over axis `dim`."""
        return functional.log_softmax(input, self.dim, _stacklevel=7, namespace=namespace_of(self))


class Softmax(_OverAxis, torch.nn.Softmax):
    """`torch.nn.Softmax` on `primitives.functional.softmax`.

    Shape:
        Input and output `[*]`, or a pytree of such tensors.

    Example:
        >>> import torch, primitives as pr
        >>> pr.nn.Softmax(dim=0)(torch.zeros(2))
        tensor([0.5000, 0.5000])
    """

    @torch.jit.ignore()
    def forward(self, input: Tensor) -> Tensor:
        """The softmax of `input` over axis `dim`."""
        return functional.softmax(input, self.dim, _stacklevel=7, namespace=namespace_of(self))


class Softmin(_OverAxis, torch.nn.Softmin):
    """`torch.nn.Softmin` on `primitives.functional.softmin`.

    Shape:
        Input and output `[*]`, or a pytree of such tensors.

    Example:
        >>> import torch, primitives as pr
        >>> pr.nn.Softmin(dim=0)(torch.zeros(2))
        tensor([0.5000, 0.5000])
    """

    @torch.jit.ignore()
    def forward(self, input: Tensor) -> Tensor:
        """The softmax of `-input` over axis `dim`."""
        return functional.softmin(input, self.dim, _stacklevel=7, namespace=namespace_of(self))


class Softmax2d(OfThisPackage, torch.nn.Softmax2d):
    """`torch.nn.Softmax2d` on `primitives.functional.softmax`.

    Shape:
        Input and output `[N, C, H, W]` or `[C, H, W]`.

    Example:
        >>> import torch, primitives as pr
        >>> pr.nn.Softmax2d()(torch.zeros(2, 1, 1)).flatten()
        tensor([0.5000, 0.5000])
    """

    @torch.jit.ignore()
    def forward(self, input: Tensor) -> Tensor:
        """The softmax of `input` over its channels."""
        if input.dim() not in (3, 4):
            raise ShapeError(f"Softmax2d: input must have 3 or 4 axes, [N, C, H, W], got {list(input.shape)}.")
        return functional.softmax(input, -3)
