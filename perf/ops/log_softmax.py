"""Log-softmax."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from perf.calls import Operands, random
from perf.ops.record import STEPS, Op
from perf.ops.samples import Sample, make_options, make_samples
from perf.ops.workload import FIRST_ORDER, KERNEL_MODES, Workload, unnamed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from perf.calls import Call, Step


def _call(functional: Any, x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    return functional.log_softmax(x, dim, dtype=dtype)


def _true_log_softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    # dtype= means a cast before the operation: a narrower one rounds x.
    x = x if dtype is None else x.to(dtype).double()
    return x - x.exp().sum(dim, keepdim=True).log()


@dataclasses.dataclass(frozen=True)
class LogSoftmax(Operands):
    """Operands of log-softmax over `dim`; its derivatives take its output `y`."""

    MODULES: ClassVar = ("log_softmax",)

    x: Tensor
    y: Tensor
    y_bar: Tensor
    x_dot: Tensor
    y_bar_dot: Tensor | None
    y_dot: Tensor | None
    dim: int
    output_dtype: torch.dtype | None = None

    @classmethod
    def draw(
        cls,
        shape: Sequence[int],
        dim: int,
        dtype: torch.dtype = torch.float32,
        arrange: Callable[[Tensor], Tensor] = torch.Tensor.contiguous,
    ) -> LogSoftmax:
        """Random operands in some layout."""
        x, y, *others = (random(*shape, dtype=torch.float64, seed=seed) for seed in range(6))
        return cls(*(arrange(tensor.to(dtype)) for tensor in (x, torch.log_softmax(y, dim), *others)), dim=dim)

    def derived(self) -> dict[str, Any]:
        """The dtype of x."""
        return {"x_dtype": self.x.dtype}


_GPU = (
    Workload("ImageNet head", "log_softmax", (8192, 1000)),
    Workload("attention rows", "log_softmax", (32768, 1024)),
    Workload("attention rows", "log_softmax", (8192, 4096), whole=True),
    Workload("odd", "log_softmax", (8192, 4097), whole=True),
    Workload("odd", "log_softmax", (8192, 5124), modes=FIRST_ORDER),
    Workload("Llama 2 vocabulary", "log_softmax", (4096, 32000), whole=True),
    Workload("GPT-2 vocabulary", "log_softmax", (4096, 50257), whole=True),
    Workload("GPT-2 vocabulary", "log_softmax", (4096, 50257), dtype="float32", modes=FIRST_ORDER),
    Workload("long rows", "log_softmax", (2048, 65536)),
    Workload("Llama 3 vocabulary", "log_softmax", (2048, 128256), quick=True),
    Workload("long rows", "log_softmax", (1024, 131072), dtype="float16", modes=FIRST_ORDER),
    Workload("Gemma vocabulary", "log_softmax", (1024, 262144)),
    Workload("segmentation", "log_softmax", (16, 21, 512, 512), dim=1, modes=FIRST_ORDER),
)
_OF_CURVATURE = ("backward_of_jvp", "x_only", "gradient_backward")
_OTHER = (
    unnamed("log_softmax", (65536, 24), modes=FIRST_ORDER),
    unnamed("log_softmax", (512, 512), "float64"),
    unnamed("log_softmax", (8192, 4096), modes=_OF_CURVATURE),
    unnamed("log_softmax", (2048, 128256), modes=_OF_CURVATURE),
    unnamed("log_softmax", (16, 5000, 96), "float32", dim=1),
)
_RESIZED = (
    (unnamed("log_softmax", (4096, 4096)), (4095, 1008)),
    (unnamed("log_softmax", (1024, 128256)), (1023, 400)),
    (unnamed("log_softmax", (64, 128256)), (63, 80)),
    (unnamed("log_softmax", (16, 21, 64, 64), dim=1), (15, 32)),
)


def softmax_calls(workload: Workload, mode: str, is_drawn: bool, kind: type[LogSoftmax] = LogSoftmax) -> list[Call]:
    """Without parameters: the pairing has derivatives of y_bar, y and the tangent of x."""
    every, wanted = (
        (True, True, True),
        {"backward_of_jvp": (False, True, True), "gradient_backward": (False, True, False)},
    )
    steps: dict[str, Sequence[Step]] = {
        "forward": [("fwd", (), None)],
        "backward": [("bwd", (), None)],
        "jvp": [("fwd_jvp", (), None), ("jvp", (), None)],
        "hvp": [("bwd_jvp", absent, None) for absent in (("y_bar_dot",), ())],
        "double_backward": [("pairing", (), (True, True, False))],
    }
    x = workload.empty()
    dim = workload.dim % x.dim()
    operands = kind.draw(x.shape, dim, x.dtype) if is_drawn else kind(x, x, x, x, x, x, dim=dim)
    if workload.masked:
        operands = operands.change(mask=random(*x.shape) > 0 if is_drawn else x.new_empty(x.shape, dtype=torch.bool))
        operands = operands.change(scale=0.7)
    return operands.steps(steps.get(mode, [("pairing", (), wanted.get(mode, every))]), {"x_dtype": x.dtype})


LOG_SOFTMAX = Op(
    name="log_softmax",
    call=_call,
    truth=_true_log_softmax,
    arguments=("x",),
    differentiable=("x",),
    samples=make_samples(
        shapes=[
            ((13, 31), make_options(dim=0)),
            ((0, 5), make_options(dim=1)),
            ((5, 0), make_options(dim=0)),
            ((), make_options(dim=0)),
            ((1, 1), make_options(dim=-1)),
            ((3, 257), make_options(dim=1)),
            ((2, 5, 3, 4), make_options(dim=1)),
            ((2, 7), make_options(dim=-1, dtype=torch.float32)),
            ((7, 2), make_options(dim=0, dtype=torch.float16)),
            ((4, 3), make_options(dim=0, dtype=torch.float64)),
            ((9,), make_options(dim=0)),
        ],
        absent=[()],
        layouts=["contiguous", "transposed", "sliced", "expanded"],
    ),
    small=Sample((2, 3, 2), make_options(dim=1)),
    tiny=Sample((1, 3), make_options(dim=1)),
    large=(
        Sample((3, 8195), make_options(dim=1)),
        Sample((3, 66_000), make_options(dim=1)),
        Sample((8200, 17), make_options(dim=0)),
    ),
    not_kept=("x",),
    rounds_between=True,
    small_workloads=(
        Workload("rows", "log_softmax", (6, 20), dtype="float32"),
        Workload("inner", "log_softmax", (4, 20, 5), dtype="float32", dim=1),
    ),
    gpu_workloads=_GPU,
    cpu_workloads=(
        Workload("ImageNet head", "log_softmax", (2048, 1000), dtype="float32", quick=True),
        Workload("GPT-2 vocabulary", "log_softmax", (64, 50257), dtype="float32"),
    ),
    other_workloads=_OTHER,
    resized=_RESIZED,
    calls=softmax_calls,
    modes=(*KERNEL_MODES, "backward_of_jvp", "x_only", "gradient_backward", "all_results"),
    options=lambda workload: {"dim": workload.dim},
    # It keeps y and not x: the cotangent of y goes on to x.
    steps={**STEPS, "double_backward": ("double_backward", "backward")},
)
