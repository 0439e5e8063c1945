"""The modules. Each adds nothing but behavior, so that a torch module can become one and turn back."""

# TorchScript reads annotations as they are, so they are not put off here.
from collections.abc import Sequence

import torch
from torch import Tensor

from primitives import functional
from primitives._core.errors import ShapeError
from primitives.nn._base import OfThisPackage, batch_normed, namespace_of
from primitives.ops import arguments

_Device = torch.device | str | int | None


class LayerNorm(OfThisPackage, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` on `primitives.functional.layer_norm`: arguments, state and results are torch's.

    `namespace`, here and in other modules over pytrees, is optree's, of custom nodes; an attribute, which may be set.

    Shape:
        Input and output `[*, *normalized_shape]`, or a pytree of such tensors.

    Example:
        >>> import torch, primitives as pr
        >>> pr.nn.LayerNorm(2, eps=0.0)(torch.tensor([[1.0, 3.0]])).detach()
        tensor([[-1.,  1.]])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: _Device = None,
        dtype: torch.dtype | None = None,
        *,
        namespace: str = "",
    ) -> None:
        shape = arguments.module_shape("LayerNorm", normalized_shape)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)  # type: ignore[arg-type] - torch takes any sequence
        self._over(namespace)

    # TorchScript calls Python here: its compiler cannot read functions of pytrees. The annotations say what it passes.
    @torch.jit.ignore()
    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input` over its last axes."""
        return functional.layer_norm(
            input, self.normalized_shape, self.weight, self.bias, self.eps, namespace=namespace_of(self)
        )


class RMSNorm(OfThisPackage, torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` on `primitives.functional.rms_norm`: arguments, state and results are torch's.

    Shape:
        Input and output `[*, *normalized_shape]`, or a pytree of such tensors.

    Example:
        >>> import torch, primitives as pr
        >>> pr.nn.RMSNorm(2)(torch.tensor([[3.0, 4.0]])).detach()
        tensor([[0.8485, 1.1314]])
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: _Device = None,
        dtype: torch.dtype | None = None,
        *,
        namespace: str = "",
    ) -> None:
        shape = arguments.module_shape("RMSNorm", normalized_shape)
        super().__init__(shape, eps, elementwise_affine, device, dtype)  # type: ignore[arg-type] - as above
        self._over(namespace)

    @torch.jit.ignore()
    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` over its last axes."""
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps, namespace=namespace_of(self))


class GroupNorm(OfThisPackage, torch.nn.GroupNorm):
    """`torch.nn.GroupNorm` on `primitives.functional.group_norm`: arguments, state and results are torch's.

    Shape:
        Input and output `[N, C, *]`, contiguous or channels_last, or a pytree of such tensors.

    Example:
        >>> import torch, primitives as pr
        >>> pr.nn.GroupNorm(1, 2, eps=0.0)(torch.tensor([[1.0, 3.0]])).detach()
        tensor([[-1.,  1.]])
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: _Device = None,
        dtype: torch.dtype | None = None,
        *,
        namespace: str = "",
        **bias: bool,
    ) -> None:
        # Torch has `bias` since 2.13.
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, **bias)
        self._over(namespace)

    @torch.jit.ignore()
    def forward(self, input: Tensor) -> Tensor:
        """Normalize each group of channels of each sample of `input`."""
        return functional.group_norm(
            input, self.num_groups, self.weight, self.bias, self.eps, namespace=namespace_of(self)
        )


class _BatchNorm(OfThisPackage, torch.nn.modules.batchnorm._BatchNorm):
    @torch.jit.ignore()
    def forward(self, input: Tensor) -> Tensor:
        """Normalize each channel of `input`; in training, move the running statistics on."""
        return batch_normed(functional.batch_norm, self, input)


class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` on `primitives.functional.batch_norm`: arguments, state and results are torch's.

    Shape:
        Input and output `[N, C]` or `[N, C, L]`.

    Example:
        >>> import torch, primitives as pr
        >>> pr.nn.BatchNorm1d(1, eps=1e-12)(torch.tensor([[1.0], [3.0]])).flatten().detach()
        tensor([-1.,  1.])
    """


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` on `primitives.functional.batch_norm`: arguments, state and results are torch's.

    Shape:
        Input and output `[N, C, H, W]`, contiguous or channels_last.

    Example:
        >>> import torch, primitives as pr
        >>> pr.nn.BatchNorm2d(1, eps=1e-12)(torch.tensor([[[[1.0]]], [[[3.0]]]])).flatten().detach()
        tensor([-1.,  1.])
    """


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` on `primitives.functional.batch_norm`: arguments, state and results are torch's.

    Shape:
        Input and output `[N, C, D, H, W]`, contiguous or channels_last_3d.

    Example:
        >>> import torch, primitives as pr
        >>> pr.nn.BatchNorm3d(1, eps=1e-12)(torch.tensor([[[[[1.0]]]], [[[[3.0]]]]])).flatten().detach()
        tensor([-1.,  1.])
    """


def _lazy(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The form that `convert` gives the lazy class of torch; its first call turns it into `cls`."""
    base = getattr(torch.nn, f"Lazy{cls.__name__}")
    return type(base.__name__, (cls.__bases__[0], base), {"cls_to_become": cls, "__module__": __name__})


LazyBatchNorm1d, LazyBatchNorm2d, LazyBatchNorm3d = map(_lazy, (BatchNorm1d, BatchNorm2d, BatchNorm3d))


class _InstanceNorm(OfThisPackage, torch.nn.modules.instancenorm._InstanceNorm):
    # Torch's own forward checks the shape and takes a sample without a batch axis; this is what it calls last.
    @torch.jit.ignore()
    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        use_input_stats = self.training or not self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        running = self.running_mean, self.running_var
        return functional.instance_norm(input, *running, self.weight, self.bias, use_input_stats, momentum, self.eps)


class InstanceNorm1d(_InstanceNorm, torch.nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d` on `primitives.functional.instance_norm`: arguments, state and results are torch's.

    Shape:
        Input and output `[N, C, L]` or `[C, L]`.

    Example:
        >>> import torch, primitives as pr
        >>> x = torch.tensor([1.0, 3.0]).reshape(1, 1, 2)
        >>> pr.nn.InstanceNorm1d(1, eps=1e-12)(x).flatten()
        tensor([-1.,  1.])
    """


class InstanceNorm2d(_InstanceNorm, torch.nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d` on `primitives.functional.instance_norm`: arguments, state and results are torch's.

    Shape:
        Input and output `[N, C, H, W]` or `[C, H, W]`.

    Example:
        >>> import torch, primitives as pr
        >>> x = torch.tensor([1.0, 3.0]).reshape(1, 1, 1, 2)
        >>> pr.nn.InstanceNorm2d(1, eps=1e-12)(x).flatten()
        tensor([-1.,  1.])
    """


class InstanceNorm3d(_InstanceNorm, torch.nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d` on `primitives.functional.instance_norm`: arguments, state and results are torch's.

    Shape:
        Input and output `[N, C, D, H, W]` or `[C, D, H, W]`.

    Example:
        >>> import torch, primitives as pr
        >>> x = torch.tensor([1.0, 3.0]).reshape(1, 1, 1, 1, 2)
        >>> pr.nn.InstanceNorm3d(1, eps=1e-12)(x).flatten()
        tensor([-1.,  1.])
    """


LazyInstanceNorm1d, LazyInstanceNorm2d, LazyInstanceNorm3d = map(
    _lazy, (InstanceNorm1d, InstanceNorm2d, InstanceNorm3d)
)


class Dropout(OfThisPackage, torch.nn.Dropout):
    """`torch.nn.Dropout` on `primitives.functional.dropout`: arguments and behavior are torch's.

    Shape:
        Input and output `[*]`, or a pytree of such tensors.

    Example:
        >>> import torch, primitives as pr
        >>> pr.nn.Dropout(0.25)(torch.ones(8)).sort().values.unique().max()
        tensor(1.3333)
    """

    def __init__(self, p: float = 0.5, inplace: bool = False, *, namespace: str = "") -> None:
        super().__init__(p, inplace)
        self._over(namespace)

    @torch.jit.ignore()
    def forward(self, input: Tensor) -> Tensor:
        """Zero elements of `input` at random in training; return it as it is in evaluation."""
        return functional.dropout(input, self.p, self.training, self.inplace, namespace=namespace_of(self))


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


# The classes that `torch.load` may build of a file that holds a module.
torch.serialization.add_safe_globals(
    [
        *(BatchNorm1d, BatchNorm2d, BatchNorm3d, CrossEntropyLoss, Dropout, GroupNorm),
        *(InstanceNorm1d, InstanceNorm2d, InstanceNorm3d, LayerNorm, LogSoftmax),
        *(NLLLoss, RMSNorm, Softmax, Softmax2d, Softmin),
    ]
)
