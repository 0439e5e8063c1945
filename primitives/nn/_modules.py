"""The modules. Each adds nothing but `forward`, so that a torch module can become one and turn back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from primitives import functional
from primitives.core.overrides import cumulative_weight
from primitives.core.write_back import count_up

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "Dropout", "LayerNorm", "LogSoftmax"]


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` on `primitives.functional.layer_norm`: arguments, state and results are torch's.

    Shape:
        Input and output `[*, *normalized_shape]`, or a pytree of such tensors.
    """

    def forward(self, input: Any) -> Any:
        """Normalize `input` over its last axes."""
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class LogSoftmax(torch.nn.LogSoftmax):
    """`torch.nn.LogSoftmax` on `primitives.functional.log_softmax`.

    Shape:
        Input and output `[*]`, or a pytree of such tensors.
    """

    def forward(self, input: Any) -> Any:
        """Logarithm of the softmax of `input` over axis `dim`."""
        return functional.log_softmax(input, self.dim, _stacklevel=6)


class _BatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        """Normalize each channel of `input`; in training, move the running statistics on."""
        self._check_input_dim(input)
        mean, var, training = self.running_mean, self.running_var, self.training
        use_batch = training or (mean is None and var is None)
        update = training and self.track_running_stats
        if training and not update:
            mean = var = None
        momentum = self._batch_weight() if update else 0.0
        output = functional.batch_norm(input, mean, var, self.weight, self.bias, use_batch, momentum, self.eps)
        count = self.num_batches_tracked if update else None
        if count is not None:
            # Counted last: a call that raises leaves the module as it was.
            count_up(count)
        return output

    def _batch_weight(self) -> float | Tensor:
        """Weight of this batch in the running statistics: the plain average over all batches if momentum is None."""
        if self.momentum is not None:
            return self.momentum
        # Not read as a Python number, which a transform, a compiler and a device would all have to wait for.
        return 0.0 if self.num_batches_tracked is None else cumulative_weight(self.num_batches_tracked + 1)


class BatchNorm1d(_BatchNorm, torch.nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` on `primitives.functional.batch_norm`: arguments, state and results are torch's.

    Shape:
        Input and output `[N, C]` or `[N, C, L]`.
    """


class BatchNorm2d(_BatchNorm, torch.nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` on `primitives.functional.batch_norm`: arguments, state and results are torch's.

    Shape:
        Input and output `[N, C, H, W]`, contiguous or channels_last.
    """


class BatchNorm3d(_BatchNorm, torch.nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` on `primitives.functional.batch_norm`: arguments, state and results are torch's.

    Shape:
        Input and output `[N, C, D, H, W]`, contiguous or channels_last_3d.
    """


class Dropout(torch.nn.Dropout):
    """`torch.nn.Dropout` on `primitives.functional.dropout`: arguments and behavior are torch's.

    Shape:
        Input and output `[*]`, or a pytree of such tensors.
    """

    def forward(self, input: Any) -> Any:
        """Zero elements of `input` at random in training; return it as it is in evaluation."""
        return functional.dropout(input, self.p, self.training, self.inplace)
