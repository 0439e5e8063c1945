"""Operands and results of the steps of batch norm: tensors of full size, numbers per channel, results."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ._channels import output_format, readable


class Operands(NamedTuple):
    """Full-size operands, in the order of the kernels' arguments; None where one is absent or not read."""

    y_bar: Tensor | None = None
    x: Tensor | None = None
    x_dot: Tensor | None = None
    y_bar_dot: Tensor | None = None

    def only(self, *needed: bool) -> Operands:
        """Those that are needed."""
        return Operands(*(tensor if need else None for tensor, need in zip(self, needed, strict=True)))

    def readable(self, batch_ndim: int) -> Operands:
        """The same with a channel view of each."""
        return Operands(*(None if tensor is None else readable(tensor, batch_ndim) for tensor in self))

    def present(self) -> list[Tensor]:
        """Those that are there."""
        return [tensor for tensor in self if tensor is not None]

    def sums(self, statistics: bool) -> int:
        """Bits of the sums that there are of these, or of x with its statistics (see `batch_norm_sums_kernel`)."""
        y_bar, x, x_dot, y_bar_dot = (tensor is not None for tensor in self)
        found = (y_bar, y_bar and x, x_dot, x_dot and x, y_bar and x_dot, y_bar_dot, y_bar_dot and x)
        return sum(is_there << place for place, is_there in enumerate((*found, *[statistics] * 3)))


class Params(NamedTuple):
    """Per-channel operands; with an `eps`, scale_statistic is a variance, otherwise rstd."""

    mean: Tensor
    scale_statistic: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    weight_dot: Tensor | None = None
    bias_dot: Tensor | None = None
    mean_dot: Tensor | None = None
    var_dot: Tensor | None = None


class Results(NamedTuple):
    """Whether each result is wanted, or what came out: four of the transform, six of the merge, one of the sums."""

    y: Any = False
    y_dot: Any = False
    x_bar: Any = False
    x_bar_dot: Any = False
    weight_bar: Any = False
    bias_bar: Any = False
    mean_bar: Any = False
    var_bar: Any = False
    weight_bar_dot: Any = False
    bias_bar_dot: Any = False
    residual_bar: Any = False


class Relu(NamedTuple):
    """Operands that the end of a residual block adds to a norm, None where it is absent: in memory as the results.

    `y` is the output of a ReLU behind the norm, for its derivatives; `follows` says that there is one behind the value.
    """

    y: Tensor | None = None
    residual: Tensor | None = None
    residual_dot: Tensor | None = None
    follows: bool = False

    def beside(self, x: Tensor, batch_ndim: int) -> Relu:
        """The same in the layout of outputs for `x`."""
        layout = output_format(x, batch_ndim)
        y, residual, residual_dot = (None if v is None else v.contiguous(memory_format=layout) for v in self[:3])
        return Relu(y, residual, residual_dot, self.follows)

    def present(self) -> list[Tensor]:
        """Those that are there."""
        return [tensor for tensor in self[:3] if tensor is not None]
