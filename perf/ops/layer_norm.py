"""Layer norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from perf.calls import EPS, Operands, randoms
from perf.ops.record import Op
from perf.ops.samples import ABSENT_PARAMS, make_samples, sample, shaped, true_norm
from perf.ops.workload import Workload
from primitives.ops.norms.layer_norm import NormOptions
from primitives.ops.rules import CHANNELS_LAST, with_layout


def _layer_norm(functional: Any, x: Tensor, weight: Any = None, bias: Any = None, norm_ndim: int = 1) -> Tensor:
    return functional.layer_norm(x, x.shape[x.dim() - norm_ndim :], weight, bias, EPS)


def true_row_norm(x: Tensor, weight: Any = None, bias: Any = None, norm_ndim: int = 1, **options: Any) -> Tensor:
    """Layer norm, or RMS norm if it is not `centered`."""
    return true_norm(x, tuple(range(-norm_ndim, 0)), weight, bias, **options)


class LayerNorm(Operands):
    """Operands of layer norm."""

    MODULES: ClassVar = ("norms.layer_norm", "norms.layer_norm_second_order")
    DEFAULTS: ClassVar = {**NormOptions(1, EPS)._asdict(), "silu": False}

    @classmethod
    def draw(cls, shape: Sequence[int], dtype: torch.dtype = torch.float32, **dims: Any) -> Any:
        """Contiguous random operands."""
        batch_ndim, norm_ndim, grouped = (
            {**cls.DEFAULTS, **dims}[key] for key in ("batch_ndim", "norm_ndim", "grouped")
        )
        of_row = shape[-3:-1] if grouped else shape[len(shape) - norm_ndim :]
        full_size = randoms("x y_bar x_dot y_bar_dot", shape, dtype)
        if grouped == CHANNELS_LAST:
            full_size = {name: with_layout(x, grouped) for name, x in full_size.items()}
        param_shape = (*shape[:batch_ndim], *of_row)
        params = randoms("weight bias weight_dot bias_dot", param_shape, dtype, len(full_size))
        return cls(**full_size, **params, **dims)

    @classmethod
    def of(cls, workload: Workload, *, centered: bool = True) -> Any:
        """Operands of a workload."""
        return with_params(cls.draw(workload.shape, workload.torch_dtype), workload, centered=centered)


def with_params(operands: Operands, workload: Workload, *, centered: bool = True) -> Any:
    """The operands without the parameters that the norm has not: one that is not centered has no bias."""
    absent = [
        *["bias", "bias_dot"] * (not centered),
        *["weight", "bias", "weight_dot", "bias_dot"] * (not workload.affine),
    ]
    return operands.change(centered=centered, **dict.fromkeys(absent))


LAYER_NORM = Op(
    name="layer_norm",
    call=_layer_norm,
    truth=true_row_norm,
    arguments=("x", "weight", "bias"),
    parameter_shape=lambda sample, name: sample.shape[-dict(sample.options)["norm_ndim"] :],
    samples=make_samples(
        [
            *shaped((13, 31), (0, 5), (1, 1), (3, 257), (9,), norm_ndim=1),
            *shaped((2, 2, 5, 4), (2, 7), norm_ndim=2),
        ],
        absent=ABSENT_PARAMS,
        constant_when_expanded=lambda shape: len(shape) == 1,
    ),
    small=sample((2, 3, 4), norm_ndim=1),
    tiny=sample((1, 3), norm_ndim=1),
    large=tuple(shaped((3, 8195), (17_000, 9), (5, 16_500), norm_ndim=1)),
    not_kept=("bias", "y"),
    operands=LayerNorm.of,
    num_params=2,
)
