"""Layer norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from perf.calls import EPS, Call, Operands, randoms
from perf.ops._norm_steps import NORM_MODES, norm_calls
from perf.ops.record import Op
from perf.ops.samples import ABSENT_PARAMS, Sample, make_options, make_samples, true_norm
from perf.ops.workload import FIRST_ORDER, Workload, unnamed
from primitives.ops.rules import CHANNELS_LAST, with_layout


def _layer_norm(functional: Any, x: Tensor, weight: Any = None, bias: Any = None, norm_ndim: int = 1) -> Tensor:
    return functional.layer_norm(x, x.shape[x.dim() - norm_ndim :], weight, bias, EPS)


def true_row_norm(x: Tensor, weight: Any = None, bias: Any = None, norm_ndim: int = 1, **options: Any) -> Tensor:
    """Layer norm, or RMS norm if it is not `centered`."""
    return true_norm(x, tuple(range(-norm_ndim, 0)), weight, bias, **options)


class LayerNorm(Operands):
    """Operands of layer norm."""

    MODULES: ClassVar = ("norms.layer_norm", "norms.layer_norm_second_order")
    RESULTS: ClassVar = {"double_backward": 6}
    DEFAULTS: ClassVar = {
        **{"norm_ndim": 1, "batch_ndim": 0, "centered": True},
        **{"rounded": False, "grouped": 0, "silu": False},
    }

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


# Other dtypes of a shape show whether the plans hold for them; their second derivatives would only cost time.
_GPU = (
    Workload("GPT-2", (8192, 768), whole=True),
    Workload("GPT-2 XL", (8192, 1600)),
    Workload("ViT-B/16", (12608, 768)),
    Workload("ViT-L/16", (12608, 1024), dtype="float16", modes=FIRST_ORDER),
    Workload("DiT-XL/2", (16384, 1152), affine=False),
    Workload("Llama 8B width", (8192, 4096), quick=True),
    Workload("Llama 8B width", (8192, 4096), dtype="float16", modes=FIRST_ORDER),
    Workload("Llama 8B width", (8192, 4096), dtype="float32"),
    Workload("Llama 8B width, few rows", (1024, 4096)),
    Workload("Llama 13B width", (8192, 5120)),
    Workload("Llama 70B width", (8192, 8192), whole=True),
    Workload("Llama 405B width", (4096, 16384)),
    Workload("short rows", (32768, 256)),
    Workload("odd", (8192, 1000)),
    Workload("odd", (8192, 4097), whole=True),
    Workload("odd", (8192, 5124)),
    Workload("long rows", (2048, 32768)),
    Workload("long rows", (1024, 65536)),
    Workload("long rows", (512, 131072), whole=True),
    Workload("long rows", (256, 262144)),
)
_OF_FLOAT32 = ("forward", "backward", "hvp", "double_backward", "x_only", "all_results")
_OF_CURVATURE = ("backward_of_jvp", "gradient_backward", "all_results")
_OTHER = (
    # So many rows that partial sums are few beside them.
    unnamed((1 << 18, 24), modes=FIRST_ORDER),
    unnamed((512, 512), "float64"),
    unnamed((8192, 768), modes=("gradient_backward",)),
    # Rows of which more than a third of a tile is empty.
    *(unnamed((8192, num_cols), modes=("backward",)) for num_cols in (640, 1152, 1280)),
    unnamed((16384, 1152), affine=False, modes=("gradient_backward",)),
    unnamed((8192, 4096), modes=(*_OF_CURVATURE, "x_only")),
    unnamed((4096, 1000), "float32", modes=_OF_FLOAT32),
    # The longest rows that the second order holds whole, without sums beside them, and rows that it sweeps.
    unnamed((8192, 8192), modes=_OF_CURVATURE),
    # Rows of which two programs of 16 warps are bound to fit a processor, in other dtypes.
    unnamed((8192, 8192), "float32", modes=("jvp", "hvp", "x_only")),
    unnamed((8192, 8192), "float16", modes=("jvp",)),
    unnamed((512, 131072), modes=_OF_CURVATURE),
)
_RESIZED = (
    (unnamed((4096, 4096)), (4095, 1008)),
    (unnamed((512, 131072)), (511, 400)),
    # Several programs share a row.
    (unnamed((64, 131072)), (63, 80)),
)


def with_params(operands: Operands, workload: Workload, *, centered: bool = True) -> Any:
    """The operands without the parameters that the norm has not: one that is not centered has no bias."""
    absent = [
        *["bias", "bias_dot"] * (not centered),
        *["weight", "bias", "weight_dot", "bias_dot"] * (not workload.affine),
    ]
    return operands.change(centered=centered, **dict.fromkeys(absent))


def row_norm_calls(workload: Workload, mode: str, *, centered: bool = True) -> list[Call]:
    """The calls of a mode of a norm over rows."""
    operands = LayerNorm.draw(workload.shape, workload.torch_dtype)
    return norm_calls(with_params(operands, workload, centered=centered), mode, is_rows=True)


_ONE_AXIS = make_options(norm_ndim=1)
LAYER_NORM = Op(
    name="layer_norm",
    call=_layer_norm,
    truth=true_row_norm,
    arguments=("x", "weight", "bias"),
    differentiable=("x", "weight", "bias"),
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
    small_workloads=(
        Workload("affine", (6, 20), dtype="float32"),
        Workload("plain", (6, 20), dtype="float32", affine=False),
    ),
    gpu_workloads=_GPU,
    cpu_workloads=(
        Workload("GPT-2", (2048, 768), dtype="float32", quick=True),
        Workload("Llama 8B width", (512, 4096), dtype="float32"),
        Workload("ViT-B/16", (1576, 768), dtype="bfloat16"),
    ),
    other_workloads=_OTHER,
    resized=_RESIZED,
    calls=row_norm_calls,
    modes=NORM_MODES,
    num_params=2,
)
