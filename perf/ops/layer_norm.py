"""Layer norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from perf.calls import EPS, Operands, randoms
from perf.ops.record import Op
from perf.ops.samples import ABSENT_PARAMS, Sample, make_options, make_samples, true_norm
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


_ONE_AXIS = make_options(norm_ndim=1)
LAYER_NORM = Op(
    name="layer_norm",
    call=_layer_norm,
    truth=true_row_norm,
    arguments=("x", "weight", "bias"),
    parameter_shape=lambda sample, name: sample.shape[-dict(sample.options)["norm_ndim"] :],
    samples=make_samples(
        shapes=[
            ((13, 31), _ONE_AXIS),
            ((0, 5), _ONE_AXIS),
            ((1, 1), _ONE_AXIS),
            ((3, 257), _ONE_AXIS),
            ((2, 2, 5, 4), make_options(norm_ndim=2)),
            ((2, 7), make_options(norm_ndim=2)),
            ((9,), _ONE_AXIS),
        ],
        absent=ABSENT_PARAMS,
        constant_when_expanded=lambda shape: len(shape) == 1,
    ),
    small=Sample((2, 3, 4), _ONE_AXIS),
    tiny=Sample((1, 3), _ONE_AXIS),
    large=(Sample((3, 8195), _ONE_AXIS), Sample((17_000, 9), _ONE_AXIS), Sample((5, 16_500), _ONE_AXIS)),
    not_kept=("bias", "y"),
    operands=LayerNorm.of,
    num_params=2,
)
