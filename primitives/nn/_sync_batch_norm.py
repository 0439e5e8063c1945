"""Batch norm over several processes."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from primitives import functional
from primitives._core.errors import ShapeError
from primitives._distributed import sync_batch_norm
from primitives.nn._base import OfThisPackage, batch_normed


# Not a subclass of torch's, which DistributedDataParallel refuses on the CPU.
class SyncBatchNorm(OfThisPackage, torch.nn.modules.batchnorm._BatchNorm):
    r"""Batch norm whose statistics in training are those of all processes of a group; all orders of derivative.

    Arguments and state are those of `torch.nn.SyncBatchNorm`; it runs on the CPU too. The processes send one message in
    the forward pass, one in the backward, one for a tangent, and one for each further pass that derivatives of higher
    order make. A derivative is that of the sum of what all processes differentiate, as that of a model which runs in
    one process on all their batches. Batches may differ in size; one may be empty. The running statistics count the
    values of all. In evaluation, without `torch.distributed.init_process_group`, and in a group of one process it is
    batch norm.

    Args:
        num_features: Number of channels C.
        eps: Added to the variance.
        momentum: Weight of a batch in the running statistics; `None` for the average of all batches.
        affine: Whether there is a weight and a bias.
        track_running_stats: Whether there are running statistics.
        process_group: The processes; `None` means all.
        device: Of parameters and buffers.
        dtype: Of parameters and buffers.
        bias: Whether an affine one has a bias.

    Shape:
        Input and output `[N, C, *]`.

    Raises:
        ShapeError, DtypeError, DeviceError: As `functional.batch_norm` does, if the input does not have `num_features`
            channels, and in every process at the first call, if `num_features` or dtypes of the processes differ.

    Example:
        >>> import torch, primitives as pr
        >>> norm = pr.nn.SyncBatchNorm(1, affine=False)
        >>> norm(torch.tensor([[1.0], [3.0]]))  # in a group of one process
        tensor([[-1.0000],
                [ 1.0000]])

    References:
        Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        if not bias:
            self.register_parameter("bias", None)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        # Before the first message: to another process, one of another length may pass for numbers.
        if input.dim() > 1 and input.shape[1] != self.num_features:
            raise ShapeError(
                f"SyncBatchNorm: input must have {self.num_features} channels, num_features, in axis 1, got "
                f"{list(input.shape)}."
            )

    @torch.jit.ignore()
    def forward(self, input: Tensor) -> Tensor:
        """Normalize each channel of `input`; in training, move the running statistics on."""
        function = functional.batch_norm
        if self.training and dist.is_available() and dist.is_initialized():
            group = self.process_group or dist.group.WORLD
            if dist.get_world_size(group) > 1:
                function = functools.partial(sync_batch_norm, module=self, group=group)
        return batch_normed(function, self, input)
